"""The decorator `triton_context`, which passes the context of the server to a callable as an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

from pytriton.decorators._calls.context import get_triton_context
from pytriton.decorators._calls.execution import SingleCall
from pytriton.decorators._calls.inputs import find_requests
from pytriton.decorators._calls.requests import Scope
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator

ResultT = TypeVar("ResultT")
_ARGUMENT: Final = "triton_context"


@overload
def triton_context(infer_func: Callable[..., ResultT]) -> Callable[..., ResultT]: ...
@overload
def triton_context(infer_func: classmethod[Any, ..., ResultT]) -> Callable[..., ResultT]: ...
def triton_context(infer_func: Any) -> Any:
    """Pass the context of its server to a callable as the keyword argument `triton_context`.

    ```python
    @batch
    @triton_context
    def infer(prompt, triton_context):
        config = triton_context.model_configs[infer]
        temperatures = [request.parameters["temperature"] for request in triton_context.row_requests]
        ...
    ```

    It may be anywhere among the decorators, or alone above a callable that takes requests. The context is a
    `TritonContext`: configurations by callable, and the requests that are being answered, with their parameters. Works
    on all kinds of callables that `batch` does.

    Args:
        infer_func: The callable to decorate.

    Returns:
        A callable that takes the same arguments but `triton_context`.

    Raises:
        PyTritonValidationError: When called: the callable is not bound to a model.
        PyTritonBadParameterError: At once: `infer_func` is not callable.
    """
    return _with_context(infer_func)


def _plan_context(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall:
    if args and instance is None:
        instance = args[0]
    requests = find_requests(args)
    context = get_triton_context(wrapped, instance)
    scope = None if requests is None else Scope(requests)
    return args, {**kwargs, _ARGUMENT: context}, scope, None


def _relay_context(
    below: Callable[..., Any],
    wrapped: Any,
    instance: Any,
    inputs: Mapping[str, Any],
    sizes: list[int],
    requests: Callable[[], Sequence[Any]],
) -> Any:
    return below({**inputs, _ARGUMENT: get_triton_context(wrapped, instance)}, sizes, requests)


def _without_context(inner: inspect.Signature) -> inspect.Signature:
    return inner.replace(parameters=[it for it in inner.parameters.values() if it.name != _ARGUMENT])


_with_context = decorator(
    _plan_context,
    DecoratorTraits(
        "triton_context",
        redecorate=triton_context,
        convert_signature=_without_context,
        relay=_relay_context,
        added_arguments=(_ARGUMENT,),
    ),
)
