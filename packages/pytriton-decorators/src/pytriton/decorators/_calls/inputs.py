"""The arguments of a decorated callable: requests, or the arrays of a batch by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytriton.decorators._calls.types import InferenceRequest
from pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonBatchSizeError,
    PyTritonRuntimeError,
    PyTritonValidationError,
)


def get_inference_request_batch_size(inference_request: InferenceRequest) -> int:
    """Return the number of rows of a request of a batching model.

    Args:
        inference_request: Arrays `(batch, *tensor.shape)` by input name.

    Returns:
        Size of axis 0 of the first input; 1 for a request without inputs, which counts as one row.

    Raises:
        PyTritonValidationError: The first input is not an array with a batch axis, or this is no request.
    """
    data = get_arrays(inference_request, 0)
    if not data:
        return 1
    try:
        size = next(iter(data.values())).shape[0]
    except (AttributeError, IndexError):
        raise make_batch_error([data]) from None
    return int(size)


# --- requests --------------------------------------------------------------------------------------------------------


def require_requests(name: str, args: tuple[Any, ...]) -> Sequence[Any]:
    """Return the requests that a callable under the decorator `name` was called with; anything else is an error."""
    requests: Sequence[Any] = args[-1] if args else ()
    if type(requests) is list and requests:
        return requests
    if isinstance(requests, (Mapping, type)) or not hasattr(requests, "__len__") or not len(requests):
        what = f"{type(requests).__name__} {requests!r:.200}" if args else "no positional argument"
        raise PyTritonValidationError(
            f"A callable under @{name} expected a list of at least one request, received {what}. Each request is a "
            f"mapping of arrays by input name; the arrays are not passed as keyword arguments. Among decorators, "
            f"@{name} goes above those that take arrays.",
            expected="a list of requests",
            received=requests,
        )
    return requests


def get_batched_inputs(requests: Sequence[Any]) -> Mapping[str, Any] | None:
    """Return the inputs of a batch as one array over all requests each; None if the server has not joined them.

    If it has, all requests have the same inputs, and decorators need not check each of them.
    """
    # Only requests that a server made have this attribute.
    gather = getattr(requests[0], "__pytriton_batch__", None) if requests else None
    gathered = None if gather is None else gather(requests)
    return None if gathered is None else gathered[0]


def find_requests(args: tuple[Any, ...]) -> Sequence[Any] | None:
    """Return the requests that a callable was called with; None if it was called with arrays by name.

    They are the last of `args`: an object or a class may precede them.
    """
    if not args:
        return None
    last = args[-1]
    if type(last) is list:
        return last
    return last if isinstance(last, Sequence) and not isinstance(last, (str, bytes)) else None


def forbid_requests(name: str, args: tuple[Any, ...]) -> None:
    """Raise an error if a callable under the decorator `name` was called with requests instead of arrays."""
    if args and (find_requests(args) is not None or isinstance(args[-1], Mapping)):
        raise PyTritonRuntimeError(
            f"A callable under @{name} expected the arrays of a batch as keyword arguments, received "
            f"{type(args[-1]).__name__} as a positional one. Place @{name} below @batch: `@batch` first, then "
            f"`@{name}`, then the function."
        )


def get_arrays(request: Any, index: int) -> dict[str, Any]:
    """Return the arrays of a request by name; `index` is its place in the batch, for the error."""
    if type(request) is dict:
        return request
    # Reading the dictionary inside a request is several times cheaper than reading the request.
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


def get_all_arrays(requests: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the arrays of each request by name."""
    return [request if type(request) is dict else get_arrays(request, index) for index, request in enumerate(requests)]


def replace_arrays(original: Any, data: dict[str, Any]) -> Any:
    """Return a copy of a request or response with other arrays; `original` is not changed."""
    if type(original) is dict:
        return data
    if isinstance(getattr(original, "data", None), dict):
        duplicate = _shallow_copy(original)
        duplicate.data = data
        return duplicate
    if isinstance(original, dict):
        duplicate = _shallow_copy(original)
        duplicate.clear()
        duplicate.update(data)
        return duplicate
    # Other mappings, such as read-only ones, carry nothing but their arrays.
    return data


def _shallow_copy(original: Any) -> Any:
    try:
        # A copy of a server's request would leave its batch, and its caller could no longer cancel it.
        kind: Any = type(original)
        duplicate = kind.__new__(kind)
        vars(duplicate).update(vars(original))
    except TypeError:
        # The class keeps its attributes in another way.
        return copy.copy(original)
    return duplicate


# --- arrays of a batch -----------------------------------------------------------------------------------------------


def make_batch_error(arrays: list[dict[str, Any]]) -> PyTritonValidationError:
    """Make the error that says which request does not fit into a batch, and why."""
    for index, data in enumerate(arrays):
        if data.keys() != arrays[0].keys():
            return PyTritonValidationError(
                f"Requests of one batch have different inputs: request 0 has {sorted(arrays[0])}, request {index} has "
                f"{sorted(data)}. For a model with optional inputs put @group_by_keys above @batch, or @fill_optionals "
                "with their defaults.",
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


def check_names(name: str, keys: Iterable[Any]) -> tuple[str, ...]:
    """Check the names of inputs that a decorator was given."""
    names = tuple(keys)
    if names and all(isinstance(key, str) and key and key != "__triton_context__" for key in names):
        return names
    if not names:
        odd: Any = names
    else:
        odd = next(key for key in names if not isinstance(key, str) or not key or key == "__triton_context__")
    raise PyTritonBadParameterError(
        f'@{name} expected the names of inputs, as in @{name}("temperature"), received {odd!r}.',
        parameter=f"{name}.keys",
        value=odd,
        rule="one or more names of inputs",
    )
