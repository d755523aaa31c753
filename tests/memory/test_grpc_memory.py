"""What callers over gRPC make the server hold is limited and given back; headers of one end no calls of others."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import GuardConfig, Triton
from support.faults.hostile_grpc import DATA_FRAME, HEADERS, RST, SETTINGS, frame, literal
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

SERVICE = "/inference.GRPCInferenceService/"
LIMIT = 24 << 20
PADDING = b"\xa2\x06"  # the tag of field 100
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")

release = threading.Event()


@batch
def same(x: Any) -> Any:
    return {"y": x}


def wait(requests: Any) -> Any:
    """Answer when the test says so."""
    release.wait(PATIENCE_S)
    return [{"y": request["x"][:1]} for request in requests]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config(), guard=GuardConfig(max_in_flight_bytes=LIMIT))
    x, y = Tensor((-1,), np.float32, "x"), Tensor((-1,), np.float32, "y")
    triton.bind("same", same, [x], [y], config=ModelConfig(max_batch_size=8))
    triton.bind("wait", wait, [x], [y], config=ModelConfig(batching=False))
    with short_home(), running(triton):
        yield triton
        release.set()


def address(triton: Triton) -> tuple[str, int]:
    host, _, port = str(triton.grpc_url).partition("//")[2].rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def connected(triton: Triton) -> Iterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel("{}:{}".format(*address(triton)), options) as channel:
        yield channel


def message(model: str = "same", floats: int = 4, classified: bool = False, **more: Any) -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model, **more)
    made.inputs.add(name="x", datatype="FP32", shape=[floats] if model == "wait" else [1, floats])
    made.raw_input_contents.append(bytes(4 * floats))
    if classified:
        # Only Triton's own front end knows how to.
        made.outputs.add(name="y").parameters["classification"].int64_param = 1
    content: bytes = made.SerializeToString()
    return content


def stream(channel: Any, messages: list[bytes], **more: Any) -> list[bytes]:
    return list(channel.stream_stream(SERVICE + "ModelStreamInfer")(iter(messages), timeout=PATIENCE_S, **more))


def infer(channel: Any, content: bytes, **more: Any) -> bytes:
    answer: bytes = channel.unary_unary(SERVICE + "ModelInfer")(content, timeout=PATIENCE_S, **more)
    return answer


def _varint(number: int) -> bytes:
    coded = b""
    while number > 127:
        coded, number = coded + bytes([number & 127 | 128]), number >> 7
    return coded + bytes([number])


def is_whole(triton: Triton) -> bool:
    """Return whether a large request is served, so that nobody else holds much."""
    with connected(triton) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer").future(message(floats=LIMIT // 12), timeout=PATIENCE_S)
        failure = call.exception()
    assert failure is None or "max_in_flight_bytes" in failure.details(), failure
    return failure is None


def head(path: str = "ModelStreamInfer", *more: tuple[bytes, bytes]) -> bytes:
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", f"{SERVICE}{path}".encode()), (b":authority", b"x"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers"), *more,
    ]  # fmt: skip
    return b"".join(literal(*field) for field in fields)


def body(stream_id: int, content: bytes, flags: int = 0) -> bytes:
    whole = b"\0" + struct.pack(">I", len(content)) + content
    pieces = [whole[start : start + 16_000] for start in range(0, len(whole), 16_000)]
    return b"".join(
        frame(DATA_FRAME, flags if number == len(pieces) - 1 else 0, stream_id, piece)
        for number, piece in enumerate(pieces)
    )


def read_to_end_of_stream(received: Any) -> None:
    """Read frames up to the one that ends a call."""
    while True:
        start = received.read(9)
        assert len(start) == 9, "the connection ended"
        received.read(int.from_bytes(start[:3], "big"))
        if start[3] == HEADERS and start[4] & END_STREAM:
            return


# ---- headers -------------------------------------------------------------------------------------------------------

# Each is more than the connection to Triton's own front end takes; the last cannot be read there.
HEADERS_OF_HOSTS: list[list[tuple[str, Any]]] = [
    [(f"k{i}", "v" * 7000) for i in range(8)],
    [(f"k{i}", "v" * 7000) for i in range(3)],
    [(f"triton-grpc-protocol-{i}", "v" * 3000) for i in range(3)],
]
ODD_FIELDS = [(b"triton-grpc-protocol-x-bin", b"!!!"), (b"grpc-encoding", b"a" * 3000), (b"grpc-tags-bin", b"!")]


def honest(triton: Triton, is_over: threading.Event) -> Counter[str]:
    """Make calls that go on to Triton's own front end."""
    seen: Counter[str] = Counter()
    with connected(triton) as channel:
        ready = channel.unary_unary(SERVICE + "ServerReady")
        while not is_over.is_set():
            infer(channel, message(classified=True))
            ready(b"", timeout=PATIENCE_S)
            seen["answered"] += 1
    return seen


def test_headers_of_one_caller_end_no_other_calls(served: Triton) -> None:
    process = server_pid(served)
    is_over = threading.Event()
    with ThreadPoolExecutor(4) as pool, connected(served) as channel:
        others = [pool.submit(honest, served, is_over) for _ in range(4)]
        try:
            for number in range(300):
                metadata = HEADERS_OF_HOSTS[number % 3]
                if number % 2:
                    call = channel.stream_stream(SERVICE + "ModelStreamInfer")
                    answer = call(iter([message(classified=True)]), timeout=PATIENCE_S, metadata=metadata)
                else:
                    call = channel.unary_unary(SERVICE + "ServerLive")
                    answer = call.future(b"", timeout=PATIENCE_S, metadata=metadata)
                assert answer.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert re.search(r"header fields .* have \d+ bytes", answer.details())
        finally:
            is_over.set()
        assert all(other.result()["answered"] > 0 for other in others)
    assert server_pid(served) == process


def test_headers_that_grpc_cannot_read_end_no_other_calls(served: Triton) -> None:
    process = server_pid(served)
    is_over = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(honest, served, is_over) for _ in range(4)]
        try:
            for number in range(60):
                calls = b"".join(
                    frame(HEADERS, END_HEADERS, 2 * i + 1, head("ServerLive", ODD_FIELDS[(number + i) % 3]))
                    + body(2 * i + 1, b"", END_STREAM)
                    for i in range(20)
                )
                with socket.create_connection(address(served), PATIENCE_S) as raw, raw.makefile("rb") as received:
                    raw.sendall(PREFACE + calls)
                    for _ in range(20):
                        read_to_end_of_stream(received)
        finally:
            is_over.set()
        assert all(other.result()["answered"] > 0 for other in others)
    assert server_pid(served) == process


# ---- memory --------------------------------------------------------------------------------------------------------


def test_calls_reset_at_once_hold_nothing(served: Triton) -> None:
    content = message(floats=25_000)
    with socket.create_connection(address(served), PATIENCE_S) as raw:
        raw.sendall(PREFACE)
        for number in range(1, 2 * 600, 2):
            # In one read of the server's.
            reset = frame(RST, 0, number, struct.pack(">I", 8))
            raw.sendall(frame(HEADERS, END_HEADERS, number, head()) + body(number, content) + reset)
    eventually(lambda: is_whole(served))


def test_streams_that_end_with_an_error_hold_nothing(served: Triton) -> None:
    bad = message(floats=25_000, classified=True)
    with connected(served) as channel:
        for _ in range(400):
            with pytest.raises(grpc.RpcError, match="header fields"):
                stream(channel, [bad], metadata=HEADERS_OF_HOSTS[2])
    eventually(lambda: is_whole(served))


@pytest.mark.parametrize("size", [LIMIT * 2, LIMIT * 8])
def test_what_a_compressed_message_grows_to_is_counted(served: Triton, size: int) -> None:
    # Zeros of a field that nobody knows.
    content = message() + PADDING + _varint(size) + bytes(size)
    with connected(served) as channel, pytest.raises(grpc.RpcError, match="max_in_flight_bytes") as caught:
        infer(channel, content, compression=grpc.Compression.Gzip)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    eventually(lambda: is_whole(served))


def test_header_fields_of_calls_that_wait_are_counted(served: Triton) -> None:
    # A field of 3900 bytes, which the table of HPACK keeps, and then takes a byte for.
    kept = b"\x40" + literal(b"triton-grpc-protocol-x", b"v" * 3900)[1:]
    with socket.create_connection(address(served), PATIENCE_S) as raw:
        raw.sendall(PREFACE)
        for number in range(3000):
            fields = head() + (b"\xbe" if number else kept) + b"\xbe" * 2
            raw.sendall(frame(HEADERS, END_HEADERS, 2 * number + 1, fields))
        eventually(lambda: not is_whole(served))
    eventually(lambda: is_whole(served))


def test_small_messages_of_one_stream_are_counted(served: Triton) -> None:
    content = message("wait", 15_000)
    with connected(served) as channel:
        try:
            with pytest.raises(grpc.RpcError, match="max_in_flight_bytes") as caught:
                stream(channel, [content] * (2 * LIMIT // len(content)))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        finally:
            release.set()
    eventually(lambda: is_whole(served))
