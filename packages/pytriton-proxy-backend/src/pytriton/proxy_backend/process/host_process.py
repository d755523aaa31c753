"""The process of one instance of a Python model: a worker process that runs a `model.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .child import Launch, StartProcess, start_process
from .messages import PythonModelJob, PythonModelServing
from .worker_process import RestartLimits, WorkerProcess

# As in Triton's Python backend: some models load for minutes, and a request that crashes a process says nothing about
# others.
_LIMITS = RestartLimits(max_crashes=None, start_timeout_s=math.inf)


class HostProcess(WorkerProcess):
    """Serves one instance of a Python model.

    Its process is started again like a worker's, and never given up. If the job completes a configuration, the first
    process then waits for `serve`; later ones serve at once.
    """

    _KIND = "host"
    _LOAD_FAILED = "its model.py failed"

    def __init__(
        self,
        job: PythonModelJob,
        number: int,
        *,
        launch: Launch | None = None,
        start: StartProcess = start_process,
    ) -> None:
        """Prepare a host; nothing happens before `start`."""
        super().__init__(job, job.model_name, number, launch=launch, limits=_LIMITS)
        self._start_process = start
        self._python_job = job
        self._configured: dict[str, Any] | None = None

    def wait_configured(self, timeout_s: float) -> bool:
        """Wait until the configuration is complete; return whether it is."""
        return self._wait(lambda: self._configured is not None, timeout_s)

    def wait_serving(self, timeout_s: float) -> bool:
        """Wait until `initialize` has returned and the host is attached; return whether it is."""
        return self._wait(lambda: self._attached, timeout_s)

    @property
    def completed_config(self) -> str:
        """The completed configuration; empty if the model completes none."""
        configured = self._configured or {}
        return str(configured.get("config", "")) if configured.get("changed") else ""

    @property
    def load_error(self) -> str:
        """The model's own text about its failed load, or else how the process ended."""
        failure = self._failure
        return str(self.error or "") if failure is None else str(failure.get("text", ""))

    def serve(self, serving: PythonModelServing) -> None:
        """Have the process that has completed the configuration serve an instance."""
        with self._changed:
            config = serving.args["model_config"]
            job = dataclasses.replace(self._python_job, auto_complete=False, serve=serving, model_config=config)
            self._job = self._python_job = job
            if self._child is not None:
                self._child.serve(serving)

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] != "configured":
            super()._take(message)
            return
        with self._changed:
            self._configured = message
            self._changed.notify_all()
