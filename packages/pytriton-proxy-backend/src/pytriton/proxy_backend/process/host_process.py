"""The process of one instance of a Python model: a worker process that runs a `model.py`."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from .child import ChildProcess, Launch, StartProcess, start_process
from .messages import PythonModelJob, PythonModelServing
from .worker_process import RestartLimits, WorkerProcess

logger = logging.getLogger(__name__)

FINALIZE_TIMEOUT_S = 30.0
"""How long a host may take to end, with `finalize`, when its requests are answered, in seconds."""

START_TIMEOUT_S = 1800.0
"""How long `auto_complete_config` and `initialize` may take, each, in seconds, where the model says nothing else."""
START_PARAMETER = "PYTRITON_START_TIMEOUT_S"
"""Parameter of a configuration that says so."""


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
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare a host; nothing happens before `start`."""
        # Triton's Python backend restarts a host without a limit, too: a request that crashes a process says nothing
        # about other requests.
        limits = RestartLimits(max_crashes=None, start_timeout_s=start_timeout_s)
        super().__init__(job, job.model_name, number, launch=launch, limits=limits)
        self._start_process = start
        self._python_job = job
        self._configured: dict[str, Any] | None = None
        self._finalizing_since: float | None = None
        # When this host was asked to serve, for a host that completed the configuration first.
        self._asked_at = 0.0

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
            self._asked_at = time.monotonic()
            if self._child is not None:
                self._child.serve(serving)

    def _look_after(self, child: ChildProcess) -> str | None:
        self._finalizing_since = None
        return super()._look_after(child)

    def _overdue(self, started: float, is_ready: bool, done_since: float | None) -> str | None:
        job = self._python_job
        if job.auto_complete and self._configured is not None:
            # The host has completed the configuration and waits for `serve`, so its start is not overdue.
            started = time.monotonic()
        reason = super()._overdue(max(started, self._asked_at), is_ready, done_since)
        if reason is not None and not is_ready and done_since is None and self._stop_deadline is None:
            what = "auto_complete_config" if job.auto_complete else "initialize"
            reason = (
                f"was still in the {what} of its model.py after {self._limits.start_timeout_s:g} s: it was killed. "
            )
            reason += f"Set the parameter {START_PARAMETER} of its config.pbtxt higher, if it needs longer"
        since = self._finalizing_since
        if reason is not None or done_since is not None or since is None:
            return reason
        if time.monotonic() < since + FINALIZE_TIMEOUT_S:
            return None
        reason = f"was still in the finalize of its model.py after {FINALIZE_TIMEOUT_S:g} s: it is killed"
        if self._stop_deadline is not None or self._was_put_to_sleep:
            # No other code reports this.
            logger.warning("%s %s", self._label, reason)
        return reason

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "finalizing":
            self._finalizing_since = time.monotonic()
            return
        if message["kind"] != "configured":
            super()._take(message)
            return
        with self._changed:
            self._configured = message
            self._changed.notify_all()
