"""Making a server say that it is not ready while it goes on to serve.

tritonserver has no switch for that. But as long as it cannot load one of its models it says that it is not ready
(unless it runs with `--strict-readiness=false`), and serves the others as before. So a model that cannot be loaded is
put beside them, under a name that tells why.
"""

import logging
import os
import shutil
import threading
import time
from pathlib import Path

from pytriton.proxy_backend import BACKEND_NAME, SIDE_FILE_NAME, ProxySettings
from pytriton.server.control.http import Control, ControlError
from pytriton.server.errors import TritonServerError
from pytriton.server.models.repository import CONFIG_FILE

__all__ = ["DRAINING", "GATE_NAMES", "NO_WORKERS", "ReadinessGate"]

DRAINING = "pytriton-draining"
"""In the list of models while the server is being stopped."""
NO_WORKERS = "pytriton-no-workers"
"""In the list of models while one of them has no worker."""
GATE_NAMES = (DRAINING, NO_WORKERS)

_CONFIG = f"""\
backend: "{BACKEND_NAME}"
max_batch_size: 0
input [{{ name: "x", data_type: TYPE_FP32, dims: [1] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [1] }}]
"""
_CALL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class ReadinessGate:
    """Turns what `/v2/health/ready` answers to "no" and back. Safe for several threads.

    Args:
        models: The server's model repository.
        endpoints: Folder of the sockets.
        scratch: A path beside the repository, for files on their way there.
    """

    def __init__(self, models: Path, endpoints: Path, scratch: Path) -> None:
        self._models = models
        self._endpoints = endpoints
        self._scratch = scratch
        self._lock = threading.Lock()
        self._shut: set[str] = set()

    def shut(self, name: str, control: Control) -> bool:
        """Make the server say that it is not ready, for the reason `name`, one of `GATE_NAMES`.

        Returns:
            Whether it does. It cannot be made to without room for two small files, for example; that is logged.
        """
        with self._lock:
            if name in self._shut:
                return True
            try:
                # Without its side file the proxy backend does not come up.
                self._put(name, None)
                control.load(name, _CALL_TIMEOUT_S)
            except ControlError as error:
                if error.reason is not None:
                    self._shut.add(name)
                    return True
                logger.warning(
                    "The server does not answer, so it cannot be made to say that it is not ready: %s", error
                )
            except OSError as error:
                logger.warning("The server cannot be made to say that it is not ready: %s", error)
            return False

    def open(self, name: str, control: Control) -> None:
        """Take `shut` back.

        Raises:
            TritonServerError: The server does not answer, or goes on to say that it is not ready.
            OSError: A file cannot be written.
        """
        with self._lock:
            if name not in self._shut:
                return
            # Triton forgets that a model failed when it is loaded, and unloaded in order.
            settings = ProxySettings(endpoint=self._endpoints / f"{name}.sock", batching=False)
            self._put(name, settings.to_text())
            try:
                control.load(name, _CALL_TIMEOUT_S)
                control.unload(name, _CALL_TIMEOUT_S)
            except TritonServerError:
                self._put(name, None)
                raise
            shutil.rmtree(self._models / name, ignore_errors=True)
            self._shut.discard(name)

    def forget(self) -> None:
        """Remove all traces, for a server that is about to be started again."""
        with self._lock:
            for name in GATE_NAMES:
                shutil.rmtree(self._models / name, ignore_errors=True)
            self._shut.clear()

    def _put(self, name: str, side_file: str | None) -> None:
        """Put a model into the repository, newer than what was there before, and never half of it."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        version = self._scratch / "1"
        version.mkdir(parents=True)
        (self._scratch / CONFIG_FILE).write_text(_CONFIG, encoding="utf-8")
        if side_file is not None:
            (version / SIDE_FILE_NAME).write_text(side_file, encoding="utf-8")
        now = time.time_ns()
        for path in (*version.iterdir(), version, self._scratch / CONFIG_FILE, self._scratch):
            os.utime(path, ns=(now, now))
        target = self._models / name
        shutil.rmtree(target, ignore_errors=True)
        self._scratch.rename(target)
