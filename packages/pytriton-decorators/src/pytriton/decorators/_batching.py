"""Decorators between the requests of a batch and a callable that takes arrays: `batch` and `sample`.

Shapes: `(batch, *tensor.shape)` is the array of one request; `rows` is the sum of `batch` over the requests of a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np

from pytriton.decorators._outputs import convert_output
from pytriton.decorators._requests import CURRENT_REQUESTS
from pytriton.decorators._types import InferCallable, InferenceRequest, InferenceResults
from pytriton.decorators._wrapping import Plan, decorator, deliver, takes_requests
from pytriton.exceptions import PyTritonBatchSizeError, PyTritonValidationError

__all__ = ["batch", "get_inference_request_batch_size", "sample"]


def get_inference_request_batch_size(inference_request: InferenceRequest) -> int:
    """Gives the number of rows of a request of a batching model.

    Args:
        inference_request: Arrays `(batch, *tensor.shape)` by input name.

    Returns:
        Size of axis 0 of the first input; 1 for a request without inputs, which counts as one row.

    Raises:
        PyTritonValidationError: The first input is not an array with a batch axis, or this is no request.
    """
    data = _arrays(inference_request, 0)
    if not data:
        return 1
    try:
        size = next(iter(data.values())).shape[0]
    except (AttributeError, IndexError):
        raise _explain_inputs([data]) from None
    return int(size)


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
    """Lets a callable take each input as one array over all requests of a batch.

    The callable is called once with keyword arguments, arrays `(rows, *tensor.shape)` by input name, and returns a
    mapping of arrays `(rows, *tensor.shape)` by output name, or a list or tuple of them in the order of the model's
    outputs. Each request gets its rows of every output, as a view. A generator does so with every step.

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
    """Lets a callable of a model without batching take the inputs of its one request as keyword arguments.

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


def _plan_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    requests = _requests_of("batch", args)
    # What precedes the requests is an object or a class: Python 3.13 calls so through @classmethod above @batch.
    leading = args[:-1]
    if leading and instance is None:
        instance = leading[0]
    # A server that has the batch as one array each hands it out without making the inputs of every request.
    whole = getattr(requests[0], "__pytriton_batch__", None)
    gathered = None if whole is None else whole(requests)
    if gathered is not None and gathered[0]:
        inputs, sizes = gathered
    else:
        inputs, sizes = _gather([_arrays(request, index) for index, request in enumerate(requests)])
    if kwargs:
        inputs = {**kwargs, **inputs}
    return Plan([(leading, inputs)], _finisher(sizes, wrapped, instance), requests)


def _finisher(sizes: list[int], wrapped: Any, instance: Any) -> Callable[[list[Any]], InferenceResults]:
    def finish(results: list[Any]) -> InferenceResults:
        outputs = convert_output(results[0], wrapped, instance)
        _check_rows(outputs, sum(sizes))
        return [outputs] if len(sizes) == 1 else _split(outputs, sizes)

    return finish


def _batch_whole(
    wrapped: Any, instance: Any, inputs: Mapping[str, Any], sizes: list[int], requests: Callable[[], Sequence[Any]]
) -> Any:
    token = CURRENT_REQUESTS.set(requests)
    try:
        outputs = wrapped(**inputs)
    finally:
        CURRENT_REQUESTS.reset(token)
    if type(outputs) is not dict:
        if not isinstance(outputs, (list, tuple)):
            # A generator, an awaitable, an object of another kind: all that the decorator does for those, per request.
            return deliver([outputs], Plan([((), inputs)], _finisher(sizes, wrapped, instance), requests()))
        outputs = dict(convert_output(outputs, wrapped, instance))
    _check_rows(outputs, sizes[0] if len(sizes) == 1 else sum(sizes))
    return outputs


def _plan_sample(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    requests = _requests_of("sample", args)
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
    inputs = _arrays(requests[0], 0)

    def finish(results: list[Any]) -> InferenceResults:
        return [convert_output(results[0], wrapped, instance)]

    return Plan([(leading, {**kwargs, **inputs} if kwargs else inputs)], finish, requests)


_batch = decorator(_plan_batch, name="batch", outward=takes_requests, whole=_batch_whole)
_sample = decorator(_plan_sample, name="sample", outward=takes_requests)


def _requests_of(name: str, args: tuple[Any, ...]) -> Sequence[Any]:
    requests: Sequence[Any] = args[-1] if args else ()
    if type(requests) is list and requests:
        return requests
    if isinstance(requests, Mapping) or not hasattr(requests, "__len__") or not len(requests):
        what = f"{type(requests).__name__} {requests!r:.200}" if args else "no positional argument"
        raise PyTritonValidationError(
            f"A callable under @{name} expected a list of at least one request, received {what}. Each request is a "
            "mapping of arrays by input name; the arrays are not passed as keyword arguments.",
            expected="a list of requests",
            received=requests,
        )
    return requests


def _arrays(request: Any, index: int) -> dict[str, Any]:
    if type(request) is dict:
        return request
    # The dictionary within a request: asking it is several times cheaper than asking the request.
    data = getattr(request, "data", None)
    if type(data) is dict:
        return data
    if hasattr(request, "items"):
        return dict(request.items())
    raise PyTritonValidationError(
        f"Request {index} is a {type(request).__name__}, expected a mapping of arrays by input name.",
        request_index=index,
        expected=Mapping,
        received=type(request),
    )


def _gather(arrays: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """Gives the inputs over all requests, and the rows of every request."""
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
                    raise _explain_inputs(arrays)
                sizes = rows
    except (KeyError, AttributeError, IndexError, TypeError):
        raise _explain_inputs(arrays) from None
    if len(arrays) == 1:
        return first, sizes
    for data in arrays:
        if len(data) != width:
            raise _explain_inputs(arrays)
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


def _split(outputs: Mapping[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    stops = list(accumulate(sizes))
    slices = list(map(slice, [0, *stops], stops))
    results: list[dict[str, Any]] = [{} for _ in sizes]
    for name, array in outputs.items():
        for result, rows in zip(results, slices, strict=True):
            result[name] = array[rows]
    return results


def _check_rows(outputs: Mapping[str, Any], rows: int) -> None:
    try:
        for array in outputs.values():
            if array.shape[0] != rows:
                break
        else:
            return
    except (AttributeError, IndexError, TypeError):
        for name, array in outputs.items():
            if not getattr(array, "shape", None):
                raise PyTritonValidationError(
                    f"Output {name!r} is a {type(array).__name__} without a batch axis, expected a numpy array of "
                    f"shape ({rows}, ...): one row for each row of the batch.",
                    tensor=name,
                    expected=rows,
                    received=getattr(array, "shape", type(array)),
                ) from None
        raise
    received = {name: array.shape[0] for name, array in outputs.items()}
    listed = ", ".join(f"{name}: {size}" for name, size in received.items())
    raise PyTritonBatchSizeError(
        f"Received output tensors with different batch sizes: {listed}. Expected batch size: {rows}. Axis 0 of every "
        "output of a callable under @batch has one row for each row of its inputs.",
        tensor=next(name for name, size in received.items() if size != rows),
        expected=rows,
        received=received,
    )


def _explain_inputs(arrays: list[dict[str, Any]]) -> PyTritonValidationError:
    """Finds out which request does not fit, and why."""
    for index, data in enumerate(arrays):
        if data.keys() != arrays[0].keys():
            return PyTritonValidationError(
                f"Requests of one batch have different inputs: request 0 has {sorted(arrays[0])}, request {index} has "
                f"{sorted(data)}. Serve a model with optional inputs by a callable without @batch, which gets every "
                "request with its own inputs, or have all callers send all inputs.",
                request_index=index,
                expected=sorted(arrays[0]),
                received=sorted(data),
            )
        for name, array in data.items():
            if not getattr(array, "shape", None):
                return PyTritonValidationError(
                    f"Input {name!r} of request {index} is a {type(array).__name__} without a batch axis, expected a "
                    "numpy array of shape (batch, ...). For a model without batching use @sample.",
                    tensor=name,
                    request_index=index,
                    received=getattr(array, "shape", type(array)),
                )
        sizes = {name: array.shape[0] for name, array in data.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            return PyTritonBatchSizeError(
                f"Inputs of request {index} have different batch sizes: {listed}. Expected the same size of axis 0.",
                request_index=index,
                received=sizes,
            )
    return PyTritonValidationError(
        "The requests cannot be made one batch, though each fits to the first. Please report this with the requests.",
        received=[{name: getattr(array, "shape", None) for name, array in data.items()} for data in arrays],
    )
