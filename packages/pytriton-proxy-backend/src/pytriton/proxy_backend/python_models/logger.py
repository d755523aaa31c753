"""`Logger`: log records at the levels of Triton."""

from __future__ import annotations

import enum
import logging
import sys
from types import FrameType

from ..wire.errors import ProxyBackendError
from .errors import TritonModelException, text_of
from .server import SERVER


class Level(enum.IntEnum):
    """The levels of Triton's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    Level.INFO: logging.INFO,
    Level.WARNING: logging.WARNING,
    Level.ERROR: logging.ERROR,
    Level.VERBOSE: logging.DEBUG,
}
_logger = logging.getLogger("pytriton.python_model")


class Logger:
    """Writes records to the log of the server."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        """Write a record at a level."""
        message = text_of(message, "Logger.log(message)")
        if not isinstance(level, Level):
            raise TypeError(f"Logger.log(level): expected a level of Logger, got a {type(level).__name__}")
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if frame is not None and SERVER.has_endpoint:
            try:
                SERVER.calls().log(int(level), message, frame.f_code.co_filename, frame.f_lineno)
            except (TritonModelException, ProxyBackendError) as error:
                _logger.warning("the server's log cannot be written to: %s", error)
            else:
                return
        _logger.log(_LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        """Write a record of what goes on."""
        Logger.log(message, Level.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""
        Logger.log(message, Level.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""
        Logger.log(message, Level.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write what only a verbose log has."""
        Logger.log(message, Level.VERBOSE)
