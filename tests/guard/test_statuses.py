"""With which status each endpoint of inference answers what is wrong; the table is in docs/errors.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.triton import Triton
from support.callables import identity
from support.faults.raw_http import ask, connect, read_answer
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

LIMIT_S = 0.2
LONG = 2000
GO_ON = threading.Event()

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def failing(requests: Any) -> Any:
    raise ValueError("not this one")


def same_stream(requests: Any) -> Iterator[Any]:
    yield identity(requests)


def failing_stream(requests: Any) -> Iterator[Any]:
    yield identity(requests)
    raise ValueError("not any more")


def slow(requests: Any) -> Any:
    time.sleep(2 * LIMIT_S)
    return identity(requests)


def slow_stream(requests: Any) -> Iterator[Any]:
    yield slow(requests)


def held(requests: Any) -> Any:
    assert GO_ON.wait(PATIENCE_S)
    return identity(requests)


def long_stream(requests: Any) -> Iterator[Any]:
    for number in range(LONG):
        yield [{"y": np.full(1000, number, np.float32)} for _ in requests]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
    for name, model in (("same", identity), ("failing", failing)):
        triton.bind(name, model, [x], [y], config=ModelConfig(batching=False))
    for stream in (same_stream, failing_stream):
        triton.bind(stream.__name__, stream, [x], [y], config=ModelConfig(batching=False, decoupled=True))
    limited = ModelConfig(batching=False, execution_timeout_s=LIMIT_S)
    triton.bind("slow", slow, [x], [y], config=limited)
    triton.bind("slow_stream", slow_stream, [x], [y], config=dataclasses.replace(limited, decoupled=True))
    full = DynamicBatcher(default_queue_policy=QueuePolicy(max_queue_size=1))
    triton.bind("held", held, [x], [y], config=ModelConfig(max_batch_size=1, batcher=full))
    long = Tensor(name="y", dtype=np.float32, shape=(1000,))
    triton.bind("long_stream", long_stream, [x], [long], config=ModelConfig(batching=False, decoupled=True))
    with short_home(), running(triton):
        yield triton


def tensor(**changes: Any) -> str:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], **changes}]})


def over_grpc(triton: Triton, model: str, values: int = 1, **changes: Any) -> str:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * values)])
    request.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [values], **changes})
    with grpc.insecure_channel((triton.grpc_url or "").removeprefix("grpc://")) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def row(name: str) -> list[str]:
    """Return what the page says of a case: over infer, generate, generate_stream and gRPC."""
    found = re.search(rf"(?m)^\| {re.escape(name)} \| (.*) \|$", PAGE.read_text())
    assert found is not None, name
    return [cell.strip("` ") for cell in found[1].split(" | ")]


# The bodies for `infer`, and for the other two; what is different over gRPC, where that is possible.
MISTAKES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "a body that is no JSON": ("{", "{", None),
    "an empty body": ("", "", None),
    "an element of another kind, such as a text for a number": (tensor(data=["a"]), '{"x":"a"}', None),
    "an input that the model has not": (tensor(name="z"), '{"z":1}', {"name": "z"}),
    "another shape than the declared one": (tensor(shape=[2], data=[1, 2]), '{"x":[1,2]}', {"values": 2}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_caller(served: Triton, name: str) -> None:
    infer, generate, changes = MISTAKES[name]
    told = [str(ask(served, post(path, body))[0]) for path, body in (
        ("same/infer", infer), ("same/generate", generate), ("same_stream/generate_stream", generate),
    )]  # fmt: skip
    told.append("-" if changes is None else over_grpc(served, "same", **changes))
    assert told == row(name)


def test_a_model_that_is_not_there(served: Triton) -> None:
    told = [str(ask(served, post(f"none/{verb}", '{"x":1}'))[0]) for verb in ("infer", "generate", "generate_stream")]
    assert [*told, over_grpc(served, "none")] == row("a model that is not there")


def test_a_callable_that_raises(served: Triton) -> None:
    assert told_of(served, "failing", tensor()) == row("the callable raises, before its first response")


def test_a_callable_that_takes_too_long(served: Triton) -> None:
    assert told_of(served, "slow", tensor()) == row("an execution timeout, or a worker that is gone")
    assert ask(served, post("slow_stream/generate_stream", '{"x":1}'))[0] == 503


def test_a_queue_that_is_full(served: Triton) -> None:
    body = tensor(shape=[1, 1])
    with contextlib.ExitStack() as stack:
        stack.callback(GO_ON.set)
        asked: list[socket.socket] = []

        def is_full() -> bool:
            asked.append(stack.enter_context(connect(served)))
            asked[-1].sendall(post("held/infer", body))
            return bool(select.select(asked, [], [], 0.05)[0])

        # Nothing is answered before, so who has an answer was refused.
        eventually(is_full)
        assert told_of(served, "held", body, shape=[1, 1]) == row("the queue is full")
        GO_ON.set()
        assert {read_answer(connection)[0] for connection in asked} == {200, 503}


def test_an_error_within_a_stream(served: Triton) -> None:
    status, _ = ask(served, post("failing_stream/generate_stream", '{"x":1}'))
    assert status == 200
    assert row("the callable raises, after that")[2] == "200, and an event with `error"
    assert row("the callable raises, after that")[:2] == ["501", "500"]
    assert ask(served, post("failing_stream/generate", '{"x":1}'))[0] == 500
    assert ask(served, post("failing_stream/infer", tensor()))[0] == 501
    assert over_grpc(served, "failing_stream") == "UNIMPLEMENTED"


def told_of(triton: Triton, model: str, infer: str, **changes: Any) -> list[str]:
    """Return how a request is answered over infer, generate, generate_stream and gRPC."""
    asked = {"infer": infer, "generate": '{"x":1}', "generate_stream": '{"x":1}'}
    over_http = [str(ask(triton, post(f"{model}/{verb}", body))[0]) for verb, body in asked.items()]
    return [*over_http, over_grpc(triton, model, **changes)]


@pytest.mark.parametrize("host", ["", "http://h"])
@pytest.mark.parametrize("line", ["HTTP/1.0", "HTTP/1.0\r\nConnection: keep-alive"])
def test_http_1_0_has_no_chunks(served: Triton, line: str, host: str) -> None:
    def answer(path: str, body: str = '{"x":1}') -> tuple[bytes, bytes]:
        with connect(served) as connection:
            connection.sendall(post(path, body, line, host))
            head, _, body_of_it = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert b"chunked" not in head, head
        return head.split(b"\r\n")[0], body_of_it

    status, body = answer("same/generate")
    assert (status, json.loads(body)["y"]) == (b"HTTP/1.0 200 OK", 1)
    status, body = answer("failing/generate")
    assert (status, "not this one" in json.loads(body)["error"]) == (b"HTTP/1.0 500 Internal Server Error", True)
    status, body = answer("failing_stream/generate_stream")
    events = [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event]
    assert (status, events[0]["y"], "not any more" in events[1]["error"]) == (b"HTTP/1.0 200 OK", 1, True)


def test_a_caller_of_http_1_0_who_reads_slowly_gets_all(served: Triton) -> None:
    with connect(served, receive_buffer=4096) as connection:
        connection.sendall(post("long_stream/generate_stream", '{"x":1}', "HTTP/1.0"))
        data = b""
        while part := connection.recv(65536 if len(data) > 1_000_000 else 1000):
            data += part
    text = data.partition(b"\r\n\r\n")[2]
    events = [json.loads(event.removeprefix(b"data: ")) for event in text.split(b"\n\n") if event]
    assert [event["y"] for event in events] == [[float(number)] * 1000 for number in range(LONG)]


def test_an_error_that_is_behind_another_request_of_its_connection(served: Triton) -> None:
    with connect(served) as connection:
        connection.sendall(post("same/infer", tensor()) + post("same/infer", "{") + post("same/infer", tensor()))
        data = b""
        while data.count(b"HTTP/1.1 ") < 3 or not data.endswith(b"]}]}"):
            part = connection.recv(65536)
            assert part, data
            data += part
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"400", b"200"]


def post(path: str, body: str, line: str = "HTTP/1.1", host: str = "") -> bytes:
    return f"POST {host}/v2/models/{path} {line}\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
