"""`RunningServer`: the process that serves, with its guard, where it listens and how it is asked."""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.control.http import Control, ControlError, HttpControl
from pytriton.server.errors import TritonServerError, TritonServerStartError, quote_log
from pytriton.server.lifecycle.readiness import GATE_NAMES
from pytriton.server.lifecycle.self_test import GuardTest
from pytriton.server.lifecycle.startup import check_cors, wait_guarded, wait_until_up
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.command_line import (
    QUIET_WITHOUT_GPU,
    ServerFolders,
    build_command,
    control_headers,
    has_gpu,
    redacted,
    secrets_of,
)
from pytriton.server.tritonserver.guard import CORS_VARIABLE, Guard, GuardConfig, find_guard
from pytriton.server.tritonserver.handover import Handover
from pytriton.server.tritonserver.outcomes import OutcomeCounts
from pytriton.server.tritonserver.ports import Endpoint, ReservedPorts, port_setting_of_bind_failure
from pytriton.server.tritonserver.process import ExitReport, ServerProcess, is_complete

_END_NOTICE_S = 1.0

logger = logging.getLogger(__name__)


class RunningServer:
    """A tritonserver that may be started again, and be replaced by another one."""

    def __init__(
        self,
        config: TritonConfig,  # its settings
        security: TritonSecurityConfig,  # the token and what it protects
        *,
        guard: GuardConfig | None,  # what requests may ask of it; None is what the environment says
        outcomes: OutcomeCounts | None,  # what was counted of the requests to the server before
        on_exit: Callable[[ExitReport], None],  # called when a process that is up has ended and nobody stopped it
    ) -> None:
        self.config = config
        """Its settings, which a replacement may change."""
        self.security = security
        """The token and what it protects."""
        self.guard = guard
        """What requests may ask of it; None is what the environment says."""
        self._on_exit = on_exit
        self._outcomes_before = outcomes
        self.outcomes: OutcomeCounts | None = None
        """How requests have ended; None without the guard, which counts them, or the page that shows them."""
        self.environment: Mapping[str, str] = {}
        """The variables that its process gets."""
        self.ports: ReservedPorts | None = None
        """Where it listens; None before the start."""
        self.process: ServerProcess | None = None
        """The process; None before the start."""
        self._control: Control | None = None
        self.is_up = False
        """Whether it has served: from then on the end of its process is reported."""
        # While it is replaced, the end of a process may be in order, or no harm.
        self._is_replacing = False
        self._ended: list[tuple[ServerProcess, ExitReport]] = []
        self._exit_lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether it is up and its process runs."""
        return self.is_up and self.process is not None and self.process.is_running

    @property
    def control(self) -> Control:
        """The calls to it."""
        if self._control is None:
            raise TritonServerStartError("tritonserver is not running.")
        return self._control

    @property
    def log_tail(self) -> list[str]:
        """The last lines of its log."""
        return self.process.log_tail if self.process is not None else []

    @property
    def encrypts_grpc(self) -> bool:
        """Whether its port for gRPC takes nothing but TLS."""
        return bool(self.config.grpc_use_ssl) or self.config.grpc_use_ssl_mutual is not None

    def start(
        self, folders: ServerFolders, ports: ReservedPorts, names: Collection[str], cancelled: Callable[[], bool]
    ) -> None:
        """Start the process.

        Raises `StartCancelled` if `cancelled` says so, and `TritonServerStartError` if it cannot.
        """
        self.ports = ports
        command = build_command(self.config, self.security, folders, ports, names)
        logger.debug("Starting %s", redacted(command))
        self._control = self._make_control(ports, self.config)
        self._spawn(command, self._control, cancelled)

    def wait_until_up(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until the process answers and listens everywhere; see `startup.wait_until_up`."""
        if self.process is not None and self.ports is not None:
            wait_until_up(self.process, self.control, self.ports, timeout_s=timeout_s, cancelled=cancelled)

    def stop(self, patience_s: float, cancelled: Callable[[], bool]) -> None:
        """End what is left of a process that has died, so that another one may be started."""
        self.is_up = False
        if self.process is not None:
            self.process.stop(patience_s, hurried=cancelled)
        if self._control is not None:
            self._control.close()

    def close(self) -> None:
        """Let go of the ports, the calls and the counts, when the process has ended."""
        if self.ports is not None:
            self.ports.release()
        if self._control is not None:
            self._control.close()
        if self.outcomes is not None:
            self.outcomes.close()

    def lost_port(self, error: TritonServerStartError) -> Endpoint | None:
        """Return the port that a start could not have, since somebody else took it; None if that is not why."""
        if self.ports is None or error.exit_code is None:
            return None
        return port_setting_of_bind_failure(list(error.log_lines), self.ports)

    def end_in_start(self) -> TritonServerStartError | None:
        """Return the error for a process that has ended before it has served; None while it runs."""
        process = self.process
        if process is None or process.is_running:
            return None
        lines = process.log_tail
        return TritonServerStartError(
            f"tritonserver {process.ending} right after its start.{quote_log(lines)}",
            exit_code=process.exit_code,
            log_lines=lines,
        )

    def explained(self, error: TritonServerError) -> TritonServerError:
        """Return what says most of why models are not served: that the process has ended, or lacks something."""
        process = self.process
        if process is not None and isinstance(error, ControlError):
            if error.reason is None:
                # No answer, most likely because it just ended, which takes a moment to be known.
                process.wait(_END_NOTICE_S)
            # Some of what Triton cannot open, it calls otherwise: "failed to open directory".
            if process.shortage:
                error = TritonServerStartError(f"{error}. {process.shortage}", log_lines=error.log_lines)
        return self.end_in_start() or error

    def make_guard_test(self) -> GuardTest | None:
        """Make the test of the guard; None if there is no guard."""
        process, ports, config = self.process, self.ports, self.config
        if process is None or process.handover is None or ports is None:
            return None
        return GuardTest(
            process.handover,
            process.guard.settings,
            ports.http,
            ports.grpc,
            is_encrypted=self.encrypts_grpc,
            is_traced=bool(config.trace_config),
            http_headers=control_headers(config, self.security, "http"),
            grpc_headers=control_headers(config, self.security, "grpc"),
            outcomes=self.outcomes,
        )

    def watched(self) -> tuple[ServerProcess, Mapping[str, Endpoint]] | None:
        """Return the process that is to answer and where, for the watchdog; None while there is none."""
        process, ports = self.process, self.ports
        if process is None or ports is None or self._is_replacing or not self.is_running:
            return None
        endpoints = {"HTTP": ports.http, "gRPC": None if self.encrypts_grpc else ports.grpc}
        return process, {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}

    @contextlib.contextmanager
    def being_replaced(self) -> Iterator[None]:
        """Report nothing that ends in this block; behind it, report what of that is left to be reported."""
        self._is_replacing = True
        try:
            yield
        finally:
            with self._exit_lock:
                # Whichever server serves now, its end is reported from here on, however far its start had come.
                self._is_replacing, self.is_up = False, True
                ended, self._ended = self._ended, []
            for process, report in ended:
                self._exited(process, report)

    def adopt(self, process: ServerProcess, ports: ReservedPorts, config: TritonConfig) -> None:
        """Be another process from now on. The calls to the one before are the caller's to close."""
        self._control = self._make_control(ports, config)
        self.process, self.ports, self.config = process, ports, config

    def put_back(self, process: ServerProcess, ports: ReservedPorts, config: TritonConfig, control: Control) -> None:
        """Be the process of before an `adopt`, however far that came."""
        adopted, self._control = self._control, control
        self.process, self.ports, self.config = process, ports, config
        if adopted is not None and adopted is not control:
            adopted.close()

    def make_process(
        self, command: Sequence[str], config: TritonConfig, guard: Guard, handover: Handover | None
    ) -> ServerProcess:
        """Make a process that is not started yet, whose end is reported where it is the one that serves.

        It refuses origins that only the guard could let read answers, where there is none.
        """
        # The configuration, which has been checked, says which origins may read.
        environment = {name: value for name, value in self.environment.items() if name != CORS_VARIABLE}
        check_cors(config, guard)
        if config.cors_origins:
            environment = {**environment, CORS_VARIABLE: " ".join(config.cors_origins)}
        process = ServerProcess(
            command,
            environment,
            on_exit=lambda report: self._exited(process, report),
            log_file=config.log_file,
            quiet=GATE_NAMES if has_gpu() else (*GATE_NAMES, *QUIET_WITHOUT_GPU),
            tells_start=bool(config.log_verbose),
            secrets=secrets_of(command),
            guard=guard,
            handover=handover,
            outcomes=self.outcomes,
        )
        return process

    def _spawn(self, command: Sequence[str], control: Control, cancelled: Callable[[], bool]) -> None:
        """Start the process with its guard, or without it where the guard turns out to be missing."""
        guard = find_guard(self.guard, Path(command[0]))
        while True:
            try:
                if guard.library is not None and self.config.allow_metrics is not False and self.outcomes is None:
                    self.outcomes = OutcomeCounts(self._outcomes_before)
                handover = None if guard.library is None else Handover(complete=is_complete(self.process))
            except OSError as error:
                raise TritonServerStartError(f"tritonserver cannot be started: {explain(error)}") from error
            self.process = process = self.make_process(command, self.config, guard, handover)
            process.start()
            if guard.library is None or wait_guarded(process, control, cancelled=cancelled):
                break
            # Its token is a random text now, since the guard was to put the real one in.
            process.stop(0.0)
            guard = Guard(obstacle=f"the loader did not take {guard.library}")
            if self.outcomes is not None:
                self.outcomes.close()
                self.outcomes = None
        if guard.obstacle is not None:
            logger.warning(
                "tritonserver runs without the guard, so a single hostile request may end it: %s. A proxy in "
                "front of it can limit requests; GuardConfig(enabled=False) accepts it.",
                guard.obstacle,
            )

    def _make_control(self, ports: ReservedPorts, config: TritonConfig) -> Control:
        if ports.http is not None:
            return HttpControl(ports.http, control_headers(config, self.security, "http"))
        # This is imported late because the import takes longer than the start of the server, and is needed only without
        # HTTP.
        from pytriton.server.control.grpc import GrpcControl

        if ports.grpc is None:
            raise TritonServerStartError(
                "Neither HTTP nor gRPC is allowed: there is no way to ask the server anything."
            )
        return GrpcControl(ports.grpc, control_headers(config, self.security, "grpc"), config)

    def _exited(self, process: ServerProcess, report: ExitReport) -> None:
        with self._exit_lock:
            if self._is_replacing:
                self._ended.append((process, report))
                return
        if process is self.process and self.is_up and not report.expected:
            self._on_exit(report)
