"""`Ending`: the steps in which a server ends, with what belongs to it."""

import time
from collections.abc import Callable

from pytriton.proxy_backend.hosting.supervisor import FINALIZE_TIMEOUT_S
from pytriton.server.lifecycle.deployment import HURRIED_DEADLINE_S, WORKER_DEADLINE_S, Deployment
from pytriton.server.lifecycle.drain import CUT_DEADLINE_S, DrainResult, drain_requests, linger
from pytriton.server.lifecycle.figures import Figures
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.readiness import Readiness
from pytriton.server.lifecycle.running import RunningServer
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.command_line import DRAIN_TIMEOUT_S, EXIT_TIMEOUT_S, is_controlled
from pytriton.server.tritonserver.stubs import remove_shared_memory, shared_memory_of

DRAIN_DEADLINE_S = float(DRAIN_TIMEOUT_S)
"""Seconds that a stop waits for requests in flight, unless `exit_timeout_secs` is set."""
EXIT_MARGIN_S = 5.0
"""What tritonserver needs to end beyond its own exit timeout, in seconds: its metrics thread sleeps in steps of
`metrics_interval_ms`."""
END_S = EXIT_TIMEOUT_S + EXIT_MARGIN_S
"""How long a server without requests may take to end, in seconds."""


def drain_s(config: TritonConfig) -> float:
    """Return how many seconds requests in flight may take when the server ends."""
    return DRAIN_DEADLINE_S if config.exit_timeout_secs is None else float(config.exit_timeout_secs)


class Ending:
    """The end of a server: `drain`, and then `end`, even if the first one failed."""

    def __init__(
        self,
        server: RunningServer,
        deployment: Deployment,
        files: ServerFiles,
        readiness: Readiness,
        figures: Figures,
        *,
        hurried: Callable[[], bool],
    ) -> None:
        self._server = server
        self._deployment = deployment
        self._files = files
        self._readiness = readiness
        self._figures = figures
        self._hurried = hurried
        self._deadline = time.monotonic() + drain_s(server.config)
        # How long the process may take to end; this value holds if the drain is interrupted.
        self._patience_s = 0.0

    def drain(self, linger_s: float | None) -> None:
        """Take all models out of service when their requests are answered.

        While lingering, the server accepts requests but says that it is not ready.
        """
        process, ports = self._server.process, self._server.ports
        if not self._server.is_up or process is None or ports is None:
            self._patience_s = END_S
            return
        self._readiness.stop()
        if process.is_running and not self._hurried():
            self._readiness.start_draining()
            ended: Callable[[float], bool] = lambda seconds: process.wait(seconds) or self._hurried()  # noqa: E731
            linger(self._server.control, linger_s, most_s=self._left_s(), ended=ended)
        if process.wait(0.0):
            self._patience_s = END_S
            return
        if self._files.supervisor is not None:
            # A model that is still loading is not waited for.
            self._files.supervisor.stop_loading()
        if not is_controlled(self._server.config):
            # Models cannot be taken out of service in this mode, so the server itself waits for its requests.
            self._patience_s = self._left_s() + EXIT_MARGIN_S
            return
        result = drain_requests(
            process, self._server.control, self._deployment, ports,
            deadline=self._deadline, hurried=self._hurried, supervisor=self._files.supervisor,
        )  # fmt: skip
        if result is DrainResult.CUT:
            self._patience_s = CUT_DEADLINE_S
        elif result is DrainResult.UNKNOWN and self._server.config.exit_timeout_secs is not None:
            # The server's own timeout is the only limit.
            self._patience_s = max(END_S, self._deadline - time.monotonic() + EXIT_MARGIN_S)
        else:
            self._patience_s = END_S

    def end(self) -> None:
        """End the process, the workers and the hosts, and remove the files."""
        has_served = self._server.is_up
        try:
            self._end_process()
        finally:
            self._server.is_up = False
            # Once the server is gone, nobody needs the results of callables.
            is_in_hurry = not has_served or not self._patience_s or self._hurried()
            try:
                self._deployment.stop_workers(HURRIED_DEADLINE_S if is_in_hurry else WORKER_DEADLINE_S)
            finally:
                self._let_go(HURRIED_DEADLINE_S if is_in_hurry else FINALIZE_TIMEOUT_S)

    def _end_process(self) -> None:
        self._readiness.stop()
        self._figures.close()
        if (process := self._server.process) is not None:
            regions = shared_memory_of(process.pid)
            process.stop(self._patience_s, hurried=self._hurried)
            if not process.is_running:
                remove_shared_memory(regions)

    def _let_go(self, hosts_timeout_s: float) -> None:
        try:
            if self._files.supervisor is not None:
                # The server is gone, so nobody needs the results of hosts.
                self._files.supervisor.cut()
                self._files.supervisor.close(hosts_timeout_s)
        finally:
            self._server.close()
            self._files.remove()

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
