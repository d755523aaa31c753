"""A gRPC server that answers with whatever bytes a test gives it, and one that speaks HTTP/2 by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import json_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc import service_pb2

from support.faults.hostile_http import config
from support.waiting import PATIENCE_S

# What a method answers: the bytes of its messages, one for a call that has one answer; or it ends the call.
Answer = list[bytes] | Callable[[Any], Any]

DATA = struct.pack("<2f", 1, 2)


def response(*, data: list[bytes] | None = None, **output: Any) -> Any:
    """Return the response of a good inference, with changes."""
    message = service_pb2.ModelInferResponse(model_name="m", model_version="1")
    message.outputs.add(**{"name": "y", "datatype": "FP32", "shape": [1, 2], **output})
    message.raw_output_contents.extend([DATA] if data is None else data)
    return message


def model_config(decoupled: bool) -> Any:
    return json_format.ParseDict({"config": config(decoupled)}, service_pb2.ModelConfigResponse())


class HostileGrpcServer(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Answers well, but for the methods where a test says otherwise."""

    def __init__(self, compression: grpc.Compression | None = None) -> None:
        self.answers: dict[str, Answer] = {}  # what a method answers, by its name
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(
            self._pool, handlers=[self], options=[("grpc.max_send_message_length", -1)], compression=compression
        )
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"  # of the server
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(PATIENCE_S)
        self._pool.shutdown()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(lambda _, context: iter(self._answer(method, b"", context)))
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: (self._answer(method, request, context) or [None])[0]
        )

    def _answer(self, method: str, request: bytes, context: Any) -> Any:
        given = self.answers.get(method)
        if given is None:
            return [self._good(method, request)]
        return given(context) if callable(given) else given

    @staticmethod
    def _good(method: str, request: bytes) -> bytes:
        if method == "ModelReady":
            message = service_pb2.ModelReadyResponse(ready=True)
        elif method == "ModelConfig":
            message = model_config(service_pb2.ModelConfigRequest.FromString(request).name == "d")
        elif method == "ModelInfer":
            message = response()
        else:
            message = service_pb2.ModelStreamInferResponse(infer_response=response())
        content: bytes = message.SerializeToString()
        return content


@contextlib.contextmanager
def hostile_grpc_server(compression: grpc.Compression | None = None) -> Iterator[HostileGrpcServer]:
    """Run a server of that kind, whose answers are compressed or not."""
    server = HostileGrpcServer(compression)
    try:
        yield server
    finally:
        server.close()


# ---- HTTP/2 by hand ------------------------------------------------------------------------------------------------

SETTINGS, HEADERS, DATA_FRAME, GOAWAY, RST, WINDOW_UPDATE, CONTINUATION = 4, 1, 0, 7, 3, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS = 1, 4  # flags of frames


def frame(kind: int, flags: int, stream: int, content: bytes, length: int | None = None) -> bytes:
    """Return a frame; its length is what it is, or what is given."""
    size = len(content) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK has it without a table."""
    return b"\0" + _prefixed(len(name)) + name + _prefixed(len(value)) + value


def _prefixed(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    coded, number = b"\x7f", number - 127
    while number >= 128:
        coded, number = coded + bytes([number % 128 + 128]), number // 128
    return coded + bytes([number])


def call_headers(method: str, **more: str) -> bytes:
    """Return the headers of a call to a method of Triton's service."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":authority": "localhost",
        ":path": f"/inference.GRPCInferenceService/{method}",
        "content-type": "application/grpc",
        "te": "trailers",
        **more,
    }
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())


def read_frame(reader: Any) -> tuple[int, int, int, int]:
    """Return kind, flags, stream and length of the next frame of a file."""
    head = reader.read(9)
    assert len(head) == 9, "the connection has ended"
    length = int.from_bytes(head[:3], "big")
    assert len(reader.read(length)) == length, "the connection has ended"
    return head[3], head[4], int.from_bytes(head[5:], "big"), length


OPENING = frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, 1, 0, b"")
GOOD_HEADERS = literal(b":status", b"200") + literal(b"content-type", b"application/grpc")


@contextlib.contextmanager
def by_hand(answer: bytes, keeps_open: bool) -> Iterator[str]:
    """Run a server that answers every request with the same bytes, whatever it was; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    is_over = threading.Event()
    connections: set[socket.socket] = set()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            received = b""
            # The preface, the settings and the headers of a request.
            while received.count(b"inference.GRPC") < 1 and (data := connection.recv(65536)):
                received += data
                if len(received) == len(data):
                    connection.sendall(OPENING)
            connection.sendall(answer)
            while keeps_open and connection.recv(65536):
                pass
            connection.shutdown(socket.SHUT_WR)
            is_over.wait(0.2)

    def accept() -> None:
        threads = []
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                break
            connections.add(connection)
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join(PATIENCE_S)

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"grpc://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        is_over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        accepting.join(PATIENCE_S)
        assert not accepting.is_alive()
