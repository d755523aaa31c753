"""`pytriton_responses_total`: what the page says of how requests ended is what their callers have counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientTimeoutError
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.server.tritonserver.outcomes import OUTCOMES, PROTOCOLS
from pytriton.triton import GuardConfig, ProcessWorker, RestartPolicy, Triton
from support.faults.hostile_grpc import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
    read_frame,
)
from support.http import call
from support.process_models import DIE
from support.serving import local_config, running, server_pid
from support.waiting import PATIENCE_S, eventually

X, Y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
GOOD, RAISES, RETURNS, SLOW = 1.0, 2.0, 3.0, 4.0
SLOW_S, LIMIT_S, PATIENT_S = 1.0, 0.3, 0.2
SEED = int(os.environ.get("PYTRITON_TEST_SEED", "20"))

# By a part of the text of an error, what a caller takes it for.
TEXTS = {
    "the inference callable": "failed",
    "not this one": "failed",
    "execution timeout": "time_limit",
    "Exceeds maximum queue size": "queue_full",
    "Request timeout expired": "queue_timeout",
    "was lost while": "worker_lost",
    "no worker is attached": "unavailable",
}

Counts = Counter[tuple[str, str, str]]


def infer(requests: list[Any]) -> list[Any]:
    value = float(requests[0]["x"].flat[0])
    if value == RAISES:
        raise ValueError("not today")
    if value == SLOW:
        time.sleep(SLOW_S)
    return [ValueError("not this one") if value == RETURNS else {"y": request["x"]} for request in requests]


def infer_stream(requests: list[Any]) -> Iterator[list[Any]]:
    yield [{"y": request["x"]} for request in requests]
    yield infer(requests)


def brief(requests: list[Any]) -> list[Any]:
    time.sleep(0.02)
    return [{"y": request["x"]} for request in requests]


def brief_stream(requests: list[Any]) -> Iterator[list[Any]]:
    yield brief(requests)


def counted(triton: Triton) -> Counts:
    """Read the page."""
    with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as response:
        text = response.read().decode()
    counts: Counts = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "pytriton_responses_total":
                labels = sample.labels
                counts[labels["model"], labels["protocol"], labels["outcome"]] += int(sample.value)
    return counts


def taken_for(call: Callable[[], object]) -> str:
    """Call, and say what the caller takes the end for."""
    try:
        call()
    except PyTritonClientTimeoutError as error:
        # The time of a caller is over, or that of a queue, of which the server tells.
        return "queue_timeout" if "Request timeout expired" in str(error) else "cancelled"
    except PyTritonClientError as error:
        return next(outcome for part, outcome in TEXTS.items() if part in str(error))
    return "ok"


def call_sync(url: str, model: str, x: Any, **settings: Any) -> None:
    with ModelClient(url, model, **settings) as client:
        client.infer_batch(x)


def call_futures(url: str, model: str, x: Any, **settings: Any) -> None:
    with FuturesModelClient(url, model, **settings) as client:
        client.infer_batch(x).result(PATIENCE_S)


def call_asyncio(url: str, model: str, x: Any, **settings: Any) -> None:
    async def call() -> None:
        async with AsyncioModelClient(url, model, **settings) as client:
            await client.infer_batch(x)

    asyncio.run(call())


def call_decoupled(url: str, model: str, x: Any, **settings: Any) -> None:
    with DecoupledModelClient(url, f"{model}_stream", **settings) as client:
        list(client.infer_batch(x))


def call_asyncio_decoupled(url: str, model: str, x: Any, **settings: Any) -> None:
    async def call() -> None:
        async with AsyncioDecoupledModelClient(url, f"{model}_stream", **settings) as client:
            async for _ in client.infer_batch(x):
                pass

    asyncio.run(call())


CLIENTS = [call_sync, call_futures, call_asyncio, call_decoupled, call_asyncio_decoupled]


# With the pattern, all that comes over gRPC goes on to Triton's own front end.
@pytest.fixture(scope="module", params=[None, "x-.*"], ids=["own", "forwarded"])
def served(request: pytest.FixtureRequest) -> Iterator[Triton]:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0, grpc_header_forward_pattern=request.param))
    queue = QueuePolicy(max_queue_size=3, default_timeout_microseconds=30_000)
    settings = {
        "plain": ModelConfig(),
        "limited": ModelConfig(execution_timeout_s=LIMIT_S),
        "narrow": ModelConfig(max_batch_size=1, batcher=DynamicBatcher(default_queue_policy=queue)),
    }
    for name, config in settings.items():
        for is_stream in (False, True):
            callables: list[Any] = [[infer, infer_stream], [brief, brief_stream]][name == "narrow"]
            triton.bind(
                name + "_stream" * is_stream,
                [callables[is_stream]] * (1 if name == "narrow" else 4),
                [X],
                [Y],
                config=ModelConfig(**{**vars(config), "decoupled": is_stream}),
            )
    with running(triton):
        yield triton


def urls(triton: Triton) -> dict[str, str]:
    return {"http": str(triton.http_url), "grpc": str(triton.grpc_url)}


def array(value: float) -> Any:
    return np.full((1, 1), value, np.float32)


def test_the_sums_are_those_of_the_callers(served: Triton) -> None:
    chance = random.Random(SEED)
    deeds = [("plain", GOOD), ("plain", RAISES), ("plain", RETURNS), ("plain", SLOW), ("limited", SLOW)]
    deeds += [("narrow", GOOD)] * 8
    plan = [(call, protocol, *deed) for call in CLIENTS for protocol in PROTOCOLS for deed in deeds]
    chance.shuffle(plan)
    before, lock = counted(served), threading.Lock()
    heard: Counts = Counter()

    def do(step: tuple[Any, str, str, float]) -> None:
        call, protocol, model, value = step
        is_left = model == "plain" and value == SLOW
        settings = {"inference_timeout_s": PATIENT_S if is_left else PATIENCE_S, "init_timeout_s": PATIENCE_S}
        name = model + "_stream" * (call in (call_decoupled, call_asyncio_decoupled))
        outcome = taken_for(lambda: call(urls(served)[protocol], model, array(value), **settings))
        with lock:
            heard[name, protocol, outcome] += 1

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(do, plan))
    # That a caller has left is noticed a moment later.
    eventually(lambda: sum((counted(served) - before).values()) >= len(plan))
    assert counted(served) - before == heard
    assert {outcome for _, _, outcome in heard} >= {"ok", "failed", "cancelled", "time_limit", "queue_full"}


def leave_decoupled(url: str) -> None:
    with DecoupledModelClient(url, "plain_stream", inference_timeout_s=PATIENCE_S) as client:
        responses = client.infer_batch(array(SLOW))
        next(responses)
        responses.close()


def leave_asyncio_decoupled(url: str) -> None:
    async def leave() -> None:
        async with AsyncioDecoupledModelClient(url, "plain_stream", inference_timeout_s=PATIENCE_S) as client:
            responses = client.infer_batch(array(SLOW))
            await anext(responses)
            await responses.aclose()

    asyncio.run(leave())


def leave_asyncio(url: str) -> None:
    async def leave() -> None:
        async with AsyncioModelClient(url, "plain", inference_timeout_s=PATIENCE_S) as client:
            task = asyncio.ensure_future(client.infer_batch(array(SLOW)))
            await asyncio.sleep(PATIENT_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(leave())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("leave", [leave_decoupled, leave_asyncio_decoupled, leave_asyncio])
def test_what_a_caller_leaves_is_cancelled(served: Triton, protocol: str, leave: Callable[[str], None]) -> None:
    model = "plain" if leave is leave_asyncio else "plain_stream"
    with ModelClient(urls(served)[protocol], "plain", init_timeout_s=PATIENCE_S):
        before = counted(served)
        leave(urls(served)[protocol])
    eventually(lambda: counted(served) - before == {(model, protocol, "cancelled"): 1})


def test_requests_on_one_connection_before_the_first_is_answered(served: Triton) -> None:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [GOOD]}]}).encode()
    request = b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    before = counted(served)
    host, port = urlsplit(urls(served)["http"]).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(request * 3)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 3:
            piece = connection.recv(65536)
            assert piece
            answer += piece
    assert counted(served) - before == {("plain", "http", "ok"): 3}


def test_without_a_guard_nobody_counts_and_without_its_front_end_http_alone() -> None:
    for guard, counts in (
        (GuardConfig(enabled=False), {}),
        (GuardConfig(grpc_front_end=False), {("plain", "http", "ok"): 1}),
    ):
        triton = Triton(config=local_config(allow_metrics=True, metrics_port=0), guard=guard)
        triton.bind("plain", infer, [X], [Y])
        with triton:
            triton.run()
            for url in urls(triton).values():
                call_sync(url, "plain", array(GOOD))
            assert +counted(triton) == counts


def test_what_is_refused_before_a_worker_sees_it(served: Triton) -> None:
    good = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    wrong = {
        "name": {"inputs": [{**good["inputs"][0], "name": "other"}]},
        "shape": {"inputs": [{**good["inputs"][0], "shape": [1, 2], "data": [1, 2]}]},
        "type": {"inputs": [{**good["inputs"][0], "datatype": "INT32"}]},
        "none": {"inputs": []},
    }
    bodies = [json.dumps(body).encode() for body in wrong.values()] + [b"", b"{", b"[" * 1000]
    before = counted(served)
    for ending in ("infer", "versions/7/infer", "versions/none/infer", "generate"):
        for body in bodies:
            assert status_of(served, f"/v2/models/plain/{ending}", body) >= 400
    growth = counted(served) - before
    assert growth == {("plain", "http", "invalid"): 4 * len(bodies)}


def status_of(triton: Triton, path: str, body: bytes) -> int:
    try:
        with urllib.request.urlopen(f"{triton.http_url}{path}", body, timeout=PATIENCE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.parametrize(("value", "outcome", "status"), [(GOOD, "invalid", 400), (RAISES, "failed", 500)])
def test_a_stream_that_is_asked_for_one_answer(served: Triton, value: float, outcome: str, status: int) -> None:
    before = counted(served)
    path = "/v2/models/plain_stream/generate"
    assert status_of(served, path, json.dumps({"x": value}).encode()) == status
    assert counted(served) - before == {("plain_stream", "http", outcome): 1}


def test_who_leaves_a_stream_that_was_asked_for_one_answer(served: Triton) -> None:
    before = counted(served)
    body = json.dumps({"x": SLOW}).encode()
    host, port = urlsplit(urls(served)["http"]).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /v2/models/plain_stream/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        # Its first response was given, and the head of the answer written, before the callable takes its time.
        connection.settimeout(PATIENT_S)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
    eventually(lambda: counted(served) - before == {("plain_stream", "http", "cancelled"): 1})


def test_names_that_callers_make_up_have_no_series(served: Triton) -> None:
    before = counted(served)
    for number in range(50):
        assert status_of(served, f"/v2/models/made_up_{number}/infer", b"{}") == 404
    after = counted(served)
    assert after - before == {("", "http", "invalid"): 50}
    assert not [model for model, _, _ in after if model.startswith("made_up")]


def test_grpc_refusals(served: Triton) -> None:
    grpc = pytest.importorskip("grpc")
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
    service = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
    asked = service_pb2.ModelInferRequest(model_name="plain", raw_input_contents=[np.float32(1).tobytes()])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    wrong = {}
    changes: dict[str, dict[str, Any]] = {
        "unknown": {"model_name": "made_up"},
        "version": {"model_version": "7"},
        "no_version": {"model_version": "none"},
        "contents": {"raw_input_contents": [b"", b""]},
    }
    for name, change in changes.items():
        wrong[name] = service_pb2.ModelInferRequest()
        wrong[name].CopyFrom(asked)
        for field, value in change.items():
            wrong[name].ClearField(field)
            wrong[name].MergeFrom(service_pb2.ModelInferRequest(**{field: value}))
    for name, change in {"name": {"name": "other"}, "type": {"datatype": "INT64"}, "odd": {"datatype": "ODD"}}.items():
        wrong[name] = service_pb2.ModelInferRequest()
        wrong[name].CopyFrom(asked)
        for field, value in change.items():
            setattr(wrong[name].inputs[0], field, value)
    before = counted(served)
    with grpc.insecure_channel(str(served.grpc_url).removeprefix("grpc://")) as channel:
        stub = service.GRPCInferenceServiceStub(channel)
        for request in wrong.values():
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(request, timeout=PATIENCE_S)
        assert counted(served) - before == {("plain", "grpc", "invalid"): len(wrong) - 1, ("", "grpc", "invalid"): 1}
        before = counted(served)
        answers = list(stub.ModelStreamInfer(iter([*wrong.values(), asked]), timeout=PATIENCE_S))
    assert sum(bool(answer.error_message) for answer in answers) == len(wrong)
    assert counted(served) - before == {
        ("plain", "grpc", "invalid"): len(wrong) - 1,
        ("", "grpc", "invalid"): 1,
        ("plain", "grpc", "ok"): 1,
    }


def test_a_call_of_health_that_is_refused_is_no_inference(served: Triton) -> None:
    before = counted(served)
    host, _, port = str(served.grpc_url).removeprefix("grpc://").rpartition(":")
    head = call_headers("ServerLive", long="x" * 20_000)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, head[:16384]))
        connection.sendall(frame(CONTINUATION, END_HEADERS, 1, head[16384:]))
        reader = connection.makefile("rb")
        # It is refused at once, for the size of its headers.
        while read_frame(reader)[:3] != (HEADERS, END_HEADERS | END_STREAM, 1):
            pass
    assert counted(served) == before


def test_a_worker_that_dies() -> None:
    with Triton(config=local_config(allow_metrics=True, metrics_port=0)) as triton:
        triton.bind("mortal", ProcessWorker("support.process_models:make"), [X], [Y])
        for protocol, url in urls(triton).items():
            call = partial(call_sync, url, "mortal", array(DIE), inference_timeout_s=PATIENCE_S)
            assert taken_for(call) == "worker_lost"
            assert counted(triton)["mortal", protocol, "worker_lost"] == 1
        assert sum(counted(triton).values()) == len(PROTOCOLS)


def test_each_way_is_there_from_the_start() -> None:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
    triton.bind("unasked", infer, [X], [Y])
    with triton:
        triton.run()
        counts = counted(triton)
    ways = {(model, protocol, outcome) for model in ("", "unasked") for protocol in PROTOCOLS for outcome in OUTCOMES}
    assert dict(counts) == dict.fromkeys(ways, 0)


def test_counts_go_on_in_the_next_server() -> None:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0), restart=RestartPolicy(first_delay_s=0.01))
    triton.bind("plain", infer, [X], [Y])
    with triton:
        triton.run()
        call_sync(urls(triton)["grpc"], "plain", array(GOOD))
        triton.replace_server()
        call_sync(urls(triton)["http"], "plain", array(GOOD))
        os.kill(server_pid(triton), signal.SIGKILL)

        def is_served() -> bool:
            with contextlib.suppress(PyTritonClientError):
                call_sync(urls(triton)["grpc"], "plain", array(GOOD))
                return True
            return False

        eventually(is_served)
        counts = +counted(triton)
    assert counts["plain", "http", "ok"] == 1
    assert counts["plain", "grpc", "ok"] == 2


def test_no_count_goes_back_when_a_server_is_stopped_and_started_again() -> None:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
    triton.bind("m", infer, [X], [Y], config=ModelConfig(batching=False))
    before: Counts = Counter()
    for _ in range(3):
        # Not `running`, which waits until no other server of this module has threads here.
        with contextlib.ExitStack() as started:
            triton.run()
            started.callback(triton.stop)
            now = counted(triton)
            assert not before - now
            # The guard is tried out by requests of this kind, which are left out of the counts.
            assert call(triton.http_url, "POST", "/v2/models/unknown/infer", {"inputs": []})[0] != 200
            wanted = now + Counter({("", "http", "invalid"): 1})
            eventually(lambda: not wanted - counted(triton))  # noqa: B023
            before = counted(triton)
