"""Checks, when a callable is bound, that its parameters fit what its decorators pass to it: the model's inputs by name.

What decorators of other packages do with the arguments is not known, so a callable is rejected only if every call of it
would fail.
"""

import functools
import inspect
import logging
from typing import Any

from pytriton.decorators._calls.wrapping import Layer, is_decorated, layer_of
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TritonModelConfig

logger = logging.getLogger(__name__)

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_callable(infer_func: Any, model_config: TritonModelConfig) -> None:
    """Check that the parameters of a decorated callable are the inputs that its decorators pass by name.

    If it cannot take an optional input, it serves requests without that input, so the log warns. Other callables are
    not checked.
    """
    layers, given, function = layers_of(infer_func)
    cost = model_config.cost
    opens = any(layer.traits.unpacks_requests for layer in layers)
    if cost is not None and not opens and (cost.extras or cost.outputs or cost.layout == "packed"):
        logger.warning(
            "Model %r: nothing pads or packs the requests for %r, which gets them as they were sent: the fields of its "
            "Cost other than inputs, limit, oversize and overhead are for callables under @batch.",
            model_config.model_name, infer_func,
        )  # fmt: skip
    signature = _signature(function) if layers else None
    if signature is None or model_config.inputs is None:
        return
    given += [name for layer in layers for name in layer.traits.added_arguments]
    given += [] if model_config.cost is None else model_config.cost.extras
    opening = [layer.traits.name for layer in layers if layer.traits.unpacks_requests]
    if not opening:
        _check_taker_of_requests(signature, given, layers, function, model_config)
    elif len(opening) == 1:
        filled = {name for layer in layers for name in layer.traits.filled_inputs}
        _check_taker_of_inputs(signature, given, filled, opening[0], function, model_config)


def layers_of(infer_func: Any) -> tuple[list[Layer], list[str], Any]:
    """Return the decorators on a callable, outermost first, the arguments that partials add, and the function."""
    layers: list[Layer] = []
    given: list[str] = []
    function: Any = infer_func
    while True:
        function = _called(function)
        callee, names = function, list[str]()
        # isinstance() sees the class of the wrapped object through a decorated callable.
        while not is_decorated(callee) and isinstance(callee, functools.partial) and not callee.args:
            names += callee.keywords
            callee = _called(callee.func)
        layer = layer_of(callee)
        if layer is None:
            # A partial at the bottom stays with its function, because its signature describes both.
            return layers, given, function
        layers.append(layer)
        given += names
        function = layer.below


def _called(function: Any) -> Any:
    """Return the decorated `__call__` of an object that has one; anything else as it is."""
    if is_decorated(function) or function is None or isinstance(function, type) or inspect.isroutine(function):
        return function
    # This needs the method itself, which callable() does not return.
    method = getattr(type(function), "__call__", None)  # noqa: B004
    return function.__call__ if is_decorated(method) else function


def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of the function below all decorators of this package; `None` if it cannot be read."""
    if function is None or isinstance(function, type) or is_decorated(function):
        return None
    if "__signature__" in getattr(function, "__dict__", {}):
        # A signature set by hand is for display, and may differ from the parameters.
        return None
    try:
        # A wrapper of another package shows the signature of the wrapped function, but may pass other arguments.
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        # Callables written in C may have no signature.
        return None


def _check_taker_of_requests(
    signature: inspect.Signature, given: list[str], layers: list[Layer], function: Any, model_config: TritonModelConfig
) -> None:
    try:
        signature.bind([], **dict.fromkeys(given))
    except TypeError as error:
        besides = "".join(f" and {name!r}" for name in given)
        raise PyTritonValidationError(
            f"Model {model_config.model_name!r}: {_shown(function, signature)} cannot serve it: {error}. Under "
            f"@{layers[-1].traits.name} a callable is called with the list of requests{besides}.",
            expected=["requests", *given],
            received=list(signature.parameters),
        ) from error


def _check_taker_of_inputs(
    signature: inspect.Signature,
    given: list[str],
    filled: set[str],
    opener: str,
    function: Any,
    model_config: TritonModelConfig,
) -> None:
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    taken = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    inputs = [spec.name for spec in model_config.inputs or ()]
    known = {*inputs, *given}
    left_out = [spec.name for spec in model_config.inputs or () if spec.optional and spec.name not in filled]
    surplus = [name for name in [*inputs, *given] if not takes_all and name not in taken]
    refused = [name for name in surplus if name not in left_out]
    # Nothing here says that an optional input never comes.
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in _COLLECTING
        and (parameter.name not in known or parameter.kind not in _BY_NAME)
    ]
    if not refused and not missing:
        for name in surplus:
            logger.warning(
                "Model %r: %s has no parameter for the optional input %r: requests that have it fail.",
                model_config.model_name, _shown(function, signature), name,
            )  # fmt: skip
        return
    problems = []
    if refused:
        problems.append(f"it has no parameter for {_listed(refused)}")
    if missing:
        problems.append(f"nothing is given for its parameter {_listed(missing)}")
    raise PyTritonValidationError(
        f"Model {model_config.model_name!r}: {_shown(function, signature)} cannot take the inputs of the model, which "
        f"@{opener} hands over by name: {', and '.join(problems)}. The inputs are {_listed(inputs)}: give parameters "
        'and inputs the same names (def infer(x), Tensor(name="x", ...)), or take them all as **inputs.',
        tensor=next((name for name in refused if name in inputs), None),
        expected=inputs,
        received=list(signature.parameters),
    )


def _shown(function: Any, signature: inspect.Signature) -> str:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    return f"{name}({', '.join(map(str, _bare(signature)))})"


def _bare(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters without their annotations, which may be long."""
    return [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
