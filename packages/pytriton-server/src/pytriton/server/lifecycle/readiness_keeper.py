"""What a server says about its readiness: not while a model has no worker, and not from the order to stop on."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytriton.server.control.http import Control
from pytriton.server.errors import TritonServerError
from pytriton.server.lifecycle.drain import linger
from pytriton.server.lifecycle.readiness_gate import DRAINING, NO_WORKERS, ReadinessGate
from pytriton.server.models.bound_model import BoundModel
from pytriton.server.models.worker_watch import WorkerWatch
from pytriton.server.tritonserver.process import ServerProcess
from pytriton.server.tritonserver.version import parse_server_version
from pytriton.server.workspace import Workspace

__all__ = ["ReadinessKeeper"]

# From this version on a server that is asked whether it is ready asks the proxy backend of each model.
_ASKS_MODELS_SINCE = (2, 68)

logger = logging.getLogger(__name__)


class ReadinessKeeper:
    """Keeps what `/v2/health/ready` says true.

    Args:
        workspace: The folder of the server's files.
        models: Gives the models in service.
    """

    def __init__(self, workspace: Workspace, models: Callable[[], Sequence[BoundModel]]) -> None:
        self._endpoints: Path = workspace.endpoints_path
        self._models = models
        self._gate = ReadinessGate(workspace.model_store_path, self._endpoints, workspace.path / "gate")
        self._control: Control | None = None
        self._watch: WorkerWatch | None = None

    def start(self, control: Control) -> None:
        """Begin to look after a server that serves its models.

        Args:
            control: How it is asked.
        """
        self._control = control
        self._watch = WorkerWatch(self._models, self._endpoints, self._pass_on)
        self._watch.start()

    def stop(self) -> None:
        """End it. What the server says stays as it is."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def forget(self) -> None:
        """Remove all traces from the repository, for a server that is about to be started again."""
        self.stop()
        self._gate.forget()

    def say_draining(
        self, process: ServerProcess, deadline: float, linger_s: float | None, hurried: Callable[[], bool]
    ) -> None:
        """Turn readiness to "no" for good, and give those who look at it the time to see that.

        Args:
            process: The server.
            deadline: When the time is over, as `time.monotonic` has it.
            linger_s: As for `drain.linger`.
            hurried: Asked again and again; True ends it at once.
        """
        self.stop()
        control = self._control
        if control is None or not process.is_running or hurried():
            return
        self._gate.shut(DRAINING, control)
        left = max(0.0, deadline - time.monotonic())
        linger(control, linger_s, most_s=left, ended=lambda seconds: process.wait(seconds) or hurried())

    def _pass_on(self, are_complete: bool) -> bool:
        control = self._control
        if control is None:
            return False
        try:
            if not are_complete:
                return _asks_models(control) or self._gate.shut(NO_WORKERS, control)
            self._gate.open(NO_WORKERS, control)
        except (TritonServerError, OSError) as error:
            logger.warning("The server cannot be made to say whether it is ready: %s", error)
            return False
        logger.info("Every model has a worker again: the server says that it is ready.")
        return True


def _asks_models(control: Control) -> bool:
    """Tell whether the server says by itself that it is not ready while a model has no worker."""
    version = parse_server_version(control.server_version())
    return version is not None and version >= _ASKS_MODELS_SINCE
