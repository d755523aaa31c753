"""Requests byte by byte, as no client makes them, sent over HTTP, gRPC, shared memory and in process."""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pytriton import inprocess
from pytriton.inprocess import DataType, MemoryBuffer, Tensor
from support.isolation.reference import Answer, RawRequest, RawTensor
from support.waiting import PATIENCE_S

NO_CODE = "?"
"""Of an error in a stream, which has a text alone."""
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 500: "INTERNAL", 503: "UNAVAILABLE"}


Send = Callable[[RawRequest], Answer]


def strings(*elements: bytes) -> bytes:
    """Return the wire form of strings."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def together(
    send: Send, requests: Sequence[RawRequest], pool: ThreadPoolExecutor, pause_s: float = 0.0
) -> list[Answer]:
    """Send requests that wait for their answers at the same time, in their order; return the answers in that order.

    Args:
        send: Sends one.
        requests: The requests.
        pool: Has a thread for each.
        pause_s: How long to wait after each, else the threads decide which comes first.
    """
    futures = []
    for request in requests:
        futures.append(pool.submit(send, request))
        if pause_s:
            time.sleep(pause_s)
    return [future.result(PATIENCE_S) for future in futures]


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class HttpSender:
    """Sends over HTTP, with tensors as binary data behind the JSON, or where `place` puts them."""

    def __init__(self, url: str | None, model: str, place: Callable[[RawTensor], dict[str, Any]] | None = None) -> None:
        assert url is not None
        self._address = url.removeprefix("http://")
        self._path = f"/v2/models/{model}/infer"
        self._place = place
        self._connections: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()

    def __call__(self, request: RawRequest) -> Answer:
        """Send a request and wait for its answer."""
        tensors = []
        payloads = []
        for name, (datatype, shape, payload) in request.inputs.items():
            about = {"binary_data_size": len(payload)}
            if self._place is not None:
                about = self._place(RawTensor(datatype, shape, payload))
            else:
                payloads.append(payload)
            tensors.append({"name": name, "datatype": datatype, "shape": shape, "parameters": about})
        body: dict[str, Any] = {"inputs": tensors, "parameters": {**request.parameters, "binary_data_output": True}}
        if request.id:
            body["id"] = request.id
        if request.outputs:
            body["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
        head = json.dumps(body).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        status, length, content = self._post(head + b"".join(payloads), headers)
        if status != 200:
            return Answer({}, _CODES.get(status, str(status)), json.loads(content)["error"])
        outputs = {}
        at = length
        for tensor in json.loads(content[:length]).get("outputs", ()):
            end = at + tensor["parameters"]["binary_data_size"]
            outputs[tensor["name"]] = RawTensor(tensor["datatype"], tuple(tensor["shape"]), content[at:end])
            at = end
        return Answer(outputs)

    def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, int, bytes]:
        try:
            connection = self._connections.get_nowait()
        except queue.Empty:
            connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        connection.request("POST", self._path, body, dict(headers))
        response = connection.getresponse()
        content = response.read()
        self._connections.put(connection)
        return response.status, int(response.getheader("Inference-Header-Content-Length", len(content))), content

    def close(self) -> None:
        """End all connections."""
        while not self._connections.empty():
            self._connections.get().close()


# ---- gRPC -----------------------------------------------------------------------------------------------------------


class GrpcSender:
    """Sends over gRPC: calls of their own, or a stream for each request."""

    def __init__(self, url: str | None, model: str, *, stream: bool = False) -> None:
        assert url is not None
        self._channel = grpc.insecure_channel(url.partition("://")[2])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model
        self._stream = stream

    def __call__(self, request: RawRequest) -> Answer:
        """Send a request and wait for its answer; of a stream, for its end."""
        message = service_pb2.ModelInferRequest(model_name=self._model, id=request.id)
        for name, (datatype, shape, payload) in request.inputs.items():
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(payload)
        for name in request.outputs:
            message.outputs.add(name=name)
        for name, value in request.parameters.items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(message.parameters[name], kind, value)
        try:
            if not self._stream:
                return _read_grpc(self._stub.ModelInfer(message, timeout=PATIENCE_S))
            parts = list(self._stub.ModelStreamInfer(iter([message]), timeout=PATIENCE_S))
        except grpc.RpcError as error:
            return Answer({}, error.code().name.replace("ARGUMENT", "ARG"), error.details())
        for part in parts:
            if part.error_message:
                return Answer({}, NO_CODE, part.error_message)
        [answer] = [_read_grpc(part.infer_response) for part in parts if part.infer_response.outputs]
        return answer

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


def _read_grpc(response: Any) -> Answer:
    contents = response.raw_output_contents
    return Answer(
        {
            output.name: RawTensor(output.datatype, tuple(output.shape), content)
            for output, content in zip(response.outputs, contents, strict=True)
        }
    )


# ---- shared memory --------------------------------------------------------------------------------------------------


class SharedInputs:
    """System shared memory for the inputs of requests over HTTP, each at a place of its own."""

    def __init__(self, url: str | None, name: str, token: str | None = None, capacity: int = 1 << 20) -> None:
        assert url is not None
        self._headers = {"triton-access-token": token or ""}
        self._key = f"/raw-requests.{os.getpid()}.{name}"
        self._path = f"/dev/shm{self._key}"
        self._url = url.removeprefix("http://")
        self._name = name
        with open(self._path, "w+b") as file:
            file.truncate(capacity)
            self.memory = mmap.mmap(file.fileno(), capacity)  # all of it
        self._at = 1
        self._lock = threading.Lock()
        self._call("register", {"key": self._key, "offset": 0, "byte_size": capacity})

    def __call__(self, tensor: RawTensor) -> dict[str, Any]:
        """Put a tensor there; return what a request says of it."""
        size = len(tensor.payload)
        with self._lock:
            begin = self._at
            if begin + size > len(self.memory):
                # Not at 0, where Triton takes no empty tensor.
                begin = 1
            self._at = begin + size
        self.memory[begin : begin + size] = tensor.payload
        return {"shared_memory_region": self._name, "shared_memory_offset": begin, "shared_memory_byte_size": size}

    def close(self) -> None:
        """Unregister and remove it."""
        self._call("unregister", {})
        self.memory.close()
        os.unlink(self._path)

    def _call(self, what: str, body: Mapping[str, Any]) -> None:
        with contextlib.closing(http.client.HTTPConnection(self._url, timeout=PATIENCE_S)) as connection:
            path = f"/v2/systemsharedmemory/region/{self._name}/{what}"
            connection.request("POST", path, json.dumps(body), self._headers)
            response = connection.getresponse()
            content = response.read()
        assert response.status == 200, content


# ---- in process -----------------------------------------------------------------------------------------------------


class InProcessSender:
    """Hands requests to a server in this process, with tensors over the payloads."""

    def __init__(self, server: inprocess.Server, model: str) -> None:
        self._model = server.model(model)

    def __call__(self, request: RawRequest) -> Answer:
        """Send a request and wait for its answer."""
        inputs: dict[str, Any] = {}
        try:
            for name, (datatype, shape, payload) in request.inputs.items():
                memory = np.frombuffer(bytearray(payload or b"\0"), np.uint8)[: len(payload)]
                inputs[name] = Tensor(DataType[datatype], shape, MemoryBuffer.from_dlpack(memory))
            responses = self._model.infer(
                inputs=inputs,
                request_id=request.id,
                parameters=dict(request.parameters),
                requested_outputs=list(request.outputs),
            )
            [answer] = [response for response in responses if response.outputs]
        except inprocess.TritonError as error:
            return Answer({}, _CODE_OF_ERROR.get(type(error), type(error).__name__), str(error))
        return Answer({name: _raw(tensor) for name, tensor in answer.outputs.items()})

    def close(self) -> None:
        """Nothing is kept."""


_CODE_OF_ERROR: Mapping[type, str] = {
    inprocess.InvalidArgumentError: "INVALID_ARG",
    inprocess.InternalError: "INTERNAL",
    inprocess.UnavailableError: "UNAVAILABLE",
}


def _raw(tensor: Any) -> RawTensor:
    if tensor.data_type is DataType.BYTES:
        return RawTensor("BYTES", tensor.shape, strings(*tensor.to_bytes_array().ravel().tolist()))
    return RawTensor(tensor.data_type.name, tensor.shape, np.asarray(tensor).tobytes())
