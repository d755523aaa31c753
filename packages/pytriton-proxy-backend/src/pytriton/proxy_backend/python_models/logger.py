"""`Logger`: log records at the levels of Triton."""

from __future__ import annotations

import enum
import logging
from typing import Protocol


class Level(enum.IntEnum):
    """The levels of Triton's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class LogSink(Protocol):
    """Where log records go."""

    def log(self, level: Level, message: str, file: str, line: int) -> None:
        """Write one record."""


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
        if not isinstance(message, str) or not isinstance(level, Level):
            raise TypeError(
                "Logger.log(message, level): expected a str and a level of Logger, got "
                f"{type(message).__name__} and {type(level).__name__}"
            )
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
