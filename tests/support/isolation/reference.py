"""Protocol 1 as a program to be read: requests in, arrays and errors out; no arenas, no sockets, no speed.

It is what docs/protocol.md says of the content of batches, for one batch of a model that is not decoupled::

    raw requests --accept--> those that Triton hands over          (what it refuses has its error)
                 --read----> each request alone, as arrays         (what cannot be read has its error)
                 --cut-----> batches that cost no more than they may (only of a model whose requests differ in length)
                 --join----> the tensors of the batch record
                 --part----> the requests that the callable gets
                 --infer---> a result for each of them             (what it raises is the error of all)
                 --answer--> outputs, or the error of one request

`serve` is all of it. Tests hold the proxies and their workers against it: see tests/serving/test_reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

DATA_TYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""The data types that numpy has by itself."""


# ---- what passes between a caller and the server --------------------------------------------------------------------


class RawTensor(NamedTuple):
    """A tensor as it travels."""

    datatype: str  # triton's name of the data type
    shape: tuple[int, ...]  # what the caller says of it
    payload: bytes  # its bytes, whatever they are


@dataclass
class RawRequest:
    """One request."""

    inputs: Mapping[str, RawTensor]  # by name
    outputs: Sequence[str] = ()  # those that are wanted; none: all
    id: str = ""
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)


class Answer(NamedTuple):
    """What its caller gets."""

    outputs: dict[str, RawTensor]  # by name; none for an error
    code: str = ""  # that of the error, by Triton's name; empty if there is none
    error: str = ""  # its text, or a part of that


class TensorSpec(NamedTuple):
    """An input or output of a model."""

    datatype: str  # triton's name of its data type
    shape: tuple[int, ...]  # without the batch axis; -1 is any size
    optional: bool = False  # whether requests may leave it out


class Model(NamedTuple):
    """What a model declares."""

    inputs: Mapping[str, TensorSpec]  # by name
    outputs: Mapping[str, TensorSpec]  # by name
    max_batch_size: int  # most rows of a batch; 0 where tensors have no batch axis


class RequestError(Exception):
    """What is wrong with one request.

    Attributes:
        code: Triton's name of the error's code.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


_ROW_NUMBERS = 1 << 32

# ---- each request alone ---------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A request that was read: what a callable gets."""

    id: str
    inputs: dict[str, Array]  # arrays by name; of strings, objects that are `bytes`
    rows: int  # of the batch axis; 1 where there is none
    outputs: Sequence[str]  # those that are wanted


def accept(model: Model, raw: RawRequest) -> RawRequest:
    """Check what Triton checks before it puts a request into a batch; return it as it is handed over.

    Raises:
        RequestError: If it refuses it.
    """
    rows = set()
    for name, (datatype, shape, _) in raw.inputs.items():
        spec = model.inputs.get(name)
        if spec is None:
            raise RequestError("INVALID_ARG", f"unexpected inference input '{name}'")
        declared = (-1, *spec.shape) if model.max_batch_size else spec.shape
        if datatype != spec.datatype or not _fits(shape, declared) or min(shape) < 0:
            raise RequestError("INVALID_ARG", f"'{name}'")
        rows.add(shape[0] if model.max_batch_size else 1)
    if any(name not in raw.inputs and not spec.optional for name, spec in model.inputs.items()):
        raise RequestError("INVALID_ARG", "expected")
    if len(rows) != 1 or (model.max_batch_size and max(rows) % _ROW_NUMBERS > model.max_batch_size):
        raise RequestError("INVALID_ARG", "batch")
    for name in raw.outputs:
        if name not in model.outputs:
            raise RequestError("INVALID_ARG", f"'{name}'")
    if model.max_batch_size and max(rows) % _ROW_NUMBERS == 0:
        # Triton takes no rows for no batch axis, and so many as it cannot count likewise.
        inputs = {name: tensor._replace(shape=tensor.shape[1:]) for name, tensor in raw.inputs.items()}
        return RawRequest(inputs, raw.outputs, raw.id, raw.parameters)
    return raw


def read(model: Model, raw: RawRequest) -> Request:
    """Read a request. Nothing but itself is looked at.

    Raises:
        RequestError: If an input has not the dimensions of the model's, or not exactly the bytes of its shape and type.
    """
    inputs = {}
    for name, tensor in raw.inputs.items():
        rank = len(model.inputs[name].shape) + bool(model.max_batch_size)
        if len(tensor.shape) != rank:
            raise RequestError(
                "INVALID_ARG",
                f"input '{name}': expected {rank} dimensions, got {len(tensor.shape)}; where there is a batch axis, it "
                f"has 1 row or more",
            )
        inputs[name] = read_tensor(name, tensor)
    first = next(iter(inputs.values()), None)
    rows = 1 if first is None or not model.max_batch_size else len(first)
    return Request(raw.id, inputs, rows, raw.outputs or list(model.outputs))


def read_tensor(name: str, tensor: RawTensor) -> Array:
    """Return an input as an array.

    Raises:
        RequestError: If its payload is not exactly what shape and type announce.
    """
    datatype, shape, payload = tensor
    count = math.prod(shape)
    if datatype == "BYTES":
        try:
            elements = read_strings(payload, count)
        except ValueError as error:
            raise RequestError("INVALID_ARG", f"input '{name}': {error}") from error
        array = np.empty(count, object)
        array[:] = elements
        return array.reshape(shape)
    dtype = DATA_TYPES[datatype]
    expected = count * dtype.itemsize
    if len(payload) != expected:
        raise RequestError(
            "INVALID_ARG", f"input '{name}': expected {expected} bytes for its shape, got {len(payload)}"
        )
    return np.frombuffer(payload, dtype).reshape(shape)


def read_strings(payload: bytes, count: int) -> list[bytes]:
    """Return strings: each is its length, 32 bits, and its bytes; and nothing else is there.

    Raises:
        ValueError: If that is not so; says which string, what was expected and what came.
    """
    elements = []
    at = 0
    for index in range(count):
        left = len(payload) - at
        if left < 4:
            raise ValueError(f"string {index} of {count}: expected 4 bytes for its length, got {left}")
        size = int.from_bytes(payload[at : at + 4], "little")
        if left - 4 < size:
            raise ValueError(f"string {index} of {count}: expected {size} bytes, as its length says, got {left - 4}")
        elements.append(payload[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(payload):
        raise ValueError(f"expected nothing behind its {count} strings, got {len(payload) - at} bytes")
    return elements


# ---- batches of requests that differ in length ----------------------------------------------------------------------


class Sizes(NamedTuple):
    """What a request costs by."""

    rows: int
    # The free sizes of each input that has any; None for an input that the request lacks.
    free: tuple[tuple[int, ...] | None, ...]


def cost(requests: Sequence[Sizes], *, packed: bool = False) -> int:
    """Return what a batch costs: the elements that the free sizes of its costliest input take there.

    A size of 0 counts as 1, so that the limit bounds the other sizes of an empty array too.
    """
    costs = [0]
    for inputs in zip(*(request.free for request in requests), strict=True):
        present = [
            (request.rows, [max(size, 1) for size in own])
            for request, own in zip(requests, inputs, strict=True)
            if own is not None
        ]
        if packed:
            costs.append(sum(rows * math.prod(sizes) for rows, sizes in present))
        elif present:
            longest = [max(sizes) for sizes in zip(*(sizes for _, sizes in present), strict=True)]
            costs.append(sum(request.rows for request in requests) * math.prod(longest))
    return max(costs)


def cut(requests: Sequence[Sizes], limit: int, overhead: int, *, packed: bool = False) -> list[list[int]]:
    """Return the places of the requests of each batch, in the order in which the batches are served.

    Requests of about one length share a batch. Of all ways to do so, it is the one whose batches cost least in all,
    with the overhead of each. A request that costs more than the limit is alone.
    """
    order = list(range(len(requests)))
    if not packed:
        order.sort(key=lambda place: -cost([requests[place]._replace(rows=1)]))
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        found = []
        for start in reversed(range(stop)):
            batch = order[start:stop]
            costs = cost([requests[place] for place in batch], packed=packed)
            if len(batch) > 1 and costs > limit:
                break
            found.append((best[start][0] + costs + overhead, [*best[start][1], sorted(batch)]))
        least = min(total for total, _ in found)
        best.append([each for each in found if each[0] == least][-1])
    return sorted(best[-1][1])


# ---- the tensors of a record ----------------------------------------------------------------------------------------

WHOLE_BATCH = None


class RecordTensor(NamedTuple):
    """A tensor of a batch record, or of a response record."""

    name: str  # the input or output
    # The place of the entry that it belongs to, or `WHOLE_BATCH`: each entry has its rows of it, in order.
    owner: int | None
    array: Array  # its elements


def join(entries: Sequence[Mapping[str, Array]], batching: bool) -> list[RecordTensor]:
    """Return the tensors of some requests, or responses: one over the batch for what all have in one form."""
    tensors = []
    for name in dict.fromkeys(name for entry in entries for name in entry):
        arrays = {owner: entry[name] for owner, entry in enumerate(entries) if name in entry}
        forms = {(array.dtype, array.shape[1:] if batching else array.shape) for array in arrays.values()}
        if len(arrays) == len(entries) and len(forms) == 1 and (batching or len(entries) == 1):
            tensors.append(
                RecordTensor(name, WHOLE_BATCH, np.concatenate([*arrays.values()]) if batching else arrays[0])
            )
        else:
            tensors += [RecordTensor(name, owner, array) for owner, array in arrays.items()]
    return tensors


def part(tensors: Sequence[RecordTensor], rows: Sequence[int], batching: bool) -> list[dict[str, Array]]:
    """Return what belongs to each entry of a record: the inverse of `join`."""
    entries: list[dict[str, Array]] = [{} for _ in rows]
    for name, owner, array in tensors:
        if owner is not WHOLE_BATCH:
            entries[owner][name] = array
            continue
        begin = 0
        for entry, count in zip(entries, rows, strict=True):
            entry[name] = array[begin : begin + count] if batching else array
            begin += count
    return entries


# ---- results, and answers -------------------------------------------------------------------------------------------

Infer = Callable[[Sequence[Request]], Any]
"""A callable: a list with one result for each request, a dictionary of outputs or an error; or it raises."""


def answer(model: Model, request: Request, result: Any) -> dict[str, Array]:
    """Return the outputs of a result that its caller wants.

    Raises:
        RequestError: If it is an error, or does not fit the model.
    """
    if isinstance(result, BaseException):
        raise RequestError("INTERNAL", str(result))
    outputs = {}
    for name in request.outputs:
        spec = model.outputs[name]
        array = result[name]
        declared = (-1, *spec.shape) if model.max_batch_size else spec.shape
        if not _fits(array.shape, declared):
            raise RequestError("INTERNAL", f"output '{name}'")
        outputs[name] = array.astype(DATA_TYPES[spec.datatype])
    return outputs


def write_tensor(spec: TensorSpec, array: Array) -> RawTensor:
    """Return an output as it travels."""
    if spec.datatype == "BYTES":
        payload = b"".join(len(element).to_bytes(4, "little") + element for element in array.ravel())
    else:
        payload = array.tobytes()
    return RawTensor(spec.datatype, array.shape, payload)


def serve(model: Model, raw: Sequence[RawRequest], infer: Infer) -> list[Answer]:
    """Return what becomes of the requests of one batch.

    What is wrong with one request, or with the result for it, ends that request alone. What the callable raises ends
    all that it has got. Nothing else ends any.
    """
    answers: dict[int, Answer] = {}
    requests: dict[int, Request] = {}
    for index, each in enumerate(raw):
        try:
            requests[index] = read(model, accept(model, each))
        except RequestError as error:
            answers[index] = Answer({}, error.code, str(error))
    batching = bool(model.max_batch_size)
    read_ones = list(requests.values())
    record = join([request.inputs for request in read_ones], batching)
    for request, inputs in zip(read_ones, part(record, [request.rows for request in read_ones], batching), strict=True):
        request.inputs = inputs
    try:
        results = infer(read_ones) if read_ones else []
    except Exception as error:
        results = [error] * len(read_ones)
    found: dict[int, dict[str, Array]] = {}
    for (index, request), result in zip(requests.items(), results, strict=True):
        try:
            found[index] = answer(model, request, result)
        except RequestError as error:
            answers[index] = Answer({}, error.code, str(error))
    response = join(list(found.values()), batching)
    rows = [len(next(iter(outputs.values()))) if batching and outputs else 1 for outputs in found.values()]
    for index, outputs in zip(found, part(response, rows, batching), strict=True):
        answers[index] = Answer({name: write_tensor(model.outputs[name], array) for name, array in outputs.items()})
    return [answers[index] for index in range(len(raw))]


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(
        size in (expected, -1) or expected == -1 for size, expected in zip(shape, declared, strict=True)
    )
