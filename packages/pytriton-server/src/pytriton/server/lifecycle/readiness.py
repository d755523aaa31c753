"""What `/v2/health/ready` says: not while a model has no worker, and not from the order to stop on.

tritonserver has no switch for that. But as long as it cannot load one of its models it says that it is not ready
(unless it runs with `--strict-readiness=false`), and serves the others as before. So a model that cannot be loaded is
put beside them, under a name that tells why.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytriton.proxy_backend import BACKEND_NAME, SIDE_FILE_NAME, ProxySettings
from pytriton.server.control.http import CALL_TIMEOUT_S, Control, ControlError
from pytriton.server.errors import TritonServerError
from pytriton.server.models.repository import CONFIG_FILE
from pytriton.server.models.service import WorkerService
from pytriton.server.models.worker_watch import WorkerWatch
from pytriton.server.tritonserver.version import parse_server_version
from pytriton.server.workspace import Workspace

DRAINING = "pytriton-draining"
"""In the list of models while the server is being stopped."""
NO_WORKERS = "pytriton-no-workers"
"""In the list of models while one of them has no worker."""
LOST_PART = "pytriton-lost-part"
"""A model of this name in the repository shows that a process beside the server was given up."""
GATE_NAMES = (DRAINING, NO_WORKERS, LOST_PART)

_CONFIG = f"""\
backend: "{BACKEND_NAME}"
max_batch_size: 0
input [{{ name: "x", data_type: TYPE_FP32, dims: [1] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [1] }}]
"""
# Since this version, a server asks the proxy backend of each model whether it is ready.
_ASKS_MODELS_SINCE = (2, 68)

logger = logging.getLogger(__name__)


class ReadinessGate:
    """Makes `/v2/health/ready` answer "no", and undoes that. Threads may share it."""

    def __init__(self, models: Path, endpoints: Path, scratch: Path) -> None:
        self._models = models
        self._endpoints = endpoints
        self._scratch = scratch
        self._lock = threading.Lock()
        self._closed: set[str] = set()

    def close(self, name: str, control: Control, again: bool = False) -> bool:
        """Make the server say that it is not ready, for the reason `name`, one of `GATE_NAMES`; return whether it does.

        It fails, for example, without room for two small files; that is logged.
        """
        with self._lock:
            if name in self._closed and not again:
                return True
            try:
                # Without its side file, the proxy backend does not start.
                self._put(name, None)
                control.load(name, CALL_TIMEOUT_S)
            except ControlError as error:
                if error.reason is not None:
                    self._closed.add(name)
                    return True
                logger.warning(
                    "The server does not answer, so it cannot be made to say that it is not ready: %s", error
                )
            except OSError as error:
                logger.warning("The server cannot be made to say that it is not ready: %s", error)
            return False

    def open(self, name: str, control: Control) -> None:
        """Undo `close`; raise an error if the server still says that it is not ready."""
        with self._lock:
            if name not in self._closed:
                return
            # Triton forgets the failure of a model once it was loaded and unloaded.
            settings = ProxySettings(endpoint=self._endpoints / f"{name}.sock", batching=False)
            self._put(name, settings.to_text())
            try:
                control.load(name, CALL_TIMEOUT_S)
                control.unload(name, CALL_TIMEOUT_S)
            except TritonServerError:
                self._put(name, None)
                raise
            shutil.rmtree(self._models / name, ignore_errors=True)
            self._closed.discard(name)

    def hide(self) -> None:
        """Take the gates, which cannot be loaded, out of the repository of a server that will load all models."""
        with self._lock:
            for name in self._closed:
                shutil.rmtree(self._models / name, ignore_errors=True)

    def close_again(self, control: Control) -> None:
        """Make the server, which may be another one, say so for all reasons that there are."""
        for name in sorted(self._closed):
            self.close(name, control, again=True)

    def reset(self) -> None:
        """Remove all traces, for a server that is about to be started again."""
        with self._lock:
            for name in GATE_NAMES:
                shutil.rmtree(self._models / name, ignore_errors=True)
            self._closed.clear()

    def _put(self, name: str, side_file: str | None) -> None:
        """Put a model into the repository in one step, newer than any before."""
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


class Readiness:
    """Closes the readiness gate of a running server while a model has no worker, and for good when it is drained."""

    def __init__(
        self, workspace: Workspace, models: Callable[[], Sequence[WorkerService]], look_first: Callable[[], None]
    ) -> None:
        self._look_first = look_first
        self._endpoints = workspace.endpoints_path
        self._models = models
        self._gate = ReadinessGate(workspace.model_store_path, self._endpoints, workspace.path / "gate")
        self._control: Control | None = None
        self._watch: WorkerWatch | None = None
        self._has_lost_part = False

    def start(self, control: Control) -> None:
        """Begin to watch the workers of a server that serves its models."""
        self._control = control
        self._gate.close_again(control)
        if self._has_lost_part:
            self._gate.close(LOST_PART, control)
        self._watch = WorkerWatch(self._models, self._endpoints, self._on_change, self._look_first)
        self._watch.start()

    def lose_part(self) -> None:
        """Make the server, and every one that takes its place, say that it is not ready, for good."""
        self._has_lost_part = True
        if self._control is not None:
            self._gate.close(LOST_PART, self._control)

    def stop(self) -> None:
        """End the watch. The gate stays as it is; a server that replaces this one starts without it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._gate.hide()

    def reset(self) -> None:
        """Remove all traces from the repository, for a server that is about to be started again."""
        self.stop()
        self._gate.reset()

    def start_draining(self) -> None:
        """Make the server say that it is not ready, for good. To be called after `stop`."""
        if self._control is not None:
            self._gate.close(DRAINING, self._control)

    def _on_change(self, are_complete: bool) -> bool:
        control = self._control
        if control is None:
            return False
        try:
            if not are_complete:
                return _asks_models(control) or self._gate.close(NO_WORKERS, control)
            self._gate.open(NO_WORKERS, control)
        except (TritonServerError, OSError) as error:
            logger.warning("The server cannot be made to say whether it is ready: %s", error)
            return False
        logger.info("Every model has a worker again: the server says that it is ready.")
        return True


def _asks_models(control: Control) -> bool:
    """Return whether the server itself says that it is not ready while a model has no worker."""
    version = parse_server_version(control.server_version())
    return version is not None and version >= _ASKS_MODELS_SINCE
