"""`Session`: a server with models from start to end; `ServerSession`: one run of a tritonserver of our own."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pytriton.proxy_backend.process.budget import MemoryBudget
from pytriton.server.control.local_token import leave_token
from pytriton.server.errors import TritonServerError, TritonServerStartError
from pytriton.server.lifecycle.deployment import Deployment
from pytriton.server.lifecycle.ending import DRAIN_DEADLINE_S, EXIT_MARGIN_S, Ending
from pytriton.server.lifecycle.figures import Figures
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.orphans import has_others
from pytriton.server.lifecycle.readiness import Readiness
from pytriton.server.lifecycle.replacement import Replacement
from pytriton.server.lifecycle.running import RunningServer
from pytriton.server.lifecycle.self_test import GuardTest
from pytriton.server.lifecycle.startup import POLL_S, find_misfit, find_server
from pytriton.server.lifecycle.watchdog import Watchdog
from pytriton.server.models.service import WorkerService
from pytriton.server.models.tracing import export_environment
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.response_cache import local_cache_bytes
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.command_line import ServerFolders
from pytriton.server.tritonserver.guard import GuardConfig
from pytriton.server.tritonserver.outcomes import OutcomeCounts
from pytriton.server.tritonserver.ports import ReservedPorts, client_urls, port_in_use, reserve_ports
from pytriton.server.tritonserver.process import ExitReport
from pytriton.server.workspace import Workspace

__all__ = ["DRAIN_DEADLINE_S", "ServerSession", "Session"]

_START_ATTEMPTS = 3

logger = logging.getLogger(__name__)


class Session(Protocol):
    """A server with models, from the start or the first contact to the end."""

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""

    @property
    def deployment(self) -> Deployment:
        """The models on the server."""

    def start(self, models: Iterable[WorkerService], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Bring server and models up. After an error, `close` has to follow."""

    def claim(self, model: WorkerService) -> None:
        """Make sure that a model may get its name, before it is loaded."""

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """Take the models out of service when their requests are answered, and stop or leave the server.

        While lingering, a server of ours accepts requests but says that it is not ready; `hurried` ends all waits.
        """


class ServerSession:
    """One run of tritonserver."""

    def __init__(
        self,
        config: TritonConfig,
        security: TritonSecurityConfig,
        workspace: Workspace,
        *,
        guard: GuardConfig | None,
        unresponsive_timeout_s: float | None,
        folders: Iterable[Path] = (),
        outcomes: OutcomeCounts | None = None,
        budget: MemoryBudget | None = None,
        on_exit: Callable[[ExitReport], None],
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        self._server = RunningServer(config, security, guard=guard, outcomes=outcomes, on_exit=on_exit)
        self._workspace = workspace
        self._deployment = Deployment(
            self,
            workspace.endpoints_path,
            control=lambda: self._server.control,
            is_running=lambda: self.is_running,
            log_tail=lambda: self._server.log_tail,
            on_unrecoverable=on_unrecoverable,
            cache_bytes=local_cache_bytes(config.cache_config),
            metrics=lambda: None if self._server.ports is None else self._server.ports.triton_metrics,
        )
        self.files = ServerFiles(
            workspace,
            self._deployment,
            folders,
            control=lambda: self._server.control,
            log_tail=lambda: self._server.log_tail,
            budget=budget,
        )
        """The files in the workspace."""
        self.readiness = Readiness(workspace, lambda: self._deployment.lasting, self.files.look)
        self._figures = Figures(self._server, self._deployment, self.files, lambda: self.guard_states)
        self._guard_test: GuardTest | None = None
        self._left_token = contextlib.ExitStack()
        self.token_path: Path | None = None
        """The file in which other processes of this user find the access token."""
        self._watchdog = (
            None if unresponsive_timeout_s is None else Watchdog(self._server.watched, unresponsive_timeout_s)
        )

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""
        return self._server.is_running

    @property
    def server(self) -> RunningServer:
        """The server itself: its process, settings and ports, and how it is asked."""
        return self._server

    @property
    def deployment(self) -> Deployment:
        """The models on the server."""
        return self._deployment

    @property
    def guard_states(self) -> dict[str, bool]:
        """Whether each protection of the guard is in force, by name; untested ones are missing."""
        test = self._guard_test
        return {} if test is None else {each.name: is_in_force for each, is_in_force in test.states.items()}

    def start(self, models: Iterable[WorkerService], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Start the server with `models` and wait until they are served; see `Session.start`."""
        config = self._server.config
        binary, _ = find_server(config, self._server.security, self._server.guard)
        folders, variables = self.files.create(binary, config)
        # Workers start now, so that they are attached by the time that the server answers.
        self._deployment.prepare_all(models, cancelled)
        self.files.write_models()
        # Before the server starts, because it reports that it is ready as soon as its models are loaded.
        for model in self._deployment.models:
            self._deployment.wait_warm(model, cancelled)
        self._server.environment = export_environment(binary.environment(os.environ)) | variables
        try:
            self._start_first(folders, timeout_s, cancelled)
            self._wait_served(timeout_s, cancelled)
            if self._watchdog is not None:
                self._watchdog.start()
        except TritonServerError as error:
            if (misfit := find_misfit(error, binary, self._server.process)) is not None:
                raise misfit from error
            raise

    def _start_first(self, folders: ServerFolders, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_process(folders, reserve_ports(self._server.config), timeout_s, cancelled)
                return
            except TritonServerStartError as error:
                # Another process may take a free port before the server binds it.
                endpoint = self._server.lost_port(error)
                if endpoint is None:
                    raise
                if not endpoint.picked or attempt == _START_ATTEMPTS:
                    raise port_in_use(endpoint, exit_code=error.exit_code, log_lines=list(error.log_lines)) from error
                logger.info("Port %d was taken by somebody else in the meantime: trying another one.", endpoint.port)

    def _start_process(
        self, folders: ServerFolders, ports: ReservedPorts, timeout_s: float, cancelled: Callable[[], bool]
    ) -> None:
        try:
            self._leave_token(ports)
            names = {model.name for model in self._deployment.models} | self.files.linked.keys()
            self._server.start(folders, ports, names, cancelled)
            self._figures.prepare()
            self._server.wait_until_up(timeout_s, cancelled)
            self._figures.start()
        finally:
            ports.release()

    def _leave_token(self, ports: ReservedPorts) -> None:
        """Leave the access token before anybody can be asked for it."""
        self._left_token.close()
        token = self._server.security.access_token
        if token is not None:
            urls = client_urls(self._server.config, ports)
            of_inference = [urls[name] for name in ("http", "grpc") if name in urls]
            metrics_port = ports.metrics.port if ports.metrics else None
            self.token_path = self._left_token.enter_context(leave_token(token, of_inference, metrics_port))

    def _wait_served(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until a server that answers serves all models."""
        server = self._server
        try:
            self.files.check_loaded(server.config)
            for model in self._deployment.models:
                self._wait_attached(model, timeout_s, cancelled)
        except TritonServerError as error:
            raise server.explained(error) from error
        self._guard_test = server.make_guard_test()
        if self._guard_test is not None:
            plain = {model.name: not model.decoupled for model in self._deployment.models}
            self._guard_test.run({**dict.fromkeys(self.files.linked, False), **plain})
        # From here on `on_exit` reports the end; an end before that is reported here.
        server.is_up = True
        ended = server.end_in_start()
        if ended is not None:
            server.is_up = False
            raise ended
        self.readiness.start(server.control)

    def _wait_attached(self, model: WorkerService, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > POLL_S and model.is_alive and not model.is_attached:
            if cancelled():
                raise StartCancelled
            ended = self._server.end_in_start()
            if ended is not None:
                raise ended
            time.sleep(POLL_S)
        self._deployment.wait_attached(model, max(0.0, left))

    def restart(self, *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Start a server that has died again, with the same models, ports and workers.

        After an error it may be called again.
        """
        folders, ports = self.files.folders, self._server.ports
        if folders is None or ports is None:
            raise TritonServerStartError("tritonserver was never started, so it cannot be started again.")
        self._server.is_up = False
        self.readiness.reset()
        if self.files.are_lost:
            self.files.restore()
        self._server.stop(EXIT_MARGIN_S, cancelled)
        # Remove the sockets of the dead server, because a socket shows that its model is loaded.
        for socket in self._deployment.endpoints.glob("*.sock"):
            socket.unlink(missing_ok=True)
        ports.reserve_again()
        self._start_process(folders, ports, timeout_s, cancelled)
        self._wait_served(timeout_s, cancelled)

    def replace(
        self, config: TritonConfig, server_dir: Path | None, *, timeout_s: float, cancelled: Callable[[], bool]
    ) -> None:
        """Replace the running server by another one with the same models, workers and ports.

        After an error, the running one goes on.
        """
        replacement = Replacement(self._server, self._deployment, self.files, self._workspace, config, server_dir)
        with self._unwatched(), self._server.being_replaced():
            try:
                replacement.start()
                replacement.stand_by(timeout_s, cancelled)
                replacement.hand_over()
                replacement.drain(cancelled)
                replacement.adopt()
            except BaseException as error:
                replacement.put_back(cancelled)
                misfit = find_misfit(error, replacement.binary, replacement.started, "The running one goes on. ")
                if misfit is not None:
                    raise misfit from error
                raise
            finally:
                replacement.release_ports()
            try:
                replacement.take_over()
                self._wait_served(timeout_s, cancelled)
                replacement.wait_answered(cancelled)
            finally:
                replacement.finish(cancelled)
        logger.info("The server was replaced by process %s.", replacement.process.pid)

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Do not watch the workers in this block, which begins to watch them anew; after an error that is done here."""
        self.readiness.stop()
        try:
            yield
        except BaseException:
            # Either server may be the one that goes on.
            if self.is_running:
                self.readiness.start(self._server.control)
            raise

    def claim(self, model: WorkerService) -> None:
        """Do nothing: the names of a server of our own are ours."""

    def deploy(self, name: str, models: Sequence[WorkerService], timeout_s: float) -> bool:
        """Make the server serve these versions under a name, and no others; see `deployment.Deployer`."""
        with self.files.changed(name, models):
            if models:
                self._server.control.load(name, timeout_s)
                if self._guard_test is not None and not self._guard_test.has_tried_model:
                    self._guard_test.run_model(name, is_plain=not models[0].decoupled)
            else:
                self._server.control.unload(name, timeout_s)
        return True

    def has_others(self, names: Collection[str]) -> bool:
        """Return whether the server has, or may have, models beside these."""
        return has_others(self._server.control, names)

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """End the server after the requests that it has got, within `exit_timeout_secs`; see `Session.close`."""
        ending = Ending(self._server, self._deployment, self.files, self.readiness, self._figures, hurried=hurried)
        if self._watchdog is not None:
            self._watchdog.stop()
        try:
            ending.drain(linger_s)
        finally:
            self._left_token.close()
            ending.end()
