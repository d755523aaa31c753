"""The end of requests and servers: what is answered arrives, what nobody has is not waited for, and the rest is."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient
from pytriton.model_config import DynamicBatcher, ModelConfig
from pytriton.proxy_backend.transport.activity import EndpointActivity, ask_activity
from pytriton.server.lifecycle import orphans
from pytriton.server.lifecycle.orphans import OrphanedRequests
from pytriton.triton import GuardConfig, Triton
from support.callables import X, Y, identity
from support.processes import stopped
from support.serving import local_config, queued, running, server_pid, short_home
from support.streams import Stream
from support.waiting import PATIENCE_S, eventually

# The time after which what is held counts as stranded, where the tests do not want to wait so long; and a time that is
# many times longer, but far from that in which requests are cut off.
QUIET_S = 0.4
LONG_S = 1.2
# More than gRPC reads ahead, in megabytes; and the time in which a server that is given up is gone.
MANY = 100
GONE_S = 3.5


def twice(requests: Any) -> Iterator[Any]:
    for _ in range(2):
        yield [{"y": request["x"]} for request in requests]


def megabytes(requests: Any) -> Iterator[Any]:
    for number in range(MANY):
        yield [{"y": np.full((1, 1 << 18), number, np.float32)} for _ in requests]


@pytest.fixture(autouse=True)
def _home() -> Iterator[None]:
    with short_home():
        yield


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "QUIET_S", QUIET_S)


def infer(url: str | None, model: str, value: float) -> float:
    connection = http.client.HTTPConnection(str(url).removeprefix("http://"), timeout=PATIENCE_S)
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return float(answer["outputs"][0]["data"][0])
    finally:
        connection.close()


# ---- what is not waited for ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_stream_that_stays_open_holds_no_unbind(caplog: pytest.LogCaptureFixture, is_ours: bool) -> None:
    triton = Triton(config=local_config(), guard=GuardConfig(grpc_front_end=is_ours))
    triton.bind("twice", twice, X, Y, config=ModelConfig(decoupled=True))
    with running(triton):
        # Its first request keeps the model loaded, in Triton's own front end, for as long as it is open.
        with Stream(triton) as stream:
            stream.send("twice", 4.0)
            while not stream.next().final:
                pass
            with caplog.at_level(logging.WARNING):
                triton.unbind("twice", timeout_s=PATIENCE_S)
            assert ("of which all requests are answered" in caplog.text) is not is_ours
            # The name is free, whatever Triton holds of the other one.
            triton.bind("twice", identity, X, Y)
            assert infer(triton.http_url, "twice", 5.0) == 5.0
        triton.unbind("twice")


@pytest.mark.usefixtures("_soon")
def test_streams_that_are_left_at_their_end_do_not_hold_the_server() -> None:
    # A stop that waited for them would take longer than a test may.
    triton = Triton(config=local_config(exit_timeout_secs=3600))
    triton.bind("twice", twice, X, Y, config=ModelConfig(decoupled=True))
    with running(triton):
        with DecoupledModelClient(str(triton.grpc_url), "twice") as client:
            for _ in range(20):
                responses = client.infer_batch(np.ones((1, 1), np.float32))
                next(responses)
                responses.close()
        assert triton.stop()


# ---- what is ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_soon")
def test_an_answer_that_is_read_slowly_arrives() -> None:
    size = 24 << 20
    triton = Triton(config=local_config())
    triton.bind("large", lambda requests: [{"y": np.zeros((1, size // 4), np.float32)} for _ in requests], X, Y)
    with running(triton):
        host, _, port = str(triton.http_url).removeprefix("http://").partition(":")
        body = json.dumps(
            {
                "inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        with socket.socket() as caller, ThreadPoolExecutor(1) as threads:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            caller.settimeout(PATIENCE_S)
            caller.connect((host, int(port)))
            caller.sendall(b"POST /v2/models/large/infer HTTP/1.1\r\nHost: here\r\nContent-Length: ")
            caller.sendall(b"%d\r\n\r\n%s" % (len(body), body))
            received = len(caller.recv(1))
            end = threads.submit(triton.stop)
            time.sleep(LONG_S)
            while chunk := caller.recv(1 << 20):
                received += len(chunk)
                if received > size:
                    break
            assert received > size
            assert end.result()


@pytest.mark.usefixtures("_soon")
def test_a_stream_that_is_read_slowly_gets_all_its_responses() -> None:
    triton = Triton(config=local_config())
    triton.bind("megabytes", megabytes, X, Y, config=ModelConfig(decoupled=True))
    with running(triton), ThreadPoolExecutor(1) as threads:
        with DecoupledModelClient(str(triton.grpc_url), "megabytes", inference_timeout_s=PATIENCE_S) as client:
            process = server_pid(triton)
            responses = client.infer_batch(np.ones((1, 1), np.float32))
            first = next(responses)
            end = threads.submit(triton.stop)
            time.sleep(GONE_S)
            numbers = [float(response["y"][0, 0]) for response in (first, *responses)]
            # After such a stream gRPC itself may take seconds for its end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        assert numbers == list(range(MANY))
        assert end.result()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("how", ["unbind", "stop"])
def test_requests_in_the_queue_and_at_slow_workers_are_answered(how: str) -> None:
    both_came = threading.Event()

    def slow(requests: Any) -> Any:
        assert both_came.wait(PATIENCE_S)
        time.sleep(LONG_S)
        return identity(requests)

    def pauses(requests: Any) -> Iterator[Any]:
        yield identity(requests)
        time.sleep(LONG_S)
        yield identity(requests)

    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
    batcher = DynamicBatcher(max_queue_delay_microseconds=int(LONG_S * 1e6), preferred_batch_size=[8])
    triton.bind("held", identity, X, Y, config=ModelConfig(max_batch_size=8, batcher=batcher))
    triton.bind("slow", slow, X, Y, config=ModelConfig(max_batch_size=1))
    triton.bind("pauses", pauses, X, Y, config=ModelConfig(decoupled=True))
    with running(triton), Stream(triton) as stream, ThreadPoolExecutor(6) as threads:
        stream.send("pauses", 1.0)
        assert stream.next().value == 1.0
        # The second one of "slow" waits for the first.
        answers = [threads.submit(infer, triton.http_url, name, 2.0) for name in ("held", "slow", "slow")]
        eventually(lambda: (answers[0].done() or queued(triton, "held") == 1) and queued(triton, "slow") == 1)
        both_came.set()
        end = [triton.stop] if how == "stop" else [partial(triton.unbind, name) for name in ("held", "slow", "pauses")]
        ends = [threads.submit(each) for each in end]
        assert [answer.result(PATIENCE_S) for answer in answers] == [2.0] * 3
        assert stream.next().value == 1.0
        stream.close()
        for each in ends:
            each.result(PATIENCE_S)


# ---- what proxy backends say -----------------------------------------------------------------------------------------

FOREIGN = """
import sys, threading
from pathlib import Path
from pytriton.proxy_backend import Worker, description_path, read_description

go_on = threading.Event()

def infer(requests):
    sys.stdout.write("has it\\n")
    sys.stdout.flush()
    go_on.wait()
    return [{"y": request["x"]} for request in requests]

endpoint = Path(sys.argv[1])
worker = Worker(infer, read_description(description_path(endpoint)), endpoint)
worker.start()
worker.wait_attached(300)
sys.stdout.write("attached\\n")
sys.stdout.flush()
sys.stdin.readline()
go_on.set()
sys.stdin.read()
worker.stop(5)
"""


def test_a_request_counts_wherever_it_is() -> None:
    begun, go = threading.Event(), threading.Event()

    def waits(requests: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE_S)
        return identity(requests)

    triton = Triton(config=local_config())
    triton.bind("m", waits, X, Y, config=ModelConfig(max_batch_size=1, attach_timeout_s=PATIENCE_S))
    with running(triton), ThreadPoolExecutor(2) as threads:
        session = triton._life.session
        assert session is not None
        endpoint = session.deployment.models[0].endpoint(session.deployment.endpoints)
        assert ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=0, taken=0)
        first = threads.submit(infer, triton.http_url, "m", 1.0)
        assert begun.wait(PATIENCE_S)
        assert ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=1, taken=1)
        go.set()
        assert first.result(PATIENCE_S) == 1.0
        assert ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=0, taken=1)

        # With no worker there, and with one of another process, which is stopped.
        session.deployment.models[0].stop_workers(PATIENCE_S)
        second = threads.submit(infer, triton.http_url, "m", 2.0)
        eventually(lambda: ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=1, taken=2))
        with subprocess.Popen(
            [sys.executable, "-c", FOREIGN, str(endpoint)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as foreign:
            assert foreign.stdin is not None
            assert foreign.stdout is not None
            assert {foreign.stdout.readline(), foreign.stdout.readline()} == {"attached\n", "has it\n"}
            with stopped(foreign.pid):
                assert ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=1, taken=2)
            foreign.stdin.write("\n")
            foreign.stdin.flush()
            assert second.result(PATIENCE_S) == 2.0
            assert ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=0, taken=2)
            foreign.communicate()


@pytest.mark.usefixtures("_soon")
def test_a_server_that_does_not_answer_is_not_quiet() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    with running(triton):
        session = triton._life.session
        assert session is not None
        endpoint = session.deployment.models[0].endpoint(session.deployment.endpoints)
        looks = OrphanedRequests()
        eventually(lambda: looks.poll({endpoint: 0.0}))
        # A request between two looks, or more time than looks are apart, and it begins anew.
        assert infer(triton.http_url, "m", 3.0) == 3.0
        time.sleep(0.3)
        assert not looks.poll({endpoint: 0.0})
        # Longer than the batcher may hold requests back.
        looks = OrphanedRequests()
        deadline = time.monotonic() + 2 * QUIET_S
        while time.monotonic() < deadline:
            assert not looks.poll({endpoint: PATIENCE_S})
            time.sleep(0.05)
        assert not looks.poll({})
        assert not OrphanedRequests().poll({endpoint.with_name("nobody.sock"): 0.0})
