"""`TritonBase`: bind models, start, serve and stop, for `Triton` and `RemoteTriton` alike."""

import abc
import atexit
import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, overload

from typing_extensions import Self

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend.system.log_gate import keep_log_from_blocking
from pytriton.proxy_backend.system.shortage import is_without_threads
from pytriton.proxy_backend.worker.loading import is_loading
from pytriton.server.errors import TritonModelLoadError, TritonServerError, TritonServerStartError
from pytriton.server.lifecycle.policies import DefaultTritonLifecyclePolicy, TritonLifecyclePolicy
from pytriton.server.lifecycle.session import DRAIN_DEADLINE_S, Session
from pytriton.server.lifecycle.stop_signals import StopSignals, end_on_sigterm_as_init
from pytriton.server.models.arguments import Servable
from pytriton.server.models.callers import calling_model, run_in_background
from pytriton.server.models.definition import ModelDefinition
from pytriton.server.models.hinted import name_of
from pytriton.server.models.notebooks import in_notebook
from pytriton.server.models.service import WorkerService
from pytriton.server.models.tracing import ModelTracing
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.rules import check_timeout
from pytriton.server.workspace import Workspace
from pytriton.triton._announcement import describe_as_html, say_ready
from pytriton.triton._bound_models import BoundModels
from pytriton.triton._description import TritonDescription, describe_model
from pytriton.triton._registry import make_alias

__all__ = ["MONITORING_PERIOD_S", "STARTUP_TIMEOUT_S", "WAIT_FORM_MODEL_TIMEOUT_S", "TritonBase"]

MONITORING_PERIOD_S = 10.0
"""How often `serve` looks after its workers, in seconds. The end of a server of our own is noticed at once."""
STARTUP_TIMEOUT_S = 120.0
"""How long the server may take to answer, in seconds."""
WAIT_FORM_MODEL_TIMEOUT_S = 60.0
"""How long a model may take to load on a running server, in seconds."""

_EXIT_REPORT_S = 1.0
_POLL_S = 0.005
_LOCK_POLL_S = 0.05

logger = logging.getLogger(__name__)


class TritonBase(abc.ABC):
    """Binds Python callables as models to a Triton Inference Server. Make a `Triton` or a `RemoteTriton`.

    The callables run in this process, each in a thread of its own, or in processes of their own (`ProcessWorker`).
    Methods may be called from any thread.

    Args:
        workspace: A path for files, which must not exist yet and is removed at the end. None takes a new folder under
            `PYTRITON_HOME`, `XDG_CACHE_HOME/pytriton` or `~/.cache/pytriton`.
        triton_lifecycle_policy: Whether entering the context manager connects.

    Raises:
        FileExistsError: `workspace` exists.
    """

    _CANCELLED = "The server was stopped from another thread while it was starting."
    _longest_period_s = math.inf
    """The longest period of `serve` between two checks, in seconds."""

    def __init__(
        self,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
    ) -> None:
        end_on_sigterm_as_init()
        self._policy = triton_lifecycle_policy or DefaultTritonLifecyclePolicy
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._context = TritonContext()
        # Of the server, if it is known: where models that are bound without one send their spans.
        self._trace_config: Sequence[str] | None = None
        self._models = BoundModels()
        # Those of them that were there at the last stop: a notebook may bind them again, and gets the new ones.
        self._stopped: set[WorkerService] = set()
        self._session: Session | None = None
        # How long it took until the models of the session were served, in seconds.
        self._start_s = 0.0
        self._failure: BaseException | None = None
        self._owner = os.getpid()
        # Held while the server is started, changed or stopped.
        self._lock = threading.RLock()
        # Set by whoever wants the server stopped, or only the one of a certain session; whoever holds the lock and
        # waits looks at them.
        self._stop_requests: list[Session | None] = []
        self._signals: list[int] = []
        # Wakes `serve`. A SimpleQueue, because a signal handler may put into it whatever the main thread is at.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Whatever lasts as long as the server refers to this one: see `_registry`.
        self._alias = make_alias(self)

    def __enter__(self) -> Self:
        """Connect, unless the lifecycle policy says otherwise."""
        if self._policy.launch_triton_on_startup:
            self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Call `stop`."""
        self.stop()

    def _repr_html_(self) -> str:
        """Return the models and addresses as a table, which is what a notebook shows."""
        return describe_as_html(self.describe(), type(self).__name__)

    @overload
    def bind(
        self,
        model_name: str,
        infer_func: Servable,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        replace: bool = False,
    ) -> None: ...
    @overload
    def bind(
        self,
        model: Servable,
        /,
        *,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        replace: bool = False,
    ) -> None: ...
    @overload
    def bind(
        self,
        model_name: str,
        infer_func: Servable,
        *,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        replace: bool = False,
    ) -> None: ...
    def bind(
        self,
        model_name: str | Servable,
        infer_func: Servable | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        replace: bool = False,
    ) -> None:
        """Make a callable a model. On a running server, the model is served when this returns.

        After `stop` the models stay for the next start, and a name of theirs may be bound anew, which replaces it.

        What is decorated with `@model` of `pytriton.decorators` is bound alone, as in `bind(softmax)`, or under a name
        of its own, as in `bind("softmax-2", softmax)`: a function, a class, of which each worker makes an object, an
        object of one, or a `ProcessWorker` of them.

        Args:
            model_name: Name of the model: letters, digits, dots, underscores and dashes.
            infer_func: Called with a list of requests, returns a list of results, one for each. A sequence of callables
                is served in parallel, each in a thread of its own. A `ProcessWorker` describes callables in processes
                of their own.
            inputs: The model's inputs. Unnamed ones are called `INPUT_1`, `INPUT_2`, ... by their place. None are those
                of `@model`.
            outputs: The model's outputs. Unnamed ones are called `OUTPUT_1`, `OUTPUT_2`, ... by their place. None are
                those of `@model`.
            model_version: Version of the model, at least 1. Several versions of one name must agree in everything but
                the callables.
            config: How the model is served; None is as `@model` says, else batched.
            strict: Whether results that differ from `outputs` in name, dtype or shape are errors.
            trace_config: Where the spans of the callables go, in items as in `TritonConfig.trace_config`, which counts
                where this is None.
            replace: Whether a model of this name and version is replaced, as by `rebind`. Nothing of the old one is
                kept but what was counted. In a notebook it is replaced without this, since a cell that is run again is
                to serve what it says now.

        Raises:
            PyTritonValidationError: A name, version, tensor or callable is not acceptable, a callable under a decorator
                such as `@batch` has not the parameters for the inputs, or the hints under `@model` say something else.
            PyTritonBadParameterError: `config` breaks one of its rules.
            PyTritonInvalidOperationError: There is a model of this name and version already and not `replace`, or
                another version of it with other tensors or another configuration; or this is a fork of the process that
                made this object.
            ValueError: `trace_config` has another mode than OpenTelemetry, no URL, or an item that cannot be
                understood.
            ImportError: `trace_config` is given, and the extra `telemetry` is not installed.
            EndpointError: The workspace's path is too long for sockets in it.
            TritonModelLoadError: The running server refused the model, a callable failed in its warm-up, or `stop` was
                called in the meantime. Nothing of it is left.
        """
        definition = ModelDefinition(
            name=model_name,
            infer_func=infer_func,
            inputs=inputs,
            outputs=outputs,
            version=model_version,
            config=config,
            strict=strict,
            triton_context=self._context,
        )
        model = WorkerService(definition, ModelTracing(trace_config, self._trace_config))
        self._check_not_forked()
        caller = calling_model(self._context)
        if replace and caller is not None and caller.key == model.key:
            run_in_background("bind", lambda: self._bind(model, replace=True))
        else:
            self._bind(model, replace=replace)

    def _bind(self, model: WorkerService, *, replace: bool) -> None:
        with self._changing():
            session = self._running()
            old = self._models.get(model.key)
            if old is not None and (session is not None or old not in self._stopped):
                if replace or in_notebook():
                    if not replace:
                        print(f"Model {old.name!r} was bound already: it is replaced, as by bind(..., replace=True).")
                    model.succeed(old)
                    self._replace(old, model, DRAIN_DEADLINE_S)
                    return
                raise PyTritonInvalidOperationError(
                    "Cannot add model with the same name twice. "
                    f"There is a model {old.name!r} of version {model.version} already: choose another name or version "
                    "(names that differ only in case count as the same), or replace it by rebind() or "
                    "bind(..., replace=True)."
                )
            self._models.check_same_config(model)
            if model.name.lower() in map(str.lower, self._other_names()):
                raise PyTritonInvalidOperationError(
                    f"There is a model {model.name!r} already, which is no bound callable: choose another name."
                )
            # Not at the start only, so that a path that is too long for sockets is an error before anything is started.
            model.side_files(self._workspace.endpoints_path)
            if session is not None:
                began = time.monotonic()
                try:
                    session.claim(model)
                    session.host.load(model, timeout_s=WAIT_FORM_MODEL_TIMEOUT_S, stop_wanted=self._is_stop_requested)
                except StartCancelled:
                    raise _stopped_meanwhile(model) from None
                self._start_s += time.monotonic() - began
                self._announce(model)
            self._models.put(model)
            model.definition.publish()

    def rebind(
        self,
        model_name: str | Servable,
        infer_func: Servable | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int | None = None,
        config: ModelConfig | None = None,
        strict: bool | None = None,
        *,
        timeout_s: float = DRAIN_DEADLINE_S,
    ) -> None:
        """Replace the callable of a bound model, on a running server without losing a request.

        Requests that the old callable has got are answered by it, later ones by the new one; when this returns, the
        old one is done. For a moment both are called. With other tensors or another configuration Triton loads the
        model anew beside the old one. Called by a callable of the model, it begins all that and returns.

        Args:
            model_name: Name of the model; or what `bind` takes alone, whose `@model` says the name.
            infer_func: The new callable or `ProcessWorker`, or a sequence of them.
            inputs: New inputs; None keeps them, or takes those of `@model`.
            outputs: New outputs; None keeps them, or takes those of `@model`.
            model_version: Which version; None is the only one.
            config: New configuration; None keeps it, or takes that of `@model`.
            strict: Whether results that differ from `outputs` are errors; None keeps what was said.
            timeout_s: How long the old callable may take for what it has got, in seconds; then it is cut off.

        Raises:
            PyTritonValidationError: A tensor or a callable is not acceptable.
            PyTritonBadParameterError: `config` or `timeout_s` breaks one of its rules.
            PyTritonInvalidOperationError: There is no such model, or several versions and `model_version` is None, or
                another version with other tensors or another configuration than the new ones; or this is a fork of the
                process that made this object.
            EndpointError: The workspace's path is too long for sockets in it.
            TritonModelLoadError: The running server refused the model, a callable failed in its warm-up, or `stop` was
                called in the meantime. The old one is served as before.
        """
        check_timeout("timeout_s", timeout_s)
        name, served = name_of(model_name, infer_func)
        self._check_not_forked()
        caller = calling_model(self._context)
        found = [] if caller is None else self._models.find(name, model_version)
        if caller is not None and [each.definition for each in found] == [caller]:
            changes: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "config": config, "strict": strict}
            # Wrong arguments are an error at once.
            found[0].successor(served, **changes)
            version = caller.version
            run_in_background(
                "rebind",
                lambda: self.rebind(name, served, **changes, model_version=version, timeout_s=timeout_s),
            )
            return
        with self._changing():
            candidates = self._models.find(name, model_version)
            if len(candidates) > 1:
                versions = sorted(model.version for model in candidates)
                raise PyTritonInvalidOperationError(
                    f"Model {name!r} is bound with versions {versions}: say with model_version which of them is "
                    "to be replaced."
                )
            old = candidates[0]
            new = old.successor(served, inputs=inputs, outputs=outputs, config=config, strict=strict)
            self._replace(old, new, timeout_s)

    def _replace(self, old: WorkerService, new: WorkerService, drain_timeout_s: float) -> None:
        self._models.check_same_config(new)
        session = self._running()
        try:
            if session is not None:
                session.host.replace(
                    old,
                    new,
                    timeout_s=WAIT_FORM_MODEL_TIMEOUT_S,
                    drain_timeout_s=drain_timeout_s,
                    stop_wanted=self._is_stop_requested,
                )
        except StartCancelled:
            raise _stopped_meanwhile(new) from None
        finally:
            if session is None or new in session.host.models:
                self._models.put(new)
        logger.info("Model %s (version %d) is served by another callable now.", new.name, new.version)

    def unbind(self, model_name: str, model_version: int | None = None, *, timeout_s: float = DRAIN_DEADLINE_S) -> None:
        """Take a model away, on a running server after its requests in flight are answered.

        New requests are refused from the beginning on. When this returns, the callables are not called any more, and
        their sockets and shared memory are given back. Other versions of the name stay. Called by a callable of the
        model, it begins all that and returns.

        Args:
            model_name: Name of the model.
            model_version: Which version; None is all of them.
            timeout_s: How long requests in flight may take, in seconds; then they are cut off, with a warning.

        Raises:
            PyTritonBadParameterError: `timeout_s` is not acceptable.
            PyTritonInvalidOperationError: There is no such model; or this is a fork of the process that made this
                object.
            TritonServerError: The server refused, or did not answer. The model is served as before.
        """
        check_timeout("timeout_s", timeout_s)
        self._check_not_forked()
        if calling_model(self._context) in [each.definition for each in self._models.find(model_name, model_version)]:
            run_in_background("unbind", lambda: self.unbind(model_name, model_version, timeout_s=timeout_s))
            return
        with self._changing():
            models = self._models.find(model_name, model_version)
            session = self._running()
            try:
                if session is not None:
                    session.host.unload(
                        models,
                        timeout_s=WAIT_FORM_MODEL_TIMEOUT_S,
                        drain_timeout_s=timeout_s,
                        stop_wanted=self._is_stop_requested,
                    )
            finally:
                self._models.remove([model for model in models if session is None or model not in session.host.models])
            for model in models:
                logger.info("Model %s (version %d) is not served any more.", model.name, model.version)

    @abc.abstractmethod
    def connect(self) -> None:
        """Make the server serve all bound models, and return when it does."""

    def describe(self) -> TritonDescription:
        """Return what is served and where, whether the server runs or not. From any thread."""
        is_running = self.is_connected()
        models = tuple(describe_model(model, is_running=is_running) for model in list(self._models.values()))
        return TritonDescription(models, is_running, self._start_s)

    def serve(
        self,
        monitoring_period_s: float = MONITORING_PERIOD_S,
        *,
        monitoring_period_sec: float | None = None,
        beside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        since: float | None = None,
    ) -> None:
        """Connect if that has not been done yet, and block until the server is stopped.

        SIGINT (Ctrl+C) and SIGTERM end it: requests that are being served are answered first, for as long as
        `TritonConfig.exit_timeout_secs` allows (30 s when unset), then this returns, so that a script ends with exit
        code 0. A second signal ends the patience. Signals that the program handles itself are left to it, and outside
        the main thread there are no handlers: call `stop` then.

        Args:
            monitoring_period_s: How often the workers are looked after, in seconds.
            monitoring_period_sec: Older name of the same.
            beside: Makes the context manager in which the server serves, for what lives and dies with it: it is entered
                when the models are served, and left before this stops the server.
            since: What the time of the start counts from, a value of `time.monotonic()`; None is this call.

        Raises:
            TritonServerExitedError: The server ended by itself, also between `run` and this call; with exit code and
                last log lines.
            PyTritonUnrecoverableError: The one that an inference callable raised, likewise.
            TritonWorkerError: A process worker was given up, likewise.
            PyTritonError: As `connect`, or because a worker lost its server.
        """
        period = monitoring_period_s if monitoring_period_sec is None else monitoring_period_sec
        if isinstance(period, bool) or not isinstance(period, (int, float)) or not period > 0:
            raise PyTritonBadParameterError(
                f"monitoring_period_s must be more than 0 seconds; got {period!r}.",
                parameter="monitoring_period_s",
                value=period,
                rule="more than 0",
            )
        with StopSignals(self._on_signal):
            try:
                # A server that ended since it was run is reported, not silently replaced.
                self._wait_exit_reported()
                if self._failure is None:
                    self._alias._start()
                    if since is not None:
                        self._start_s = time.monotonic() - since
                    with beside():
                        self._present()
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
        """Take the models out of service after their requests are answered, and let go of the server.

        May be called from any thread and again and again. It always returns: what does not end in time is cut off.
        Called by an inference callable of the server, it begins the stop and returns: its request is one of those that
        are answered first.

        Returns:
            True if it stopped something, or has begun to; False if there was nothing to stop.
        """
        if os.getpid() != self._owner:
            # A fork of the owner: the server is not its child.
            return False
        if calling_model(self._context) is not None:
            return self._stop_in_background()
        return self._stop(None)

    def is_alive(self) -> bool:
        """Tell whether the server runs and every bound model has a worker that is up."""
        return self.is_connected() and all(model.is_alive for model in list(self._models.values()))

    def is_connected(self) -> bool:
        """Tell whether the server runs."""
        session = self._session
        return session is not None and session.is_running

    @abc.abstractmethod
    def _open(self) -> Session:
        """Make a session, without starting it."""

    @abc.abstractmethod
    def _urls(self) -> Sequence[str]:
        """Return the addresses of the connected server, for the log."""

    @abc.abstractmethod
    def _startup_timeout_s(self) -> float:
        """Return how long the server may take to answer, in seconds."""

    def _present(self) -> None:
        """Say what is served, and how to stop it."""
        logger.info("Serving. Press Ctrl+C or send SIGTERM to stop.")
        say_ready(self.describe())

    def _linger_s(self) -> float | None:
        """Return how long requests are accepted after SIGTERM, in seconds; None is as long as some come."""
        return 0.0

    def _restart_if_dead(self) -> bool:
        """Start a server that has ended again, where that is wanted and possible; return whether it did.

        To be called with the lock.
        """
        return False

    def _find_failure(self) -> BaseException | None:
        """Return the error of a server or worker that has failed; None where all is well."""
        return next((model.error for model in list(self._models.values()) if model.error is not None), None)

    def _other_names(self) -> Collection[str]:
        """Return the names of the models that are no bound callables."""
        return ()

    def _running(self) -> Session | None:
        self._restart_if_dead()
        session = self._session
        return session if session is not None and session.is_running else None

    def _connect(self) -> None:
        try:
            self._alias._start()
        except StartCancelled:
            raise TritonServerStartError(self._CANCELLED) from None

    def _start(self) -> None:
        self._check_not_forked()
        keep_log_from_blocking()
        if is_loading():
            raise PyTritonInvalidOperationError(
                "This script is imported for what it defines, and must not start servers itself: put what the script "
                'does under `if __name__ == "__main__":`'
            )
        with self._changing():
            if self._session is not None:
                self._restart_if_dead()
                if self._is_stop_requested():
                    raise StartCancelled
                if self._session.is_running:
                    return
                # It ended by itself, and its remains are about to be cleaned up.
                self._close()
            self._failure = None
            began = time.monotonic()
            session = self._session = self._open()
            atexit.register(self._alias.stop)
            try:
                session.start(
                    list(self._models.values()),
                    timeout_s=self._startup_timeout_s(),
                    cancelled=self._is_stop_requested,
                )
            except BaseException:
                self._close()
                raise
            self._start_s = time.monotonic() - began
            for model in self._models.values():
                self._announce(model)

    def _close(self) -> bool:
        session, self._session = self._session, None
        if session is None:
            return False
        self._stopped = set(self._models.values())
        atexit.unregister(self._alias.stop)
        # Ctrl+C comes from somebody who looks at the screen, SIGTERM from what starts servers and sends them requests.
        linger_s = self._linger_s() if self._signals[:1] == [signal.SIGTERM] else 0.0
        try:
            session.close(hurried=lambda: len(self._signals) > 1, linger_s=linger_s)
        finally:
            self._wake.put(None)
        return True

    def _wait_exit_reported(self) -> None:
        """Wait until the end of a server, if it has ended, is reported as `_failure`."""
        deadline = time.monotonic() + _EXIT_REPORT_S
        while self._failure is None and time.monotonic() < deadline:
            session = self._session
            if session is None or session.is_running:
                return
            time.sleep(_POLL_S)

    def _block(self, period_s: float) -> None:
        while not self._signals:
            if self._session is None or self._failure is not None:
                return
            failure = self._find_failure()
            if failure is not None:
                self._failure = failure
                return
            try:
                self._wake.get(timeout=min(period_s, self._longest_period_s))
            except queue.Empty:
                continue
        logger.info("Got %s: stopping the server.", signal.Signals(self._signals[0]).name)

    def _stop(self, only: Session | None) -> bool:
        """Stop the server, or that of one session: who has started another one since then keep it."""
        self._stop_requests.append(only)
        try:
            with self._lock:
                return self._close() if only in (None, self._session) else False
        finally:
            self._stop_requests.remove(only)

    def _is_stop_requested(self) -> bool:
        return bool(self._signals) or any(only in (None, self._session) for only in list(self._stop_requests))

    def _on_signal(self, number: int) -> None:
        # Runs between any two instructions of the main thread: no locks, no logging.
        self._signals.append(number)
        self._wake.put(None)

    def _on_unrecoverable(self, error: BaseException) -> None:
        logger.error("An inference callable can never answer again, so the server is stopped: %s", error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._wake.put(None)
        # Not in the thread that reports: stopping waits for it.
        self._stop_in_background()

    def _stop_in_background(self) -> bool:
        session = self._session
        if session is None:
            return False
        # At the end of the interpreter, its atexit hook stops the server.
        return session in self._stop_requests or run_in_background("stop", lambda: self._stop(session))

    def _changing(self) -> contextlib.AbstractContextManager[object]:
        """Hold the lock. A callable does not wait for a stop, which waits for the callable."""
        if calling_model(self._context) is None:
            return _tell_shortage(self._lock)
        return _held(self._lock, lambda: bool(self._stop_requests or self._signals))

    def _check_not_forked(self) -> None:
        if os.getpid() != self._owner:
            raise PyTritonInvalidOperationError(
                f"This process is a fork of process {self._owner}, which owns the server and the inference callables. "
                f"Make a {type(self).__name__} of its own here, or call the one of process {self._owner} there."
            )

    def _announce(self, model: WorkerService) -> None:
        logger.info("Model %s (version %d) is served at %s", model.name, model.version, " and ".join(self._urls()))


@contextlib.contextmanager
def _tell_shortage(lock: "threading.RLock") -> Iterator[None]:
    """Hold a lock.

    Raises:
        TritonServerError: The system starts no more threads.
    """
    with lock:
        try:
            yield
        except RuntimeError as error:
            if not is_without_threads(error):
                raise
            # What to do follows from the text.
            raise TritonServerError(f"This process cannot serve: {error}.") from error


@contextlib.contextmanager
def _held(lock: "threading.RLock", is_hopeless: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock, unless there is no hope to get it.

    Raises:
        PyTritonInvalidOperationError: A callable asks, and the server is being stopped.
    """
    while not lock.acquire(timeout=_LOCK_POLL_S):
        if is_hopeless():
            raise PyTritonInvalidOperationError(
                "The server is being stopped, and waits for the inference callable that asks for this. Let it return."
            )
    try:
        yield
    finally:
        lock.release()


def _stopped_meanwhile(model: WorkerService) -> TritonModelLoadError:
    reason = "the server was stopped in the meantime"
    return TritonModelLoadError(
        f"Model {model.name!r} (version {model.version}) cannot be served: {reason}.",
        model_name=model.name,
        model_version=model.version,
        reason=reason,
    )
