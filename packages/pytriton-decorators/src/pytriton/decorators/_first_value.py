"""The decorator `first_value`, which passes one value instead of an input whose rows are all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from pytriton.decorators._calls.context import find_model_config
from pytriton.decorators._calls.execution import SingleCall
from pytriton.decorators._calls.inputs import check_names, find_requests, get_arrays, replace_arrays, require_requests
from pytriton.decorators._calls.requests import Scope, current_scope
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, is_decorated, picklable
from pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


def first_value(
    *keys: str, squeeze_single_values: bool = True, strict: bool = True
) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Hand a callable one value of an input in place of its array over the batch.

    It is for values that are the same for all rows, as below `@group_by_values`:

    ```python
    @batch
    @group_by_values("temperature")
    @first_value("temperature")
    def infer(prompt, temperature):  # temperature is one number
        ...
    ```

    An input `(rows, *tensor.shape)` becomes its first row, an array `tensor.shape`; a row of one element becomes the
    element itself: a numpy scalar of the dtype, `bytes` for a string. Directly on a callable that takes requests it
    does so within each request. An input that is not there is passed over: an optional one that a caller left out, and
    one that the model has not at all, of which a warning in the log tells once. Works on all kinds of callables that
    `batch` does.

    Args:
        *keys: Names of the inputs.
        squeeze_single_values: False leaves a row of one element as an array `tensor.shape`.
        strict: Whether all rows have to be equal. False takes the first, whatever the others are. Two NaN are equal.

    Returns:
        The decorator.

    Raises:
        PyTritonBadParameterError: At once: there are no keys, or one is no name or `__triton_context__`.
        PyTritonRuntimeError: When called: the model does not batch; an input is no array with a batch axis, or has no
            rows; with `strict`, its rows differ.
    """
    if len(keys) == 1 and callable(keys[0]):
        raise PyTritonBadParameterError(
            'Write @first_value("temperature"), with the names of the inputs, not @first_value alone.',
            parameter="first_value.keys",
            value=keys[0],
            rule="one or more names of inputs",
        )
    names = check_names("first_value", keys)
    taken = frozenset(names)
    # The models and inputs of which the log has warned.
    warned: set[tuple[str, str]] = set()

    def replaced(inputs: Mapping[str, Any], wrapped: Any, instance: Any) -> dict[str, Any]:
        result = dict(inputs)
        for name in names:
            if name in inputs:
                result[name] = _first(name, inputs[name], squeeze_single_values, strict)
            else:
                _warn_of_unknown_key(name, wrapped, instance, warned)
        return result

    def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall:
        if args and instance is None:
            instance = args[0]
        _check_batching(wrapped, instance)
        requests = find_requests(args)
        if requests is None:
            if args and isinstance(args[-1], Mapping):
                require_requests("first_value", args)
            # Only decorators below need to know which inputs have lost their batch axis.
            scope = current_scope().without_batch_axis(taken) if is_decorated(wrapped) else None
            return args, replaced(kwargs, wrapped, instance), scope, None
        changed = [
            replace_arrays(request, replaced(get_arrays(request, index), wrapped, instance))
            for index, request in enumerate(requests)
        ]
        return (*args[:-1], changed), kwargs, Scope(requests), None

    redecorate = picklable(first_value, *keys, squeeze_single_values=squeeze_single_values, strict=strict)
    return decorator(prepare, DecoratorTraits("first_value", redecorate=redecorate))


def _check_batching(wrapped: Any, instance: Any) -> None:
    config = find_model_config(wrapped, instance)
    if config is not None and not config.batching:
        raise PyTritonRuntimeError(
            f"@first_value takes a value from the rows of a batch, and model {config.model_name!r} has batching=False, "
            "so its inputs have no rows. Take the decorator off, or bind the model with ModelConfig(batching=True)."
        )


def _warn_of_unknown_key(name: str, wrapped: Any, instance: Any, warned: set[tuple[str, str]]) -> None:
    """Warn once of a key that is no input of the model.

    It is no error, because PyTriton shares a decorator between models.
    """
    config = find_model_config(wrapped, instance)
    if config is None or (config.model_name, name) in warned:
        return
    inputs = [spec.name for spec in config.inputs or ()]
    if name not in inputs:
        warned.add((config.model_name, name))
        logger.warning(
            "@first_value has the key %r, which is no input of model %r, so it does nothing about it. The inputs are "
            "%s.",
            name,
            config.model_name,
            ", ".join(map(repr, inputs)),
        )


def _first(name: str, column: Any, squeeze: bool, strict: bool) -> Any:
    shape = column.shape if isinstance(column, np.ndarray) else None
    if not shape:
        raise PyTritonRuntimeError(
            f"@first_value expected input {name!r} to be an array with a batch axis, (rows, ...), received a "
            f"{type(column).__name__} without one."
        )
    if not shape[0]:
        raise PyTritonRuntimeError(f"@first_value found no row in input {name!r}, which has shape {shape}.")
    if strict and shape[0] > 1 and not _is_constant(column):
        values = str(column.reshape(shape[0], -1)[:, :8].tolist())
        raise PyTritonRuntimeError(
            f"@first_value expected all {shape[0]} rows of input {name!r} to be equal, received {values[:200]}. Put "
            f'@group_by_values("{name}") above it, or give it strict=False to take the first row, whatever the others '
            "are."
        )
    return column.flat[0] if squeeze and column.size == shape[0] else column[0]


def _is_constant(column: Any) -> bool:
    if column.dtype.kind == "O":
        rows = column.reshape(len(column), -1).tolist()
        return all(row == rows[0] for row in rows)
    raw = column.tobytes()
    if raw == raw[: len(raw) // len(column)] * len(column):
        return True
    # Equal values may have different bytes: 0.0 and -0.0, the forms of NaN.
    equal = column == column[0]
    if column.dtype.kind not in "biuSUT":
        equal |= (column != column) & (column[0] != column[0])
    return bool(equal.all())
