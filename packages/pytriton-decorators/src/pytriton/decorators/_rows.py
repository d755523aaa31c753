"""Splits the outputs of a batch by request, and merges the outputs of groups of rows into those of the batch.

Outputs may cover only some rows of the batch (`PartialOutputs`): a generator that was called once for each group of
rows may end for one group earlier than for the others, and yields outputs for the rows of the others from then on.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators._calls.inputs import replace_arrays
from pytriton.decorators._casts import as_array, describe_value, has_mask
from pytriton.exceptions import PyTritonBatchSizeError, PyTritonRuntimeError, PyTritonValidationError


class PartialOutputs(dict[str, Any]):
    """Outputs `(len(rows), *tensor.shape)` by name, for some rows of a batch only."""

    def __init__(self, outputs: Mapping[str, Any], rows: NDArray[np.intp], template: Mapping[str, Any]) -> None:
        super().__init__(outputs)
        self.rows = rows  # the indices of these rows in the batch, ascending
        self.template = template  # a result whose response parameters these outputs have


def to_arrays(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return outputs with numpy arrays in place of those of other libraries, whose rows cannot all be split alike."""
    if all(type(value) is np.ndarray for value in outputs.values()):
        return outputs
    made: Mapping[str, Any] = replace_arrays(outputs, {name: as_array(value) for name, value in outputs.items()})
    return made


def check_rows(
    outputs: Mapping[str, Any], rows: int, decorator_name: str = "@batch", sizes: Sequence[int] = ()
) -> None:
    """Raise an error unless every output has one row for each row of the batch."""
    try:
        for array in outputs.values():
            if array.shape[0] != rows:
                break
        else:
            return
    except (AttributeError, IndexError, TypeError):
        for name, array in outputs.items():
            if not getattr(array, "shape", None):
                _check_not_ragged(name, array, decorator_name, sizes)
                advice = "" if isinstance(array, (np.ndarray, np.generic)) else " numpy.asarray makes an array."
                raise PyTritonValidationError(
                    f"Output {name!r} has no batch axis: expected a numpy array of shape ({rows}, ...), one row for "
                    f"each row of the batch; received {describe_value(array)}.{advice}",
                    tensor=name,
                    expected=rows,
                    received=getattr(array, "shape", type(array)),
                ) from None
        raise
    received = {name: array.shape[0] for name, array in outputs.items()}
    listed = ", ".join(f"{name}: {size}" for name, size in received.items())
    raise PyTritonBatchSizeError(
        f"Received output tensors with different batch sizes: {listed}. Expected batch size: {rows}. Axis 0 of every "
        f"output of a callable under {decorator_name} has one row for each row of its inputs.",
        tensor=next(name for name, size in received.items() if size != rows),
        expected=rows,
        received=received,
    )


def _check_not_ragged(name: str, output: Any, decorator_name: str, sizes: Sequence[int]) -> None:
    shapes = [getattr(row, "shape", None) for row in output] if isinstance(output, (list, tuple)) else []
    odd = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None or None in shapes:
        return
    request = next((index for index, stop in enumerate(accumulate(sizes)) if odd < stop), None)
    raise PyTritonValidationError(
        f"Output {name!r} is ragged: row 0 has the shape {shapes[0]}, row {odd} the shape {shapes[odd]}"
        + ("" if request is None else f", which is of request {request}")
        + ". An output of a batch is one array. Pad the rows to one shape, as "
        f"@group_by_values(pad_fn=ConstantPadder(0)) does for groups of them; or leave {decorator_name} out: what "
        "takes the list of requests returns an array for each, and these may differ.",
        tensor=name,
        request_index=request,
        expected=shapes[0],
        received=shapes[odd],
    )


def split_by_request(outputs: Mapping[str, Any], sizes: list[int]) -> list[Any]:
    """Split the outputs of a batch into one result for each request; None if all its rows are missing."""
    stops = list(accumulate(sizes))
    starts = [0, *stops][:-1]
    present = [True] * len(sizes)
    if isinstance(outputs, PartialOutputs):
        begins, ends = np.searchsorted(outputs.rows, [starts, stops]).tolist()
        for index, (begin, end, size) in enumerate(zip(begins, ends, sizes, strict=True)):
            present[index] = end - begin == size
            if 0 < end - begin < size:
                raise PyTritonRuntimeError(
                    f"The rows of request {index} are in several groups of @group_by_values, and the generators of "
                    f"these groups yielded different numbers of times: {end - begin} of its {size} rows got outputs, "
                    "the others have ended. Yield equally often for every group, or have callers send such rows as "
                    "separate requests."
                )
        starts, stops = begins, ends
    results: list[Any] = [{} for _ in sizes]
    slices = list(map(slice, starts, stops))
    for name, array in outputs.items():
        for result, rows in zip(results, slices, strict=True):
            result[name] = array[rows]
    template = outputs.template if isinstance(outputs, PartialOutputs) else outputs
    if getattr(template, "parameters", None):
        # Each request gets the parameters of the response.
        results = [replace_arrays(template, result) for result in results]
    if isinstance(outputs, PartialOutputs):
        return [result if complete else None for result, complete in zip(results, present, strict=True)]
    return results


def merge(groups: Sequence[tuple[slice, Mapping[str, Any]]], order: NDArray[np.intp]) -> Mapping[str, Any]:
    """Join the outputs of groups of rows in the order of the batch; `order` has the rows of one group after the other.

    The result is `PartialOutputs` if groups have ended. Groups must have the same outputs, which may differ in axis 0
    only.
    """
    first = groups[0][1]
    for _, outputs in groups:
        if outputs.keys() != first.keys():
            raise PyTritonValidationError(
                "The groups of @group_by_values have different outputs: the first one has "
                f"{sorted(first)}, another one {sorted(outputs)}. Return the same outputs for every group.",
                expected=sorted(first),
                received=sorted(outputs),
            )
    # The places in the batch of the rows of the outputs, one group after the other.
    positions = order
    if sum(span.stop - span.start for span, _ in groups) < len(order) or any(
        isinstance(outputs, PartialOutputs) for _, outputs in groups
    ):
        positions = np.concatenate([_positions(order[span], outputs) for span, outputs in groups])
    by_position = positions.argsort()
    merged = {
        name: _concatenate(name, [as_array(outputs[name]) for _, outputs in groups]).take(by_position, 0)
        for name in first
    }
    kept = None if len(positions) == len(order) else positions[by_position]
    parameters = [_parameters(outputs) for _, outputs in groups]
    if any(other != parameters[0] for other in parameters):
        raise PyTritonRuntimeError(
            "The groups of @group_by_values have different response parameters, which one batch cannot have. Return "
            f"equal ones for all groups, or none. Received: {parameters!r:.500}"
        )
    template = first.template if isinstance(first, PartialOutputs) else first
    if kept is not None:
        return PartialOutputs(merged, kept, template)
    return replace_arrays(template, merged) if parameters[0] else merged


def _positions(group: NDArray[np.intp], outputs: Mapping[str, Any]) -> NDArray[np.intp]:
    return group[outputs.rows] if isinstance(outputs, PartialOutputs) else group


def _parameters(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(getattr(outputs.template if isinstance(outputs, PartialOutputs) else outputs, "parameters", None) or {})


def _concatenate(name: str, arrays: list[Any]) -> Any:
    first = arrays[0]
    for array in arrays:
        if array.shape[1:] != first.shape[1:]:
            raise PyTritonRuntimeError(
                f"Output {name!r} of the groups of @group_by_values cannot be made one batch: one has shape "
                f"{first.shape}, another one {array.shape}; only axis 0 may differ. Give the decorator a pad_fn, "
                "such as ConstantPadder(0)."
            )
    if len({array.dtype.kind for array in arrays}) > 1 and any(array.dtype.kind in "OSUT" for array in arrays):
        # numpy would convert strings of several kinds to one kind, and drop the zeros at their ends.
        arrays = [array.astype(object) for array in arrays]
    # numpy.concatenate drops masks, and with them what the server refuses.
    join: Any = np.ma.concatenate if any(map(has_mask, arrays)) else np.concatenate
    return join(arrays)
