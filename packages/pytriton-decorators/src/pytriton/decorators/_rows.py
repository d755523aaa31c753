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
from pytriton.exceptions import PyTritonBatchSizeError, PyTritonRuntimeError, PyTritonValidationError

__all__ = ["PartialOutputs", "check_rows", "merge", "split_by_request"]


class PartialOutputs(dict[str, Any]):
    """Outputs `(len(rows), *tensor.shape)` by name, for some rows of a batch only.

    Attributes:
        rows: The indices of these rows in the batch, ascending.
        template: A result whose response parameters these outputs have.
    """

    def __init__(self, outputs: Mapping[str, Any], rows: NDArray[np.intp], template: Mapping[str, Any]) -> None:
        super().__init__(outputs)
        self.rows = rows
        self.template = template


def check_rows(
    outputs: Mapping[str, Any], rows: int, decorator_name: str = "@batch", sizes: Sequence[int] = ()
) -> None:
    """Make sure that every output has one row for each row of the batch.

    Args:
        outputs: What the callable returned.
        rows: The rows of the batch.
        decorator_name: Above the callable, for errors.
        sizes: The rows of each request, for errors, where they are known.

    Raises:
        PyTritonValidationError: An output is no array with a batch axis, or a list of rows of different shapes.
        PyTritonBatchSizeError: An output has another number of rows.
    """
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
    """Split the outputs of a batch into one result for each request.

    Args:
        outputs: Checked outputs over the whole batch, or `PartialOutputs`.
        sizes: The rows of each request.

    Returns:
        A result for each request; None for one whose rows are all missing.

    Raises:
        PyTritonRuntimeError: Some rows of a request are there and others are missing.
    """
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
        # A response with parameters: each request gets them.
        results = [replace_arrays(template, result) for result in results]
    if isinstance(outputs, PartialOutputs):
        return [result if complete else None for result, complete in zip(results, present, strict=True)]
    return results


def merge(groups: Sequence[tuple[slice, Mapping[str, Any]]], order: NDArray[np.intp]) -> Mapping[str, Any]:
    """Put the outputs of groups of rows together in the order of the batch.

    Args:
        groups: The span of each group in `order` and its checked outputs. Where groups have ended, those that are left.
        order: The indices of the rows of all groups in the batch, one group after the other.

    Returns:
        Outputs over the batch; `PartialOutputs` where rows are missing.

    Raises:
        PyTritonValidationError: The groups have different outputs.
        PyTritonRuntimeError: The outputs of the groups differ in more than axis 0, or in response parameters.
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
    # Where the rows of the outputs, one group after the other, belong in the batch.
    positions = order
    if sum(span.stop - span.start for span, _ in groups) < len(order) or any(
        isinstance(outputs, PartialOutputs) for _, outputs in groups
    ):
        positions = np.concatenate([_positions(order[span], outputs) for span, outputs in groups])
    by_position = positions.argsort()
    merged = {
        name: _concatenate(name, [np.asarray(outputs[name]) for _, outputs in groups]).take(by_position, 0)
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
        # Strings of several kinds: numpy would make one kind of them, and lose the zeros at their ends.
        arrays = [array.astype(object) for array in arrays]
    return np.concatenate(arrays)
