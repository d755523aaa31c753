"""Requests that differ in length as one batch: inputs padded or packed, and outputs cut back to each request.

Shapes: `(batch, *sizes)` is the array of one request, whose free sizes are its own; `rows` is the sum of `batch` over
the requests, and `longest` the largest size of each free axis. All arrays of one request are its own until they are
copied into a batch, where each has a place of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pytriton.decorators._calls.inputs import make_batch_error, replace_arrays
from pytriton.decorators._casts import describe_value
from pytriton.decorators._rows import PartialOutputs, check_rows, to_arrays
from pytriton.exceptions import PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config.cost import Cost, free_axes
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


class RaggedBatch:
    """The requests of one batch of a model that has a `Cost`."""

    def __init__(
        self,
        config: TritonModelConfig,
        arrays: Sequence[Mapping[str, Any]],
        whole: tuple[Mapping[str, Any], list[int]] | None = None,
    ) -> None:
        """Join the requests, whose inputs are in `arrays` by name.

        Inputs of equal length lie in one piece already: then `whole` has them with the rows of each request, and
        `arrays` is not looked at.
        """
        assert config.cost is not None
        self._cost = config.cost
        self._config = config
        if whole is None:
            self.sizes = _rows_of(arrays)  # the rows of each request
            self._lengths = _lengths_of(self._cost, config.inputs or (), arrays)
        else:
            arrays, self.sizes = [whole[0]], whole[1]
            self._lengths = _lengths_of(self._cost, config.inputs or (), arrays) * len(self.sizes)
        self.inputs = self._join(arrays)  # what the callable gets
        self._add_extras()

    def _join(self, arrays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        free = {spec.name: free_axes(spec.shape) for spec in self._config.inputs or ()}
        joined = {}
        for name in arrays[0]:
            column = [data[name] for data in arrays]
            if not free.get(name):
                joined[name] = _concatenate(column)
            elif self._cost.layout == "packed":
                joined[name] = _concatenate([array.reshape(-1, *array.shape[2:]) for array in column])
            else:
                joined[name] = _pad(column, self._cost.pad_value(name))
        return joined

    def _add_extras(self) -> None:
        cost = self._cost
        if not cost.extras and cost.layout == "padded":
            return
        lengths = np.repeat(np.array(self._lengths, np.int64), self.sizes, axis=0)
        lengths = lengths[:, 0] if lengths.shape[1] == 1 else lengths
        if cost.lengths is not None:
            self.inputs[cost.lengths] = lengths
        if cost.mask is not None:
            longest = max(length for (length,) in self._lengths)
            self.inputs[cost.mask] = np.arange(longest) < lengths[:, np.newaxis]
        if cost.offsets is not None:
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            self.inputs[cost.offsets] = offsets

    def split(self, outputs: Mapping[str, Any]) -> list[Any]:
        """Return the result of each request.

        An output is refused that is not as long, or has not as many rows, as the batch.
        """
        if isinstance(outputs, PartialOutputs):
            raise PyTritonRuntimeError(
                "The generators of the groups of @group_by_values yielded different numbers of times. A batch of a "
                "model with a Cost cannot end in parts: yield equally often for every group."
            )
        outputs = to_arrays(outputs)
        long = {name for name in self._cost.outputs if name in outputs}
        by_rows = {name: array for name, array in outputs.items() if name not in long}
        if self._cost.layout == "padded":
            by_rows = dict(outputs)
        check_rows(by_rows, sum(self.sizes), sizes=self.sizes)
        results: list[Any] = [{} for _ in self.sizes]
        for name, array in outputs.items():
            cut = self._cut_rows(array) if name not in long else self._cut_lengths(name, array)
            for result, own in zip(results, cut, strict=True):
                result[name] = own
        if getattr(outputs, "parameters", None):
            results = [replace_arrays(outputs, result) for result in results]
        return results

    def _cut_rows(self, array: Any) -> list[Any]:
        stops = list(itertools.accumulate(self.sizes))
        return [array[stop - size : stop] for stop, size in zip(stops, self.sizes, strict=True)]

    def _cut_lengths(self, name: str, array: Any) -> list[Any]:
        if self._cost.layout == "packed":
            return self._cut_packed(name, array)
        axes = next(free_axes(spec.shape) for spec in self._config.outputs or () if spec.name == name)
        longest = [max(sizes) for sizes in zip(*self._lengths, strict=True)]
        # Places of the axes in the arrays, which have the rows in front.
        places = list(zip([axis + 1 for axis in axes], longest, strict=True))
        wrong = [place for place, size in places if array.ndim <= place or array.shape[place] != size]
        if wrong:
            raise _wrong_length(name, array, f"{longest} along the free sizes, as the padded input has")
        cut = []
        for rows, lengths in zip(self._cut_rows(array), self._lengths, strict=True):
            own: list[Any] = [slice(None)] * array.ndim
            for (place, _), length in zip(places, lengths, strict=True):
                own[place] = slice(length)
            cut.append(rows[tuple(own)])
        return cut

    def _cut_packed(self, name: str, array: Any) -> list[Any]:
        totals = [rows * lengths[0] for rows, lengths in zip(self.sizes, self._lengths, strict=True)]
        if not hasattr(array, "ndim"):
            raise PyTritonValidationError(
                f"Output {name!r} of the batch is no array: expected a numpy array of shape ({sum(totals)}, ...), the "
                "rows of all requests behind each other, as numpy.concatenate joins them, because it is one of "
                f"Cost.outputs and the layout is packed; received {describe_value(array)}.",
                tensor=name,
                expected=sum(totals),
                received=type(array),
            )
        if not array.ndim or array.shape[0] != sum(totals):
            raise _wrong_length(name, array, f"{sum(totals)} along its first axis, the sum of the lengths of all rows")
        stops = itertools.accumulate(totals)
        return [
            array[stop - total : stop].reshape(rows, lengths[0], *array.shape[1:])
            for stop, total, rows, lengths in zip(stops, totals, self.sizes, self._lengths, strict=True)
        ]


def are_of_model(config: TritonModelConfig, names: Iterable[str]) -> bool:
    """Return whether inputs are such as requests of a model with a `Cost` have."""
    names = set(names)
    cost = config.cost
    if cost is None or not names.isdisjoint(cost.names):
        return cost is not None
    # If all inputs with a length may be omitted, the other inputs decide.
    optional = {spec.name: spec.optional for spec in config.inputs or ()}
    return all(optional.get(name) for name in cost.names) and names <= optional.keys()


def _rows_of(arrays: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the rows of each request, whose inputs have the same names and equally many rows."""
    sizes = []
    for data in arrays:
        try:
            rows = {array.shape[0] for array in data.values()}
        except (AttributeError, IndexError):
            raise make_batch_error(list(map(dict, arrays))) from None
        if len(rows) > 1 or data.keys() != arrays[0].keys():
            raise make_batch_error(list(map(dict, arrays)))
        sizes.append(rows.pop() if rows else 1)
    return sizes


def _lengths_of(cost: Cost, inputs: Sequence[TensorSpec], arrays: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Return the free sizes of each request."""
    free = {spec.name: free_axes(spec.shape) for spec in inputs}
    axes = {name: tuple(axis + 1 for axis in free[name]) for name in cost.names}
    lengths = []
    for index, data in enumerate(arrays):
        own = {name: tuple(data[name].shape[axis] for axis in axes[name]) for name in axes if name in data}
        if len(set(own.values())) > 1:
            raise PyTritonValidationError(
                f"Inputs of request {index} have different lengths: {own}. Expected the same free sizes of all.",
                request_index=index,
                received=own,
            )
        # An input that a request omits has no length there.
        lengths.append(next(iter(own.values()), (0,) * len(axes[cost.names[0]])))
    return lengths


def _concatenate(column: list[Any]) -> Any:
    return column[0] if len(column) == 1 else np.concatenate(column)


def _pad(column: list[Any], value: float) -> Any:
    """Return the arrays of all requests as one, filled up to the longest."""
    tails = {array.shape[1:] for array in column}
    if len(tails) == 1:
        return _concatenate(column)
    longest = tuple(map(max, zip(*tails, strict=True)))
    shape = (sum(len(array) for array in column), *longest)
    dtype = np.result_type(*(array.dtype for array in column))
    padded = np.full(shape, b"" if dtype.kind in "OSUT" else value, dtype)
    start = 0
    for array in column:
        stop = start + len(array)
        place = (slice(start, stop), *map(slice, array.shape[1:]))
        padded[place] = array
        start = stop
    return padded


def _wrong_length(name: str, array: Any, expected: str) -> PyTritonValidationError:
    return PyTritonValidationError(
        f"Output {name!r} of the batch has the shape {array.shape}, expected {expected}. It is one of Cost.outputs, of "
        "which each request gets its own length; leave it out there if it is not as long as the input.",
        tensor=name,
        expected=expected,
        received=array.shape,
    )
