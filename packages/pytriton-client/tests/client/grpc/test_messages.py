"""Large tensors of requests and responses, which pass by the message classes of protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc import service_pb2

from pytriton.client._core.requests import InferCall, InferRequest
from pytriton.client._core.spec import TensorSpec
from pytriton.client._grpc.messages import decode_infer_response, encode_infer_request

LARGE = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)


@pytest.mark.parametrize(
    "array",
    [
        LARGE,
        LARGE.T,
        LARGE[::2, 1:],
        (LARGE % 7).astype(np.float16),
        np.array([[b"\x3a" * (1 << 17)]], object),
        np.zeros((0, 4), np.float32),
    ],
    ids=["whole", "transposed", "parts", "halves", "strings", "nothing"],
)
def test_a_request_is_what_protobuf_writes(array: Any) -> None:
    small = np.array([[1.5]], np.float32)
    inputs = ((TensorSpec("x", (-1,), array.dtype), array), (TensorSpec("y", (1,), np.float32), small))
    call = InferCall(inputs=(array, small), parameters={"colour": "blue"})
    found = service_pb2.ModelInferRequest.FromString(encode_infer_request(InferRequest("m", "2", "id", inputs, call)))
    assert (found.model_name, found.model_version, found.id) == ("m", "2", "id")
    assert found.parameters["colour"].string_param == "blue"
    assert [(each.name, tuple(each.shape)) for each in found.inputs] == [("x", array.shape), ("y", (1, 1))]
    expected = len(array.item()).to_bytes(4, "little") + array.item() if array.dtype == object else array.tobytes()
    assert list(found.raw_input_contents) == [expected, small.tobytes()]


def response() -> Any:
    message = service_pb2.ModelInferResponse(model_name="m", id="id")
    message.parameters["colour"].string_param = "blue"
    for name, array in (("x", LARGE), ("y", LARGE[:1, :1])):
        message.outputs.add(name=name, datatype="FP32", shape=array.shape)
        message.raw_output_contents.append(array.tobytes())
    return message


def test_a_response_is_what_protobuf_reads() -> None:
    # Fields may come in any order, and so may those that nobody knows: 19 of each wire type.
    odd = b"\x98\x01\x96\x01" + b"\x99\x01" + bytes(8) + b"\x9a\x01\x02ab" + b"\x9d\x01" + bytes(4)
    late = service_pb2.ModelInferResponse(model_version="3").SerializeToString()
    for data in (response().SerializeToString(), odd + response().SerializeToString() + late):
        found = decode_infer_response(data)
        assert (found.model_name, found.request_id, found.parameters) == ("m", "id", {"colour": "blue"})
        assert (found.outputs["x"] == LARGE).all()
        assert found.outputs["y"].item() == 0
        assert found.outputs["x"].flags.writeable
    assert found.model_version == "3"


@pytest.mark.parametrize("cut", [1, 2, 70_000])
def test_a_response_that_ends_too_soon_is_none(cut: int) -> None:
    with pytest.raises(DecodeError):
        decode_infer_response(response().SerializeToString()[:-cut])


def test_a_response_with_groups_is_what_protobuf_says() -> None:
    """Groups are not looked into: the parser of protobuf takes the whole message, or refuses it."""
    assert (decode_infer_response(b"\x9b\x01\x9c\x01" + response().SerializeToString()).outputs["x"] == LARGE).all()
    with pytest.raises(DecodeError):
        decode_infer_response(response().SerializeToString() + b"\x9b\x01")
