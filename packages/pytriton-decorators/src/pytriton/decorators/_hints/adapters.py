"""From a function of values to a callable that takes the requests of a batch: conversion, then `batch` or `sample`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from pytriton.decorators._batching import batch, sample
from pytriton.decorators._calls.execution import SingleCall
from pytriton.decorators._calls.inputs import get_arrays, require_requests
from pytriton.decorators._calls.requests import CURRENT_SCOPE, Scope
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, picklable
from pytriton.decorators._grouping import group_by_keys
from pytriton.decorators._hints.signatures import ModelSignature
from pytriton.exceptions import PyTritonUnrecoverableError, PyTritonValidationError

_Row = tuple[dict[str, Any], Scope]


def make_infer_func(func: Callable[..., Any], signature: ModelSignature) -> Callable[..., Any]:
    """Return the inference callable for a function, or an object of a class, with this signature."""
    converted = _converting(signature)(func)
    if signature.batched:
        has_optional = any(tensor.optional for tensor in signature.inputs)
        return group_by_keys(batch(converted)) if has_optional else batch(converted)
    if not signature.config.batching:
        return sample(converted)
    serve_each = _serve_each_async if inspect.iscoroutinefunction(converted) else _serve_each
    infer = serve_each(converted)
    # Logs and metrics show this name.
    infer.__qualname__ = infer.__name__ = getattr(func, "__qualname__", type(func).__qualname__)
    return infer


def _converting(signature: ModelSignature) -> Callable[[Any], Any]:
    """Make the decorator between arrays by name and the values of the hints."""

    def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall:
        return args, signature.to_arguments(kwargs), None, finish

    def finish(results: list[Any]) -> dict[str, Any]:
        return signature.to_arrays(results[0])

    return decorator(prepare, DecoratorTraits("model", redecorate=picklable(_converting, signature)))


def _serve_each(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function for every sample of a batch; an error fails only the request of its sample."""

    def infer(requests: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for index, request in enumerate(require_requests("model", (requests,))):
            try:
                results.append(_stacked([_call(func, *row) for row in _rows(request, index)], index))
            except PyTritonUnrecoverableError:
                raise
            except Exception as error:
                results.append(_only_error(error, requests))
        return results

    return infer


def _serve_each_async(func: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Do the same for a coroutine function, for all samples at once."""

    async def call(arguments: dict[str, Any], scope: Scope) -> Any:
        # Each task has its own context.
        CURRENT_SCOPE.set(scope)
        return await func(**arguments)

    async def infer(requests: Sequence[Any]) -> list[Any]:
        rows = [_rows(request, index) for index, request in enumerate(require_requests("model", (requests,)))]
        found = iter(await asyncio.gather(*(call(*row) for group in rows for row in group), return_exceptions=True))
        results: list[Any] = []
        for index, group in enumerate(rows):
            answers: list[Any] = [next(found) for _ in group]
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            for error in errors:
                if isinstance(error, PyTritonUnrecoverableError) or not isinstance(error, Exception):
                    raise error
            try:
                results.append(_only_error(errors[0], requests) if errors else _stacked(answers, index))
            except PyTritonValidationError as error:
                results.append(_only_error(error, requests))
        return results

    return infer


def _rows(request: Any, index: int) -> list[_Row]:
    """Return the inputs of every row of a request by name, and the scope of the function's call for it."""
    arrays = get_arrays(request, index)
    count = next((len(array) for array in arrays.values()), 1)
    scope = Scope([request], [count])
    return [({name: array[row] for name, array in arrays.items()}, scope.of_rows([row])) for row in range(count)]


def _call(func: Callable[..., Any], arguments: dict[str, Any], scope: Scope) -> Any:
    token = CURRENT_SCOPE.set(scope)
    try:
        return func(**arguments)
    finally:
        CURRENT_SCOPE.reset(token)


def _only_error(error: BaseException, requests: Sequence[Any]) -> BaseException:
    """Return the error in place of the result, or raise it if there is only one request."""
    if len(requests) == 1:
        raise error
    return error


def _stacked(rows: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return the outputs of one request, joined from those of its rows."""
    if len(rows) == 1:
        return {name: array[np.newaxis] for name, array in rows[0].items()}
    outputs: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        arrays = [row[name] for row in rows]
        shapes = list(dict.fromkeys(array.shape for array in arrays))
        if len(shapes) > 1:
            raise PyTritonValidationError(
                f"Output {name!r} of request {index} is ragged: its samples have the shapes {shapes[0]} and "
                f"{shapes[1]}, and one request has one array. Return the same shape for each, padded if need be, or "
                "have callers send one sample a request.",
                tensor=name,
                request_index=index,
                expected=shapes[0],
                received=shapes[1],
            )
        outputs[name] = np.stack(arrays)
    return outputs
