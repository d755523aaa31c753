"""The server behind a model: calls into it, and what may be asked of it when."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..wire.errors import ProxyBackendError
from .errors import TritonModelException

if TYPE_CHECKING:
    from ..transport.calls import Calls

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """How far the model of this process is."""

    LOADING = "loading"
    SERVING = "serving"
    FINALIZING = "finalizing"


class Server:
    """The server, as the model of this process sees it. Thread-safe."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING  # how far the model is
        self.name = ""  # what errors call the model: the name of its instance
        self._endpoint: Path | None = None
        self._label = ""
        self._calls: Calls | None = None
        self._lock = threading.Lock()

    def set_endpoint(self, endpoint: Path, name: str, label: str) -> None:
        """Set the address of the server."""
        self._endpoint = endpoint
        self.name = name
        self._label = label

    def calls(self) -> Calls:
        """Return the connection for calls, made at first use."""
        with self._lock:
            if self._calls is None:
                if self._endpoint is None:
                    raise TritonModelException(
                        "the server can be called from `initialize` on, not while the configuration is completed"
                    )
                # Imported late, because most models do not need it.
                from ..transport.calls import Calls

                try:
                    self._calls = Calls(self._endpoint, self._label)
                except (ProxyBackendError, OSError) as error:
                    raise TritonModelException(f"the server cannot be called: {error}") from error
            return self._calls

    @property
    def has_endpoint(self) -> bool:
        """Whether it can be called."""
        return self._endpoint is not None

    @contextlib.contextmanager
    def replaced(self, calls: Any, name: str, phase: Phase) -> Iterator[None]:
        """Replace the server for a block, as tests of models do."""
        with self._lock:
            before = self._calls, self.name, self.phase
            self._calls, self.name, self.phase = calls, name, phase
        try:
            yield
        finally:
            with self._lock:
                self._calls, self.name, self.phase = before

    def failed(self, what: str, error: Exception) -> TritonModelException:
        """Return the error of a call that failed, in the words of Triton's stub."""
        return TritonModelException(f"{what}: Failed to process the request for model '{self.name}', message: {error}")

    def close(self) -> None:
        """Close the connection for calls: running ones fail, and metrics are deleted."""
        with self._lock:
            calls, self._calls = self._calls, None
            self._endpoint = None
        if calls is not None:
            calls.close()


SERVER = Server()
"""The server of this process."""
