"""`Server`: Triton inside the process."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.enums import MetricFormat
from pytriton.inprocess.capi.errors import (
    InvalidArgumentError,
    UnavailableError,
    wrong_argument,
)
from pytriton.inprocess.requests.model import Model, ModelDictionary, listed_models
from pytriton.inprocess.server.model_control import ModelControl, Wait
from pytriton.inprocess.server.options import Options
from pytriton.inprocess.server.session import Session
from pytriton.server.models.callers import run_in_background

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pytriton.inprocess.callables.bindings import Bindings
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.server.models.arguments import BindOptions

_READY_TIMEOUT_S = 60.0


class Server:
    """Triton inside this process: no network, no second process.

    It is started and stopped explicitly or by a `with` statement, and may be started again. Several servers may run at
    the same time. All methods may be called from any thread.

    Args:
        options: Settings of the server. They are checked by `start()`.
        **kwargs: Fields of `Options`, in place of `options` or to change some of them.

    Raises:
        TypeError: If there is no option of the name of a keyword.

    Attributes:
        options: The settings. Changes apply to the next start.
    """

    def __init__(self, options: Options | None = None, **kwargs: Any) -> None:
        self._session: Session | None = None
        self._was_started = False
        self._lock = threading.RLock()
        if options is None:
            options = Options(**kwargs)
        elif kwargs:
            options = dataclasses.replace(options, **kwargs)
        self.options = options
        self._bindings: Bindings | None = None
        self._bindings_lock = threading.Lock()

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Self:
        """Start the server. The models that are there at the start are loaded when this returns.

        Args:
            wait_until_ready: Whether to wait until `ready()`.
            polling_interval: How often to look whether it is, in seconds.
            timeout: How long to wait for it, in seconds; `None` for as long as it takes.

        Returns:
            This server.

        Raises:
            OptionTypeError: If an option has a value of the wrong type. It is a `TypeError`, too.
            InvalidArgumentError: If the server is started already, or the value of an argument or of an option is not
                accepted.
            RepositoryNotFoundError: If a model repository is not there.
            TimedOutError: If the server is not ready in time. It is stopped again.
            TritonServerNotFoundError: If there is no tritonserver in any of the places that are searched.
            UnsupportedError: If the process was forked from one in which a server was started.
            TritonError: What Triton says if it does not start, as when a model fails to load.
        """
        wait = Wait(polling_interval, timeout)
        process.check_may_start()
        with self._lock:
            if self._session is not None:
                raise _already_started(self._session.name)
            # A copy: changes during the start count for the next start.
            options = dataclasses.replace(self.options) if isinstance(self.options, Options) else self.options
            self._session = process.interruptible(lambda: Session(options), Session.stop, "start")
            self._was_started = True
            try:
                if self._bindings is not None:
                    self._bindings.on_started(self._session)
                if wait_until_ready:
                    wait.until(self.ready, self._session.name, "be ready")
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Stop the server: cancel the requests in flight, unload all models and free what it holds.

        Responses that were received stay valid, held or not. Does nothing if the server was stopped before. Called by a
        bound callable, which is part of what it waits for, it begins the stop and returns; what it would raise is
        logged.

        Raises:
            TimedOutError: If requests or models were not done within `Options.exit_timeout`, because a model does not
                look whether its request was cancelled. Calling it again waits again.
            InvalidArgumentError: If the server was never started, or belongs to the process that this one was forked
                from.
        """
        if self._session is not None and self._session.is_foreign:
            # Without the lock, because a thread that this forked process lacks may hold it.
            self._session.stop()
        if self._session is not None and self._bindings is not None and self._bindings.are_calling():
            # The interpreter must live as long as Triton may call it.
            run_in_background("stop", self.stop, daemon=False)
            return
        with self._lock:
            session = self._session
            if session is None:
                if self._was_started:
                    return
                raise _not_started(self.options)
            session.stop()
            self._session = None

    def __enter__(self) -> Self:
        """Start the server unless it is started, and wait until it is ready."""
        with self._lock:
            if self._session is None:
                # If failed models are allowed, a server with strict readiness may never be ready.
                self.start(wait_until_ready=self.options.exit_on_error, timeout=_READY_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    def __del__(self) -> None:
        session: Session | None = getattr(self, "_session", None)
        if session is None or not session.is_stoppable or sys.is_finalizing():
            return
        # In a thread of its own, because Triton may wait for the thread that runs this finaliser.
        threading.Thread(target=session.stop, name="pytriton-inprocess-finaliser").start()
        warnings.warn(
            f"Server {session.name!r} was dropped without being stopped. Use `with Server(...) as server:` or call "
            "stop().",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )

    def live(self) -> bool:
        """Tell whether the server runs.

        Raises:
            InvalidArgumentError: If the server is not started. So do all methods below.
        """
        return self._running().flag("TRITONSERVER_ServerIsLive")

    def ready(self) -> bool:
        """Tell whether the server and, with strict readiness, all of its models answer requests."""
        return self._running().flag("TRITONSERVER_ServerIsReady")

    def metadata(self) -> dict[str, Any]:
        """Return the name, the version and the extensions of the server."""
        metadata: dict[str, Any] = self._running().ask("TRITONSERVER_ServerMetadata")
        return metadata

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """Return the metrics of all servers of this process and of the metrics made with `Metric`.

        Args:
            metric_format: Format of the text.

        Raises:
            InvalidArgumentError: If the format is no `MetricFormat`.
        """
        if not isinstance(metric_format, MetricFormat):
            raise wrong_argument("metric_format", "a member of MetricFormat", metric_format)
        return self._running().metrics(metric_format)

    def model(self, model_name: str, model_version: int = -1) -> Model:
        """Return a model by its name. Nothing is looked up before it is used.

        Args:
            model_name: Name of the model.
            model_version: Its version; -1 for the one that the model's version policy chooses.
        """
        self._running()
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """List the models of the repositories.

        Args:
            exclude_not_ready: Whether to leave out those that do not answer requests.
        """
        return listed_models(self, self._running().index(ready_only=exclude_not_ready))

    def load(
        self,
        model_name: str,
        parameters: Mapping[str, str | int | bool | bytes] | None = None,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> Model:
        """Load a model, or load it anew. Returns when it is loaded.

        With `config` and `files` the model is given entirely in memory, and needs no folder in a repository:
        `server.load("linear", config={"backend": "python", ...}, files={"1/model.py": source})`.

        Args:
            model_name: Name of the model.
            parameters: Parameters of the load as Triton has them: `"config"` is the configuration as JSON text, and
                `"file:1/model.py"` the content of a file.
            config: Configuration of the model, in place of the one in its folder: the fields of Triton's `ModelConfig`,
                or their JSON text.
            files: Content of the files of the model by their path inside its folder, in place of the folder. Triton
                wants a configuration with them. Not needed for models without files, such as ensembles.

        Returns:
            The model, with version -1.

        Raises:
            InvalidArgumentError: If a parameter is of a type that is not accepted, or is given twice.
            UnavailableError: If the server is not in mode `EXPLICIT`.
            ModelNotFoundError: If the model is in no repository.
            TritonError: What Triton says if the model does not load.
        """
        control = self._control()
        control.check_explicit("load a model", UnavailableError)
        model = Model(self, model_name)
        control.load(model.name, parameters, config, files)
        return model

    def unload(
        self,
        model: str | Model,
        unload_dependents: bool = False,
        wait_until_unloaded: bool = False,
        polling_interval: float = 0.1,
        timeout: float | None = None,
    ) -> None:
        """Unload all versions of a model. Requests that it has are served first.

        Args:
            model: Name of the model, or the model.
            unload_dependents: Whether to unload the models of its ensemble, too, if it is one.
            wait_until_unloaded: Whether to wait until it is gone.
            polling_interval: How often to look whether it is, in seconds.
            timeout: How long to wait for it, in seconds; `None` for as long as it takes.

        Raises:
            UnavailableError: If the server is not in mode `EXPLICIT`.
            ModelNotFoundError: If there is no model of the name. One that is there and not loaded is no error.
            InvalidArgumentError: If an argument is of the wrong type.
            TimedOutError: If the model is not gone in time. It goes when its requests are served.
        """
        name = model.name if isinstance(model, Model) else model
        wait = Wait(polling_interval, timeout)
        self._control().unload(name, dependents=unload_dependents, wait=wait if wait_until_unloaded else None)

    def register_model_repository(
        self, repository_path: str | os.PathLike[str], name_mapping: Mapping[str, str] | None = None
    ) -> None:
        """Add a model repository, whose models can be loaded then.

        Args:
            repository_path: Its folder.
            name_mapping: Names to load models by, by the name of their folder.

        Raises:
            UnsupportedError: If the server is not in mode `EXPLICIT`.
            InvalidArgumentError: If the folder is not there, or the mapping is not one from text to text.
            AlreadyExistsError: If the folder is registered already.
        """
        self._control().register(repository_path, name_mapping)

    def unregister_model_repository(self, repository_path: str | os.PathLike[str]) -> None:
        """Remove a model repository. Models that were loaded from it stay.

        Args:
            repository_path: Its folder, as it was registered or given in the options.

        Raises:
            UnsupportedError: If the server is not in mode `EXPLICIT`.
            InvalidArgumentError: If it is not registered.
        """
        self._control().unregister(repository_path)

    def poll_model_repository(self) -> None:
        """Load, reload and unload what has changed in the repositories.

        Raises:
            UnavailableError: If the server is not in mode `POLL`.
        """
        self._control().poll()

    @overload
    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        *,
        copy_inputs: bool = False,
    ) -> Model: ...
    @overload
    def bind(
        self,
        model: Callable[..., Any] | Sequence[Callable[..., Any]],
        /,
        *,
        copy_inputs: bool = False,
        **options: Unpack[BindOptions],
    ) -> Model: ...
    @overload
    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        copy_inputs: bool = False,
        **options: Unpack[BindOptions],
    ) -> Model: ...
    def bind(
        self,
        model_name: str | Callable[..., Any] | Sequence[Callable[..., Any]],
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        *,
        copy_inputs: bool = False,
    ) -> Model:
        """Make a callable a model, which Triton's scheduler then calls directly. Takes what `Triton.bind` takes.

        May be called before the start, which loads the model then, and after it: the model is loaded when this returns.
        The callable stays bound when the server is stopped, and is served again after the next start.

        A synchronous callable runs in a thread of Triton, one batch at a time. Inputs of less than 1 MiB are the
        callable's own. A larger one is read-only; alone in its batch, it is a view on the memory of the caller, without
        a copy, which keeps that memory alive: a caller that writes to it later writes to the view.

        Args:
            model_name: Name of the model: letters, digits, dots, underscores and dashes.
            infer_func: Called with a list of requests, returns a list of results, one for each. Of a sequence of
                callables each serves an instance of the model: Triton calls them in parallel.
            inputs: The inputs of the model. Unnamed ones are called `INPUT_1`, `INPUT_2`, ... by their place. None are
                those of `@model`.
            outputs: The outputs of the model. Unnamed ones are called `OUTPUT_1`, `OUTPUT_2`, ... by their place. None
                are those of `@model`.
            model_version: Version of the model, at least 1. Several versions of one name must agree in everything but
                the callables.
            config: How the model is served; None is as `@model` says, else batched.
            strict: Whether results that differ from `outputs` in name, dtype or shape are errors.
            trace_config: Where the spans of the callable go, in items as in `TritonConfig.trace_config`.
            copy_inputs: Whether the callable gets inputs of every size as its own, which it may write to.

        Returns:
            The model, of the version that was bound.

        Raises:
            PyTritonValidationError: If a name, version, tensor or callable is not acceptable.
            PyTritonBadParameterError: If `config` breaks one of its rules.
            AlreadyBoundError: If there is a model of the name and version already, or another version of it with other
                tensors or another configuration. It is an `AlreadyExistsError` and a `PyTritonInvalidOperationError`.
            InvalidArgumentError: If the server is in mode `POLL`, or a callable is a `ProcessWorker`.
            TritonError: If the model does not load, as when its warm-up fails; the server has nothing of it then.
            ValueError: If `trace_config` has another mode than OpenTelemetry, no URL, or an item that cannot be
                understood.
            ImportError: If `trace_config` is given, and the extra `telemetry` is not installed.
        """
        options = model_version, config, strict, trace_config, copy_inputs
        mode = self.options.model_control_mode
        name, version = self._bound().bind(model_name, infer_func, inputs, outputs, *options, control_mode=mode)
        return Model(self, name, version)

    def unbind(self, model_name: str, model_version: int | None = None, *, timeout_s: float = 30.0) -> None:
        """Take a bound model away. When this returns, its requests are answered and its callables not called any more.

        Called by a callable of the model, it begins all that and returns.

        Args:
            model_name: Name of the model.
            model_version: Which version; `None` for all of them.
            timeout_s: How long requests in flight may take, in seconds.

        Raises:
            NotBoundError: If there is no such bound model. It is a `NotFoundError` and a
                `PyTritonInvalidOperationError`.
            TimedOutError: If requests were not answered in time. The model goes when they are.
        """
        self._bound().unbind(model_name, model_version, timeout_s=timeout_s)

    def _running(self) -> Session:
        session = self._session
        if session is None:
            raise _not_started(self.options)
        return session

    def _control(self) -> ModelControl:
        return ModelControl(self._running())

    def _bound(self) -> Bindings:
        # Imported late, because serving callables needs many modules, which other models do not.
        from pytriton.inprocess.callables.bindings import Bindings

        with self._bindings_lock:
            if self._bindings is None:
                self._bindings = Bindings(lambda: self._session)
            return self._bindings


def _already_started(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Server already started: expected server {name!r} to be stopped before it is started again. Call stop() "
        "first, or make another Server.",
        expected="a server that is not started",
        received="a started one",
        where=f"server {name!r}",
    )


def _not_started(options: object) -> InvalidArgumentError:
    server_id = getattr(options, "server_id", None)
    return InvalidArgumentError(
        f"Server not started: expected server {server_id!r} to be started before it is used. Call start(), or use "
        "it in a `with` statement.",
        expected="a started server",
        received="one that is not started",
        where=f"server {server_id!r}",
    )
