"""How tensors travel: KServe v2 over HTTP and gRPC, and raw bytes or JSON for servers without binary tensors."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.servers.models import Model

_LENGTH_HEADER = "Inference-Header-Content-Length"
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
GRPC_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_GRPC_LIMIT_BYTES = 1 << 30

Array = npt.NDArray[Any]


class WrongAnswerError(Exception):
    """A server answered something else than what its model computes."""


@dataclass(frozen=True)
class HttpRequest:
    """What is posted, again and again."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Wire(ABC):
    """A form of requests and answers over HTTP."""

    @abstractmethod
    def encode(self, model: Model, inputs: Sequence[Array]) -> HttpRequest:
        """Return the request for one row of each input."""

    def encode_many(self, model: Model, inputs: Sequence[Array], request_id: str) -> HttpRequest | None:
        """Return the request for several rows of each input, with an id; `None` where the form has no such thing."""
        return None

    @abstractmethod
    def decode(self, model: Model, headers: Mapping[str, str], body: bytes) -> Array:
        """Return the row `y` of an answer, whose header names are in lower case.

        Raises:
            WrongAnswerError: it has another form.
        """


class KServeWire(Wire):
    """KServe v2 over HTTP with the binary tensor extension, as Triton speaks it."""

    def encode(self, model: Model, inputs: Sequence[Array]) -> HttpRequest:
        return self.encode_many(model, [value.reshape(1, -1) for value in inputs])

    def encode_many(self, model: Model, inputs: Sequence[Array], request_id: str = "") -> HttpRequest:
        data = [dump_tensor(value) for value in inputs]
        named = {"id": request_id} if request_id else {}
        header = json.dumps(
            {
                **named,
                "inputs": [
                    {
                        "name": name,
                        "shape": [len(value), model.width],
                        "datatype": model.datatype,
                        "parameters": {"binary_data_size": len(raw)},
                    }
                    for name, value, raw in zip(model.inputs, inputs, data, strict=True)
                ],
                "parameters": {"binary_data_output": True},
            },
            separators=(",", ":"),
        ).encode()
        headers = {"Content-Type": "application/octet-stream", _LENGTH_HEADER: str(len(header))}
        return HttpRequest(f"/v2/models/{model.name}/infer", headers, b"".join([header, *data]))

    def decode(self, model: Model, headers: Mapping[str, str], body: bytes) -> Array:
        split = headers.get(_LENGTH_HEADER.lower())
        if split is None:
            raise WrongAnswerError(f"expected the header {_LENGTH_HEADER}, received {dict(headers)} and {body[:200]!r}")
        outputs = json.loads(body[: int(split)])["outputs"]
        found = [(output["name"], output["shape"], output["datatype"]) for output in outputs]
        if found != [("y", [1, model.width], model.datatype)]:
            raise WrongAnswerError(f"expected one output y {model.datatype} [1, {model.width}], received {found}")
        return load_tensor(model, body[int(split) :])


class RawWire(Wire):
    """The bytes of all inputs in, the bytes of the output back."""

    def encode(self, model: Model, inputs: Sequence[Array]) -> HttpRequest:
        body = b"".join(dump_tensor(value) for value in inputs)
        return HttpRequest(f"/{model.name}", {"Content-Type": "application/octet-stream"}, body)

    def decode(self, model: Model, headers: Mapping[str, str], body: bytes) -> Array:
        return load_tensor(model, body)


class KServeJsonWire(Wire):
    """KServe v2 with the numbers as JSON, for servers without the binary extension."""

    def encode(self, model: Model, inputs: Sequence[Array]) -> HttpRequest:
        tensors = [
            {"name": name, "shape": [1, model.width], "datatype": model.datatype, "data": value.tolist()}
            for name, value in zip(model.inputs, inputs, strict=True)
        ]
        body = json.dumps({"inputs": tensors}).encode()
        return HttpRequest(f"/v2/models/{model.name}/infer", {"Content-Type": "application/json"}, body)

    def decode(self, model: Model, headers: Mapping[str, str], body: bytes) -> Array:
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)


class JsonWire(Wire):
    """A JSON object with a list of rows, each with all inputs; a list of rows back."""

    def encode(self, model: Model, inputs: Sequence[Array]) -> HttpRequest:
        body = json.dumps({"rows": [[value.tolist() for value in inputs]]}).encode()
        return HttpRequest(f"/{model.name}", {"Content-Type": "application/json"}, body)

    def decode(self, model: Model, headers: Mapping[str, str], body: bytes) -> Array:
        return np.array(json.loads(body), np.float32).reshape(-1)


def dump_tensor(value: Array) -> bytes:
    """Return the bytes of a tensor: strings each behind its length in four bytes."""
    if value.dtype.kind in "SO":
        return b"".join(struct.pack("<I", len(text)) + text for text in value.ravel().tolist())
    return value.tobytes()


def load_tensor(model: Model, data: bytes) -> Array:
    """Return the row that `dump_tensor` wrote; raises `WrongAnswerError` when it has another length."""
    if model.datatype == "FP32":
        if len(data) != 4 * model.width:
            raise WrongAnswerError(f"expected {model.width} float32, received {len(data)} bytes: {data[:200]!r}")
        return np.frombuffer(data, np.float32)
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if len(found) != model.width:
        raise WrongAnswerError(f"expected {model.width} strings, received {len(found)}: {data[:200]!r}")
    return np.array(found, object)


# --- gRPC ----------------------------------------------------------------------------------------------------------


def encode_grpc(model: Model, inputs: Sequence[Array]) -> bytes:
    """Return a `ModelInferRequest` for one row of each input."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model.name)
    for name, value in zip(model.inputs, inputs, strict=True):
        request.inputs.add(name=name, datatype=model.datatype, shape=[1, model.width])
        request.raw_input_contents.append(dump_tensor(value))
    return bytes(request.SerializeToString())


def decode_grpc(model: Model, data: bytes) -> Array:
    """Return the row `y` of a `ModelInferResponse`."""
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse.FromString(data)
    if len(response.outputs) != 1 or response.outputs[0].name != "y":
        raise WrongAnswerError(f"expected one output y, received {[output.name for output in response.outputs]}")
    return load_tensor(model, response.raw_output_contents[0])


def decode_grpc_stream(model: Model, data: bytes) -> Array:
    """Return the row `y` of a `ModelStreamInferResponse`."""
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse.FromString(data)
    if response.error_message:
        raise WrongAnswerError(f"expected a response, received the error {response.error_message!r}")
    return decode_grpc(model, response.infer_response.SerializeToString())


# --- checks --------------------------------------------------------------------------------------------------------


def example(model: Model, number: int = 0) -> list[Array]:
    """Return one row of each input, which differs from number to number."""
    if model.datatype == "BYTES":
        return [np.array([b"%0*d" % (model.item_bytes, number + column) for column in range(model.width)], object)]
    row = np.arange(model.width, dtype=np.float32) % 4096 + np.float32(number)
    return [row, row * np.float32(0.5)][: len(model.inputs)]


def answer_to(inputs: Sequence[Array]) -> Array:
    """Return the row that every model gives for a row of each input."""
    result: Array = inputs[0] + inputs[1] if len(inputs) > 1 else inputs[0]
    return result


class HttpCaller:
    """Asks a server over one HTTP connection; close it."""

    def __init__(self, port: int, wire: Wire, timeout_s: float) -> None:
        self._wire = wire
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self.close = self._connection.close

    def __call__(self, model: Model, inputs: Sequence[Array]) -> Array:
        request = self._wire.encode(model, inputs)
        self._connection.request("POST", request.path, request.body, dict(request.headers))
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise WrongAnswerError(
                f"expected status 200 from {request.path}, received {response.status}: {answer[:200]!r}"
            )
        return self._wire.decode(model, {name.lower(): value for name, value in response.getheaders()}, answer)


class BareSocket:
    """HTTP with the least that a client can do; the body of a response lies in `body`."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = bytearray(1 << 16)
        self.body = memoryview(b"")
        self.headers: dict[str, str] = {}
        self.close = self._socket.close

    def post(self, request: HttpRequest) -> None:
        """Send a request, wait for its response."""
        fields = {"Host": "localhost", "Content-Length": str(len(request.body)), **request.headers}
        head = f"POST {request.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._socket.sendall(head.encode() + b"\r\n")
        self._socket.sendall(request.body)
        size, end = 0, -1
        while end < 0:
            size += self._receive(size)
            end = self._memory.find(b"\r\n\r\n", 0, size)
        status, *lines = bytes(self._memory[:end]).decode().split("\r\n")
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        total = end + 4 + int(self.headers["content-length"])
        if total > len(self._memory):
            self._memory = self._memory + bytearray(total - len(self._memory))
        while size < total:
            size += self._receive(size)
        self.body = memoryview(self._memory)[end + 4 : total]
        if " 200 " not in f"{status} ":
            raise WrongAnswerError(f"expected status 200, received {status} {bytes(self.body[:200])!r}")

    def _receive(self, at: int) -> int:
        with memoryview(self._memory) as memory:
            count = self._socket.recv_into(memory[at:])
        if not count:
            raise ConnectionError("the server closed the connection")
        return count


class GrpcCaller:
    """Asks a server over one gRPC channel; close it."""

    def __init__(self, port: int, timeout_s: float) -> None:
        import grpc

        self._error: type[Exception] = grpc.RpcError
        limits = [("grpc.max_send_message_length", _GRPC_LIMIT_BYTES), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[*limits, ("grpc.use_local_subchannel_pool", 1)]
        )
        self._ask = self._channel.unary_unary(GRPC_INFER)
        self._timeout_s = timeout_s
        self.close = self._channel.close

    def __call__(self, model: Model, inputs: Sequence[Array]) -> Array:
        return decode_grpc(model, self.send(encode_grpc(model, inputs)))

    def send(self, message: bytes) -> bytes:
        """Return the bytes of the answer to the bytes of a request."""
        try:
            return bytes(self._ask(message, timeout=self._timeout_s))
        except self._error as error:
            raise ConnectionError(f"gRPC: {error}") from None

    def stream(self, message: bytes) -> list[bytes]:
        """Return the bytes of all answers to the bytes of a request that is answered by a stream."""
        try:
            return list(self._channel.stream_stream(GRPC_STREAM)(iter([message]), timeout=self._timeout_s))
        except self._error as error:
            raise ConnectionError(f"gRPC: {error}") from None


def check_answers(caller: Any, model: Model, *, threads: int = 1, requests: int = 1, timeout_s: float = 120) -> None:
    """Send rows that differ from request to request and compare every answer with what the model computes.

    Several threads make the server form batches, so rows that come back to the wrong caller show up.

    Args:
        caller: Makes an `HttpCaller` or a `GrpcCaller`, given how long to wait for an answer, in seconds.
        model: What to ask.
        threads: How many ask at the same time.
        requests: How many each of them sends.
        timeout_s: How long to wait for each answer.

    Raises:
        WrongAnswerError: an answer has another status, form or value than expected.
        OSError: the server does not listen, or closed the connection, or did not answer in time.
    """
    failures: list[Exception] = []

    def ask(thread: int) -> None:
        call = caller(timeout_s)
        try:
            for request in range(requests):
                inputs = example(model, thread * 1000 + request)
                expected = answer_to(inputs)
                received = call(model, inputs)
                if not np.array_equal(received, expected):
                    raise WrongAnswerError(f"expected {expected[:8]} from {model.name}, received {received[:8]}")
        except (WrongAnswerError, OSError, http.client.HTTPException) as error:
            failures.append(error)
        finally:
            call.close()

    crowd = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(requests * timeout_s)
    if any(thread.is_alive() for thread in crowd):
        raise TimeoutError(f"waited {requests * timeout_s:g} s for {requests} answers of model {model.name}")
    if failures:
        error = failures[0]
        raise OSError(f"{type(error).__name__}: {error}") if isinstance(error, http.client.HTTPException) else error
