"""`Server`: Triton inside the process."""

from __future__ import annotations

import ctypes
import dataclasses
import numbers
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.c_types import MetricsHandle
from pytriton.inprocess.capi.enums import MetricFormat, ModelControlMode
from pytriton.inprocess.capi.errors import (
    InvalidArgumentError,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
    encoded_text,
    wrong_argument,
)
from pytriton.inprocess.capi.parameters import c_parameters
from pytriton.inprocess.requests.model import Model, ModelDictionary
from pytriton.inprocess.server.load_parameters import load_parameters
from pytriton.inprocess.server.options import Options
from pytriton.inprocess.server.session import Session
from pytriton.server.models.callers import run_in_background

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pytriton.inprocess.callables.bindings import Bindings
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.server.models.arguments import BindOptions

__all__ = ["Server"]

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

    # -- start and stop ----------------------------------------------------------------------------------------------

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
        _check_wait(polling_interval, timeout)
        process.check_may_start()
        with self._lock:
            if self._session is not None:
                raise InvalidArgumentError(
                    f"Server already started: expected server {self._session.name!r} to be stopped before it is "
                    "started again. Call stop() first, or make another Server.",
                    expected="a server that is not started",
                    received="a started one",
                    where=f"server {self._session.name!r}",
                )
            # Of now: what is changed during the start is for the next one.
            options = dataclasses.replace(self.options) if isinstance(self.options, Options) else self.options
            self._session = process.interruptible(lambda: Session(options), Session.stop, "start")
            self._was_started = True
            try:
                if self._bindings is not None:
                    self._bindings.on_started(self._session)
                if wait_until_ready:
                    self._wait(self.ready, "be ready", polling_interval, timeout)
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
            # Not with the lock, which a thread may hold that this process does not have.
            self._session.stop()
        if self._session is not None and self._bindings is not None and self._bindings.are_calling():
            # The interpreter must not go while Triton may still call into it.
            run_in_background("stop", self.stop, daemon=False)
            return
        with self._lock:
            session = self._session
            if session is None:
                if self._was_started:
                    return
                raise self._not_started()
            session.stop()
            self._session = None

    def __enter__(self) -> Self:
        """Start the server unless it is started, and wait until it is ready."""
        with self._lock:
            if self._session is None:
                # With failures of models allowed, a server with strict readiness may never be ready.
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
        # Not here: this may be any thread at any point, also one that Triton waits for.
        threading.Thread(target=session.stop, name="pytriton-inprocess-finaliser").start()
        warnings.warn(
            f"Server {session.name!r} was dropped without being stopped. Use `with Server(...) as server:` or call "
            "stop().",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )

    # -- state -------------------------------------------------------------------------------------------------------

    def live(self) -> bool:
        """Tell whether the server runs.

        Raises:
            InvalidArgumentError: If the server is not started. So do all methods below.
        """
        return self._flag("TRITONSERVER_ServerIsLive")

    def ready(self) -> bool:
        """Tell whether the server and, with strict readiness, all of its models answer requests."""
        return self._flag("TRITONSERVER_ServerIsReady")

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
        session = self._running()
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        with session.use() as handle:
            metrics = MetricsHandle()
            session.api.TRITONSERVER_ServerMetrics(handle, ctypes.byref(metrics))
            try:
                session.api.TRITONSERVER_MetricsFormatted(
                    metrics, metric_format, ctypes.byref(text), ctypes.byref(size)
                )
                return ctypes.string_at(text, size.value).decode()
            finally:
                session.api.TRITONSERVER_MetricsDelete(metrics)

    # -- models ------------------------------------------------------------------------------------------------------

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
        listed = self._running().index(ready_only=exclude_not_ready)
        return ModelDictionary(
            self,
            [
                Model(self, model["name"], int(model.get("version", -1)), model.get("state"), model.get("reason"))
                for model in listed
            ],
        )

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
        self._explicit_only("load a model", UnavailableError)
        model = Model(self, model_name)
        self._running().load(model.name, load_parameters(model.name, parameters, config, files))
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
        encoded_text("model", name)
        _check_wait(polling_interval, timeout)
        self._explicit_only("unload a model", UnavailableError)
        self._running().check_listed(name)
        self._running().unload(name, dependents=unload_dependents)
        if wait_until_unloaded:
            self._wait(lambda: self._is_unloaded(name), f"have unloaded model {name!r}", polling_interval, timeout)

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
        self._explicit_only("register a model repository", UnsupportedError)
        session = self._running()
        path = _c_path(repository_path)
        mapping = {} if name_mapping is None else name_mapping
        where = f"model repository {str(repository_path)!r}"
        if not isinstance(mapping, Mapping):
            raise wrong_argument("name_mapping", "a dict from str to str", mapping, where=where)
        for key, value in mapping.items():
            encoded_text("a name of name_mapping", key, where=where)
            encoded_text("a name of name_mapping", value, where=where)
        with session.use() as handle, c_parameters(session.api, mapping) as (array, count):
            session.api.TRITONSERVER_ServerRegisterModelRepository(handle, path, array, count)

    def unregister_model_repository(self, repository_path: str | os.PathLike[str]) -> None:
        """Remove a model repository. Models that were loaded from it stay.

        Args:
            repository_path: Its folder, as it was registered or given in the options.

        Raises:
            UnsupportedError: If the server is not in mode `EXPLICIT`.
            InvalidArgumentError: If it is not registered.
        """
        self._explicit_only("unregister a model repository", UnsupportedError)
        session = self._running()
        with session.use() as handle:
            session.api.TRITONSERVER_ServerUnregisterModelRepository(handle, _c_path(repository_path))

    def poll_model_repository(self) -> None:
        """Load, reload and unload what has changed in the repositories.

        Raises:
            UnavailableError: If the server is not in mode `POLL`.
        """
        session = self._running()
        with session.use() as handle:
            session.api.TRITONSERVER_ServerPollModelRepository(handle)

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
        name, version = self._bound().bind(
            model_name,
            infer_func,
            inputs,
            outputs,
            model_version,
            config,
            strict,
            trace_config,
            copy_inputs,
            control_mode=self.options.model_control_mode,
        )
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

    # -- for the other modules ---------------------------------------------------------------------------------------

    def _running(self) -> Session:
        session = self._session
        if session is None:
            raise self._not_started()
        return session

    def _not_started(self) -> InvalidArgumentError:
        server_id = getattr(self.options, "server_id", None)
        return InvalidArgumentError(
            f"Server not started: expected server {server_id!r} to be started before it is used. Call start(), or use "
            "it in a `with` statement.",
            expected="a started server",
            received="one that is not started",
            where=f"server {server_id!r}",
        )

    def _bound(self) -> Bindings:
        # Not at the top: what serves callables is much to import, and of no use for other models.
        from pytriton.inprocess.callables.bindings import Bindings

        with self._bindings_lock:
            if self._bindings is None:
                self._bindings = Bindings(lambda: self._session)
            return self._bindings

    def _is_unloaded(self, name: str) -> bool:
        return all(
            model.get("state") in (None, "UNAVAILABLE") for model in self._running().index() if model["name"] == name
        )

    def _explicit_only(self, what: str, error: type[UnavailableError] | type[UnsupportedError]) -> None:
        mode = self._running().control_mode
        if mode is not ModelControlMode.EXPLICIT:
            raise error(
                f"Server {self._running().name!r} runs in model control mode {mode.name}: expected mode EXPLICIT to "
                f"{what}. Start it with model_control_mode=ModelControlMode.EXPLICIT.",
                expected=ModelControlMode.EXPLICIT,
                received=mode,
                where=f"server {self._running().name!r}",
            )

    def _flag(self, function: str) -> bool:
        session = self._running()
        flag = ctypes.c_bool()
        with session.use() as handle:
            getattr(session.api, function)(handle, ctypes.byref(flag))
        return flag.value

    def _wait(self, done: Callable[[], bool], what: str, polling_interval: float, timeout: float | None) -> None:
        name = self._running().name
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimedOutError(
                    f"Expected server {name!r} to {what} within {timeout:g} s, which it did not.",
                    expected=what,
                    received=f"not within {timeout:g} s",
                    where=f"server {name!r}",
                )
            time.sleep(polling_interval if left_s is None else min(polling_interval, left_s))


def _check_wait(polling_interval: object, timeout: object) -> None:
    """Check the arguments of a wait before anything is done that it is to wait for.

    Raises:
        InvalidArgumentError: If one is not a number of seconds; the timeout may also be `None`.
    """
    for name, value in (("polling_interval", polling_interval), ("timeout", timeout)):
        if value is None and name == "timeout":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
            raise wrong_argument(name, "a number of seconds that is not negative", value)


def _c_path(path: object) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_argument("repository_path", "a path (str or os.PathLike)", path)
    encoded = os.fsencode(path)
    if 0 in encoded:
        raise wrong_argument("repository_path", "a path without zero characters", path)
    return encoded
