"""Conversion of requests and responses to and from the protobuf messages of KServe v2.

The message classes are those of tritonclient. Its ``InferInput`` and ``InferResult`` are not used: they copy every
tensor once more, and cannot represent one response of many. Nor do large tensors pass through the message classes,
which copy what is put into a message, and again when they write it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import json_format  # type: ignore[import-untyped, unused-ignore]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from .._core.options import ParameterValue
from .._core.requests import InferRequest, InferResponse, SharedTensors, Slice
from .._core.tensors import decode_tensor, encode_tensor
from .._core.untrusted import check_shape, describe
from .._core.url import TritonUrl
from .._route.proxies import NO_GRPC_PROXY
from ..exceptions import PyTritonClientValueError
from .wire import fields, write_varint

__all__ = [
    "INFER_METHOD",
    "STREAM_METHOD",
    "DecodeError",
    "channel_options",
    "decode_infer_response",
    "decode_model_config",
    "encode_infer_request",
    "encode_load_request",
    "make_metadata",
    "service_pb2",
    "service_pb2_grpc",
]

_MAX_MESSAGE_BYTES = 2**31 - 1
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A channel that could not connect refuses to try again for 1 s and up to 2 minutes by default: too long for a
    # client that waits for its server to start.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
# The keys of the fields `ModelInferRequest.raw_input_contents` and `ModelInferResponse.raw_output_contents`.
_INPUT_CONTENTS, _OUTPUT_CONTENTS = b"\x3a", 0x32
# From here on a copy costs more than what avoids it.
_LARGE_BYTES = 1 << 16
# A message also holds names, shapes and parameters, which need some room.
_MAX_TENSOR_BYTES = _MAX_MESSAGE_BYTES - (1 << 20)


def channel_options(url: TritonUrl, max_response_bytes: int) -> list[tuple[str, int | str]]:
    """Return the options of a channel to an address that takes messages up to a size."""
    return [
        *_CHANNEL_OPTIONS,
        *([NO_GRPC_PROXY] if url.is_loopback or not url.trust_env else []),
        ("grpc.max_receive_message_length", min(max_response_bytes, _MAX_MESSAGE_BYTES)),
        ("grpc.lb_policy_name", "round_robin" if url.is_balanced else "pick_first"),
    ]


def encode_infer_request(request: InferRequest) -> bytes:
    """Return the bytes of the ``ModelInferRequest``."""
    shared = request.shared
    placed = {} if shared is None else shared.inputs
    # Numbers come first, because their size is known before they are copied; strings come last.
    sent = [(tensor, array) for tensor, array in request.inputs if tensor.name not in placed]
    _check_size(request, sum(array.nbytes for tensor, array in sent if tensor.datatype != "BYTES"))
    message = service_pb2.ModelInferRequest(
        model_name=request.model_name, model_version=request.model_version or "", id=request.request_id
    )
    contents: list[bytes | memoryview] = []
    for tensor, array in request.inputs:
        described = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        if tensor.name in placed:
            _set_slice(described.parameters, placed[tensor.name])
        else:
            content = _encode_input(array, tensor.datatype)
            contents += (_INPUT_CONTENTS, write_varint(len(content)), content)
    for name, where in ({} if shared is None else shared.outputs).items():
        wanted = message.outputs.add(name=name)
        if where is not None:
            _set_slice(wanted.parameters, where)
    _check_size(request, sum(map(len, contents)))
    for name, value in request.call.options.items():
        if name == "priority":
            message.parameters[name].uint64_param = value
        else:
            _set_parameter(message.parameters[name], value)
    for name, value in request.call.parameters.items():
        _set_parameter(message.parameters[name], value)
    return b"".join([message.SerializeToString(), *contents])


def decode_infer_response(answer: Any, shared: SharedTensors | None = None) -> InferResponse:
    """Read a ``ModelInferResponse``, or its bytes."""
    message, contents = _parse(answer) if isinstance(answer, bytes) else (answer, answer.raw_output_contents)
    described, given = message.outputs, message.parameters
    if len(described) != len(contents):
        raise ValueError(f"expected the bytes of {len(described)} outputs, received {len(contents)}")
    outputs = {
        output.name: _decode_output(output, data, shared) for output, data in zip(described, contents, strict=True)
    }
    if len(outputs) != len(described):
        raise ValueError(f"expected each output once, received {describe([output.name for output in described])}")
    parameters = {}
    for name in given:  # items() takes several times as long
        value = given[name]
        kind = value.WhichOneof("parameter_choice")
        if kind:
            parameters[name] = getattr(value, kind)
    return InferResponse(
        outputs,
        parameters=parameters,
        request_id=message.id,
        model_name=message.model_name,
        model_version=message.model_version or None,
        is_final=bool(parameters.pop("triton_final_response", False)),
    )


def decode_model_config(message: Any) -> Mapping[str, Any]:
    """Return the configuration in a ``ModelConfigResponse`` in the form of its JSON."""
    config: Mapping[str, Any] = json_format.MessageToDict(message.config, preserving_proto_field_name=True)
    return config


def encode_load_request(model_name: str, config: str | None, files: Mapping[str, bytes] | None) -> Any:
    """Return the ``RepositoryModelLoadRequest``."""
    message = service_pb2.RepositoryModelLoadRequest(model_name=model_name)
    if config is not None:
        message.parameters["config"].string_param = config
    for path, content in (files or {}).items():
        message.parameters[path].bytes_param = content
    return message


def make_metadata(*headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return headers as the metadata of a call; of two with one name the last one counts."""
    # gRPC refuses capital letters in the keys of metadata.
    return list({name.lower(): value for mapping in headers for name, value in mapping.items()}.items())


def _check_size(request: InferRequest, size: int) -> None:
    """Refuse what protobuf would refuse later, after copies of gigabytes and without a word about the reason."""
    if size > _MAX_TENSOR_BYTES:
        raise PyTritonClientValueError(
            f"Model {request.model_name}: expected inputs of less than 2 GiB together, all that a gRPC message "
            f"holds; received {size} bytes. Send smaller batches, or use HTTP.",
            model_name=request.model_name,
            model_version=request.model_version,
            expected="less than 2 GiB",
            received=f"{size} bytes",
        )


def _encode_input(array: npt.NDArray[Any], datatype: str) -> bytes | memoryview:
    if datatype == "BYTES" or array.nbytes < _LARGE_BYTES:
        return encode_tensor(array, datatype)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _parse(data: bytes) -> tuple[Any, Sequence[bytes | memoryview]]:
    """Return the message in the bytes, and what its outputs hold."""
    if len(data) >= _LARGE_BYTES:
        view, rest, contents = memoryview(data), [], []
        with contextlib.suppress(ValueError):  # the parser of protobuf reports the error
            for key, start, begin, end in fields(data):
                if key == _OUTPUT_CONTENTS:
                    contents.append(view[begin:end])
                else:
                    rest.append(view[start:end])
            return service_pb2.ModelInferResponse.FromString(b"".join(rest)), contents
    message = service_pb2.ModelInferResponse.FromString(data)
    return message, message.raw_output_contents


def _decode_output(output: Any, data: bytes | memoryview, shared: SharedTensors | None) -> npt.NDArray[Any]:
    shape = check_shape(output.shape)
    if not data and shared is not None and shared.outputs.get(output.name) is not None:
        # Nothing else shows that the server has written the output to the place that it was given.
        return shared.read(output.name, output.datatype, shape)
    return decode_tensor(data, output.datatype, shape)


def _set_slice(parameters: Any, where: Slice) -> None:
    parameters["shared_memory_region"].string_param = where.region
    parameters["shared_memory_offset"].int64_param = where.offset
    parameters["shared_memory_byte_size"].int64_param = where.size


def _set_parameter(target: Any, value: ParameterValue) -> None:
    # bool before int, because a bool is an int
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value
