"""Decorators that call a callable once for each group: of requests with equal inputs, of rows with equal values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pytriton.decorators._calls.context import find_model_config
from pytriton.decorators._calls.execution import EXHAUSTED, Call, Plan, SingleCall
from pytriton.decorators._calls.inputs import (
    check_names,
    forbid_requests,
    get_all_arrays,
    get_batched_inputs,
    require_requests,
)
from pytriton.decorators._calls.outputs import convert_output
from pytriton.decorators._calls.requests import Scope, current_scope, find_batched_arrays
from pytriton.decorators._calls.types import InferenceResult
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, picklable
from pytriton.decorators._rows import PartialOutputs, check_rows, merge, to_arrays
from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError

CallableT = TypeVar("CallableT")
PadFunction = Callable[[list[InferenceResult]], Sequence[InferenceResult]]

# For columns of up to this many bytes, comparing all rows is cheaper than hashing each of them.
_MAX_COMPARED_BYTES = 1 << 16


def group_by_keys(infer_func: CallableT) -> CallableT:
    """Call a callable once for each group of requests that have the same inputs.

    It is for models with optional inputs, whose requests `@batch` cannot make one array each of. Place it above:

    ```python
    @group_by_keys
    @batch
    def infer(image, mask=None):
        ...
    ```

    The callable below gets the list of the requests of a group, the groups in the order of their first requests, and
    returns a result for each of them; what kind of results makes no difference. Each request gets its result in its own
    place. Under `get_requests()` are those of the group. A generator advances by one step for every group at a time; a
    group whose generator has ended sends nothing (`None`) in later steps, while the others go on. An error of one group
    is an error of the whole batch. Works on all kinds of callables that `batch` does; coroutines are awaited one group
    after the other.

    Args:
        infer_func: The callable to decorate.

    Returns:
        A callable that takes the list of requests and returns the list of results.

    Raises:
        PyTritonValidationError: (When called.) No requests; or the callable below does not return a list (or tuple)
            with a result for each request of the group.
        PyTritonBadParameterError: At once: `infer_func` is not callable.
    """
    decorated: CallableT = _by_keys(infer_func)
    return decorated


def _plan_keys(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | SingleCall:
    requests = require_requests("group_by_keys", args)
    leading = args[:-1]
    if get_batched_inputs(requests) is not None:
        return args, kwargs, Scope(requests), None
    all_arrays = get_all_arrays(requests)
    # Usually all requests are in one group, and even name their inputs in the same order.
    if len(set(map(tuple, all_arrays))) == 1:
        return args, kwargs, Scope(requests), None
    groups: dict[frozenset[str], list[int]] = {}
    for index, data in enumerate(all_arrays):
        groups.setdefault(frozenset(data), []).append(index)
    calls: list[Call] = []
    for positions in groups.values():
        group = [requests[position] for position in positions]
        calls.append(((*leading, group), kwargs, Scope(group)))

    def finish(results: list[Any]) -> list[Any]:
        scattered: list[Any] = [None] * len(requests)
        for positions, result in zip(groups.values(), results, strict=True):
            if result is EXHAUSTED:
                continue
            if not isinstance(result, (list, tuple)) or len(result) != len(positions):
                raise _not_one_each(requests[positions[0]], len(positions), result)
            for position, one in zip(positions, result, strict=True):
                scattered[position] = one
        return scattered

    return Plan(calls, finish)


def _relay_keys(
    below: Callable[..., Any],
    wrapped: Any,
    instance: Any,
    inputs: Mapping[str, Any],
    sizes: list[int],
    requests: Callable[[], Sequence[Any]],
) -> Any:
    # Every input is there for the whole batch, so there is one group.
    return below(inputs, sizes, requests)


_by_keys = decorator(_plan_keys, DecoratorTraits("group_by_keys", redecorate=group_by_keys, relay=_relay_keys))


def _not_one_each(request: Any, count: int, result: Any) -> PyTritonValidationError:
    received = f"a {type(result).__name__}"
    if isinstance(result, (list, tuple)):
        received += f" of {len(result)}"
    return PyTritonValidationError(
        f"The callable under @group_by_keys returned {received} for the {count} requests with the inputs "
        f"{sorted(request)}. Expected a list with a result for each of them; @batch makes one of arrays.",
        expected=count,
        received=result,
    )


# --- by values -------------------------------------------------------------------------------------------------------


def group_by_values(*keys: str, pad_fn: PadFunction | None = None) -> Callable[[CallableT], CallableT]:
    """Call a callable once for each group of rows that have the same values in some inputs.

    It is for models that take such a value once per call, such as a temperature. Place it below `@batch`, and
    `first_value` below itself:

    ```python
    @batch
    @group_by_values("temperature")
    @first_value("temperature")
    def infer(prompt, temperature):
        ...
    ```

    The callable below gets arrays `(rows of the group, *tensor.shape)`, the groups in ascending order of their values
    (in the order of their first rows where these cannot be compared), and returns outputs with as many rows, as under
    `@batch`. They are put back into the order of the batch. Two NaN are the same value. A batch of one group is handed
    on as it is; of several, inputs are copied where rows of a group do not lie side by side, and outputs once. An
    optional input of the model that is not there makes no difference between rows.

    `get_requests()` gives the requests with rows in the group, `get_row_requests()` that of every row of it. A
    generator advances by one step for every group at a time. Where the generator of a group has ended, `@batch` sends
    nothing (`None`) to the requests of that group in later steps; all rows of a request have to end at the same step.
    Works on all kinds of callables that `batch` does; coroutines are awaited one group after the other.

    Args:
        *keys: Names of the inputs whose values make the groups.
        pad_fn: Gets the outputs of all groups, arrays by name for each, and returns them with equal shapes but for axis
            0, where the groups' are not; `ConstantPadder(0)`, for example. None is for outputs of equal shapes.

    Returns:
        The decorator. The decorated callable takes arrays as keyword arguments and returns arrays by output name.

    Raises:
        PyTritonBadParameterError: At once: there are no keys, or one is no name. When called, as all that follow: a key
            that is no input of the model.
        PyTritonRuntimeError: It was called with requests, so it is above `@batch`; outputs of different shapes; a
            request whose rows end at different steps.
        PyTritonValidationError: Groups with different outputs, an output without a batch axis, or a `pad_fn` that does
            not return as many groups as it got.
        PyTritonBatchSizeError: Inputs, or outputs of a group, with different numbers of rows.
    """
    if len(keys) == 1 and callable(keys[0]):
        raise PyTritonBadParameterError(
            'Write @group_by_values("temperature"), with the names of the inputs, not @group_by_values alone.',
            parameter="group_by_values.keys",
            value=keys[0],
            rule="one or more names of inputs",
        )
    names = check_names("group_by_values", keys)
    if pad_fn is not None and not callable(pad_fn):
        raise PyTritonBadParameterError(
            f"@group_by_values expected a callable as pad_fn, such as ConstantPadder(0), received {pad_fn!r}.",
            parameter="group_by_values.pad_fn",
            value=pad_fn,
            rule="a callable or None",
        )

    return decorator(
        partial(_plan_values, names, pad_fn),
        DecoratorTraits("group_by_values", redecorate=picklable(group_by_values, *keys, pad_fn=pad_fn)),
    )


def _plan_values(
    names: tuple[str, ...],
    pad_fn: PadFunction | None,
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Plan | None:
    forbid_requests("group_by_values", args)
    if args and instance is None:
        instance = args[-1]
    scope = current_scope()
    rows, arrays = find_batched_arrays("group_by_values", kwargs, scope)
    columns = []
    for name in names:
        if name in arrays:
            columns.append(np.asarray(arrays[name]))
        elif name not in kwargs:
            _check_absent(name, kwargs, wrapped, instance)
    groups = _equal_rows(columns, rows)
    if groups is None:
        if pad_fn is None:
            return None
        groups = [range(rows)]
    flat = [position for positions in groups for position in positions]
    order = np.array(flat, np.intp)
    if flat != list(range(rows)):
        # Place the rows of a group side by side; if they already are, its arrays are views of the batch.
        arrays = {name: np.asarray(array).take(order, 0) for name, array in arrays.items()}
    spans: list[slice] = []
    calls: list[Call] = []
    stop = 0
    for positions in groups:
        start, stop = stop, stop + len(positions)
        span = slice(start, stop)
        inputs = dict(kwargs)
        for name, array in arrays.items():
            inputs[name] = array[span]
        spans.append(span)
        calls.append((args, inputs, scope.of_rows(positions)))

    def finish(results: list[Any]) -> Any:
        parts: list[tuple[slice, Mapping[str, Any]]] = []
        for span, result in zip(spans, results, strict=True):
            if result is EXHAUSTED:
                continue
            outputs = to_arrays(convert_output(result, wrapped, instance))
            count = len(outputs.rows) if isinstance(outputs, PartialOutputs) else span.stop - span.start
            check_rows(outputs, count, "@group_by_values")
            parts.append((span, outputs))
        if pad_fn is not None:
            parts = _apply_pad_fn(pad_fn, parts)
        return merge(parts, order)

    return Plan(calls, finish)


def _check_absent(key: str, inputs: Mapping[str, Any], wrapped: Any, instance: Any) -> None:
    """Raise an error unless a key that is missing in a call is an input of the model."""
    config = find_model_config(wrapped, instance)
    if config is not None and any(spec.name == key for spec in config.inputs or ()):
        return
    known = "" if config is None else f", and none that model {config.model_name!r} has"
    raise PyTritonBadParameterError(
        f"@group_by_values has the key {key!r}, which is no input of the batch{known}. Received inputs: "
        f"{sorted(inputs)}. Where it is an optional input, a unit test has to say so: "
        "pytriton.decorators.testing.Harness takes inputs as Triton.bind does.",
        parameter="group_by_values.keys",
        value=key,
        rule="the name of an input",
    )


def _equal_rows(columns: list[Any], rows: int) -> list[Sequence[int]] | None:
    """Group rows by their values; None if all rows are equal."""
    if rows <= 1 or all(_is_uniform(column) for column in columns):
        return None
    values = [_values(column) for column in columns]
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for position, value in enumerate(values[0] if len(values) == 1 else zip(*values, strict=True)):
        groups[value].append(position)
    if len(groups) == 1:
        return None
    try:
        return [groups[value] for value in sorted(groups)]
    except TypeError:
        # The rows cannot be sorted, for example bytes and text together.
        return list(groups.values())


def _is_uniform(column: Any) -> bool:
    """Return whether all rows are surely equal; this cheap test may miss some equal rows."""
    if column.dtype.kind == "O" or column.nbytes > _MAX_COMPARED_BYTES:
        return False
    raw = column.tobytes()
    return bool(raw == raw[: len(raw) // len(column)] * len(column))


def _values(column: Any) -> list[Any]:
    """Return the value of each row, as something that can be hashed."""
    scalar = column.size == len(column)
    flat: list[Any] = column.reshape(-1).tolist()
    if column.dtype.kind not in "biuOSUT":
        # Two NaN are equal keys of a dictionary only if they are the same object.
        flat = [math.nan if value != value else value for value in flat]
    if scalar:
        return flat
    width = column.size // len(column)
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)] if width else [()] * len(column)


def _apply_pad_fn(
    pad_fn: PadFunction, parts: list[tuple[slice, Mapping[str, Any]]]
) -> list[tuple[slice, Mapping[str, Any]]]:
    padded = pad_fn([outputs for _, outputs in parts])
    if not isinstance(padded, (list, tuple)) or len(padded) != len(parts):
        raise PyTritonValidationError(
            f"The pad_fn of @group_by_values expected to return a list of the outputs of {len(parts)} groups, returned "
            f"a {type(padded).__name__} {padded!r:.200}.",
            expected=len(parts),
            received=padded,
        )
    return [
        (span, PartialOutputs(new, old.rows, old.template) if isinstance(old, PartialOutputs) else new)
        for (span, old), new in zip(parts, padded, strict=True)
    ]
