"""Decorators between the requests of a batch and a callable that takes arrays: `batch` and `sample`.

Shapes: `(batch, *tensor.shape)` is the array of one request; `rows` is the sum of `batch` over the requests of a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from pytriton.decorators._calls.context import find_model_config
from pytriton.decorators._calls.execution import Plan, SingleCall, combine
from pytriton.decorators._calls.inputs import get_all_arrays, get_arrays, make_batch_error, require_requests
from pytriton.decorators._calls.outputs import convert_output
from pytriton.decorators._calls.requests import CURRENT_SCOPE, PendingScope, Scope, make_scope
from pytriton.decorators._calls.types import InferCallable, InferenceResults
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, requests_signature
from pytriton.decorators._ragged import RaggedBatch, are_of_model
from pytriton.decorators._rows import PartialOutputs, check_rows, split_by_request, to_arrays
from pytriton.exceptions import PyTritonRuntimeError, PyTritonValidationError


@overload
def batch(
    infer_func: Callable[..., Coroutine[Any, Any, Any]],
) -> InferCallable[Coroutine[Any, Any, InferenceResults]]: ...
@overload
def batch(infer_func: Callable[..., AsyncIterator[Any]]) -> InferCallable[AsyncIterator[InferenceResults]]: ...
@overload
def batch(infer_func: Callable[..., Iterator[Any]]) -> InferCallable[Iterator[InferenceResults]]: ...
@overload
def batch(infer_func: Callable[..., Any] | classmethod[Any, ..., Any]) -> InferCallable[InferenceResults]: ...
def batch(infer_func: Any) -> Any:
    """Let a callable take each input as one array over all requests of a batch.

    The callable is called once with keyword arguments, arrays `(rows, *tensor.shape)` by input name, and returns a
    mapping of arrays `(rows, *tensor.shape)` by output name, or a list or tuple of them in the order of the model's
    outputs. Each request gets its rows of every output, as a view. A generator does so with every step.

    Of a model with a `Cost`, requests differ in length: inputs are padded or packed, as it says, and outputs cut back.

    Works on functions, methods, callable objects and `functools.partial`, be they ordinary, `async def` or generators
    of either kind; the decorated callable is of the same kind. For a single request, and where the server has laid the
    batch out in one piece, the arrays are handed on without a copy; else each input is concatenated once. A request
    without inputs counts as one row. `get_requests()` gives the callable the requests, with their parameters.

    Args:
        infer_func: The callable to decorate.

    Returns:
        A callable that takes the list of requests (or any mappings of arrays by input name) and returns the list of
        results.

    Raises:
        PyTritonValidationError: (When called, as all but the next.) No requests; requests with different inputs;
            an input that is not an array with a batch axis or does not fit to that of the other
            requests; a result of a kind that is not supported.
        PyTritonBadParameterError: At once: `infer_func` is not callable.
        PyTritonBatchSizeError: Inputs of one request, or outputs, that have not the same number of rows. Also a
            ValueError.
    """
    return _batch(infer_func)


@overload
def sample(
    infer_func: Callable[..., Coroutine[Any, Any, Any]],
) -> InferCallable[Coroutine[Any, Any, InferenceResults]]: ...
@overload
def sample(infer_func: Callable[..., AsyncIterator[Any]]) -> InferCallable[AsyncIterator[InferenceResults]]: ...
@overload
def sample(infer_func: Callable[..., Iterator[Any]]) -> InferCallable[Iterator[InferenceResults]]: ...
@overload
def sample(infer_func: Callable[..., Any] | classmethod[Any, ..., Any]) -> InferCallable[InferenceResults]: ...
def sample(infer_func: Any) -> Any:
    """Let a callable of a model without batching take the inputs of its one request as keyword arguments.

    The callable gets arrays `tensor.shape` by input name and returns a mapping of arrays by output name, or a list or
    tuple of them in the order of the model's outputs. Works on the same kinds of callables as `batch`.

    Args:
        infer_func: The callable to decorate.

    Returns:
        A callable that takes a list of one request and returns a list of one result.

    Raises:
        PyTritonBadParameterError: `infer_func` is not callable.
        PyTritonValidationError: When called: not exactly one request (the model needs
            `ModelConfig(batching=False)`), or a result of a kind that is not supported.
    """
    return _sample(infer_func)


def _plan_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall:
    requests = require_requests("batch", args)
    # Arguments before the requests are an object or a class: Python 3.13 passes them if @classmethod is above @batch.
    leading = args[:-1]
    if leading and instance is None:
        instance = leading[0]
    # A server that holds each input as one array returns these without making the inputs of every request.
    gather = getattr(requests[0], "__pytriton_batch__", None)
    gathered = None if gather is None else gather(requests)
    config = find_model_config(wrapped, instance)
    if config is not None and config.cost is not None:
        whole = gathered if gathered is not None and gathered[0] else None
        arrays = [whole[0]] if whole else get_all_arrays(requests)
        # The inputs may be those of a helper that the model's callable calls, which the cost does not concern.
        if are_of_model(config, arrays[0]):
            ragged = RaggedBatch(config, arrays, whole)
            scope = Scope(requests, ragged.sizes)
            return leading, {**kwargs, **ragged.inputs}, scope, _ragged_finisher(ragged, wrapped, instance)
    if gathered is not None and gathered[0]:
        inputs, sizes = gathered
    else:
        inputs, sizes = _gather(get_all_arrays(requests))
    if kwargs:
        inputs = {**kwargs, **inputs}
    return leading, inputs, Scope(requests, sizes), _finisher(sizes, wrapped, instance)


def _ragged_finisher(ragged: RaggedBatch, wrapped: Any, instance: Any) -> Callable[[list[Any]], InferenceResults]:
    def finish(results: list[Any]) -> InferenceResults:
        return ragged.split(convert_output(results[0], wrapped, instance))

    return finish


def _finisher(sizes: list[int], wrapped: Any, instance: Any) -> Callable[[list[Any]], InferenceResults]:
    def finish(results: list[Any]) -> InferenceResults:
        outputs = to_arrays(convert_output(results[0], wrapped, instance))
        partial = isinstance(outputs, PartialOutputs)
        rows = len(outputs.rows) if isinstance(outputs, PartialOutputs) else sum(sizes)
        check_rows(outputs, rows, sizes=sizes)
        return [outputs] if len(sizes) == 1 and not partial else split_by_request(outputs, sizes)

    return finish


def _make_batch_call(
    wrapped: Any, instance: Any, inputs: Mapping[str, Any], sizes: list[int], requests: Callable[[], Sequence[Any]]
) -> Any:
    scope: PendingScope = [requests, sizes, None]
    token = CURRENT_SCOPE.set(scope)
    try:
        outputs = wrapped(**inputs)
    finally:
        CURRENT_SCOPE.reset(token)
    if type(outputs) is not dict:
        if not isinstance(outputs, (list, tuple)):
            # For a generator, an awaitable or an unknown object, the decorator works request by request.
            return combine([outputs], Plan([((), inputs, make_scope(scope))], _finisher(sizes, wrapped, instance)))
        outputs = dict(convert_output(outputs, wrapped, instance))
    outputs = to_arrays(outputs)
    check_rows(outputs, sizes[0] if len(sizes) == 1 else sum(sizes), sizes=sizes)
    return outputs


def _plan_sample(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall:
    requests = require_requests("sample", args)
    leading = args[:-1]
    if leading and instance is None:
        instance = leading[0]
    if len(requests) != 1:
        raise PyTritonValidationError(
            f"@sample expected one request, received {len(requests)}. It is for models without batching: bind the "
            "model with ModelConfig(batching=False), or use @batch.",
            expected=1,
            received=len(requests),
        )
    inputs = get_arrays(requests[0], 0)

    def finish(results: list[Any]) -> InferenceResults:
        outputs = convert_output(results[0], wrapped, instance)
        if isinstance(outputs, PartialOutputs):
            raise PyTritonRuntimeError(
                "The generators of the groups of @group_by_values yielded different numbers of times. Under @sample "
                "there is one request, which cannot end in parts: yield equally often for every group."
            )
        return [outputs]

    return leading, {**kwargs, **inputs} if kwargs else inputs, Scope(requests, [1]), finish


_batch = decorator(
    _plan_batch,
    DecoratorTraits(
        "batch",
        redecorate=batch,
        convert_signature=requests_signature,
        batch_call=_make_batch_call,
        unpacks_requests=True,
    ),
)
_sample = decorator(
    _plan_sample,
    DecoratorTraits("sample", redecorate=sample, convert_signature=requests_signature, unpacks_requests=True),
)


def _gather(arrays: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs over all requests, and the rows of every request."""
    first = arrays[0]
    if not first and not any(arrays):
        return {}, [1] * len(arrays)
    columns = {}
    sizes: list[int] = []
    width = len(first)
    try:
        for name in first:
            columns[name] = column = [data[name] for data in arrays]
            rows = [array.shape[0] for array in column]
            if rows != sizes:
                if sizes:
                    raise make_batch_error(arrays)
                sizes = rows
    except (KeyError, AttributeError, IndexError, TypeError):
        raise make_batch_error(arrays) from None
    if len(arrays) == 1:
        return first, sizes
    for data in arrays:
        if len(data) != width:
            raise make_batch_error(arrays)
    return {name: _concatenate(name, column) for name, column in columns.items()}, sizes


def _concatenate(name: str, column: list[Any]) -> Any:
    try:
        return np.concatenate(column)
    except ValueError as error:
        shapes = [array.shape for array in column]
        odd = next((index for index, shape in enumerate(shapes) if shape[1:] != shapes[0][1:]), 0)
        raise PyTritonValidationError(
            f"Input {name!r} cannot be made one batch: request 0 has shape {shapes[0]}, request {odd} has shape "
            f"{shapes[odd]}; only axis 0 may differ. Triton batches such requests together only if told to: group or "
            "pad them before @batch.",
            tensor=name,
            request_index=odd,
            expected=shapes[0],
            received=shapes[odd],
        ) from error
