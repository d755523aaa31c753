"""Requests over gRPC for inference, good ones and ones with faults, each made from a seed and its number alone."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

# Data type: bytes of an element, the field of typed contents, or none.
TYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "bool_contents"),
    "INT8": (1, "int_contents"),
    "INT16": (2, "int_contents"),
    "INT32": (4, "int_contents"),
    "INT64": (8, "int64_contents"),
    "UINT8": (1, "uint_contents"),
    "UINT16": (2, "uint_contents"),
    "UINT32": (4, "uint_contents"),
    "UINT64": (8, "uint64_contents"),
    "FP16": (2, ""),
    "FP32": (4, "fp32_contents"),
    "FP64": (8, "fp64_contents"),
    "BYTES": (0, "bytes_contents"),
}
NUMPY = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"} | {
    f"{sign}INT{8 * size}": f"{letter}{size}" for sign, letter in (("", "i"), ("U", "u")) for size in (1, 2, 4, 8)
}
TEXTS = ["", "a", "y", "nobody", "\U0001f600 \u00e4", "n" * 200, "a.b/c d", "0"]
VERSIONS = ["", "1", "01", "2", "-1", "x", "1x", " 1", "+1", "9" * 30, "9223372036854775807", "9223372036854775808"]
PARAMETERS = [
    *("mine", "responses", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers"),
    *("triton_enable_empty_final_response", "triton_mine", "", "\u00e4"),
]
INTEGERS = [0, 1, 2, 7, -1, -(2**63), 2**31, 2**63 - 1]


@dataclasses.dataclass(frozen=True)
class Made:
    """One request as it is sent."""

    content: bytes  # the message
    kind: str  # what was done to a good one


def make(seed: int, number: int, models: Mapping[str, str]) -> Made:
    """Return the request of one number.

    Args:
        seed: Of all requests.
        number: Of this one.
        models: The data type of input `x`, of two dimensions, for each model that there is.
    """
    rng = random.Random(f"{seed}/{number}")
    model = rng.choice(list(models))
    request = good(rng, model, models[model])
    names = [rng.choice(list(FAULTS)) for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3]))]
    for name in names:
        FAULTS[name](rng, request)
    content = request.SerializeToString()
    if rng.random() < 0.3:
        names.append("as old writers have it")
        content = rewritten(rng, request)
    return Made(content, ", ".join([model, *names]))


def elements(rng: random.Random, datatype: str, count: int) -> list[Any]:
    """Return values of a data type, those at its edges too."""
    if datatype == "BYTES":
        return [rng.choice([b"", b"abc", b"\xff\0", b"x" * 100]) for _ in range(count)]
    dtype = np.dtype(NUMPY[datatype])
    if dtype.kind == "b":
        return [rng.random() < 0.5 for _ in range(count)]
    if dtype.kind == "f":
        return [rng.choice([0.0, -1.5, 2.0, 1e4, float("inf")]) for _ in range(count)]
    limits = np.iinfo(dtype)
    return [rng.choice([int(limits.min), int(limits.max), 0, 1, 100]) for _ in range(count)]


def raw(datatype: str, values: list[Any]) -> bytes:
    """Return values as a tensor has them."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return np.array(values, NUMPY[datatype]).tobytes()


def good(rng: random.Random, model: str, datatype: str) -> Any:
    """Return a request that the model answers."""
    request = service_pb2.ModelInferRequest(model_name=model, id=rng.choice(TEXTS))
    shape = [rng.randrange(1, 3), rng.choice([1, 2, 3, 7, 300])]
    values = elements(rng, datatype, shape[0] * shape[1])
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    field = TYPES[datatype][1]
    if field and rng.random() < 0.4:
        getattr(tensor.contents, field).extend(values)
    else:
        request.raw_input_contents.append(raw(datatype, values))
    if rng.random() < 0.3:
        request.outputs.add(name="y")
    if rng.random() < 0.3:
        request.parameters["responses"].int64_param = rng.randrange(4)
    if rng.random() < 0.2:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def set_parameter(rng: random.Random, parameters: Any) -> None:
    """Set a parameter of any name to a value of any type, or of none."""
    value = parameters[rng.choice(PARAMETERS)]
    kind = rng.choice(["bool_param", "int64_param", "string_param", "double_param", "uint64_param", ""])
    values = {
        "bool_param": rng.random() < 0.5,
        "int64_param": rng.choice(INTEGERS),
        "string_param": rng.choice(TEXTS),
        "double_param": rng.choice([0.0, -1.5, 1e308]),
        "uint64_param": rng.choice([0, 3, 2**64 - 1]),
    }
    if kind:
        setattr(value, kind, values[kind])


def _tensor(rng: random.Random, request: Any) -> Any:
    return rng.choice(request.inputs) if request.inputs else request.inputs.add()


def _shape(rng: random.Random, request: Any) -> None:
    tensor = _tensor(rng, request)
    del tensor.shape[:]
    tensor.shape.extend(rng.choice([0, 1, 2, 3, -1, 2**31, 2**62]) for _ in range(rng.randrange(5)))


def _contents(rng: random.Random, request: Any) -> None:
    datatype = rng.choice(list(TYPES))
    field = TYPES[datatype][1]
    if field:
        getattr(_tensor(rng, request).contents, field).extend(elements(rng, datatype, rng.randrange(3)))


def _empty_contents(rng: random.Random, request: Any) -> None:
    _tensor(rng, request).contents.SetInParent()


def _no_raw(rng: random.Random, request: Any) -> None:
    del request.raw_input_contents[:]


def _more_raw(rng: random.Random, request: Any) -> None:
    request.raw_input_contents.append(bytes(rng.randrange(9)))


def _other_raw(rng: random.Random, request: Any) -> None:
    _no_raw(rng, request)
    request.raw_input_contents.append(rng.choice([b"", b"\0", bytes(8), b"\xff\xff\xff\x7fab", bytes(100_000)]))


def _again(rng: random.Random, request: Any) -> None:
    request.inputs.add().CopyFrom(_tensor(rng, request))
    request.raw_input_contents.extend(list(request.raw_input_contents)[:1])


def _output(rng: random.Random, request: Any) -> None:
    output = request.outputs.add(name=rng.choice(["y", "x", *TEXTS]))
    if rng.random() < 0.2:
        output.parameters["classification"].int64_param = rng.choice([-1, 0, 1, 3])
    if rng.random() < 0.1:
        set_parameter(rng, output.parameters)


def _region(rng: random.Random, request: Any) -> None:
    parameters = _tensor(rng, request).parameters
    parameters["shared_memory_region"].string_param = "nothing"
    parameters["shared_memory_byte_size"].int64_param = 8


def _set(field: str, values: list[str]) -> Callable[[random.Random, Any], None]:
    return lambda rng, request: setattr(request, field, rng.choice(values))


FAULTS: dict[str, Callable[[random.Random, Any], None]] = {
    "shape": _shape,
    "datatype": lambda rng, request: setattr(
        _tensor(rng, request), "datatype", rng.choice([*TYPES, "BF16", "FP8", ""])
    ),
    "name": lambda rng, request: setattr(_tensor(rng, request), "name", rng.choice(TEXTS)),
    "parameter": lambda rng, request: set_parameter(rng, request.parameters),
    "tensor parameter": lambda rng, request: set_parameter(rng, _tensor(rng, request).parameters),
    "contents": _contents,
    "empty contents": _empty_contents,
    "no raw": _no_raw,
    "more raw": _more_raw,
    "other raw": _other_raw,
    "again": _again,
    "no input": lambda rng, request: request.ClearField("inputs"),
    "output": _output,
    "region": _region,
    "version": _set("model_version", VERSIONS),
    "model": _set("model_name", TEXTS),
    "id": _set("id", TEXTS),
}


# ---- the same message in other bytes ---------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return a number as protobuf has it."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


_UNKNOWN = [
    varint(100 << 3) + varint(5),
    varint(101 << 3 | 1) + bytes(8),
    varint(102 << 3 | 2) + varint(3) + b"abc",
    varint(103 << 3 | 5) + bytes(4),
    # A group, with a group and a number in it.
    varint(104 << 3 | 3) + varint(1 << 3 | 3) + varint(2 << 3) + b"\1" + varint(1 << 3 | 4) + varint(104 << 3 | 4),
    # Fields that are known, of another type.
    varint(1 << 3) + varint(5),
    varint(7 << 3 | 5) + bytes(4),
]


def rewritten(rng: random.Random, request: Any) -> bytes:
    """Return a request with its fields in another order, unknown ones between them, and numbers that are not packed."""
    parts = [field(number, text.encode()) for number, text in enumerate(
        (request.model_name, request.model_version, request.id), 1
    ) if text or rng.random() < 0.2]  # fmt: skip
    for name in request.parameters:
        part = service_pb2.ModelInferRequest()
        part.parameters[name].CopyFrom(request.parameters[name])
        parts.append(part.SerializeToString())
    parts.extend(rng.sample(_UNKNOWN, rng.randrange(3)))
    rng.shuffle(parts)
    # Of these the order matters, but not where they stand.
    for number, contents in (
        (5, [_input(rng, tensor) for tensor in request.inputs]),
        (6, [output.SerializeToString() for output in request.outputs]),
        (7, list(request.raw_input_contents)),
    ):
        places = sorted(rng.randrange(len(parts) + 1) for _ in contents)
        for offset, (place, content) in enumerate(zip(places, contents, strict=True)):
            parts.insert(place + offset, field(number, content))
    return b"".join(parts)


def _input(rng: random.Random, tensor: Any) -> bytes:
    parts = [field(1, tensor.name.encode()), field(2, tensor.datatype.encode())]
    parts.append(b"".join(varint(3 << 3) + varint(size) for size in tensor.shape))
    for name in tensor.parameters:
        part = service_pb2.ModelInferRequest.InferInputTensor()
        part.parameters[name].CopyFrom(tensor.parameters[name])
        parts.append(part.SerializeToString())
    if tensor.HasField("contents"):
        parts.append(field(5, _loose(tensor.contents) if rng.random() < 0.7 else tensor.contents.SerializeToString()))
    rng.shuffle(parts)
    return b"".join(parts)


def _loose(contents: Any) -> bytes:
    """Write elements one by one."""
    written = b""
    for descriptor, values in contents.ListFields():
        number = descriptor.number
        for value in values:
            if number == 8:
                written += field(8, value)
            elif number in (6, 7):
                written += varint(number << 3 | (5 if number == 6 else 1)) + struct.pack(
                    "<f" if number == 6 else "<d", value
                )
            else:
                written += varint(number << 3) + varint(int(value))
    return written
