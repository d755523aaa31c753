"""Padding: whole batches to the sizes that a model prefers (`pad_batch`), outputs of groups to one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators._calls.context import get_model_config
from pytriton.decorators._calls.execution import Prepare, SingleCall
from pytriton.decorators._calls.inputs import forbid_requests, replace_arrays
from pytriton.decorators._calls.outputs import convert_output
from pytriton.decorators._calls.requests import current_scope, find_batched_arrays
from pytriton.decorators._calls.types import InferenceResult
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, picklable
from pytriton.decorators._casts import as_array, has_mask
from pytriton.decorators._rows import PartialOutputs
from pytriton.exceptions import PyTritonBadParameterError, PyTritonBatchSizeError, PyTritonRuntimeError
from pytriton.model_config.triton_model_config import TritonModelConfig

CallableT = TypeVar("CallableT")

_PADDED_KINDS = frozenset("biufcV")


@overload
def pad_batch(infer_func: CallableT, /) -> CallableT: ...
@overload
def pad_batch(*, trim: bool = True) -> Callable[[CallableT], CallableT]: ...
def pad_batch(infer_func: Any = None, /, *, trim: bool = True) -> Any:
    """Let a callable get batches of the sizes that its model prefers, and no other.

    A batch is filled up with copies of its last row to the smallest preferred batch size
    (`DynamicBatcher.preferred_batch_size`) that holds it, else to the `max_batch_size` of the model. The added rows are
    taken off the outputs again. Place it below `@batch`:

    ```python
    @batch
    @pad_batch
    def infer(image):  # (preferred batch size, *tensor.shape)
        return {"scores": network(image)}
    ```

    Inputs `(rows, *tensor.shape)` are copied where rows are added; a batch that has a preferred size already is handed
    on as it is. A batch of no rows at all is filled with zeros and empty strings. Works on all kinds of callables that
    `batch` does.

    Args:
        infer_func: The callable to decorate, where the decorator is used without parentheses.
        trim: False leaves the added rows in the outputs, for a callable above that takes them off itself.

    Returns:
        A callable that takes arrays as keyword arguments and returns arrays by output name.

    Raises:
        PyTritonRuntimeError: (When called, as the next three.) It was called with requests, so it is above `@batch`; or
            the model does not batch.
        PyTritonValidationError: The callable is not bound to a model.
        PyTritonBatchSizeError: The batch has more rows than the model's maximum, or its inputs have different ones.
        PyTritonBadParameterError: At once: what is decorated is not callable.
    """
    decorate = decorator(_plan_padding(trim), DecoratorTraits("pad_batch", redecorate=picklable(pad_batch, trim=trim)))
    return decorate if infer_func is None else decorate(infer_func)


def _plan_padding(trim: bool) -> Prepare:
    def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall | None:
        forbid_requests("pad_batch", args)
        if args and instance is None:
            instance = args[-1]
        config = get_model_config(wrapped, instance)
        scope = current_scope()
        rows, arrays = find_batched_arrays("pad_batch", kwargs, scope)
        size = _padded_size(config, rows)
        if size == rows or not arrays:
            return None
        indices, sources = _row_indices(rows, size)
        inputs = dict(kwargs)
        for name, array in arrays.items():
            inputs[name] = _pad_rows(array, indices, rows)
        inner = scope.of_rows(sources) if rows else None

        def finish(results: list[Any]) -> Any:
            return _trim(convert_output(results[0], wrapped, instance), rows, size)

        return args, inputs, inner, finish if trim else None

    return prepare


def _padded_size(config: TritonModelConfig, rows: int) -> int:
    if not config.batching:
        raise PyTritonRuntimeError(
            f"@pad_batch fills up batches, and model {config.model_name!r} has batching=False. Take the decorator off, "
            "or bind the model with ModelConfig(batching=True)."
        )
    preferred = None if config.batcher is None else config.batcher.preferred_batch_size
    if preferred:
        for size in sorted(preferred):
            if size >= rows:
                return size
    if rows > config.max_batch_size:
        raise PyTritonBatchSizeError(
            f"@pad_batch received a batch of {rows} rows, the max_batch_size of model {config.model_name!r} is "
            f"{config.max_batch_size}. A server sends no such batches; send fewer rows at once.",
            expected=config.max_batch_size,
            received=rows,
        )
    return config.max_batch_size


@lru_cache(maxsize=1024)
def _row_indices(rows: int, size: int) -> tuple[NDArray[np.intp], tuple[int, ...]]:
    """Return the index of the row of the batch for each row of the padded batch."""
    indices = np.minimum(np.arange(size), rows - 1)
    return indices, tuple(indices.tolist())


def _pad_rows(array: Any, indices: NDArray[np.intp], rows: int) -> Any:
    if rows:
        return (array if type(array) is np.ndarray else np.asarray(array)).take(indices, 0)
    padded = np.zeros((len(indices), *array.shape[1:]), array.dtype)
    if array.dtype.kind == "O":
        padded[...] = b""
    return padded


def _trim(outputs: Mapping[str, Any], rows: int, size: int) -> Any:
    if isinstance(outputs, PartialOutputs):
        count = int(np.searchsorted(outputs.rows, rows))
        trimmed = {name: array[:count] for name, array in outputs.items()}
        return trimmed if count == rows else PartialOutputs(trimmed, outputs.rows[:count], outputs.template)
    try:
        # The callable has already trimmed an output of `rows` rows; @batch reports any other size.
        trimmed = {name: array[:rows] if array.shape[0] == size else array for name, array in outputs.items()}
    except (AttributeError, IndexError):
        return outputs
    return trimmed if type(outputs) is dict or not hasattr(outputs, "parameters") else replace_arrays(outputs, trimmed)


class ConstantPadder:
    """Pads arrays of several batches to one shape, as the `pad_fn` of `group_by_values`.

    ```python
    @batch
    @group_by_values("length", pad_fn=ConstantPadder(0))
    @first_value("length")
    def infer(prompt, length):
        return {"tokens": generate(prompt, length)}  # (rows, length)
    ```

    Arrays `(batch, ...)` of one name get the largest size that any of them has along each axis but the first, filled up
    at the end. Arrays of strings are filled up with empty strings.
    """

    def __init__(self, pad_value: float = 0) -> None:
        """Make a padder.

        Args:
            pad_value: The value to fill up numeric arrays with; it has to be one of their dtype.

        Raises:
            PyTritonBadParameterError: `pad_value` is not a number.
        """
        if not isinstance(pad_value, (int, float, np.number, np.bool_)):
            raise PyTritonBadParameterError(
                f"ConstantPadder expected a number as pad_value, received {pad_value!r}.",
                parameter="ConstantPadder.pad_value",
                value=pad_value,
                rule="a number",
            )
        self.pad_value = pad_value

    def __repr__(self) -> str:
        return f"ConstantPadder({self.pad_value!r})"

    def __call__(self, batches_list: Sequence[InferenceResult]) -> list[InferenceResult]:
        """Pad the arrays of several batches.

        Args:
            batches_list: Arrays `(batch, ...)` by name, of each batch. They are not changed.

        Returns:
            Arrays `(batch, ...)` by name that differ along axis 0 only. Those that have the shape already are handed on
            as they are.

        Raises:
            PyTritonRuntimeError: Arrays of one name have different dtypes or numbers of axes, or the batches have
                different names.
            PyTritonBadParameterError: `pad_value` is no value of the dtype of an array that has to be padded.
        """
        padded: list[dict[str, Any]] = [dict(arrays) for arrays in batches_list]
        for name in {name: None for arrays in padded for name in arrays}:
            column = [arrays[name] for arrays in padded if name in arrays]
            if len(column) != len(padded):
                raise PyTritonRuntimeError(
                    f"Only {len(column)} of the {len(padded)} batches to be padded have an array {name!r}. Expected "
                    "the same names in all of them."
                )
            for arrays, array in zip(padded, self._pad(name, [as_array(array) for array in column]), strict=True):
                arrays[name] = array
        return list(padded)

    def _pad(self, name: str, column: list[Any]) -> list[Any]:
        first = column[0]
        for array in column:
            if has_mask(array):
                raise PyTritonRuntimeError(
                    f"Arrays {name!r} of the batches to be padded have masked values. Expected a value in every place, "
                    "such as array.filled(0) gives."
                )
            strings = first.dtype.kind == array.dtype.kind and first.dtype.kind in "SU"
            if not strings and array.dtype != first.dtype:
                raise PyTritonRuntimeError(
                    f"Arrays {name!r} of the batches to be padded have different dtypes, {first.dtype} and "
                    f"{array.dtype}. Expected the same for all of them."
                )
            if array.ndim != first.ndim or not array.ndim:
                raise PyTritonRuntimeError(
                    f"Arrays {name!r} of the batches to be padded have shapes {first.shape} and {array.shape}. "
                    "Expected the same number of axes, and a batch axis in front."
                )
        tail = tuple(max(sizes) for sizes in zip(*[array.shape[1:] for array in column], strict=True))
        return [array if array.shape[1:] == tail else self._grow(name, array, tail) for array in column]

    def _grow(self, name: str, array: Any, tail: tuple[int, ...]) -> Any:
        grown = np.empty((len(array), *tail), array.dtype)
        grown[...] = self._value(name, array.dtype)
        grown[tuple(map(slice, array.shape))] = array
        return grown

    def _value(self, name: str, dtype: np.dtype[Any]) -> Any:
        if dtype.kind not in _PADDED_KINDS:
            return "" if dtype.kind in "UT" else b""
        value = np.asarray(self.pad_value)
        with np.errstate(all="ignore"):
            cast = value.astype(dtype)
        # They are compared as Python numbers, because comparing arrays would round the value to the dtype first.
        if dtype.kind not in "biu" or cast.item() == value.item():
            return cast
        raise PyTritonBadParameterError(
            f"ConstantPadder({self.pad_value!r}) cannot pad {name!r}: {self.pad_value!r} is no value of {dtype}.",
            parameter="ConstantPadder.pad_value",
            value=self.pad_value,
            rule=f"a value of {dtype}",
        )
