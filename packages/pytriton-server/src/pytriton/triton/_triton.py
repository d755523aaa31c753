"""`Triton`: bind inference callables, start the server, serve."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from pytriton.exceptions import PyTritonError, PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.system.threads import call_safely
from pytriton.server.errors import (
    PortInUseError,
    TritonServerExitedError,
    TritonServerStartError,
    quote_log,
)
from pytriton.server.lifecycle.policies import (
    RestartPolicy,
    RestartSchedule,
    TritonLifecyclePolicy,
    VertextAILifecyclePolicy,
)
from pytriton.server.lifecycle.session import ServerSession
from pytriton.server.lifecycle.startup import find_server
from pytriton.server.lifecycle.watchdog import UNRESPONSIVE_TIMEOUT_S
from pytriton.server.models.callers import calling_model
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig, vertex_ai_is_on
from pytriton.server.settings.memory import without_processes
from pytriton.server.settings.rules import check_timeout
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.guard import GuardConfig
from pytriton.server.tritonserver.ports import (
    ReservedPorts,
    check_ports,
    client_urls,
    fixed_addresses,
    listening_address,
)
from pytriton.server.tritonserver.process import ExitReport, mark_complete
from pytriton.server.workspace import Workspace
from pytriton.triton._announcement import present
from pytriton.triton._base import STARTUP_TIMEOUT_S, WAIT_FORM_MODEL_TIMEOUT_S, TritonBase
from pytriton.triton._description import TritonDescription
from pytriton.triton._registry import Registry

_POLL_S = 0.02

logger = logging.getLogger(__name__)


class Triton(TritonBase):
    """A Triton Inference Server with Python callables as its models.

    ```python
    with Triton() as triton:
        triton.bind("double", double, inputs=[Tensor((-1,), "float32")], outputs=[Tensor((-1,), "float32")])
        triton.serve()
    ```

    The server is a child process; the callables run in this one, each in a thread of its own. Methods may be called
    from any thread. Two objects side by side do not meet as long as their ports differ.

    Args:
        config: Settings of the server. What is unset there is taken from `PYTRITON_TRITON_CONFIG_*` in the environment.
        workspace: A path for the server's files, which must not exist yet and is removed with the server. None takes a
            new folder under `PYTRITON_HOME`, `XDG_CACHE_HOME/pytriton` or `~/.cache/pytriton`.
        triton_lifecycle_policy: When the server is started. None is `DefaultTritonLifecyclePolicy`, or
            `VertextAILifecyclePolicy` where Vertex AI's endpoints are served.
        security_config: The access token, and what it protects. None makes a random token.
        restart: Whether a server that dies is started again, with the models that it had and on the same ports. None
            does not: `serve` raises then, and `is_alive` becomes False.
        linger_s: How long `serve` goes on to accept requests after SIGTERM, in seconds, while `/v2/health/ready` says
            "no" already, so that a load balancer has the time to see it. None is as long as requests come, up to 5
            seconds, and not at all where none came in the last second.
        guard: What one request may ask of the server before it is refused. None takes the defaults, or what
            `PYTRITON_GUARD` in the environment says.
        unresponsive_timeout_s: How long a server that is alive may answer nothing, over HTTP or gRPC, before it is
            ended, in seconds. That is its death then, for `restart` as well. None leaves it alone.
        memory_budget: How much memory all worker processes together may take: bytes, or text such as `2GiB`. For one
            that needs more than is left, those that were used least recently sleep. Threads of this process, hosts of a
            `model.py` and tritonserver do not count. None is `PYTRITON_MEMORY_BUDGET`, else any amount.
        min_awake: How many of the models that sleep when nobody calls them stay awake all the same.

    Raises:
        FileExistsError: `workspace` exists.
        PyTritonBadParameterError: A time, or a setting for worker processes, is not acceptable.
        PyTritonValidationError: A setting is not acceptable, or an argument is of another type.
    """

    _alias: "Triton"

    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
        restart: RestartPolicy | None = None,
        linger_s: float | None = None,
        guard: GuardConfig | None = None,
        unresponsive_timeout_s: float | None = UNRESPONSIVE_TIMEOUT_S,
        memory_budget: str | int | None = None,
        min_awake: int = 0,
    ) -> None:
        if linger_s is not None:
            check_timeout("linger_s", linger_s)
        if unresponsive_timeout_s is not None:
            check_timeout("unresponsive_timeout_s", unresponsive_timeout_s)
        _check_type("config", config, TritonConfig)
        _check_type("security_config", security_config, TritonSecurityConfig)
        _check_type("triton_lifecycle_policy", triton_lifecycle_policy, TritonLifecyclePolicy)
        _check_type("restart", restart, RestartPolicy)
        _check_type("guard", guard, GuardConfig)
        self._config = (TritonConfig() if config is None else config).with_environment()
        self._security = security_config or TritonSecurityConfig()
        self._server: ServerSession | None = None
        # Models that are served by their folders, by name.
        self._folders: dict[str, Path] = {}
        self._restart_policy = restart
        self._guard, self._unresponsive_timeout_s = guard, unresponsive_timeout_s
        self._schedule: RestartSchedule | None = None
        if triton_lifecycle_policy is None and vertex_ai_is_on(self._config):
            # Its front end picks the model at the start, so a start on entering the context manager could only fail.
            triton_lifecycle_policy = VertextAILifecyclePolicy
        super().__init__(workspace, triton_lifecycle_policy, memory_budget=memory_budget, min_awake=min_awake)
        self._trace_config, self._life.linger_s = self._config.trace_config, linger_s
        _registry.add(self, self._alias)

    @property
    def http_url(self) -> str | None:
        """`http://host:port` for clients on this machine; None while the server is not running, or without HTTP."""
        return self._url("http")

    @property
    def grpc_url(self) -> str | None:
        """`grpc://host:port` for clients on this machine; None while the server is not running, or without gRPC.

        With TLS it is `grpcs://host:port`.
        """
        return self._url("grpc")

    @property
    def metrics_url(self) -> str | None:
        """`http://host:port/metrics`; None while the server is not running, or without metrics."""
        base = self._url("metrics")
        return None if base is None else f"{base}/metrics"

    @property
    def sagemaker_url(self) -> str | None:
        """`http://host:port` of SageMaker's endpoints; None while the server is not running, or without them."""
        return self._url("sagemaker")

    @property
    def vertex_ai_url(self) -> str | None:
        """`http://host:port` of Vertex AI's endpoints; None while the server is not running, or without them."""
        return self._url("vertex_ai")

    def get_access_token(self) -> str | None:
        """Return the token that protected endpoints ask for; None if there is none."""
        return self._security.access_token

    @property
    def access_token_path(self) -> "Path | None":
        """The file in which other processes of this user find the access token, as `RemoteTriton` does.

        None while the server is not running, without a token, or where no file can be written.
        """
        return None if (current := self._current()) is None else current.token_path

    def check(self) -> None:
        """Check the settings as a start does, without starting anything.

        Raises:
            PyTritonValidationError: A setting names no file, address or option of the server, or excludes another one.
            PyTritonBadParameterError: There is a memory budget, and no worker process.
            TritonServerNotFoundError: There is no tritonserver on this machine.
            TritonServerStartError: A setting needs the guard, and there is none.
        """
        self._check_budget()
        find_server(self._config, self._security, self._guard)
        check_ports(self._config)

    def describe(self) -> TritonDescription:
        """Return what is served and where, whether the server runs or not. From any thread."""
        names = ("http", "grpc", "metrics", "sagemaker", "vertex_ai")
        ports = [port for _, port in fixed_addresses(self._config)]
        if (found := self._ports()) is not None:
            ports = [each.port for each in (getattr(found, name) for name in names) if each is not None]
        urls = {name: url for name in names if (url := getattr(self, f"{name}_url")) is not None}
        found_at = dataclasses.replace(super().describe(), folders=dict(self._folders), urls=urls, ports=tuple(ports))
        return dataclasses.replace(
            found_at, address=listening_address(self._config), cors_origins=tuple(self._config.cors_origins or ())
        )

    def bind_model(self, path: "str | os.PathLike[str]") -> None:
        """Serve a model of a folder of yours, such as one with a `model.py` for Triton's Python backend, as it is.

        Processes of this Python, or of the environment that the model names, run its `model.py`, unless
        `TritonConfig(python_models="stub")` leaves that to Triton's Python backend. Nothing in the folder is changed.
        On a running server, the model is served when this returns. After `stop` it stays for the next start.

        Args:
            path: The folder, with `config.pbtxt` and a folder for each version, as in a model repository. Its name is
                that of the model.

        Raises:
            PyTritonValidationError: There is no such folder.
            PyTritonInvalidOperationError: There is a model of this name already; or the running server was started
                without such a model and without `TritonConfig(python_models="workers")`.
            TritonModelLoadError: The running server did not load it, with Triton's reason.
        """
        # The path is not resolved, because the name counts, whatever it leads to.
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        if not folder.is_dir():
            raise PyTritonValidationError(
                f"bind_model takes the folder of a model; there is none at {folder}.",
                expected="a folder",
                received=str(path),
            )
        self._check_own()
        with self._life.changing():
            taken = {*self._folders, *(model.name for model in self._models.values())}
            if folder.name.lower() in map(str.lower, taken):
                raise PyTritonInvalidOperationError(
                    f"There is a model {folder.name!r} already: give the folder another name, or call unbind first."
                )
            if self._running() is not None and self._server is not None:
                self._server.files.load_folder(folder, WAIT_FORM_MODEL_TIMEOUT_S)
            self._folders[folder.name] = folder

    def unbind_model(self, name: str) -> None:
        """Take a model away that `bind_model` has added.

        Args:
            name: The name of its folder.

        Raises:
            PyTritonInvalidOperationError: There is no such model.
            TritonServerError: The running server refused, or did not answer. The model is served as before.
        """
        self._check_own()
        with self._life.changing():
            if name not in self._folders:
                raise PyTritonInvalidOperationError(
                    f"bind_model has added no model {name!r}, but {', '.join(sorted(self._folders)) or 'none'}."
                )
            if self._running() is not None and self._server is not None:
                self._server.files.unload_folder(name, WAIT_FORM_MODEL_TIMEOUT_S)
            del self._folders[name]

    def replace_server(
        self,
        config: TritonConfig | None = None,
        *,
        server_dir: "str | os.PathLike[str] | None" = None,
        timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        """Let another tritonserver take the place of the running one, at the same ports and for the same workers.

        The new one is started beside the running one. When it has loaded all models it accepts the connections that
        come, the running one answers what it has got, and ends; then the workers go over, with what their callables
        have in memory. If the new one does not get ready, the running one goes on.

        Args:
            config: The settings of the new one, with the same ports and addresses; None is those of the running one.
            server_dir: The folder of the new one, laid out as `/opt/tritonserver`; None is the one that a start takes.
            timeout_s: How long the new one may take to get ready, in seconds.

        Raises:
            PyTritonInvalidOperationError: No server runs, it is one that cannot be replaced, or an inference callable
                of it asks.
            PyTritonValidationError: The settings say other ports, or are not acceptable.
            TritonServerNotFoundError: There is no tritonserver in `server_dir`.
            TritonServerStartError: The new one ended instead of getting ready, or `stop` was called in the meantime.
            TritonServerTimeoutError: It was not ready in time.
        """
        check_timeout("timeout_s", timeout_s)
        self._check_own()
        if calling_model(self._context) is not None:
            raise PyTritonInvalidOperationError(
                "An inference callable cannot have its own server replaced, which waits for it: ask in another thread."
            )
        with self._life.changing():
            server = self._server
            if self._running() is None or server is None:
                raise PyTritonInvalidOperationError("No server runs that could be replaced: call run or serve first.")
            try:
                server.replace(
                    self._config if config is None else config.with_environment(),
                    None if server_dir is None else Path(server_dir),
                    timeout_s=timeout_s,
                    cancelled=self._life.is_stop_requested,
                )
            except StartCancelled:
                raise TritonServerStartError("The server was stopped while it was being replaced.") from None
            finally:
                self._config = server.server.config

    def guard_states(self) -> dict[str, bool]:
        """Return which protections of the guard are in force, by name; empty without one, and where no server runs.

        The server is asked for what the guard refuses before it is announced, so this is what was seen, not what was
        hoped for. A protection that nothing has come to yet is left out: some take a model, or a protocol that is off.
        """
        return {} if (server := self._current()) is None else server.guard_states

    def lose_part(self) -> None:
        """Make the server say for good that it is not ready, since what belongs to it was given up. It goes on."""
        if (server := self._current()) is not None:
            server.readiness.lose_part()

    def run(self) -> None:
        """Start the server in the background and return when all bound models are served. Does nothing if it runs.

        The server is stopped by `stop`, at the end of the `with` block, or when the interpreter ends.

        Raises:
            TritonServerNotFoundError: There is no tritonserver on this machine.
            TritonServerStartError: It ended instead of answering (with exit code and last log lines), a port is taken,
                or `stop` was called in the meantime.
            TritonServerTimeoutError: It did not answer within `STARTUP_TIMEOUT_S`.
            TritonModelLoadError: It refused a model, or a callable failed in its warm-up.
            WorkspaceError: The workspace cannot be made or written.
            PyTritonValidationError: Two settings exclude each other, or name a file that is not there.
            PyTritonInvalidOperationError: This is a fork of the process that made this object, or a script that is
                imported for what it defines, by `pytriton serve` or a worker process.
        """
        self._connect()

    def connect(self) -> None:
        """Kept for old scripts: the same as `run`."""
        self.run()

    def _start(self, *, announces: bool = True) -> None:
        if self._life.session is None:
            _registry.stop_lost_servers(self._config)
        try:
            super()._start(announces=announces)
        except PortInUseError as error:
            if (explained := _registry.explain(error)) is error:
                raise
            raise explained from error

    def _open(self) -> ServerSession:
        _warn_if_verbose(self._config)
        self._schedule = None if self._restart_policy is None else RestartSchedule(self._restart_policy)
        self._server = ServerSession(
            self._config,
            self._security,
            self._workspace,
            guard=self._guard,
            unresponsive_timeout_s=self._unresponsive_timeout_s,
            folders=self._folders.values(),
            outcomes=None if self._server is None else self._server.server.outcomes,
            budget=self._budget,
            on_exit=self._on_exit,
            on_unrecoverable=self._life.fail_for_good,
        )
        return self._server

    def _other_names(self) -> Collection[str]:
        return self._folders

    def _check_budget(self, others: Sequence[str] | None = ()) -> None:
        super()._check_budget(without_processes(self._config, self._folders))

    def _current(self) -> ServerSession | None:
        return self._server if self._life.session is not None else None

    def _ports(self) -> ReservedPorts | None:
        return None if (current := self._current()) is None else current.server.ports

    def _url(self, name: str) -> str | None:
        ports = self._ports()
        return None if ports is None else client_urls(self._config, ports).get(name)

    def _urls(self) -> Sequence[str]:
        return [url for url in (self.http_url, self.grpc_url) if url is not None]

    def _startup_timeout_s(self) -> float:
        return STARTUP_TIMEOUT_S

    _presents_models = True

    def _present(self) -> None:
        mark_complete(None if self._server is None else self._server.server.process)
        present(self.describe())

    def _on_exit(self, report: ExitReport) -> None:
        failure = TritonServerExitedError(
            f"tritonserver {report.ending} although nobody stopped it.{quote_log(report.log_lines)}",
            exit_code=report.exit_code,
            log_lines=report.log_lines,
        )
        logger.error("%s", failure)
        if self._schedule is None:
            self._life.fail(failure)
            return
        # This runs in another thread than the report, because the start of the next server waits for the report.
        try:
            threading.Thread(target=self._restart, name="pytriton-restart", daemon=True).start()
        except RuntimeError:
            logger.debug("No thread can be started any more: the interpreter is ending.")

    def _restart(self) -> None:
        with self._life.lock:
            try:
                self._restart_if_dead()
            except Exception as error:
                # This tells those who wait for the end of the server that it does not come back.
                call_safely(logger.exception, "tritonserver could not be started again.")
                self._life.fail(error)

    def _restart_if_dead(self) -> bool:
        """Start a server that has died again, as often as the policy allows. Whoever has the lock first does it."""
        session, schedule = self._current(), self._schedule
        if session is None or schedule is None or session.is_running or self._life.failure is not None:
            return False
        died = time.monotonic()
        error: Exception | None = None
        while True:
            delay_s = schedule.next_delay_s()
            if delay_s is None:
                failure = _given_up(session, schedule.crashes, error)
                logger.error("%s", failure)
                self._life.fail(failure)
                return False
            try:
                self._wait(delay_s)
                session.restart(timeout_s=self._startup_timeout_s(), cancelled=self._life.is_stop_requested)
            except StartCancelled:
                return False
            except (PyTritonError, ProxyBackendError, OSError) as refusal:
                logger.error("tritonserver could not be started again: %s", refusal)
                error = refusal
                continue
            logger.warning(
                "tritonserver was started again, and serves its models %.1f s after its end.", time.monotonic() - died
            )
            return True

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._life.is_stop_requested():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_POLL_S, left))
        raise StartCancelled


def _given_up(session: ServerSession, crashes: int, error: Exception | None) -> TritonServerExitedError:
    process = session.server.process
    lines = process.log_tail if process is not None else []
    return TritonServerExitedError(
        f"tritonserver is not started again after {crashes} crashes: RestartPolicy allows no more in its time."
        + (f" The last start failed: {error}" if error is not None else quote_log(lines)),
        exit_code=process.exit_code if process is not None else None,
        log_lines=lines,
    )


_registry: Registry[Triton] = Registry()


def running() -> list[Triton]:
    """Return the `Triton` objects of this process whose servers run, the oldest first.

    Also those that the program has no variable for any more, such as that of a notebook's cell that was run again:
    `stop` ends their servers.
    """
    return _registry.running()


def _warn_if_verbose(config: TritonConfig) -> None:
    if config.log_verbose:
        logger.warning(
            "Triton Inference Server is running with enabled verbose logs (log_verbose_level=%d). It may "
            "affect inference performance.",
            config.log_verbose,
        )


def _check_type(name: str, value: object, kind: type[object]) -> None:
    if value is not None and not isinstance(value, kind):
        raise PyTritonValidationError(
            f"Triton({name}=...) must be a {kind.__name__}, or None; got {type(value).__name__}.",
            expected=kind.__name__,
            received=type(value).__name__,
        )
