"""The description of a model that is bound: from the arguments of `bind`, or from the hints under `@model`."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytriton.decorators import ModelSignature
from pytriton.decorators.serving import (
    DESCRIPTION_PARAMETER,
    docstring_of,
    find_signature,
    load_infer_func,
    reads_parameters,
)
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.models.process_workers import ProcessWorker


@dataclass(frozen=True)
class Description:
    """The description of a model before it is checked."""

    name: Any
    infer_func: Any
    inputs: Any
    outputs: Any
    config: Any


def describe(name: Any, infer_func: Any, inputs: Any, outputs: Any, config: Any) -> Description:
    """Complete the description of a model by the hints of its function or class; raise an error if both disagree."""
    if infer_func is None and not isinstance(name, str):
        name, infer_func = None, name
    signatures = _signatures(infer_func)
    first = next((signature for signature in signatures if signature is not None), None)
    if first is None or (None in signatures and (inputs is None or outputs is None)):
        _check_told(name, infer_func, inputs, outputs)
    if first is None:
        return Description(name, infer_func, inputs, outputs, ModelConfig() if config is None else config)
    described = Description(
        name=first.name if name is None else name,
        infer_func=infer_func,
        inputs=first.inputs if inputs is None else inputs,
        outputs=first.outputs if outputs is None else outputs,
        config=first.config if config is None else config,
    )
    for signature in signatures:
        if signature is not None and isinstance(described.config, ModelConfig):
            signature.check_description(
                _tensors(described.inputs),
                _tensors(described.outputs),
                batching=described.config.batching,
                decoupled=described.config.decoupled,
                cost=described.config.cost,
            )
    return described


def name_of(model_name: Any, infer_func: Any) -> tuple[str, Any]:
    """Return the name of a model and its callable; `model_name` may be a function or class under `@model` alone."""
    if infer_func is not None:
        return model_name, infer_func
    if isinstance(model_name, str):
        raise PyTritonValidationError(
            f"Model {model_name!r}: rebind() expects infer_func, what serves it from now on; got none.",
            expected="a callable",
            received=None,
        )
    described = describe(model_name, None, None, None, None)
    return described.name, described.infer_func


def is_hinted(infer_func: Any) -> bool:
    """Return whether hints describe the inputs and outputs of a callable, or of one of several."""
    return any(signature is not None for signature in _signatures(infer_func))


def ignores_parameters(infer_func: Any) -> bool:
    """Return whether all callables of a model ignore the parameters of requests; only hints show that."""
    served = infer_func.factory if isinstance(infer_func, ProcessWorker) else infer_func
    return find_signature(served) is not None and not reads_parameters(served)


def description_of(infer_funcs: Sequence[Any]) -> dict[str, str]:
    """Return the parameter by which callers learn what a model does: the docstring of what serves it, if it has one."""
    for infer in infer_funcs:
        served = infer
        if isinstance(infer, ProcessWorker):
            # The docstring of another factory is about the factory.
            served = infer.factory if find_signature(infer.factory) is not None else None
        text = "" if served is None else docstring_of(served)
        if text:
            return {DESCRIPTION_PARAMETER: text}
    return {}


def load_callable(infer_func: Any, model: str) -> Any:
    """Return the callable that serves a model; for a class under `@model`, a new object."""
    if isinstance(infer_func, ProcessWorker) or find_signature(infer_func) is None:
        return infer_func
    if isinstance(infer_func, type):
        try:
            inspect.signature(infer_func).bind()
        except TypeError as error:
            name = infer_func.__name__
            raise PyTritonValidationError(
                f"Model {model!r}: {name} cannot be made without arguments ({error}): bind an object, {name}(...), a "
                f"list of them for several workers, or ProcessWorker({name}, args=[...]).",
                expected="a class that is made without arguments, or an object of it",
                received=infer_func,
            ) from error
    return load_infer_func(infer_func)


def _signatures(infer_func: Any) -> list[ModelSignature | None]:
    is_list = isinstance(infer_func, Sequence) and not callable(infer_func)
    return [
        find_signature(infer.factory if isinstance(infer, ProcessWorker) else infer)
        for infer in (infer_func if is_list else [infer_func])
    ]


def _tensors(tensors: Any) -> Sequence[Tensor] | None:
    """Return tensors that can be compared; invalid ones are reported later, when they get their names."""
    listed = isinstance(tensors, Sequence) and all(isinstance(tensor, Tensor) for tensor in tensors)
    return tensors if listed else None


def _check_told(name: Any, infer_func: Any, inputs: Any, outputs: Any) -> None:
    missing = [what for what, given in (("inputs", inputs), ("outputs", outputs)) if given is None]
    advice = "decorate the function with @model of pytriton.decorators, whose hints say that"
    if isinstance(infer_func, ProcessWorker) and isinstance(infer_func.factory, str):
        advice += ", and give it itself to ProcessWorker: what is named as text is not imported here"
    if name is None:
        raise PyTritonValidationError(
            f"bind() of a callable alone expects one that is decorated with @model; got {infer_func!r}. Say the name "
            f"of the model, its inputs and outputs, or {advice}.",
            expected="a function or class that is decorated with @model",
            received=infer_func,
        )
    if missing:
        raise PyTritonValidationError(
            f"Model {name!r}: {' and '.join(missing)} have to be said: pass lists of Tensor, or {advice}.",
            expected="lists of pytriton.model_config.Tensor",
            received=None,
        )
