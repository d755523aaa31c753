"""A small KServe v2 server over real sockets, HTTP and gRPC, that can be slow, stuck or restricted."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from google.protobuf import json_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

TOKEN_HEADERS = {"http": "triton-access-token", "grpc": "triton-grpc-protocol-triton-access-token"}


def encode(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype == object or array.dtype.kind == "S":
        return bytes(serialize_byte_tensor(array).item()) if array.size else b""
    return array.tobytes()


def decode(data: bytes, datatype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    if datatype == "BYTES":
        return np.asarray(deserialize_bytes_tensor(data), dtype=object).reshape(shape)
    if datatype == "BF16":
        import ml_dtypes

        return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(shape)
    return np.frombuffer(data, dtype=triton_to_np_dtype(datatype)).reshape(shape)


def from_json(config: dict[str, Any], request: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a generate request, in the shapes that Triton would give to them."""
    arrays = {}
    for item in config["input"]:
        if item["name"] not in request:
            continue
        datatype = item["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        elements = request[item["name"]]
        flat = np.empty(len(elements), dtype=object) if datatype == "BYTES" else None
        if flat is None:
            flat = np.array(elements, triton_to_np_dtype(datatype))
        else:
            flat[:] = [element.encode() for element in elements]
        arrays[item["name"]] = flat.reshape(-1, *item["dims"]) if -1 not in item["dims"] else flat.reshape(1, -1)
    return arrays


def to_json(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The outputs of a generate response, which tells no shapes."""
    result: dict[str, Any] = {}
    for name, array in arrays.items():
        elements = [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]
        result[name] = elements[0] if len(elements) == 1 else elements
    return result


def datatype_of(array: np.ndarray[Any, Any]) -> str:
    # Not every tritonclient that we work with has a name for bfloat16.
    return "BF16" if array.dtype.name == "bfloat16" else str(np_to_triton_dtype(array.dtype))


class FakeError(Exception):
    """What the fake server answers in place of a result."""

    def __init__(self, http_status: int, grpc_code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.http_status = http_status
        self.grpc_code = grpc_code
        self.text = text


@dataclass
class FakeModel:
    """A model: its configuration, and what it computes from named arrays; a decoupled one yields that."""

    config: dict[str, Any]
    function: Callable[[dict[str, Any]], Any]
    versions: tuple[str, ...] = ("1",)
    is_ready: bool = True


@dataclass
class FakeTriton:
    """What both front ends share: models, faults, and a record of what was asked."""

    protocol: str
    models: dict[str, FakeModel] = field(default_factory=dict)
    is_ready: bool = True
    token: str | None = None
    restricted: set[str] = field(default_factory=set)
    delay_s: float = 0.0
    is_stuck: bool = False
    asked: Counter[str] = field(default_factory=Counter)
    last_parameters: dict[str, Any] = field(default_factory=dict)
    last_headers: dict[str, str] = field(default_factory=dict)
    last_datatypes: dict[str, str] = field(default_factory=dict)
    last_request_id: str = ""
    response_parameters: dict[str, Any] = field(default_factory=dict)
    loaded: list[dict[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def begin(self, endpoint: str, headers: dict[str, str]) -> None:
        self.asked[endpoint] += 1
        self.last_headers = headers
        if self.is_stuck:
            self.released.wait(300)
        if self.delay_s:
            time.sleep(self.delay_s)
        header = TOKEN_HEADERS[self.protocol]
        if endpoint in self.restricted and headers.get(header) != self.token:
            text = f"This API is restricted, expecting header '{header}'"
            raise FakeError(403, grpc.StatusCode.UNAVAILABLE, text)

    def model(self, name: str, version: str) -> FakeModel:
        model = self.models.get(name)
        if model is None or (version and version not in model.versions) or not model.is_ready:
            text = f"Request for unknown model: '{name}' is not found"
            raise FakeError(400, grpc.StatusCode.NOT_FOUND, text)
        return model

    def is_model_ready(self, name: str, version: str) -> bool:
        model = self.models.get(name)
        return model is not None and model.is_ready and (not version or version in model.versions)

    def infer(self, name: str, version: str, inputs: dict[str, Any]) -> dict[str, Any]:
        model = self.model(name, version)
        self.last_datatypes = {key: datatype_of(value) for key, value in inputs.items()}
        try:
            outputs: dict[str, Any] = model.function(inputs)
            return outputs
        except Exception as error:
            text = f"Traceback (most recent call last):\n{type(error).__name__}: {error}"
            raise FakeError(500, grpc.StatusCode.INTERNAL, text) from error

    def stream(self, name: str, version: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        model = self.model(name, version)
        try:
            yield from model.function(inputs)
        except Exception as error:
            raise FakeError(500, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}") from error

    def load(self, name: str, parameters: dict[str, Any]) -> None:
        self.loaded.append({"name": name, **parameters})
        self.model_or_error(name).is_ready = True

    def unload(self, name: str) -> None:
        self.model_or_error(name).is_ready = False

    def model_or_error(self, name: str) -> FakeModel:
        if name not in self.models:
            text = f"failed to load '{name}', failed to poll from model repository"
            raise FakeError(400, grpc.StatusCode.INTERNAL, text)
        return self.models[name]

    def index(self) -> list[dict[str, str]]:
        return [
            {"name": name, "version": version, "state": "READY" if model.is_ready else "UNAVAILABLE"}
            for name, model in self.models.items()
            for version in model.versions
        ]


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeTriton
    open_sockets: set[socket.socket]

    def setup(self) -> None:
        super().setup()
        self.open_sockets.add(self.connection)

    def finish(self) -> None:
        self.open_sockets.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        if self.path.endswith("/generate_stream"):
            self._generate(body)
            return
        headers: dict[str, str] = {}
        try:
            status, answer = 200, self._route(body, headers)
        except FakeError as error:
            status, answer = error.http_status, json.dumps({"error": error.text}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _generate(self, body: bytes) -> None:
        fake, request = self.fake, json.loads(body)
        parts = self.path.strip("/").split("/")
        name, version = parts[2], parts[4] if parts[3] == "versions" else ""
        fake.last_parameters, fake.last_request_id = request.pop("parameters"), request.pop("id", "")
        has_started = False
        try:
            fake.begin("inference", self._headers())
            config = fake.model(name, version).config
            for outputs in fake.stream(name, version, from_json(config, request)):
                if not has_started:
                    self._start_stream(200)
                    has_started = True
                self._send_event(
                    {"model_name": name, "model_version": "1", **fake.response_parameters, **to_json(outputs)}
                )
        except FakeError as error:
            if not has_started:
                self._start_stream(error.http_status)
                has_started = True
            self._send_event({"error": error.text})
        except OSError:
            fake.cancelled.set()
            self.close_connection = True
            return
        if not has_started:
            self._start_stream(200)
        self.wfile.write(b"0\r\n\r\n")

    def _headers(self) -> dict[str, str]:
        return {name.lower(): ", ".join(self.headers.get_all(name, [])) for name in self.headers}

    def _start_stream(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send_event(self, content: dict[str, Any]) -> None:
        event = b"data: " + json.dumps(content).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _route(self, body: bytes, answer_headers: dict[str, str]) -> bytes:
        fake, headers = self.fake, self._headers()
        parts = self.path.strip("/").split("/")
        if parts == ["v2", "health", "ready"]:
            fake.begin("health", headers)
            return self._ready(fake.is_ready)
        if parts[:3] == ["v2", "repository", "index"]:
            fake.begin("model-repository", headers)
            return json.dumps(fake.index()).encode()
        if parts[:3] == ["v2", "repository", "models"]:
            fake.begin("model-repository", headers)
            parameters = json.loads(body).get("parameters", {})
            if parts[4] == "load":
                fake.load(parts[3], parameters)
            else:
                fake.unload(parts[3])
            return b""
        name, rest = parts[2], parts[3:]
        version = rest[1] if rest[0] == "versions" else ""
        if rest[-1] == "ready":
            fake.begin("model-ready", headers)
            return self._ready(fake.is_model_ready(name, version))
        if rest[-1] == "config":
            fake.begin("model-config", headers)
            return json.dumps(fake.model(name, version).config).encode()
        fake.begin("inference", headers)
        return self._infer(name, version, headers, body, answer_headers)

    def _infer(
        self, name: str, version: str, headers: dict[str, str], body: bytes, answer_headers: dict[str, str]
    ) -> bytes:
        length = int(headers["inference-header-content-length"])
        request, position = json.loads(body[:length]), length
        self.fake.last_parameters = request.get("parameters", {})
        self.fake.last_request_id = request.get("id", "")
        inputs = {}
        for item in request["inputs"]:
            size = item["parameters"]["binary_data_size"]
            inputs[item["name"]] = decode(body[position : position + size], item["datatype"], item["shape"])
            position += size
        outputs = self.fake.infer(name, version, inputs)
        data = [encode(array) for array in outputs.values()]
        described = [
            {
                "name": key,
                "datatype": datatype_of(array),
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(piece)},
            }
            for (key, array), piece in zip(outputs.items(), data, strict=True)
        ]
        about = {"model_name": name, "model_version": "1", "id": request.get("id", "")}
        head = json.dumps({**about, "parameters": self.fake.response_parameters, "outputs": described}).encode()
        answer_headers["Inference-Header-Content-Length"] = str(len(head))
        return head + b"".join(data)

    @staticmethod
    def _ready(is_ready: bool) -> bytes:
        if not is_ready:
            raise FakeError(400, grpc.StatusCode.UNAVAILABLE, "")
        return b""


class _HttpServer(ThreadingHTTPServer):
    # More than any test opens connections: one that finds the queue full is reset after a while.
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no error of the server."""


class _GrpcServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc, unused-ignore]
    def __init__(self, fake: FakeTriton) -> None:
        self.fake = fake

    def _begin(self, endpoint: str, context: Any) -> None:
        self.fake.begin(endpoint, dict(context.invocation_metadata()))

    def _answer(self, context: Any, produce: Callable[[], Any]) -> Any:
        try:
            return produce()
        except FakeError as error:
            context.abort(error.grpc_code, error.text)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("health", context)
            return service_pb2.ServerReadyResponse(ready=self.fake.is_ready)

        return self._answer(context, produce)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("model-ready", context)
            return service_pb2.ModelReadyResponse(ready=self.fake.is_model_ready(request.name, request.version))

        return self._answer(context, produce)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("model-config", context)
            response = service_pb2.ModelConfigResponse()
            json_format.ParseDict(self.fake.model(request.name, request.version).config, response.config)
            return response

        return self._answer(context, produce)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("model-repository", context)
            return json_format.ParseDict({"models": self.fake.index()}, service_pb2.RepositoryIndexResponse())

        return self._answer(context, produce)

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("model-repository", context)
            parameters = {
                name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
            }
            self.fake.load(request.model_name, parameters)
            return service_pb2.RepositoryModelLoadResponse()

        return self._answer(context, produce)

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            self._begin("model-repository", context)
            self.fake.unload(request.model_name)
            return service_pb2.RepositoryModelUnloadResponse()

        return self._answer(context, produce)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        def produce() -> Any:
            inputs = self._read(request, context)
            return self._response(request, self.fake.infer(request.model_name, request.model_version, inputs))

        context.add_callback(lambda: None if context.code() else self.fake.cancelled.set())
        answer = self._answer(context, produce)
        context.set_code(grpc.StatusCode.OK)
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        context.add_callback(lambda: None if context.code() else self.fake.cancelled.set())
        for request in requests:
            try:
                inputs = self._read(request, context)
                for outputs in self.fake.stream(request.model_name, request.model_version, inputs):
                    yield service_pb2.ModelStreamInferResponse(infer_response=self._response(request, outputs))
            except FakeError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=error.text)
        context.set_code(grpc.StatusCode.OK)

    def _read(self, request: Any, context: Any) -> dict[str, Any]:
        self._begin("inference", context)
        self.fake.last_request_id = request.id
        self.fake.last_parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
        }
        return {
            item.name: decode(data, item.datatype, list(item.shape))
            for item, data in zip(request.inputs, request.raw_input_contents, strict=True)
        }

    def _response(self, request: Any, outputs: dict[str, Any]) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        for name, value in self.fake.response_parameters.items():
            kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
            setattr(response.parameters[name], kinds[type(value)], value)
        for name, array in outputs.items():
            response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            response.raw_output_contents.append(encode(array))
        return response


@dataclass(frozen=True)
class Certificates:
    """An authority, its certificate for this host, and files: of its own, of another authority, of a client."""

    authority: trustme.CA
    server: trustme.LeafCert
    ca: Path
    other_ca: Path
    client: Path
    client_key: Path

    def context(self, *, mutual: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.configure_cert(context)
        if mutual:
            self.authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def grpc_credentials(self, *, mutual: bool) -> Any:
        chain = b"".join(blob.bytes() for blob in self.server.cert_chain_pems)
        pair = (self.server.private_key_pem.bytes(), chain)
        root = self.authority.cert_pem.bytes() if mutual else None
        return grpc.ssl_server_credentials([pair], root, require_client_auth=mutual)


def _serve_http(fake: FakeTriton, context: ssl.SSLContext | None = None) -> Iterator[FakeTriton]:
    open_sockets: set[socket.socket] = set()
    handler = type("Handler", (_HttpHandler,), {"fake": fake, "open_sockets": open_sockets})
    with _HttpServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False
        if context is not None:
            # The handshake is for the thread of the connection, not for the one that accepts.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        fake.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            fake.released.set()
            server.shutdown()
            thread.join(300)
            for connection in list(open_sockets):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was faster


def _serve_grpc(fake: FakeTriton, credentials: Any = None) -> Iterator[FakeTriton]:
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_GrpcServicer(fake), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    fake.url = f"{'grpcs' if credentials else 'grpc'}://127.0.0.1:{port}"
    try:
        yield fake
    finally:
        fake.released.set()
        server.stop(None).wait(300)


def tensor(name: str, data_type: str, dims: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": dims, **more}


def _models() -> dict[str, FakeModel]:
    def add(arrays: dict[str, Any]) -> dict[str, Any]:
        total = arrays["a"]
        if "b" in arrays:
            total = total + arrays["b"]
        return {"sum": total}

    def upper(arrays: dict[str, Any]) -> dict[str, Any]:
        text = arrays["text"]
        result = np.empty(text.shape, dtype=object)
        result.reshape(-1)[:] = [element.upper() for element in text.reshape(-1)]
        return {"upper": result}

    def fail(arrays: dict[str, Any]) -> dict[str, Any]:
        return {"out": arrays["a"] // 0 if arrays["a"].dtype == object else np.array([1 // int(arrays["a"].sum())])}

    def count(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield as many rows as asked for: 0, 1, ...; fail at 5; never end below 0."""
        number = 0
        while number != int(arrays["n"].max()):
            if number == 5 and int(arrays["n"].max()) > 0:
                raise ValueError("five is too many")
            yield {"i": np.full(arrays["n"].shape, number, np.int64)}
            number += 1
            time.sleep(0.01 if arrays["n"].max() < 0 else 0)

    add_config = {
        "name": "add",
        "max_batch_size": 8,
        "input": [tensor("a", "FP32", [-1]), tensor("b", "FP32", [-1], optional=True)],
        "output": [tensor("sum", "FP32", [-1])],
    }
    return {
        "add": FakeModel(add_config, add, versions=("1", "2")),
        "single": FakeModel({**add_config, "name": "single", "max_batch_size": 0}, add),
        "upper": FakeModel(
            {
                "name": "upper",
                "max_batch_size": 8,
                "input": [tensor("text", "STRING", [1])],
                "output": [tensor("upper", "STRING", [1])],
            },
            upper,
        ),
        "fail": FakeModel(
            {
                "name": "fail",
                "max_batch_size": 8,
                "input": [tensor("a", "INT64", [1])],
                "output": [tensor("out", "INT64", [1])],
            },
            fail,
        ),
        "count": FakeModel(
            {
                "name": "count",
                "max_batch_size": 8,
                "input": [tensor("n", "INT64", [1])],
                "output": [tensor("i", "INT64", [1])],
                "model_transaction_policy": {"decoupled": True},
            },
            count,
        ),
        "stream": FakeModel(
            {**add_config, "name": "stream", "model_transaction_policy": {"decoupled": True}},
            lambda arrays: iter([add(arrays)]),
        ),
    }


@pytest.fixture(params=["http", "grpc"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeTriton]:
    """A server with the models add, single, upper, fail, count and stream, over each protocol in turn."""
    fake = FakeTriton(request.param, _models())
    yield from _serve_http(fake) if request.param == "http" else _serve_grpc(fake)


@pytest.fixture
def http_server() -> Iterator[FakeTriton]:
    """The same over HTTP only."""
    yield from _serve_http(FakeTriton("http", _models()))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority that has signed for this host and for a client, and another one."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    client = authority.issue_cert("client.example")
    paths = [folder / name for name in ("ca.pem", "other.pem", "client.pem", "client.key")]
    blobs = [authority.cert_pem, trustme.CA().cert_pem, client.cert_chain_pems[0], client.private_key_pem]
    for path, blob in zip(paths, blobs, strict=True):
        blob.write_to_path(path)
    return Certificates(authority, authority.issue_cert("127.0.0.1", "triton.test"), *paths)


@pytest.fixture(params=["http", "grpc"])
def encrypted_server(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[FakeTriton]:
    """The same with TLS."""
    fake = FakeTriton(request.param, _models())
    if request.param == "http":
        yield from _serve_http(fake, certificates.context(mutual=False))
    else:
        yield from _serve_grpc(fake, certificates.grpc_credentials(mutual=False))


@pytest.fixture(params=["http", "grpc"])
def mutual_server(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[FakeTriton]:
    """The same with TLS, and for clients with a certificate only."""
    fake = FakeTriton(request.param, _models())
    if request.param == "http":
        yield from _serve_http(fake, certificates.context(mutual=True))
    else:
        yield from _serve_grpc(fake, certificates.grpc_credentials(mutual=True))


@pytest.fixture
def make_model() -> Callable[..., FakeModel]:
    """Makes a model of the fake server from a configuration and a function."""
    return FakeModel


@pytest.fixture
def frozen_address() -> Iterator[str]:
    """host:port of a server that was stopped with SIGSTOP: the kernel accepts, and nobody ever answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def free_address() -> str:
    """host:port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
