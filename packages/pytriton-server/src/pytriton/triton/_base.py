"""`TritonBase`: bind models, start, serve and stop, for `Triton` and `RemoteTriton` alike."""

import abc
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, overload

from typing_extensions import Self, Unpack

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.errors import TritonServerStartError
from pytriton.server.lifecycle.policies import DefaultTritonLifecyclePolicy, TritonLifecyclePolicy
from pytriton.server.lifecycle.session import DRAIN_DEADLINE_S, Session
from pytriton.server.lifecycle.stop_signals import StopSignals, end_on_sigterm_as_init
from pytriton.server.models.arguments import BindOptions, Servable
from pytriton.server.models.callers import calling_model, run_in_background
from pytriton.server.models.definition import ModelDefinition
from pytriton.server.models.hinted import name_of
from pytriton.server.models.service import WorkerService
from pytriton.server.models.tracing import ModelTracing
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.memory import make_budget
from pytriton.server.settings.rules import check_timeout
from pytriton.server.workspace import Workspace
from pytriton.triton._announcement import describe_as_html, say_ready
from pytriton.triton._bound_models import WAIT_FORM_MODEL_TIMEOUT_S, BoundModels
from pytriton.triton._description import TritonDescription, describe_model, describe_triton
from pytriton.triton._life import ServerLife, check_may_start
from pytriton.triton._registry import make_alias

__all__ = ["MONITORING_PERIOD_S", "STARTUP_TIMEOUT_S", "WAIT_FORM_MODEL_TIMEOUT_S", "TritonBase"]

MONITORING_PERIOD_S = 10.0
"""How often `serve` looks after its workers, in seconds. The end of a server of our own is noticed at once."""
STARTUP_TIMEOUT_S = 120.0
"""How long the server may take to answer, in seconds."""

logger = logging.getLogger(__name__)


class TritonBase(abc.ABC):
    """Binds Python callables as models to a Triton Inference Server. Make a `Triton` or a `RemoteTriton`.

    The callables run in this process, each in a thread of its own, or in processes of their own (`ProcessWorker`).
    Methods may be called from any thread.

    Args:
        workspace: A path for files, which must not exist yet and is removed at the end. None takes a new folder under
            `PYTRITON_HOME`, `XDG_CACHE_HOME/pytriton` or `~/.cache/pytriton`.
        triton_lifecycle_policy: Whether entering the context manager connects.
        memory_budget: How much memory all worker processes together may take, as for `Triton`.
        min_awake: How many models stay awake however long nobody calls them.

    Raises:
        FileExistsError: `workspace` exists.
        PyTritonBadParameterError: `memory_budget` or `min_awake` is not acceptable.
    """

    _CANCELLED = "The server was stopped from another thread while it was starting."
    _longest_period_s = math.inf
    """The longest period of `serve` between two checks, in seconds."""

    def __init__(
        self,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        *,
        memory_budget: str | int | None = None,
        min_awake: int = 0,
    ) -> None:
        self._budget = make_budget(type(self).__name__, memory_budget, min_awake)
        self._has_budget_of_environment = memory_budget is None
        end_on_sigterm_as_init()
        self._policy = triton_lifecycle_policy or DefaultTritonLifecyclePolicy
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._context = TritonContext()
        # The trace settings of the server, if known: models that are bound without their own send their spans there.
        self._trace_config: Sequence[str] | None = None
        self._models = BoundModels(self._workspace.endpoints_path)
        self._life = ServerLife(self._models, self._context)
        # Whatever lasts as long as the server refers to this one: see `_registry`.
        self._alias = make_alias(self)
        self._life.at_exit = self._alias.stop

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
    def bind(self, model: Servable, /, *, replace: bool = False, **options: Unpack[BindOptions]) -> None: ...
    @overload
    def bind(
        self, model_name: str, infer_func: Servable, *, replace: bool = False, **options: Unpack[BindOptions]
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
        model = WorkerService(definition, ModelTracing(trace_config, self._trace_config), self._budget)
        self._check_own()
        caller = calling_model(self._context)
        if replace and caller is not None and caller.key == model.key:
            run_in_background("bind", lambda: self._bind(model, replace=True))
        else:
            self._bind(model, replace=replace)

    def _bind(self, model: WorkerService, *, replace: bool) -> None:
        with self._life.changing():
            session = self._running()
            began = time.monotonic()
            is_new = self._models.bind(
                model, session, replace=replace, taken=self._other_names(), stop_wanted=self._life.is_stop_requested
            )
            if is_new and session is not None:
                self._life.start_s += time.monotonic() - began
                self._announce(model)

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
        self._check_own()
        changes: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "config": config, "strict": strict}
        if self._models.is_alone(calling_model(self._context), name, model_version):
            # Wrong arguments are an error at once.
            found = self._models.find(name, model_version)[0]
            found.successor(served, **changes)
            run_in_background(
                "rebind",
                lambda: self.rebind(name, served, **changes, model_version=found.version, timeout_s=timeout_s),
            )
            return
        with self._life.changing():
            session, stop_wanted = self._running(), self._life.is_stop_requested
            self._models.rebind(
                name, model_version, session, served, changes, drain_timeout_s=timeout_s, stop_wanted=stop_wanted
            )

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
        self._check_own()
        if calling_model(self._context) in [each.definition for each in self._models.find(model_name, model_version)]:
            run_in_background("unbind", lambda: self.unbind(model_name, model_version, timeout_s=timeout_s))
            return
        with self._life.changing():
            models = self._models.find(model_name, model_version)
            session, stop_wanted = self._running(), self._life.is_stop_requested
            self._models.unbind(models, session, drain_timeout_s=timeout_s, stop_wanted=stop_wanted)

    @abc.abstractmethod
    def connect(self) -> None:
        """Make the server serve all bound models, and return when it does."""

    def describe(self) -> TritonDescription:
        """Return what is served and where, whether the server runs or not. From any thread."""
        is_running = self.is_connected()
        models = tuple(describe_model(model, is_running=is_running) for model in list(self._models.values()))
        return describe_triton(models, self._budget, is_running=is_running, start_s=self._life.start_s)

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
        _check_period(period)
        life = self._life
        with StopSignals(life.orders.on_signal):
            try:
                # A server that ended since it was run is reported, not silently replaced.
                life.wait_exit_reported()
                if life.failure is None:
                    self._alias._start(announces=not self._presents_models)
                    if since is not None:
                        life.start_s = time.monotonic() - since
                    with beside():
                        self._present()
                        life.block(min(period, self._longest_period_s), self._find_failure)
            except StartCancelled:
                logger.info("The start was stopped.")
            except KeyboardInterrupt:
                # From a handler of the program's own.
                logger.info("Interrupted: stopping the server.")
            finally:
                self.stop()
                life.orders.signals.clear()
        failure, life.failure = life.failure, None
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
        return self._life.stop()

    def is_alive(self) -> bool:
        """Tell whether the server runs and every bound model has a worker that is up."""
        return self.is_connected() and all(model.is_alive for model in list(self._models.values()))

    def is_connected(self) -> bool:
        """Tell whether the server runs."""
        return self._life.is_running

    @abc.abstractmethod
    def _open(self) -> Session:
        """Make a session, without starting it."""

    @abc.abstractmethod
    def _urls(self) -> Sequence[str]:
        """Return the addresses of the connected server, for the log."""

    @abc.abstractmethod
    def _startup_timeout_s(self) -> float:
        """Return how long the server may take to answer, in seconds."""

    # Whether `_present` names the models, which are not announced before it then.
    _presents_models = False

    def _present(self) -> None:
        """Say what is served, and how to stop it."""
        logger.info("Serving. Press Ctrl+C or send SIGTERM to stop.")
        say_ready(self.describe())

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
        return self._life.session if self._life.is_running else None

    def _connect(self) -> None:
        try:
            self._alias._start()
        except StartCancelled:
            raise TritonServerStartError(self._CANCELLED) from None

    def _start(self, *, announces: bool = True) -> None:
        self._check_own()
        check_may_start()
        with self._life.changing():
            if self._life.session is not None:
                self._restart_if_dead()
                self._life.check_wanted()
                if self._life.is_running:
                    return
            self._check_budget()
            self._life.start(self._open, self._startup_timeout_s())
            for model in self._models.values() if announces else ():
                self._announce(model)

    def _check_budget(self, others: Sequence[str] | None = ()) -> None:
        self._models.check_budget(self._budget, others, from_environment=self._has_budget_of_environment)

    def _check_own(self) -> None:
        self._life.check_own(type(self).__name__)

    def _announce(self, model: WorkerService) -> None:
        logger.info("Model %s (version %d) is served at %s", model.name, model.version, " and ".join(self._urls()))


def _check_period(period_s: object) -> None:
    if isinstance(period_s, bool) or not isinstance(period_s, (int, float)) or not period_s > 0:
        raise PyTritonBadParameterError(
            f"monitoring_period_s must be more than 0 seconds; got {period_s!r}.",
            parameter="monitoring_period_s",
            value=period_s,
            rule="more than 0",
        )
