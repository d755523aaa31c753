"""`Session`: a server with models from start to end; `ServerSession`: one run of a tritonserver of our own."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend.hosting.supervisor import FINALIZE_TIMEOUT_S
from pytriton.proxy_backend.system.processes import resident_bytes
from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.control.http import Control, ControlError, HttpControl
from pytriton.server.errors import (
    TritonModelLoadError,
    TritonServerError,
    TritonServerStartError,
    quote_log,
)
from pytriton.server.lifecycle.drain import CUT_DEADLINE_S, DrainResult, drain_requests, linger
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.hosting import HURRIED_DEADLINE_S, WORKER_DEADLINE_S, ModelHost
from pytriton.server.lifecycle.orphans import has_others
from pytriton.server.lifecycle.readiness import GATE_NAMES, Readiness
from pytriton.server.lifecycle.replacement import Replacement, check_same_places
from pytriton.server.lifecycle.self_test import GuardTest
from pytriton.server.lifecycle.startup import POLL_S, wait_guarded, wait_until_up
from pytriton.server.lifecycle.watchdog import Watchdog
from pytriton.server.models.service import WorkerService
from pytriton.server.models.tracing import export_environment
from pytriton.server.models.workers import StartCancelled
from pytriton.server.observe.metrics_totals import HostedModel, hosted_models
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.preflight import check_settings
from pytriton.server.settings.response_cache import local_cache_bytes
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.binary import TritonServerBinary, find_tritonserver
from pytriton.server.tritonserver.command_line import (
    DRAIN_TIMEOUT_S,
    EXIT_TIMEOUT_S,
    QUIET_WITHOUT_GPU,
    ServerFolders,
    build_command,
    control_headers,
    has_gpu,
    is_controlled,
    redacted,
    secrets_of,
)
from pytriton.server.tritonserver.guard import Guard, GuardConfig, find_guard
from pytriton.server.tritonserver.handover import Handover
from pytriton.server.tritonserver.options import check_options, explain_misfit
from pytriton.server.tritonserver.outcomes import OutcomeCounts
from pytriton.server.tritonserver.ports import (
    Endpoint,
    ReservedPorts,
    port_in_use,
    port_setting_of_bind_failure,
    reserve_ports,
)
from pytriton.server.tritonserver.process import ExitReport, ServerProcess, is_complete
from pytriton.server.tritonserver.stubs import remove_shared_memory, shared_memory_of
from pytriton.server.workspace import Workspace

if TYPE_CHECKING:
    from pytriton.server.observe.metrics_page import MetricsPage

__all__ = ["DRAIN_DEADLINE_S", "ServerSession", "Session"]

DRAIN_DEADLINE_S = float(DRAIN_TIMEOUT_S)
"""How long a stop waits for requests that are being served, in seconds, unless `exit_timeout_secs` says."""

_START_ATTEMPTS = 3
_END_NOTICE_S = 1.0
# What tritonserver needs to end beyond its own exit timeout: its metrics thread sleeps in steps of
# `metrics_interval_ms`.
_EXIT_MARGIN_S = 5.0
# Between two attempts to write a workspace anew.
_RESTORE_PAUSE_S = 10.0
_END_S = EXIT_TIMEOUT_S + _EXIT_MARGIN_S

logger = logging.getLogger(__name__)


class Session(Protocol):
    """A server with models, from the start or the first contact to the end."""

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""

    @property
    def host(self) -> ModelHost:
        """The models on the server."""

    def start(self, models: Iterable[WorkerService], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Bring server and models up. After an error, `close` has to follow.

        Args:
            models: The models that are bound already.
            timeout_s: How long the server, and then each model's callables, may take, in seconds.
            cancelled: Asked again and again; True ends the wait.
        """

    def claim(self, model: WorkerService) -> None:
        """Make sure that a model may get its name, before it is loaded.

        Raises:
            PyTritonInvalidOperationError: The name is somebody else's.
        """

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """Take the models out of service when their requests are answered, and let go of the server.

        Args:
            hurried: Asked again and again; True ends all patience.
            linger_s: How long a server of our own accepts requests while it says already that it is not ready, in
                seconds; None is as long as some come, within limits.
        """


class ServerSession:
    """One run of tritonserver.

    Args:
        config: The settings.
        security: The token and what it protects.
        workspace: The folder for its files, which is made by `start` and removed by `close`.
        guard: What requests may ask of the server; None is what the environment says.
        unresponsive_timeout_s: How long it may answer nothing before it is ended, in seconds; None for ever.
        folders: Folders of models that are served as they are.
        outcomes: What was counted of the requests to the server before.
        on_exit: Called when the process has ended after a successful start and nobody stopped it.
        on_unrecoverable: Called when a callable raised PyTritonUnrecoverableError.
    """

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
        on_exit: Callable[[ExitReport], None],
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        self._guard_config = guard
        self._config = config
        self._security = security
        self._workspace = workspace
        self._on_exit = on_exit
        self._host = ModelHost(
            self,
            workspace.endpoints_path,
            is_running=lambda: self.is_running,
            log_tail=self._log_tail,
            on_unrecoverable=on_unrecoverable,
            cache_bytes=local_cache_bytes(config.cache_config),
        )
        self.files = ServerFiles(workspace, self._host, folders, control=lambda: self.control, log_tail=self._log_tail)
        """What is in the workspace."""
        self._ports: ReservedPorts | None = None
        self._process: ServerProcess | None = None
        self._control: Control | None = None
        self._guard_test: GuardTest | None = None
        self._metrics_page: MetricsPage | None = None
        self._outcomes_before = outcomes
        self.outcomes: OutcomeCounts | None = None
        """How requests have ended; None without the guard, which counts them, or the page that shows them."""
        self._environment: dict[str, str] = {}
        self.readiness = Readiness(workspace, lambda: self._host.lasting, self.files.look)
        self._is_up = False
        # While it is replaced, the end of a server may be in order, or no harm.
        self._is_replacing = False
        self._ended: list[tuple[ServerProcess, ExitReport]] = []
        self._exit_lock = threading.Lock()
        self._watchdog = None if unresponsive_timeout_s is None else Watchdog(self._watched, unresponsive_timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""
        return self._is_up and self._process is not None and self._process.is_running

    @property
    def process(self) -> ServerProcess | None:
        """The server's process; None before the start."""
        return self._process

    @property
    def host(self) -> ModelHost:
        """The models on the server."""
        return self._host

    @property
    def ports(self) -> ReservedPorts | None:
        """Where it listens; None before the start."""
        return self._ports

    @property
    def config(self) -> TritonConfig:
        """The settings of the server."""
        return self._config

    @property
    def control(self) -> Control:
        """The calls to the running server."""
        if self._control is None:
            raise TritonServerStartError("tritonserver is not running.")
        return self._control

    @property
    def guard_states(self) -> dict[str, bool]:
        """Whether each protection of the guard is in force, by its name, without those that nothing has come to yet."""
        test = self._guard_test
        return {} if test is None else {each.name: is_in_force for each, is_in_force in test.states.items()}

    def start(self, models: Iterable[WorkerService], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Start the server with `models` and wait until they are served; see `Session.start`.

        Raises:
            StartCancelled: `cancelled` said so.
            TritonServerNotFoundError: There is no tritonserver.
            TritonServerStartError: It ended instead of answering, or a port is taken.
            TritonServerTimeoutError: It did not answer in time.
            TritonModelLoadError: It refused a model, or a worker.
            WorkspaceError: The files cannot be written.
        """
        check_settings(self._config, self._security)
        binary = find_tritonserver()
        check_options(self._config, binary)
        folders, variables = self.files.create(binary, self._config.python_models)
        for model in models:
            # At once: attaching is done by the time that the server answers.
            self._host.prepare(model)
        self.files.write_models()
        # Before the server starts, because it says that it is ready as soon as it has loaded its models.
        for model in self._host.models:
            self._host.wait_warm(model, cancelled)
        self._environment = export_environment(binary.environment(os.environ)) | variables
        try:
            self._start_first(folders, timeout_s, cancelled)
            self._wait_served(timeout_s, cancelled)
            if self._watchdog is not None:
                self._watchdog.start()
        except TritonServerError as error:
            if (misfit := _misfit(error, binary, self._process)) is not None:
                raise misfit from error
            raise

    def _start_first(self, folders: ServerFolders, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_process(folders, reserve_ports(self._config), timeout_s, cancelled)
                return
            except TritonServerStartError as error:
                # Between the choice of a free port and the server's bind somebody else may take it.
                endpoint = self._lost_port(error)
                if endpoint is None:
                    raise
                if not endpoint.picked or attempt == _START_ATTEMPTS:
                    raise port_in_use(endpoint, exit_code=error.exit_code, log_lines=list(error.log_lines)) from error
                logger.info("Port %d was taken by somebody else in the meantime: trying another one.", endpoint.port)

    def restart(self, *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Start a server that has died once more: with the same models, on the same ports, for the same workers.

        After an error it may be called again.

        Args:
            timeout_s: How long the server, and then each model's callables, may take, in seconds.
            cancelled: Asked again and again; True ends the wait.

        Raises:
            StartCancelled: `cancelled` said so.
            TritonServerError: As `start`.
        """
        folders, ports = self.files.folders, self._ports
        if folders is None or ports is None:
            raise TritonServerStartError("tritonserver was never started, so it cannot be started again.")
        self._is_up = False
        self.readiness.reset()
        if self._workspace.is_damaged:
            self.files.restore()
        if self._process is not None:
            self._process.stop(_EXIT_MARGIN_S, hurried=cancelled)
        if self._control is not None:
            self._control.close()
        # Left by the server that died. That one of them is there means that its model is.
        for socket in self._host.endpoints.glob("*.sock"):
            socket.unlink(missing_ok=True)
        ports.reserve_again()
        self._start_process(folders, ports, timeout_s, cancelled)
        self._wait_served(timeout_s, cancelled)

    def replace(
        self, config: TritonConfig, server_dir: Path | None, *, timeout_s: float, cancelled: Callable[[], bool]
    ) -> None:
        """Let another server take the place of the running one, with the same models, workers and ports.

        After an error the running one goes on, if it has not ended itself.

        Args:
            config: The settings of the new one.
            server_dir: The folder of the new one; None is the one that a start would take.
            timeout_s: How long it, and then each model's callables, may take, in seconds.
            cancelled: Asked again and again; True ends the wait.

        Raises:
            PyTritonInvalidOperationError: This server cannot be replaced.
            PyTritonValidationError: The settings say other places, or are not acceptable.
            StartCancelled: `cancelled` said so.
            TritonServerError: The new one did not get ready.
        """
        old, ports, folders = self._process, self._ports, self.files.folders
        if old is None or ports is None or folders is None or not self.is_running:
            raise PyTritonInvalidOperationError("No server runs that could be replaced.")
        handover = old.handover
        if handover is None or self.files.supervisor is not None or not is_controlled(config):
            raise PyTritonInvalidOperationError(
                "The server cannot be replaced while it serves: that needs the guard, models that are bound (none by "
                "its folder), and TritonConfig.model_control_mode='explicit' or unset. Stop it, and start it again."
            )
        check_same_places(self._config, config)
        check_settings(config, self._security)
        binary = find_tritonserver(server_dir)
        check_options(config, binary)
        guard = find_guard(self._guard_config, binary.executable)
        if guard.library is None:
            raise PyTritonInvalidOperationError(f"{binary.executable} cannot take over: {guard.obstacle}.")
        replacement = Replacement(
            old,
            handover,
            ports,
            folders,
            binary=binary,
            guard=guard,
            workspace=self._workspace,
            endpoints=self._host.endpoints,
            names=[model.name for model in self._host.models],
        )
        self.readiness.stop()
        self._is_replacing = True
        try:
            self.files.resize_cache(local_cache_bytes(config.cache_config))
            replacement.start(config, self._security, self._make_process)
            replacement.stand_by(timeout_s, cancelled)
            replacement.hand_over()
            replacement.drain(_drain_s(config), cancelled)
            new_control = self._make_control(replacement.ports)
        except BaseException as error:
            replacement.put_back(_EXIT_MARGIN_S, cancelled)
            self.files.resize_cache(local_cache_bytes(self._config.cache_config))
            if old.is_running:
                self.readiness.start(self.control)
            self._end_replacing()
            if (misfit := _misfit(error, binary, replacement.started, "The running one goes on. ")) is not None:
                raise misfit from error
            raise
        finally:
            replacement.ports.release()
        self._process, self._ports, self._config = replacement.process, replacement.ports, config
        self.files.belong_to(binary, replacement.folders)
        old_control, self._control = self.control, new_control
        try:
            replacement.take_over()
            try:
                self._wait_served(timeout_s, cancelled)
            finally:
                replacement.finish(_END_S, cancelled)
                old_control.close()
        finally:
            self._end_replacing()

    def _end_replacing(self) -> None:
        """Report from now on what ends, and what has ended meanwhile of what is left."""
        with self._exit_lock:
            self._is_replacing = False
            ended, self._ended = self._ended, []
        for process, report in ended:
            self._exited(process, report)

    def claim(self, model: WorkerService) -> None:
        """Do nothing: the names of a server of our own are ours."""

    def deploy(self, name: str, models: Sequence[WorkerService], timeout_s: float) -> bool:
        """Make the server serve these versions under a name, and no others; see `hosting.Deployer`."""
        with self.files.changed(name, models):
            if models:
                self.control.load(name, timeout_s)
                if self._guard_test is not None and not self._guard_test.has_tried_model:
                    self._guard_test.run_model(name, is_plain=not models[0].decoupled)
            else:
                self.control.unload(name, timeout_s)
        return True

    def has_others(self, names: Collection[str]) -> bool:
        """Tell whether the server has, or may have, models beside these."""
        return has_others(self.control, names)

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """End the server after the requests that it has got, within `exit_timeout_secs`; see `Session.close`."""
        deadline = time.monotonic() + _drain_s(self._config)
        # What is left when the drain is broken off, as by a KeyboardInterrupt.
        rest = 0.0
        if self._watchdog is not None:
            self._watchdog.stop()
        try:
            rest = self._drain(deadline, linger_s, hurried) if self._is_up else _END_S
        finally:
            self._end(rest, hurried)

    def _drain(self, deadline: float, linger_s: float | None, hurried: Callable[[], bool]) -> float:
        """Take all models out of service when their requests are answered; return how long the end may take then."""
        process, ports, control = self._process, self._ports, self.control
        self.readiness.stop()
        if process is None or ports is None or not process.is_running:
            return _END_S
        if not hurried():
            self.readiness.start_draining()
            left = max(0.0, deadline - time.monotonic())
            linger(control, linger_s, most_s=left, ended=lambda seconds: process.wait(seconds) or hurried())
        if process.wait(0.0):
            return _END_S
        if self.files.supervisor is not None:
            # A model that is loading for minutes, or for ever, is not waited for.
            self.files.supervisor.stop_loading()
        if not is_controlled(self._config):
            # Nothing can be taken out of service: the server waits for its requests itself.
            return max(0.0, deadline - time.monotonic()) + _EXIT_MARGIN_S
        result = drain_requests(
            process, control, self._host, ports, deadline=deadline, hurried=hurried, supervisor=self.files.supervisor
        )
        if result is DrainResult.CUT:
            return CUT_DEADLINE_S
        if result is DrainResult.UNKNOWN and self._config.exit_timeout_secs is not None:
            # Its own patience is all there is.
            return max(_END_S, deadline - time.monotonic() + _EXIT_MARGIN_S)
        return _END_S

    def _end(self, patience_s: float, hurried: Callable[[], bool]) -> None:
        has_served = self._is_up
        try:
            self.readiness.stop()
            if self._metrics_page is not None:
                self._metrics_page.close()
            if self._process is not None:
                regions = shared_memory_of(self._process.pid)
                self._process.stop(patience_s, hurried=hurried)
                if not self._process.is_running:
                    remove_shared_memory(regions)
        finally:
            self._is_up = False
            # With the server gone, what a callable still computes is for nobody.
            is_in_hurry = not has_served or not patience_s or hurried()
            try:
                self._host.stop_workers(HURRIED_DEADLINE_S if is_in_hurry else WORKER_DEADLINE_S)
            finally:
                self._let_go(HURRIED_DEADLINE_S if is_in_hurry else FINALIZE_TIMEOUT_S)

    def _let_go(self, hosts_timeout_s: float) -> None:
        try:
            if self.files.supervisor is not None:
                # The server is gone: nobody waits for what they are at.
                self.files.supervisor.cut()
                self.files.supervisor.close(hosts_timeout_s)
        finally:
            if self._ports is not None:
                self._ports.release()
            if self._control is not None:
                self._control.close()
            if self.outcomes is not None:
                self.outcomes.close()
            self._workspace.clean()

    def _start_process(
        self, folders: ServerFolders, ports: ReservedPorts, timeout_s: float, cancelled: Callable[[], bool]
    ) -> None:
        self._ports = ports
        try:
            names = {model.name for model in self._host.models} | self.files.linked.keys()
            command = build_command(self._config, self._security, folders, ports, names)
            logger.debug("Starting %s", redacted(command))
            self._control = control = self._make_control(ports)
            process = self._spawn(command, control, cancelled)
            # Not at the top: while the server starts, the import of an HTTP server costs nothing.
            from pytriton.server.observe.metrics_page import MetricsPage

            wait_until_up(process, control, ports, timeout_s=timeout_s, cancelled=cancelled)
            self._serve_metrics(ports, MetricsPage)
        finally:
            ports.release()

    def _make_process(
        self, command: Sequence[str], config: TritonConfig, guard: Guard, handover: Handover | None
    ) -> ServerProcess:
        process = ServerProcess(
            command,
            self._environment,
            on_exit=lambda report: self._exited(process, report),
            log_file=config.log_file,
            quiet=GATE_NAMES if has_gpu() else (*GATE_NAMES, *QUIET_WITHOUT_GPU),
            secrets=secrets_of(command),
            guard=guard,
            handover=handover,
            outcomes=self.outcomes,
        )
        return process

    def _spawn(self, command: Sequence[str], control: Control, cancelled: Callable[[], bool]) -> ServerProcess:
        """Start the process with its guard, and without where that turns out not to be there."""
        guard = find_guard(self._guard_config, Path(command[0]))
        while True:
            try:
                if guard.library is not None and self._config.allow_metrics is not False and self.outcomes is None:
                    self.outcomes = OutcomeCounts(self._outcomes_before)
                handover = None if guard.library is None else Handover(complete=is_complete(self._process))
            except OSError as error:
                raise TritonServerStartError(f"tritonserver cannot be started: {explain(error)}") from error
            self._process = process = self._make_process(command, self._config, guard, handover)
            process.start()
            if guard.library is not None and not wait_guarded(process, control, cancelled=cancelled):
                # Its token is a random text now, since the guard was to put the real one in.
                process.stop(0.0)
                guard = Guard(obstacle=f"the loader did not take {guard.library}")
                if self.outcomes is not None:
                    self.outcomes.close()
                    self.outcomes = None
                continue
            if guard.obstacle is not None:
                logger.warning(
                    "tritonserver runs without the guard, so a single hostile request may end it: %s. A proxy in "
                    "front of it can limit requests; GuardConfig(enabled=False) accepts it.",
                    guard.obstacle,
                )
            return process

    def _wait_served(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until a server that answers serves all models."""
        try:
            self._check_loaded()
            for model in self._host.models:
                self._wait_attached(model, timeout_s, cancelled)
        except TritonServerError as error:
            if self._process is not None and isinstance(error, ControlError) and error.reason is None:
                # No answer, most likely because it just ended, which takes a moment to be known.
                self._process.wait(_END_NOTICE_S)
            # Some of what Triton cannot open, it calls otherwise: "failed to open directory".
            shortage = "" if self._process is None else self._process.shortage
            if shortage and isinstance(error, ControlError):
                error = TritonServerStartError(f"{error}. {shortage}", log_lines=error.log_lines)
            raise self._ended_in_start() or error from error
        self._try_guard()
        # From here on `on_exit` reports the end; what happened before that has to be reported here.
        self._is_up = True
        ended = self._ended_in_start()
        if ended is not None:
            self._is_up = False
            raise ended
        self.readiness.start(self.control)

    def _try_guard(self) -> None:
        self._guard_test = None
        process, ports, config = self._process, self._ports, self._config
        if process is None or process.handover is None or ports is None:
            return
        self._guard_test = GuardTest(
            process.handover,
            process.guard.settings,
            ports.http,
            ports.grpc,
            is_encrypted=_encrypts_grpc(config),
            is_traced=bool(config.trace_config),
            http_headers=control_headers(config, self._security, "http"),
            grpc_headers=control_headers(config, self._security, "grpc"),
            outcomes=self.outcomes,
        )
        plain = {model.name: not model.decoupled for model in self._host.models}
        self._guard_test.run({**dict.fromkeys(self.files.linked, False), **plain})

    def _wait_attached(self, model: WorkerService, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > POLL_S and model.is_alive and not model.is_attached:
            if cancelled():
                raise StartCancelled
            ended = self._ended_in_start()
            if ended is not None:
                raise ended
            time.sleep(POLL_S)
        self._host.wait_attached(model, max(0.0, left))

    def _serve_metrics(self, ports: ReservedPorts, page_type: "type[MetricsPage]") -> None:
        page, first, listener = ports.metrics, ports.triton_metrics, ports.take_metrics_listener()
        if page is None or first is None or listener is None:
            return

        def render() -> bytes:
            # Not at the top: its import takes as long as the rest of the start.
            from pytriton.server.observe.metrics import render_metrics

            # Of the server that is there now, which may have replaced the first one.
            current = None if self._ports is None else self._ports.triton_metrics
            outcomes = None if self.outcomes is None else self.outcomes.read()
            return render_metrics(
                current or first,
                self._counted_models,
                lambda: self.guard_states,
                files=self._open_files,
                memory=self._memory,
                outcomes=outcomes,
            )

        self._metrics_page = page_type(listener, render)
        self._metrics_page.start()
        logger.info("Metrics are served at http://%s/metrics", page.authority)

    def _open_files(self) -> tuple[int, int] | None:
        return None if self._process is None else self._process.open_files

    def _memory(self) -> int | None:
        pid = None if self._process is None else self._process.pid
        return None if pid is None else resident_bytes(pid)

    def _counted_models(self) -> list[WorkerService | HostedModel]:
        hosted = [] if self.files.supervisor is None else hosted_models(self.files.supervisor.serving())
        return [*self._host.models, *hosted]

    def _ended_in_start(self) -> TritonServerStartError | None:
        process = self._process
        if process is None or process.is_running:
            return None
        lines = process.log_tail
        return TritonServerStartError(
            f"tritonserver {process.ending} right after its start.{quote_log(lines)}",
            exit_code=process.exit_code,
            log_lines=lines,
        )

    def _make_control(self, ports: ReservedPorts) -> Control:
        if ports.http is not None:
            return HttpControl(ports.http, control_headers(self._config, self._security, "http"))
        # Not at the top: its import takes longer than the start of the server, and is needed only without HTTP.
        from pytriton.server.control.grpc import GrpcControl

        if ports.grpc is None:
            raise TritonServerStartError(
                "Neither HTTP nor gRPC is allowed: there is no way to ask the server anything."
            )
        return GrpcControl(ports.grpc, control_headers(self._config, self._security, "grpc"), self._config)

    def _watched(self) -> tuple[ServerProcess, Mapping[str, Endpoint]] | None:
        """Return the server that is to answer and where, for the watchdog; None while there is none."""
        process, ports, config = self._process, self._ports, self._config
        if process is None or ports is None or not self._is_up or self._is_replacing or not process.is_running:
            return None
        endpoints = {"HTTP": ports.http, "gRPC": None if _encrypts_grpc(config) else ports.grpc}
        return process, {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}

    def _exited(self, process: ServerProcess, report: ExitReport) -> None:
        with self._exit_lock:
            if self._is_replacing:
                self._ended.append((process, report))
                return
        if process is self._process and self._is_up and not report.expected:
            self._on_exit(report)

    def _lost_port(self, error: TritonServerStartError) -> Endpoint | None:
        if self._ports is None or error.exit_code is None:
            return None
        return port_setting_of_bind_failure(list(error.log_lines), self._ports)

    def _log_tail(self) -> list[str]:
        return self._process.log_tail if self._process is not None else []

    def _check_loaded(self) -> None:
        states = {(state.name, state.version): state for state in self.control.index()}
        for model in self._host.models:
            state = states.get((model.name, model.version))
            if state is None or state.state != "READY":
                raise self._host.load_error(
                    model, state.reason if state is not None else "it is not in the server's list of models"
                )
        for state in states.values():
            if state.name in self.files.linked and state.state == "UNAVAILABLE":
                raise self.files.folder_error(state.name, state.version, state.reason)
        if self._config.exit_on_error is not False:
            for state in states.values():
                if state.state == "UNAVAILABLE":
                    raise TritonModelLoadError(
                        f"tritonserver cannot load model {state.name!r} of {self._config.model_repository}: "
                        f"{state.reason.rstrip().removesuffix('.')}. "
                        "Mend the model, or set TritonConfig.exit_on_error=False to serve without it.",
                        model_name=state.name,
                        model_version=state.version,
                        reason=state.reason,
                    )


def _drain_s(config: TritonConfig) -> float:
    """Return how long requests that are being served may take when the server is to end, in seconds."""
    return DRAIN_DEADLINE_S if config.exit_timeout_secs is None else float(config.exit_timeout_secs)


def _encrypts_grpc(config: TritonConfig) -> bool:
    """Tell whether the port for gRPC takes nothing but TLS."""
    return bool(config.grpc_use_ssl) or config.grpc_use_ssl_mutual is not None


def _misfit(
    error: BaseException, binary: TritonServerBinary, process: ServerProcess | None, note: str = ""
) -> TritonServerStartError | None:
    """Return what to raise in place of an error because the server lacks what this package needs; None if not."""
    if process is None or not isinstance(error, (TritonServerStartError, TritonModelLoadError)):
        return None
    text = explain_misfit(binary, process.command, [str(error), *error.log_lines])
    if text is None:
        return None
    return TritonServerStartError(f"{note}{text}", exit_code=error.exit_code, log_lines=error.log_lines)
