"""The five clients and a gRPC server whose messages lie: errors of ours, in time and in bounds."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from support.faults.hostile_grpc import (
    DATA,
    DATA_FRAME,
    GOAWAY,
    GOOD_HEADERS,
    HEADERS,
    RST,
    Answer,
    HostileGrpcServer,
    by_hand,
    frame,
    hostile_grpc_server,
    literal,
    model_config,
    response,
)
from support.faults.hostile_http import CLIENTS, DECOUPLED, Caller, caller

GOOD = [[1.0, 2.0]]
LONGEST_ERROR = 20_000
MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[HostileGrpcServer]:
    with hostile_grpc_server() as one:
        yield one


@pytest.fixture
def gzip_server() -> Iterator[HostileGrpcServer]:
    with hostile_grpc_server(grpc.Compression.Gzip) as one:
        yield one


def problem_of(client: Caller, name: str) -> str | None:
    """What is wrong with how a call to a hostile server ended; `None` if it is as documented."""
    try:
        return f"{name}: answered with {client.infer()}"
    except PyTritonClientError as error:
        return f"{name}: {error!r:.500}" if len(str(error)) > LONGEST_ERROR else None
    except Exception as error:
        return f"{name}: {type(error).__name__} came through: {error!s:.500}"


def twice() -> Any:
    message = response(data=[DATA, DATA])
    message.outputs.add().CopyFrom(message.outputs[0])
    return message


STRING = struct.pack("<I", 2**32 - 1) + b"abc"
MESSAGES: dict[str, Any] = {
    "no data": response(data=[]),
    "data twice": response(data=[DATA, DATA]),
    "data too short": response(data=[DATA[:-1]]),
    "data too long": response(data=[DATA * 2]),
    "an output twice": twice(),
    "a negative shape": response(shape=[1, -1]),
    "a shape of two negatives": response(shape=[-1, -2]),
    "a shape that overflows": response(shape=[2**32, 2**32]),
    "a shape that is huge": response(shape=[2**62]),
    "an empty shape that is huge": response(shape=[0, 2**63 - 1], data=[b""]),
    "a shape of 100,000 axes": response(shape=[1] * 100_000),
    "a shape smaller than the data": response(shape=[1]),
    "no datatype": response(datatype=""),
    "an unknown datatype": response(datatype="FP31" * 10_000),
    "strings that are huge in number": response(shape=[2**40], datatype="BYTES", data=[b""]),
    "a string beyond its data": response(shape=[1], datatype="BYTES", data=[STRING]),
    "a string's length that breaks off": response(shape=[1], datatype="BYTES", data=[b"\1\0"]),
}
RAW: dict[str, bytes] = {
    "no protobuf": b"\xff\xff\xff\xff",
    "text that is no UTF-8": b"\x0a\x02\xff\xfe",
    "a field beyond the message": b"\x2a\xff\xff\xff\x7f",
    "groups in groups": b"\xfb\x7f" * 100_000,
}


def ending(code: Any, text: str) -> Answer:
    return lambda context: context.abort(code, text)


@pytest.mark.parametrize("kind", CLIENTS)
def test_messages(server: HostileGrpcServer, kind: str) -> None:
    method = "ModelStreamInfer" if kind in DECOUPLED else "ModelInfer"
    rows: dict[str, Answer] = {name: [content] for name, content in RAW.items()}
    for name, message in MESSAGES.items():
        whole = service_pb2.ModelStreamInferResponse(infer_response=message) if kind in DECOUPLED else message
        rows[name] = [whole.SerializeToString()]
    rows["a long text"] = ending(grpc.StatusCode.INTERNAL, "e" * 7000)
    rows["a text longer than headers may be"] = ending(grpc.StatusCode.INTERNAL, "e" * 100_000)
    rows["a status of ours"] = ending(grpc.StatusCode.UNAUTHENTICATED, "\x00\x01")
    if kind in DECOUPLED:
        long = service_pb2.ModelStreamInferResponse(error_message="e" * 10 * MIB)
        rows["a long error"] = [long.SerializeToString()]
    problems = []
    with caller(kind, server.url) as client:
        for name, answer in rows.items():
            server.answers[method] = answer
            problems.append(problem_of(client, name))
            server.answers.clear()
            assert client.infer() == GOOD, name
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.parametrize("kind", CLIENTS)
def test_more_than_a_client_takes(server: HostileGrpcServer, kind: str) -> None:
    large = response(shape=[1, MIB], data=[bytes(4 * MIB)])
    message = service_pb2.ModelStreamInferResponse(infer_response=large) if kind in DECOUPLED else large
    with caller(kind, server.url, max_response_bytes=MIB) as client:
        server.answers["ModelStreamInfer" if kind in DECOUPLED else "ModelInfer"] = [message.SerializeToString()]
        with pytest.raises(PyTritonClientInferenceServerError) as caught:
            client.infer()
        assert caught.value.status == "RESOURCE_EXHAUSTED"
        server.answers.clear()
        assert client.infer() == GOOD
    with caller(kind, server.url) as client:
        server.answers["ModelStreamInfer" if kind in DECOUPLED else "ModelInfer"] = [message.SerializeToString()]
        assert client.infer() == [[0.0] * MIB]


@pytest.mark.parametrize("kind", CLIENTS)
def test_small_message_that_becomes_more_than_a_client_takes(gzip_server: HostileGrpcServer, kind: str) -> None:
    large = response(shape=[1, 4 * MIB], data=[bytes(16 * MIB)])
    message = service_pb2.ModelStreamInferResponse(infer_response=large) if kind in DECOUPLED else large
    with caller(kind, gzip_server.url, max_response_bytes=MIB) as client:
        gzip_server.answers["ModelStreamInfer" if kind in DECOUPLED else "ModelInfer"] = [message.SerializeToString()]
        with pytest.raises(PyTritonClientInferenceServerError) as caught:
            client.infer()
        assert caught.value.status == "RESOURCE_EXHAUSTED"
        gzip_server.answers.clear()
        assert client.infer() == GOOD


@pytest.mark.parametrize("kind", CLIENTS)
def test_configurations(server: HostileGrpcServer, kind: str) -> None:
    wrong_shape, wrong_type = model_config(kind in DECOUPLED), model_config(kind in DECOUPLED)
    wrong_shape.config.input[0].dims[:] = [-5]
    wrong_type.config.input[0].data_type = 99
    rows: dict[str, bytes] = {
        **RAW,
        "a shape below -1": wrong_shape.SerializeToString(),
        "an unknown type": wrong_type.SerializeToString(),
    }
    problems = []
    for name, content in rows.items():
        with caller(kind, server.url) as client:
            server.answers["ModelConfig"] = [content]
            problems.append(problem_of(client, name))
            server.answers.clear()
            assert client.infer() == GOOD, name
    assert not any(problems), "\n".join(filter(None, problems))


BEGUN = frame(HEADERS, 4, 1, GOOD_HEADERS)
MESSAGE = b"\0" + struct.pack(">I", 2**31) + b"abc"
BY_HAND: dict[str, bytes] = {
    "nothing": b"",
    "no frames": b"\xff" * 1000,
    "a frame of 16 MiB": frame(DATA_FRAME, 0, 1, b"abc", length=2**24 - 1),
    "a message of 2 GiB": BEGUN + frame(DATA_FRAME, 0, 1, MESSAGE),
    "a message that ends early": BEGUN + frame(DATA_FRAME, 1, 1, b"\0\0\0\1\0abc"),
    "a message with an unknown flag": BEGUN + frame(DATA_FRAME, 1, 1, b"\7\0\0\0\1x"),
    "a status that is no number": frame(HEADERS, 5, 1, GOOD_HEADERS + literal(b"grpc-status", b"many")),
    "a status of 2**40": frame(HEADERS, 5, 1, GOOD_HEADERS + literal(b"grpc-status", str(2**40).encode())),
    "an unknown status": frame(HEADERS, 5, 1, GOOD_HEADERS + literal(b"grpc-status", b"99")),
    "a status of success without a message": frame(HEADERS, 5, 1, GOOD_HEADERS + literal(b"grpc-status", b"0")),
    "a text that is no UTF-8": frame(
        HEADERS, 5, 1, GOOD_HEADERS + literal(b"grpc-status", b"13") + literal(b"grpc-message", b"%ff%fe%")
    ),
    "an HTTP error": frame(HEADERS, 5, 1, literal(b":status", b"502")),
    "a header that is no HPACK": frame(HEADERS, 5, 1, b"\xff" * 100),
    "a reset": frame(RST, 0, 1, struct.pack(">I", 2)),
    "goodbye": frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)),
}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("keeps_open", [False, True])
def test_frames(kind: str, keeps_open: bool) -> None:
    tensors = (TensorSpec("x", (-1,), np.float32),), (TensorSpec("y", (-1,), np.float32),)
    known = ModelSpec("m", None, 4, True, kind in DECOUPLED, *tensors)
    problems = []
    for name, answer in BY_HAND.items():
        with (
            by_hand(answer, keeps_open) as url,
            caller(kind, url, inference_timeout_s=0.5, model_config=known, ensure_model_is_ready=False) as client,
        ):
            problem = problem_of(client, name)
            if not (problem and kind in DECOUPLED and name.startswith("a status of success")):
                problems.append(problem)
    assert not any(problems), "\n".join(filter(None, problems))
