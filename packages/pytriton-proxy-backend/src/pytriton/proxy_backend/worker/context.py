"""What a callable finds around it in a process of its own: its model's configuration, a tracer, its warm-up.

The decorators are not needed for any of it. Where they are installed, they find what they find in the server's process.
"""

from __future__ import annotations

import contextvars
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from pytriton.proxy.tracers import find_tracer, use_worker_tracer
from pytriton.proxy.types import Request

from ..errors import ProxyBackendError, TargetError
from ..model import ModelSpec, TensorSpec

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 2.0


def unrecoverable_errors() -> tuple[type[BaseException], ...]:
    """Return the errors after which a callable must not be called again.

    None where pytriton-decorators is not installed.
    """
    exceptions = _optional("pytriton.exceptions")
    return () if exceptions is None else (exceptions.PyTritonUnrecoverableError,)


def import_all(model: ModelSpec) -> None:
    """Import what the other functions would, for a process whose forks shall find it."""
    unrecoverable_errors()
    _optional("pytriton.model_config.warmup")
    if _optional("pytriton.decorators.serving") is not None:
        _served_config(model)


def make_context(infer_func: Callable[..., Any], model: ModelSpec, tracer: Any = None) -> contextvars.Context:
    """Make the context of a callable, in which the decorators find its model."""
    context = contextvars.copy_context()
    if tracer is not None:
        context.run(use_worker_tracer, tracer)
    serving = _optional("pytriton.decorators.serving")
    if serving is not None:
        context.run(serving.set_served_model, infer_func, _served_config(model))
    return context


def make_infer_func(
    found: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, is_factory: bool
) -> tuple[Any, Any]:
    """Make the inference callable for a target: the callable itself, a factory, or a function or class under `@model`.

    Returns also the signature of its hints, or `None`.
    """
    serving = _optional("pytriton.decorators.serving")
    signature = None if serving is None else serving.find_signature(found)
    kwargs = kwargs or {}
    if signature is None and is_factory:
        found = found(*args, **kwargs)
        args, kwargs = (), {}
        signature = None if serving is None else serving.find_signature(found)
    return (found if signature is None else serving.load_infer_func(found, *args, **kwargs)), signature


def check_callable(infer_func: Callable[..., Any], signature: Any, model: ModelSpec, target: str) -> None:
    """Check that a callable is for this model, and can take what its decorators pass to it."""
    serving = _optional("pytriton.decorators.serving")
    if serving is None:
        # Without pytriton-decorators, there are no decorators on it.
        return
    config = _served_config(model)
    try:
        if signature is not None:
            signature.check_description(
                config.inputs, config.outputs, batching=config.batching, decoupled=config.decoupled, cost=config.cost
            )
        serving.check_callable(infer_func, config)
    except importlib.import_module("pytriton.exceptions").PyTritonValidationError as error:
        raise TargetError(str(error), target=target) from error


def _served_config(model: ModelSpec) -> Any:
    described = importlib.import_module("pytriton.model_config.triton_model_config")

    def specs(tensors: Sequence[TensorSpec]) -> list[Any]:
        return [
            described.TensorSpec(
                name=tensor.name,
                shape=tensor.shape,
                dtype=bytes if tensor.dtype.kind in "OSUT" else tensor.dtype.type,
                optional=tensor.optional,
            )
            for tensor in tensors
        ]

    return described.TritonModelConfig(
        model_name=model.name,
        model_version=model.version,
        max_batch_size=model.max_batch_size,
        batching=model.batching,
        decoupled=model.decoupled,
        inputs=specs(model.inputs),
        outputs=specs(model.outputs),
        cost=None if model.cost is None else importlib.import_module("pytriton.model_config.cost").Cost(**model.cost),
    )


def open_tracer(trace_config: Sequence[str]) -> tuple[Any, Callable[[], None]]:
    """Return a tracer for a setting and a function that closes it; `None` without tracing or OpenTelemetry."""
    if not trace_config or find_tracer() is not None:
        return None, _nothing
    from pytriton.proxy.trace_export import SpanExport, is_opentelemetry

    if not is_opentelemetry(trace_config):
        return None, _nothing
    try:
        export = SpanExport(tuple(trace_config))
    except (ImportError, ValueError) as error:
        logger.warning("The inference callable is not traced: %s", error)
        return None, _nothing

    def close() -> None:
        export.close(_FLUSH_TIMEOUT_S)

    return export.tracer, close


class Warmup(Sequence[Sequence[Request]]):
    """Batches of one request each, made on demand."""

    def __init__(self, warmups: Sequence[Mapping[str, Any]], model: ModelSpec) -> None:
        self._model = model
        self._made: list[tuple[Any, int]] = []
        if not warmups:
            return
        common = _optional("pytriton.model_config.common")
        if common is None:
            raise ProxyBackendError(
                f"model '{model.name}' has a warm-up, which needs the package pytriton-decorators in the interpreter "
                "of the worker process: install it there, or bind the model without ModelConfig.model_warmup"
            )
        for fields in warmups:
            inputs = {name: common.WarmupInput(**given) for name, given in fields["inputs"].items()}
            warmup = common.ModelWarmup(**{**fields, "inputs": inputs})
            self._made += [(warmup, index) for index in range(warmup.count)]

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, place: int) -> Sequence[Request]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[Request]]: ...
    def __getitem__(self, place: int | slice) -> Sequence[Request] | Sequence[Sequence[Request]]:
        if isinstance(place, slice):
            return list(self._requests(self._made[place]))
        return next(self._requests([self._made[place]]))

    def _requests(self, made: Sequence[tuple[Any, int]]) -> Iterator[Sequence[Request]]:
        make = importlib.import_module("pytriton.model_config.warmup").warmup_request
        for warmup, index in made:
            yield [
                Request(
                    make(warmup, index, batching=self._model.batching),
                    requested_output_names=[tensor.name for tensor in self._model.outputs],
                    request_id=f"warmup-{warmup.name}-{index}",
                )
            ]


def _optional(name: str) -> Any:
    """Import a module of pytriton-decorators; `None` if that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _nothing() -> None:
    pass
