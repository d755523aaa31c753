"""Models whose worker processes end while nobody calls them, and start again for the next request."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend.process import sleep
from pytriton.proxy_backend.worker import placeholder
from pytriton.triton import ProcessWorker, Triton
from support import process_models
from support.callables import X, Y, identity
from support.http import call, infer, tensor
from support.load import ask_while_killed
from support.process_models import PID
from support.python_models import is_asleep, parent_processes, worker_processes
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

IDLE_S = 0.2


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config(allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1"))
        with running(triton):
            yield triton
            assert worker_processes() == set()


@pytest.fixture
def bind(triton: Triton) -> Iterator[Callable[..., None]]:
    """Binds a model that sleeps, which is taken away after the test."""
    bound: list[str] = []

    def bind(name: str = "m", *, config: ModelConfig | None = None, **options: Any) -> None:
        options = {"idle_timeout_s": IDLE_S, "max_crashes": 1000, **options}
        # However long a busy machine takes to start a process.
        config = config or ModelConfig(attach_timeout_s=PATIENCE_S)
        triton.bind(name, ProcessWorker(process_models.make, **options), X, Y, config=config)
        bound.append(name)

    yield bind
    for name in bound:
        triton.unbind(name)
    assert worker_processes() == set()


def test_a_model_sleeps_and_its_next_request_is_answered(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    bind(copies=2)
    for _ in range(2):
        eventually(lambda: is_asleep(triton))
        assert call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 200
        assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 200
        (pid,) = infer(triton.http_url, "m", PID)
        assert pid != os.getpid()
    text = caplog.text
    assert "sleeps: no request came for 0.2 s, so its worker processes (2) end. They took" in text
    assert "is awake again, after" in text
    assert "is started again in" not in text  # no end of a process was taken for a crash
    # Each fall into sleep and each wake-up has one line.
    lines = [
        line for line in caplog.messages if re.search("model .*m.* (sleeps|awake|asleep|detached)|Detached", line, re.I)
    ]
    assert all(re.search(r" sleeps: | is awake again, ", line) for line in lines), lines


@pytest.mark.parametrize("kind", ["process", "parent"])
def test_a_model_that_starts_asleep_has_no_process_before_its_first_request(
    triton: Triton, bind: Callable[..., None], kind: str
) -> None:
    bind(starts_asleep=True, copies=2, sleep=kind)
    assert is_asleep(triton)
    assert call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 200
    assert worker_processes() | parent_processes() == set()
    assert infer(triton.http_url, "m", 3.0) == [6.0]
    assert bool(parent_processes()) is (kind == "parent")
    eventually(lambda: is_asleep(triton))
    assert infer(triton.http_url, "m", 4.0) == [8.0]


def test_a_model_that_starts_asleep_and_has_no_idle_time_wakes_once(triton: Triton, bind: Callable[..., None]) -> None:
    bind(starts_asleep=True, idle_timeout_s=None)
    assert is_asleep(triton)
    (pid,) = infer(triton.http_url, "m", PID)
    triton.rebind("m", ProcessWorker(process_models.make, [3.0], starts_asleep=True), X, Y)
    assert infer(triton.http_url, "m", 3.0) == [9.0]
    assert infer(triton.http_url, "m", PID) != [pid]


def test_the_state_of_a_sleeping_model_is_on_the_metrics_page(triton: Triton, bind: Callable[..., None]) -> None:
    bind("m")
    eventually(lambda: is_asleep(triton))
    url = urlsplit(str(triton.metrics_url))
    page = call(f"http://{url.netloc}", "GET", "/metrics")[1]
    assert 'pytriton_worker_asleep{model="m",version="1",worker="0"} 1.0' in page
    # The alert for models without workers reads this one.
    assert 'pytriton_worker_attached{model="m"' not in page
    assert 'pytriton_worker_ends_total{model="m",version="1",worker="0"} 0.0' in page
    # A process may take a moment to end.
    eventually(lambda: 'pytriton_worker_pid{model="m"' not in call(f"http://{url.netloc}", "GET", "/metrics")[1])


def test_no_request_is_lost_between_falling_asleep_and_waking(triton: Triton, bind: Callable[..., None]) -> None:
    """Requests come at any moment around the idle time; each is answered, and rightly."""
    bind(copies=2)
    chance = random.Random(35)
    model = triton._models["m", 1]
    with ThreadPoolExecutor(4) as callers:
        wake_ups = 0
        while wake_ups < 3:
            # The looks at the idle time are a quarter of it apart, so this hits every part of a fall into sleep.
            time.sleep(chance.uniform(1.0, 1.6) * IDLE_S)
            values = [float(chance.randrange(1, 1000)) for _ in range(4)]
            answers = list(callers.map(lambda value: infer(triton.http_url, "m", value), values))
            assert answers == [[2 * value] for value in values]
            wake_ups = model.workers.totals.wakes.seconds.count


def test_workers_that_are_killed_while_they_fall_asleep_and_wake(triton: Triton, bind: Callable[..., None]) -> None:
    """Every request is answered rightly, or its caller is told which worker was lost."""
    bind(copies=2, crash_window_s=0.1)
    ask_while_killed(str(triton.http_url), worker_processes, 0.5, IDLE_S)
    # Whatever has happened, it serves and sleeps again.
    assert eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
    eventually(lambda: is_asleep(triton))


def test_a_model_that_does_not_wake_says_why(triton: Triton, bind: Callable[..., None], tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    config = ModelConfig(attach_timeout_s=0.5)
    bind(config=config, kwargs={"marker": str(marker)}, max_crashes=3, crash_window_s=600)
    eventually(lambda: is_asleep(triton))
    marker.touch()
    # Its factory kills the process: the request waits for its time, and the model is given up at last.
    assert "no worker is attached. Waited 500 ms" in infer(triton.http_url, "m", 3.0)
    eventually(lambda: "is given up after 3 ends" in str(infer(triton.http_url, "m", 3.0)))
    eventually(lambda: call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 400)


def test_a_model_whose_workers_end_while_they_wake_is_not_ready(
    triton: Triton, bind: Callable[..., None], tmp_path: Path
) -> None:
    marker = tmp_path / "broken"
    bind(config=ModelConfig(attach_timeout_s=0.1), kwargs={"marker": str(marker)}, crash_window_s=0.1)
    eventually(lambda: is_asleep(triton))
    marker.touch()
    assert "no worker is attached" in infer(triton.http_url, "m", 3.0)
    eventually(lambda: call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 400)
    marker.unlink()
    eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
    eventually(lambda: is_asleep(triton))


def test_a_factory_that_takes_longer_than_requests_wait(
    triton: Triton, bind: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    bind(config=ModelConfig(attach_timeout_s=0.1), kwargs={"gate": str(gate)})
    eventually(lambda: is_asleep(triton))
    gate.unlink()
    assert "while its workers wake from their sleep" in infer(triton.http_url, "m", 3.0)
    # The server holds its place, so it counts as ready while it wakes.
    assert call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 200
    gate.touch()
    eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
    told = "requests wait 0.1 s for a worker, and those that came first have failed meanwhile"
    eventually(lambda: told in caplog.text)


def test_a_bounded_number_of_requests_waits_for_a_wake_up(
    triton: Triton, bind: Callable[..., None], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    bind(kwargs={"gate": str(gate)})
    eventually(lambda: is_asleep(triton))
    gate.unlink()
    body = json.dumps({"inputs": [tensor("x", 3.0)]})
    request = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    address = urlsplit(str(triton.http_url))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    callers = [socket.create_connection((str(address.hostname), int(address.port or 0))) for _ in range(1100)]
    try:
        for caller in callers:
            caller.sendall(request)
        poller = select.poll()
        for caller in callers:
            poller.register(caller, select.POLLIN)
        eventually(lambda: len(poller.poll(0)) >= 100 - 4)
        gate.touch()
        answers = [answer_of(caller) for caller in callers]
    finally:
        for caller in callers:
            caller.close()
    refused = [answer for answer in answers if answer.startswith("HTTP/1.1 503")]
    assert all("as many requests as may, 1000, wait already for them to wake" in answer for answer in refused)
    assert all(answer.startswith("HTTP/1.1 200") for answer in answers if answer not in refused)
    # The waiting ones come to be a batch at a time.
    assert 96 <= len(refused) <= 104


def answer_of(caller: socket.socket) -> str:
    caller.settimeout(PATIENCE_S)
    text = b""
    while b"}" not in text:
        piece = caller.recv(65536)
        assert piece, "a connection ended without an answer"
        text += piece
    return text.decode()


def test_a_model_is_rebound_and_unbound_asleep(triton: Triton, bind: Callable[..., None]) -> None:
    bind()
    eventually(lambda: is_asleep(triton))
    triton.rebind("m", ProcessWorker(process_models.make, [3.0], idle_timeout_s=IDLE_S))
    assert infer(triton.http_url, "m", 3.0) == [9.0]
    eventually(lambda: is_asleep(triton))


def test_a_proxy_backend_that_cannot_wake_anybody_keeps_its_workers(
    triton: Triton, bind: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The same as one that does not know the bit: the capability is not in its welcome.
    monkeypatch.setattr(placeholder, "Capability", SimpleNamespace(ASLEEP=1 << 40))
    bind()
    eventually(lambda: "Model 'm' (version 1) stays awake" in caplog.text)
    assert worker_processes()
    assert infer(triton.http_url, "m", 3.0) == [6.0]


def test_a_failure_of_the_thread_wakes_the_workers(
    triton: Triton, bind: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []

    class Failing(placeholder.Placeholder):
        def hold(self, on_attached: Callable[[], bool]) -> bool:
            woken = super().hold(on_attached)
            calls.append(True)
            if len(calls) == 1:
                raise ZeroDivisionError("injected")
            return woken

    monkeypatch.setattr(sleep, "Placeholder", Failing)
    bind()
    eventually(lambda: is_asleep(triton))
    assert infer(triton.http_url, "m", 3.0) == [6.0]
    assert "ZeroDivisionError: injected" in caplog.text
    eventually(lambda: is_asleep(triton))
    assert infer(triton.http_url, "m", 3.0) == [6.0]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5m", True])
def test_an_idle_time_that_is_none(value: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.idle_timeout_s must be a finite number"):
        ProcessWorker(process_models.make, idle_timeout_s=value)


def test_what_a_model_that_starts_asleep_must_not_have() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.starts_asleep must be True or False; got 1"):
        ProcessWorker(process_models.make, starts_asleep=1)  # type: ignore[arg-type]
    with pytest.raises(PyTritonBadParameterError, match=r"pinned must be False where starts_asleep is given"):
        ProcessWorker(process_models.make, starts_asleep=True, pinned=True)
    lazy = ProcessWorker(process_models.make, starts_asleep=True)
    with pytest.raises(PyTritonBadParameterError, match="starts_asleep must be the same for all workers of a model"):
        Triton(config=local_config()).bind("m", [lazy, ProcessWorker(process_models.make)], X, Y)


def test_a_model_sleeps_as_a_whole() -> None:
    triton = Triton(config=local_config())
    sleepy = ProcessWorker(process_models.make, idle_timeout_s=5)
    with pytest.raises(PyTritonBadParameterError, match="A callable in a thread of this process cannot sleep"):
        triton.bind("m", [sleepy, identity], X, Y)
    with pytest.raises(PyTritonBadParameterError, match=r"must be the same for all workers of a model.*got 5, 6"):
        triton.bind("m", [sleepy, ProcessWorker(process_models.make, idle_timeout_s=6)], X, Y)
    triton.bind("m", [sleepy, sleepy], X, Y)
    assert str(triton.describe()).endswith("2 processes, sleeps after 5 s")
