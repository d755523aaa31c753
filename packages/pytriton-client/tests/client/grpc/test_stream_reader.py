"""The responses of a stream are read alike, whether or not they look like the one before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pytriton.client._core.requests import InferResponse
from pytriton.client._core.tensors import encode_tensor
from pytriton.client._core.translate import Operation
from pytriton.client._grpc.messages import service_pb2
from pytriton.client._grpc.stream_reader import StreamReader
from pytriton.client.exceptions import PyTritonClientError

OPERATION = Operation("streaming inference", "grpc://localhost:8001", 0, "model", "1")


def shown(response: InferResponse) -> dict[str, Any]:
    outputs = {name: (array.dtype, array.shape, array.tolist()) for name, array in response.outputs.items()}
    return {**vars(response), "outputs": outputs}


def read(reader: StreamReader, data: bytes) -> Any:
    try:
        return shown(reader.read(data, is_followed=False))
    except PyTritonClientError as error:
        return str(error)


def message(generator: random.Random, number: int) -> Any:
    """A message that is mostly like the others."""
    made = service_pb2.ModelStreamInferResponse()
    response = made.infer_response
    response.model_name, response.model_version, response.id = "model", "1", "stream"
    kind = generator.choice([*["alike"] * 20, "shape", "parameter", "error", "two", "none", "wrong", "final", "id"])
    texts = np.array([f"{number}".encode() * generator.randrange(3)] * (2 if kind == "shape" else 1), object)
    tensors = {"text": ("BYTES", texts), "score": ("FP32", np.full((1, 2), number, np.float32))}
    if kind == "none":
        tensors = {}
    elif kind == "two":
        tensors = {"score": tensors["score"], "text": tensors["text"]}
    for name, (datatype, array) in tensors.items():
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(encode_tensor(array, datatype))
    response.parameters["triton_final_response"].bool_param = kind == "final"
    if kind == "parameter":
        response.parameters["number"].int64_param = number
    elif kind == "id":
        # What looks like the bytes of a tensor.
        response.id = (b"\x32\x06" + encode_tensor(texts, "BYTES")).decode()
    elif kind == "wrong":
        response.raw_output_contents[-1] += b"x"
    elif kind == "error":
        made.error_message = f"failed at {number}"
    return made


@pytest.mark.parametrize("seed", range(10))
def test_each_is_what_it_is_by_itself(seed: int) -> None:
    generator = random.Random(seed)
    reader = StreamReader(OPERATION)
    for number in range(300):
        made = message(generator, number)
        data = made.SerializeToString(deterministic=True)
        if generator.random() < 0.3:
            # Fields may come in any order: our own server has the parameters last.
            inner = made.infer_response
            last = service_pb2.ModelInferResponse(parameters=inner.parameters)
            inner.ClearField("parameters")
            body = inner.SerializeToString() + last.SerializeToString()
            data = service_pb2.ModelStreamInferResponse(error_message=made.error_message).SerializeToString()
            data += b"\x12" + length(len(body)) + body
        assert read(reader, data) == read(StreamReader(OPERATION), data)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_of_anybody_are_read_as_they_are_by_themselves(seed: int) -> None:
    generator = random.Random(seed)
    reader = StreamReader(OPERATION)
    for number in range(500):
        data = bytearray(message(generator, number).SerializeToString(deterministic=True))
        if number % 2:
            for _ in range(generator.randrange(1, 3)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            del data[generator.randrange(len(data)) + 1 :]
        assert read(reader, bytes(data)) == read(StreamReader(OPERATION), bytes(data))


def length(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])
