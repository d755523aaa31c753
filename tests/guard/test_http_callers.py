"""Callers over HTTP who leave before they have their answer: their requests leave the queue, and callables are told."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.faults.raw_http import ask, connect
from support.http import call
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

# Closes a connection with a reset.
AT_ONCE = struct.pack("ii", 1, 0)

entered: Counter[float] = Counter()
cancelled: Counter[float] = Counter()
opened = threading.Event()


def seen(numbers: Counter[float], number: float) -> bool:
    return numbers[number] == 1


def number_of(request: Any) -> float:
    return float(request["x"].flat[0])


def patient(requests: Any) -> Any:
    """Run until the caller has left."""
    for request in requests:
        entered[number_of(request)] += 1
        eventually(request.is_cancelled)
        cancelled[number_of(request)] += 1
    return [{"y": request["x"]} for request in requests]


def patient_stream(requests: Any) -> Iterator[Any]:
    """Give an answer, and go on until the caller has left."""
    yield [{"y": request["x"]} for request in requests]
    yield patient(requests)


def gate(requests: Any) -> Any:
    for request in requests:
        entered[number_of(request)] += 1
    assert opened.wait(PATIENCE_S)
    return [{"y": request["x"]} for request in requests]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(
        config=local_config(http_thread_count=2, allow_metrics=True, metrics_address="127.0.0.1", metrics_port=0)
    )
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
    for model in (patient, gate):
        triton.bind(model.__name__, model, [x], [y], config=ModelConfig(batching=False))
    triton.bind("batches", gate, [x], [y], config=ModelConfig(max_batch_size=2))
    triton.bind("patient_stream", patient_stream, [x], [y], config=ModelConfig(batching=False, decoupled=True))
    with short_home(), running(triton):
        yield triton


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    entered.clear()
    cancelled.clear()
    opened.clear()
    yield
    opened.set()


def request(model: str, number: float, verb: str = "infer") -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1] if model == "batches" else [1], "data": [number]}
    body = json.dumps({"inputs": [tensor]} if verb == "infer" else {"x": number})
    return f"POST /v2/models/{model}/{verb} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def pending(triton: Triton, model: str) -> int:
    """Return how many requests wait for their model."""
    _, page = call(str(triton.metrics_url).removesuffix("/metrics"), "GET", "/metrics")
    found = re.search(rf'(?m)^nv_inference_pending_request_count{{.*model="{model}".*}} (\d+)', page)
    return 0 if found is None else int(found[1])


def leave(connection: socket.socket, way: str) -> None:
    if way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    elif way == "half":
        connection.shutdown(socket.SHUT_WR)
        return
    connection.close()


@pytest.mark.parametrize("way", ["close", "reset", "half", "another request"])
@pytest.mark.parametrize(
    ("model", "verb"), [("patient", "infer"), ("patient", "generate"), ("patient_stream", "generate_stream")]
)
def test_a_callable_is_told(served: Triton, model: str, verb: str, way: str) -> None:
    for number in range(1, 4):
        with connect(served) as connection:
            connection.sendall(request(model, number, verb))
            eventually(partial(seen, entered, number))
            if way == "another request":
                # It waits, unread, in front of the end of what the caller sends.
                connection.sendall(request("gate", 0))
                assert ask(served, b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n")[0] == 200
            leave(connection, way)
            eventually(partial(seen, cancelled, number))


@pytest.mark.parametrize("model", ["gate", "batches"])
@pytest.mark.parametrize("way", ["close", "reset"])
def test_what_waits_in_the_queue_is_dropped(served: Triton, model: str, way: str) -> None:
    with connect(served) as first:
        first.sendall(request(model, 1))
        eventually(partial(seen, entered, 1))
        others = [connect(served) for _ in range(20)]
        for number, connection in enumerate(others, 2):
            connection.sendall(request(model, number))
        eventually(lambda: pending(served, model) >= 18)
        for connection in others:
            leave(connection, way)
        last = connect(served)
        last.sendall(request(model, 100))
        # The thread of each connection has seen all that came before this.
        for _ in range(8):
            assert ask(served, b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n")[0] == 200
        opened.set()
        eventually(partial(seen, entered, 100))
        last.close()
    # Some may have been collected for the next batch before they left.
    assert sum(entered.values()) <= 6, entered


def test_callers_who_stay_are_answered(served: Triton) -> None:
    opened.set()
    for number in range(50):
        with connect(served) as leaving, connect(served) as staying:
            leaving.sendall(request("gate", -1))
            staying.sendall(request("gate", number))
            leaving.close()
            body = staying.recv(65536)
            assert b'"data":[%d' % number in body, body
