"""Hostile gRPC messages, each made from a seed and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from support.faults.front_end import bodies
from support.faults.front_end.values import DTYPES, INTEGERS

SERVICE = "/inference.GRPCInferenceService/"
_INT64 = [value for value in INTEGERS if -(2**63) <= value < 2**63]
_TEXTS = ["", "x", "y", "\0", "a" * 300, "n" * 3000, "../..", "\U0001f600"]


@dataclass(frozen=True)
class Message:
    """One call: which method, and what is sent for it."""

    kind: str
    method: str
    content: bytes

    @property
    def is_stream(self) -> bool:
        return self.method.endswith("ModelStreamInfer")


def make(seed: int, number: int) -> Message:
    """Return the message of one number: the same for the same seed, whatever was made before."""
    rng = random.Random(f"grpc {seed}/{number}")
    roll = rng.random()
    if roll < 0.75:
        kind, request = "infer", _infer(rng)
        method = "ModelInfer" if rng.random() < 0.7 else "ModelStreamInfer"
    else:
        kind = method = rng.choice(list(_OTHERS))
        request = _OTHERS[method](rng)
    content: bytes = request.SerializeToString()
    if rng.random() < 0.15:
        kind, content = f"{kind} + scrambled", bodies.scramble(rng, content)
    elif rng.random() < 0.02:
        kind, content = f"{kind} + nested", _nested(rng)
    return Message(kind, SERVICE + method, content)


def _nested(rng: random.Random) -> bytes:
    """Group in each other, as an unknown field: what a parser of protobuf follows down."""
    levels = rng.choice([50, 1000, 100_000])
    return b"\xfb\x7f" * levels + b"\xfc\x7f" * (levels if rng.random() < 0.5 else 0)


def _set_parameter(rng: random.Random, parameters: Any, name: str) -> None:
    value = parameters[name]
    field = rng.choice(["bool_param", "int64_param", "string_param", "double_param", "uint64_param", ""])
    if field == "bool_param":
        value.bool_param = True
    elif field == "int64_param":
        value.int64_param = rng.choice(_INT64)
    elif field == "string_param":
        value.string_param = rng.choice(_TEXTS)
    elif field == "double_param":
        value.double_param = rng.choice([float("nan"), float("inf"), -1.0, 1e308])
    elif field == "uint64_param":
        value.uint64_param = rng.choice([0, 2**63, 2**64 - 1])


def _parameters(rng: random.Random, parameters: Any) -> None:
    if rng.random() < 0.05:
        for index in range(rng.choice([1000, 100_000])):
            parameters[f"p{index}"].int64_param = index
    for _ in range(rng.randrange(1, 4)):
        _set_parameter(rng, parameters, rng.choice(bodies.PARAMETERS))


def _infer(rng: random.Random) -> Any:
    name = bodies.model(rng)
    request = service_pb2.ModelInferRequest(model_name=name)
    for tensor, datatype in bodies.MODELS.get(name, {"x": "FP32"}).items():
        count = rng.randrange(1, 5)
        one = request.inputs.add(name=tensor, datatype=datatype, shape=[1, count])
        if datatype == "BYTES":
            request.raw_input_contents.append(b"\x02\0\0\0ab" * count)
        elif rng.random() < 0.2:
            getattr(
                one.contents, {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}[datatype]
            ).extend([1] * count)
        else:
            request.raw_input_contents.append(bytes(bodies.SIZES[datatype] * count))
    if name == "sequence":
        request.parameters["sequence_id"].int64_param = rng.randrange(1, 50)
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        _mutate(rng, request)
    return request


def _mutate(rng: random.Random, request: Any) -> None:  # noqa: C901
    if not request.inputs:
        return
    tensor = rng.choice(request.inputs)
    roll = rng.randrange(14)
    if roll < 3:
        del tensor.shape[:]
        count = rng.randrange(5) if rng.random() < 0.9 else rng.choice([100, 100_000])
        tensor.shape.extend(rng.choice(_INT64) for _ in range(count))
    elif roll == 3:
        tensor.datatype = rng.choice([*DTYPES, *_TEXTS])
    elif roll == 4:
        tensor.name = rng.choice(_TEXTS)
    elif roll == 5:
        _parameters(rng, tensor.parameters)
    elif roll == 6:
        _parameters(rng, request.parameters)
    elif roll == 7 and request.raw_input_contents:
        raw = request.raw_input_contents
        raw[rng.randrange(len(raw))] = rng.choice([b"", b"\0", b"\xff" * 9, b"\xff\xff\xff\x7fab", bytes(1_000_000)])
    elif roll == 8:
        request.raw_input_contents.extend([b"abcd"] * rng.choice([1, 100, 10_000]))
    elif roll == 9:
        again = service_pb2.ModelInferRequest.InferInputTensor()
        again.CopyFrom(tensor)
        request.inputs.extend([again] * rng.choice([1, 100, 10_000] if again.ByteSize() < 500 else [1]))
    elif roll == 10:
        for index in range(rng.choice([1, 2, 10_000])):
            output = request.outputs.add(name=rng.choice(["y", f"y{index}"]))
            if rng.random() < 0.3:
                _parameters(rng, output.parameters) if index < 5 else None
    elif roll == 11:
        request.model_version = rng.choice(["1", "2", "-1", "9" * 30, "x"])
    elif roll == 12:
        tensor.contents.fp32_contents.extend([1.0] * rng.choice([1, 100_000]))
        if rng.random() < 0.5:
            tensor.contents.bytes_contents.extend([b"abc"] * rng.choice([1, 100_000]))
    else:
        del request.raw_input_contents[:]


def _name(rng: random.Random) -> str:
    return rng.choice([*_TEXTS, bodies.model(rng)])


_OTHERS: dict[str, Any] = {
    "ServerMetadata": lambda rng: service_pb2.ServerMetadataRequest(),
    "ModelReady": lambda rng: service_pb2.ModelReadyRequest(name=_name(rng), version=_name(rng)),
    "ModelMetadata": lambda rng: service_pb2.ModelMetadataRequest(name=_name(rng)),
    "ModelConfig": lambda rng: service_pb2.ModelConfigRequest(name=_name(rng)),
    "ModelStatistics": lambda rng: service_pb2.ModelStatisticsRequest(name=_name(rng), version=_name(rng)),
    "RepositoryIndex": lambda rng: service_pb2.RepositoryIndexRequest(repository_name=_name(rng), ready=True),
    "RepositoryModelLoad": lambda rng: service_pb2.RepositoryModelLoadRequest(model_name=rng.choice(_TEXTS)),
    "RepositoryModelUnload": lambda rng: service_pb2.RepositoryModelUnloadRequest(model_name=rng.choice(_TEXTS)),
    "SystemSharedMemoryStatus": lambda rng: service_pb2.SystemSharedMemoryStatusRequest(name=_name(rng)),
    "SystemSharedMemoryRegister": lambda rng: service_pb2.SystemSharedMemoryRegisterRequest(
        name=_name(rng),
        key=rng.choice(_TEXTS),
        offset=rng.choice([0, 2**63, 2**64 - 1]),
        byte_size=rng.choice([0, 1, 2**63, 2**64 - 1]),
    ),
    "SystemSharedMemoryUnregister": lambda rng: service_pb2.SystemSharedMemoryUnregisterRequest(name=_name(rng)),
    "CudaSharedMemoryStatus": lambda rng: service_pb2.CudaSharedMemoryStatusRequest(name=_name(rng)),
    "CudaSharedMemoryRegister": lambda rng: service_pb2.CudaSharedMemoryRegisterRequest(
        name=_name(rng),
        raw_handle=rng.choice([b"", b"x", bytes(64), bytes(100_000)]),
        device_id=rng.choice([-1, 0, 99]),
        byte_size=2**63,
    ),
    "TraceSetting": lambda rng: service_pb2.TraceSettingRequest(
        model_name=_name(rng),
        settings={
            rng.choice(["trace_rate", "trace_count", "trace_level", "x"]): {
                "value": [rng.choice([*_TEXTS, "-1", "1", "9" * 40])]
            }
        },
    ),
    "LogSettings": lambda rng: service_pb2.LogSettingsRequest(
        settings={rng.choice(["log_info", "log_format", "x"]): {"string_param": rng.choice(_TEXTS)}}
    ),
}
