"""The methods of `Server` for functions of this process. What they do is in `_bind.py`, imported when it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pytriton.inprocess.callables.bind import Bindings
    from pytriton.inprocess.server.model import Model
    from pytriton.inprocess.server.server import Server
    from pytriton.model_config import ModelConfig, Tensor

__all__ = ["BindMethods"]


class BindMethods:
    """The part of `Server` that makes functions of this process models."""

    def __init__(self) -> None:
        self._bindings: Bindings | None = None
        self._bindings_lock = threading.Lock()

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
            inputs: The inputs of the model. Unnamed ones are called `INPUT_1`, `INPUT_2`, ... by their place.
            outputs: The outputs of the model. Unnamed ones are called `OUTPUT_1`, `OUTPUT_2`, ... by their place.
            model_version: Version of the model, at least 1. Several versions of one name must agree in everything but
                the callables.
            config: How the model is served; batched by default.
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
        return self._bound().bind(
            model_name, infer_func, inputs, outputs, model_version, config, strict, trace_config, copy_inputs
        )

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

    def _bound(self) -> Bindings:
        # Not at the top: what serves callables is much to import, and of no use for other models.
        from pytriton.inprocess.callables.bind import Bindings

        with self._bindings_lock:
            if self._bindings is None:
                self._bindings = Bindings(cast("Server", self))
            return self._bindings
