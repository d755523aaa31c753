"""Large tensors, where copies are all that counts: over HTTP, gRPC and shared memory of the same host."""

from __future__ import annotations

import http.client
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.generators import Run
from benchmarks.harness.results import RATE
from benchmarks.harness.wires import (
    Array,
    BareSocket,
    GrpcCaller,
    HttpRequest,
    WrongAnswerError,
    answer_to,
    encode_grpc,
    example,
)
from benchmarks.servers.models import ACCESS_TOKEN, Model
from benchmarks.workloads.base import Bench, ServedWorkload
from benchmarks.workloads.serving import Served
from pytriton.client import ModelClient

Call = Callable[[], None]
_ANSWER_TIMEOUT_S = 120
_MINIMUM_CALLS = 3
_SHARED_MEMORY = "/dev/shm"
_MANAGEMENT = {"Content-Type": "application/json", "triton-access-token": ACCESS_TOKEN}


class Large(ServedWorkload):
    """One caller with tensors of megabytes.

    The load generator of each protocol does as little as can be: `http` is a socket that sends bytes and receives them
    into memory of its own, `grpc` is grpcio without a message of protobuf to parse. `shm` writes its inputs into shared
    memory for each call, as the others have to send them, and copies the outputs out; `in-place` has its arrays there.
    `client-...` is our `ModelClient` with a new result for each call.
    """

    name = "large"
    title = "1 MiB -> 1 MiB, 2 x 4 MiB -> 4 MiB and 64 MiB -> 64 MiB, one caller, over HTTP, gRPC and shared memory"
    memory_mib = 6000
    peers = ("ours", "limit", "python-backend", "python-models", "nvidia-pytriton", "fastapi")
    models: Sequence[Model] = (
        Model("1MiB", 1 << 18, ("a",), max_batch_size=4),
        Model("2x4MiB", 1 << 20, max_batch_size=4),
        Model("64MiB", 1 << 24, ("a",), max_batch_size=4),
    )

    def cases(self) -> Sequence[str]:
        """Return a case for each way and model."""
        ways = ("http", "grpc", "shm", "in-place", "client-http", "client-grpc", "client-shm")
        return [f"{way}/{model.name}" for model in self.models for way in ways]

    def protocols(self, cases: Sequence[str]) -> Sequence[str]:
        """Return HTTP, which all have."""
        return ["http"]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Call one after the other."""
        way, _, name = case.partition("/")
        if way != "http" and not server.peer.is_triton:
            return None
        model = next(model for model in self.models if model.name == name)
        with _WAYS[way](server, model) as call:
            call()
            runs: list[Run] = []

            def repeat() -> Run:
                runs.append(_repeat(call, bench.seconds))
                return runs[-1]

            numbers, noise = server.count(repeat, model)
            numbers["client us/req"] = runs[0].cpu_s / runs[0].requests * 1e6
        megabytes = (len(model.inputs) + 1) * model.width * model.item_bytes / 1e6
        return {RATE: numbers[RATE], "MB/s": numbers[RATE] * megabytes, **numbers}, noise


def _repeat(call: Call, seconds: float) -> Run:
    times: list[float] = []
    cpu_s, began = time.process_time(), time.perf_counter()
    while len(times) < _MINIMUM_CALLS or time.perf_counter() < began + seconds:
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    wall_s = time.perf_counter() - began
    p99_ms = statistics.quantiles(times, n=100, method="inclusive")[98]
    return Run(len(times), len(times) / wall_s, statistics.median(times), p99_ms, time.process_time() - cpu_s, wall_s)


def _compare(model: Model, received: Array) -> None:
    if not np.array_equal(received, answer_to(example(model))):
        raise WrongAnswerError(f"expected what {model.name} computes, received {received[:8]}")


# --- over the network ----------------------------------------------------------------------------------------------


@contextmanager
def _over_http(server: Served, model: Model) -> Iterator[Call]:
    wire = server.peer.wire(model)
    request = wire.encode(model, example(model))
    with closing(BareSocket(server.ports.http, _ANSWER_TIMEOUT_S)) as connection:
        connection.post(request)
        _compare(model, wire.decode(model, connection.headers, bytes(connection.body)))
        yield lambda: connection.post(request)


@contextmanager
def _over_grpc(server: Served, model: Model) -> Iterator[Call]:
    message = encode_grpc(model, example(model))
    with closing(GrpcCaller(server.ports.grpc, _ANSWER_TIMEOUT_S)) as caller:
        _compare(model, caller(model, example(model)))

        def call() -> None:
            caller.send(message)

        yield call


# --- shared memory -------------------------------------------------------------------------------------------------


@contextmanager
def _region(server: Served, name: str, size: int) -> Iterator[mmap.mmap]:
    """Make a region of shared memory and register it; its name is gone from the system at once."""
    key = f"{server.scratch.name}-{name}"
    path = os.path.join(_SHARED_MEMORY, key)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.truncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        _manage(server, f"region/{name}/register", {"key": f"/{key}", "offset": 0, "byte_size": size})
    finally:
        os.close(descriptor)
        os.unlink(path)
    try:
        yield memory
    finally:
        _manage(server, f"region/{name}/unregister", {})


def _manage(server: Served, what: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=_ANSWER_TIMEOUT_S)
    with closing(connection):
        connection.request("POST", f"/v2/systemsharedmemory/{what}", json.dumps(body), _MANAGEMENT)
        response = connection.getresponse()
        text = response.read()
    if response.status != 200:
        raise WrongAnswerError(f"expected status 200 from {what}, received {response.status}: {text[:200]!r}")


@contextmanager
def _shared(server: Served, model: Model, *, is_copied: bool) -> Iterator[Call]:
    size = model.width * model.item_bytes
    inputs = example(model)

    def place(index: int, region: str) -> dict[str, Any]:
        return {
            "shared_memory_region": region,
            "shared_memory_offset": index * size,
            "shared_memory_byte_size": size,
        }

    with ExitStack() as stack:
        taken = np.frombuffer(stack.enter_context(_region(server, "inputs", size * len(inputs))), np.float32)
        given = np.frombuffer(stack.enter_context(_region(server, "outputs", size)), np.float32)
        parts = np.split(taken, len(inputs))
        result = np.empty_like(given)
        tensors = [
            {"name": name, "shape": [1, model.width], "datatype": model.datatype, "parameters": place(index, "inputs")}
            for index, name in enumerate(model.inputs)
        ]
        output = {"name": "y", "parameters": place(0, "outputs")}
        body = json.dumps({"inputs": tensors, "outputs": [output]}).encode()
        request = HttpRequest(f"/v2/models/{model.name}/infer", {"Content-Type": "application/json"}, body)
        connection = stack.enter_context(closing(BareSocket(server.ports.http, _ANSWER_TIMEOUT_S)))

        def call() -> None:
            if is_copied:
                for part, value in zip(parts, inputs, strict=True):
                    part[:] = value
            connection.post(request)
            if is_copied:
                result[:] = given

        for part, value in zip(parts, inputs, strict=True):
            part[:] = value
        call()
        _compare(model, given)
        yield call


# --- our client ----------------------------------------------------------------------------------------------------


@contextmanager
def _by_client(server: Served, model: Model, protocol: str, **options: Any) -> Iterator[Call]:
    port = server.ports.grpc if protocol == "grpc" else server.ports.http
    inputs = dict(zip(model.inputs, example(model), strict=True))
    url = f"{protocol}://127.0.0.1:{port}"
    with ModelClient(url, model.name, inference_timeout_s=_ANSWER_TIMEOUT_S, **options) as client:
        _compare(model, client.infer_sample(**inputs)["y"])

        def call() -> None:
            client.infer_sample(**inputs)

        yield call


_WAYS: dict[str, Callable[[Served, Model], Any]] = {
    "http": _over_http,
    "grpc": _over_grpc,
    "shm": lambda server, model: _shared(server, model, is_copied=True),
    "in-place": lambda server, model: _shared(server, model, is_copied=False),
    "client-http": lambda server, model: _by_client(server, model, "http"),
    "client-grpc": lambda server, model: _by_client(server, model, "grpc"),
    "client-shm": lambda server, model: _by_client(
        server, model, "http", shared_memory=True, access_token=ACCESS_TOKEN
    ),
}
