"""`Triton`: bind inference callables, start the server, serve."""

import atexit
import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.bound_model import BoundModel, InferFunc
from pytriton.server.errors import TritonServerExitedError, TritonServerStartError, describe_exit, quote_log
from pytriton.server.lifecycle import DefaultTritonLifecyclePolicy, TritonLifecyclePolicy
from pytriton.server.ports import Endpoint
from pytriton.server.process import ExitReport
from pytriton.server.readiness import StartCancelled
from pytriton.server.security import TritonSecurityConfig
from pytriton.server.session import ServerSession
from pytriton.server.settings import TritonConfig
from pytriton.server.stop_signals import StopSignals
from pytriton.server.workspace import Workspace

__all__ = ["MONITORING_PERIOD_S", "STARTUP_TIMEOUT_S", "WAIT_FORM_MODEL_TIMEOUT_S", "Triton"]

MONITORING_PERIOD_S = 10.0
"""How often `Triton.serve` looks after its workers, in seconds. The end of the server is noticed at once."""
STARTUP_TIMEOUT_S = 120.0
"""How long the server may take to answer, in seconds."""
WAIT_FORM_MODEL_TIMEOUT_S = 60.0
"""How long a model may take to load on a running server, in seconds."""

logger = logging.getLogger(__name__)


class Triton:
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
        triton_lifecycle_policy: When the server is started.
        security_config: The access token, and what it protects. None makes a random token.

    Raises:
        FileExistsError: `workspace` exists.
        PyTritonValidationError: A setting is not acceptable.
    """

    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
    ) -> None:
        self._config = (TritonConfig() if config is None else config).with_environment()
        self._security = security_config or TritonSecurityConfig()
        self._policy = triton_lifecycle_policy or DefaultTritonLifecyclePolicy
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._context = TritonContext()
        self._models: dict[tuple[str, int], BoundModel] = {}
        self._session: ServerSession | None = None
        self._failure: BaseException | None = None
        self._owner = os.getpid()
        # Held while the server is started, changed or stopped.
        self._lock = threading.RLock()
        # Set by whoever wants the server stopped; a start that holds the lock looks at them.
        self._stop_requests: list[None] = []
        self._signals: list[int] = []
        # Wakes `serve`. A SimpleQueue, because a signal handler may put into it whatever the main thread is at.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> "Triton":
        """Starts the server, unless the lifecycle policy says otherwise."""
        if self._policy.launch_triton_on_startup:
            self.run()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the server."""
        self.stop()

    @property
    def http_url(self) -> str | None:
        """`http://host:port` for clients on this machine; None while the server is not running, or without HTTP."""
        session = self._session
        return _url("http", session.http) if session is not None else None

    @property
    def grpc_url(self) -> str | None:
        """`grpc://host:port` for clients on this machine; None while the server is not running, or without gRPC."""
        session = self._session
        return _url("grpc", session.grpc) if session is not None else None

    @property
    def metrics_url(self) -> str | None:
        """`http://host:port/metrics`; None while the server is not running, or without metrics."""
        session = self._session
        base = _url("http", session.metrics) if session is not None else None
        return None if base is None else f"{base}/metrics"

    def get_access_token(self) -> str | None:
        """Gives the token that protected endpoints ask for; None if there is none."""
        return self._security.access_token

    def bind(
        self,
        model_name: str,
        infer_func: "InferFunc | Sequence[InferFunc]",
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
    ) -> None:
        """Makes a callable a model. On a running server, the model is served when this returns.

        Args:
            model_name: Name of the model: letters, digits, dots, underscores and dashes.
            infer_func: Called with a list of requests, returns a list of results, one for each. A sequence of callables
                is served in parallel, each in a thread of its own.
            inputs: The model's inputs. Unnamed ones are called `INPUT_1`, `INPUT_2`, ... by their place.
            outputs: The model's outputs. Unnamed ones are called `OUTPUT_1`, `OUTPUT_2`, ... by their place.
            model_version: Version of the model, at least 1. Several versions of one name must agree in everything but
                the callables.
            config: How the model is served; batched by default.
            strict: Whether results that differ from `outputs` in name, dtype or shape are errors.
            trace_config: Kept for old scripts; has no effect yet.

        Raises:
            PyTritonValidationError: A name, version, tensor or callable is not acceptable.
            PyTritonBadParameterError: `config` breaks one of its rules.
            PyTritonInvalidOperationError: There is a model of this name and version already, or another version of it
                with other tensors or another configuration.
            EndpointError: Workspace and name make the path of a socket that is too long for the system.
            TritonModelLoadError: The running server refused the model. Nothing of it is left.
        """
        if trace_config:
            logger.warning("Model %r: trace_config is not supported yet and has no effect.", model_name)
        model = BoundModel(
            name=model_name,
            infer_func=infer_func,
            inputs=inputs,
            outputs=outputs,
            version=model_version,
            config=ModelConfig() if config is None else config,
            strict=strict,
            triton_context=self._context,
        )
        with self._lock:
            self._refuse_clash(model)
            # Now and not at the start, so that a socket path that is too long is told where the name is chosen.
            model.side_files(self._workspace.endpoints_path)
            session = self._session
            if session is not None and session.is_running:
                session.load(model, timeout_s=WAIT_FORM_MODEL_TIMEOUT_S)
                self._announce(model, session)
            self._models[model.key] = model
            model.publish()

    def run(self) -> None:
        """Starts the server in the background and returns when all bound models are served. Does nothing if it runs.

        The server is stopped by `stop`, at the end of the `with` block, or when the interpreter ends.

        Raises:
            TritonServerNotFoundError: There is no tritonserver on this machine.
            TritonServerStartError: It ended instead of answering (with exit code and last log lines), a port is taken,
                or `stop` was called in the meantime.
            TritonServerTimeoutError: It did not answer within `STARTUP_TIMEOUT_S`.
            TritonModelLoadError: It refused a model.
            WorkspaceError: The workspace cannot be made or written.
        """
        try:
            self._start()
        except StartCancelled:
            raise TritonServerStartError("The server was stopped from another thread while it was starting.") from None

    def connect(self) -> None:
        """Kept for old scripts: the same as `run`."""
        self.run()

    def serve(
        self, monitoring_period_s: float = MONITORING_PERIOD_S, *, monitoring_period_sec: float | None = None
    ) -> None:
        """Starts the server if it does not run yet, and blocks until it is stopped.

        SIGINT (Ctrl+C) and SIGTERM end it: requests that are being served are answered first, for as long as
        `TritonConfig.exit_timeout_secs` allows (30 s when unset), then this returns, so that a script ends with exit
        code 0. A second signal ends the patience. Signals that the program handles itself are left to it, and outside
        the main thread there are no handlers: call `stop` then.

        Args:
            monitoring_period_s: How often the workers are looked after, in seconds.
            monitoring_period_sec: Older name of the same.

        Raises:
            TritonServerExitedError: The server ended by itself, also between `run` and this call; with exit code and
                last log lines.
            PyTritonUnrecoverableError: The one that an inference callable raised, likewise.
            PyTritonError: As `run`, or because a worker lost its server.
        """
        period = monitoring_period_s if monitoring_period_sec is None else monitoring_period_sec
        if not period > 0:
            raise PyTritonBadParameterError(
                f"monitoring_period_s must be more than 0 seconds; got {period!r}.",
                parameter="monitoring_period_s",
                value=period,
                rule="more than 0",
            )
        with StopSignals(self._note_signal):
            try:
                # A server that ended since it was run is told of, not silently replaced.
                if self._failure is None:
                    self._start()
                    self._block(period)
            except StartCancelled:
                logger.info("The start was stopped.")
            except KeyboardInterrupt:
                # From a handler of the program's own.
                logger.info("Interrupted: stopping the server.")
            finally:
                self.stop()
                self._signals.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> bool:
        """Stops the server: answers the requests that are being served, detaches the callables, ends the process.

        May be called from any thread and again and again. It always returns: what does not end in time is killed.

        Returns:
            True if it stopped the server, False if there was none to stop.
        """
        if os.getpid() != self._owner:
            # A fork of the owner: the server is not its child.
            return False
        self._stop_requests.append(None)
        try:
            with self._lock:
                return self._close()
        finally:
            self._stop_requests.pop()

    def is_alive(self) -> bool:
        """Tells whether the server runs and every bound model has a worker that is up."""
        return self.is_connected() and all(model.is_alive for model in list(self._models.values()))

    def is_connected(self) -> bool:
        """Tells whether the server runs."""
        session = self._session
        return session is not None and session.is_running

    def _start(self) -> None:
        with self._lock:
            if self._session is not None:
                if self._session.is_running:
                    return
                # It ended by itself, and its remains are about to be cleaned up.
                self._close()
            self._failure = None
            if self._config.log_verbose:
                logger.warning(
                    "Triton Inference Server is running with enabled verbose logs (log_verbose_level=%d). It may "
                    "affect inference performance.",
                    self._config.log_verbose,
                )
            session = self._session = ServerSession(
                self._config,
                self._security,
                self._workspace,
                on_exit=self._note_exit,
                on_unrecoverable=self._note_unrecoverable,
            )
            atexit.register(self.stop)
            try:
                session.start(self._models.values(), timeout_s=STARTUP_TIMEOUT_S, cancelled=self._is_stop_wanted)
            except BaseException:
                self._close()
                raise
            for model in self._models.values():
                self._announce(model, session)

    def _close(self) -> bool:
        session, self._session = self._session, None
        if session is None:
            return False
        atexit.unregister(self.stop)
        try:
            session.close(hurried=lambda: len(self._signals) > 1)
        finally:
            self._wake.put(None)
        return True

    def _block(self, period_s: float) -> None:
        logger.info("Serving. Press Ctrl+C or send SIGTERM to stop.")
        while not self._signals:
            session = self._session
            if session is None or self._failure is not None:
                return
            for model in list(self._models.values()):
                if model.error is not None:
                    self._failure = model.error
                    return
            try:
                self._wake.get(timeout=period_s)
            except queue.Empty:
                continue
        logger.info("Got %s: stopping the server.", signal.Signals(self._signals[0]).name)

    def _is_stop_wanted(self) -> bool:
        return bool(self._stop_requests or self._signals)

    def _note_signal(self, number: int) -> None:
        # Runs between any two instructions of the main thread: no locks, no logging.
        self._signals.append(number)
        self._wake.put(None)

    def _note_exit(self, report: ExitReport) -> None:
        failure = TritonServerExitedError(
            f"tritonserver {describe_exit(report.exit_code)} although nobody stopped it.{quote_log(report.log_lines)}",
            exit_code=report.exit_code,
            log_lines=report.log_lines,
        )
        logger.error("%s", failure)
        self._fail(failure)

    def _note_unrecoverable(self, error: BaseException) -> None:
        logger.error("An inference callable can never answer again, so the server is stopped: %s", error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._wake.put(None)
        # Not in the thread that reports: stopping waits for it.
        stopper = threading.Thread(target=self.stop, name="pytriton-stop", daemon=True)
        try:
            stopper.start()
        except RuntimeError:
            # The interpreter is ending; its atexit hook stops the server.
            logger.debug("No thread can be started any more.")

    def _refuse_clash(self, model: BoundModel) -> None:
        if model.key in self._models:
            raise PyTritonInvalidOperationError(
                "Cannot add model with the same name twice. "
                f"There is a model {self._models[model.key].name!r} of version {model.version} already: choose another "
                "name or version (names that differ only in case count as the same)."
            )
        for other in self._models.values():
            if other.name == model.name and other.config_text != model.config_text:
                raise PyTritonInvalidOperationError(
                    f"Model {model.name!r}: version {model.version} differs from version {other.version} in its "
                    "tensors or its configuration, but Triton keeps one configuration for all versions of a name. Bind "
                    "it under another name."
                )

    def _announce(self, model: BoundModel, session: ServerSession) -> None:
        urls: list[Any] = [_url("http", session.http), _url("grpc", session.grpc)]
        logger.info(
            "Model %s (version %d) is served at %s", model.name, model.version, " and ".join(url for url in urls if url)
        )


def _url(scheme: str, endpoint: Endpoint | None) -> str | None:
    return None if endpoint is None else f"{scheme}://{endpoint.authority}"
