"""Models whose worker processes come while requests wait, and go when they are not needed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend.process import scaling, worker_process
from pytriton.server.control.http import HttpControl
from pytriton.triton import ModelDescription, ProcessWorker, RemoteTriton, Triton, TritonBase
from support.callables import X, Y, identity
from support.http import call, infer
from support.process_models import WAIT, make_large, make_slow
from support.python_models import is_asleep, parent_processes, worker_processes
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

CALM_S = 0.5
CONFIG = ModelConfig(max_batch_size=2, attach_timeout_s=PATIENCE_S)


class Callers:
    """Threads that keep a model busy; each answer is right, or says which worker was lost."""

    def __init__(self, url: str | None, count: int = 8) -> None:
        self._url = url
        self._over = threading.Event()
        self.pids: set[int] = set()
        """The processes that have answered."""
        self.answered = 0
        self.lost: list[str] = []
        self.wrong: list[Any] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request was never answered"

    def has_answered(self, count: int) -> bool:
        return self.answered >= count

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        while not self._over.is_set():
            value = float(chance.randrange(1, 1000))
            answer = infer(self._url, "m", value)
            if isinstance(answer, str):
                (self.lost if "was lost" in answer else self.wrong).append(answer)
            elif answer[1] == 2 * value:
                self.answered += 1
                self.pids.add(int(answer[0]))
            else:
                self.wrong.append((value, answer))


@contextlib.contextmanager
def bound(triton: TritonBase, factory: Callable[..., Any] = make_slow, **options: Any) -> Iterator[None]:
    """Bind a model `m`, a slow one, of one to three processes, and take it away in the end."""
    usual = {"copies": 3, "min_copies": 1, "grow_queue_s": 0.01, "shrink_calm_s": CALM_S, "max_crashes": 1000}
    triton.bind("m", ProcessWorker(factory, **{**usual, **options}), X, Y, config=CONFIG)
    try:
        yield
    finally:
        triton.unbind("m")
    assert worker_processes() == set()


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    config = local_config(allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1")
    with short_home(), running(Triton(config=config)) as triton:
        yield triton


def described(triton: Triton) -> ModelDescription:
    (model,) = triton.describe().models
    return model


def samples(triton: Triton) -> dict[str, float]:
    """Return what the page of metrics says of how many processes the model has."""
    page = call(f"http://{urlsplit(str(triton.metrics_url)).netloc}", "GET", "/metrics")[1]
    # Labels are in the order of the alphabet.
    found = re.findall(r'^pytriton_model_(\w+)\{(?:change="(\w+)",)?model="m",version="1"\} (\S+)$', page, re.MULTILINE)
    return {change or name: float(value) for name, change, value in found}


def test_processes_come_while_requests_wait_and_go_when_nobody_does(
    triton: Triton, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    with bound(triton):
        assert len(worker_processes()) == 1
        assert "1 to 3 processes" in str(described(triton))
        with Callers(triton.http_url) as callers:
            eventually(lambda: len(callers.pids) == 3)
            assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 200
            eventually(lambda: described(triton).running_processes == 3)
            assert "ready, 3 running, " in str(described(triton))
            found = samples(triton)
            assert (found["workers_running"], found["workers_wanted"], found["down"]) == (3, 3, 0)
            listed = subprocess.run(
                [sys.executable, "-m", "pytriton", "models", str(triton.http_url), "--json",
                 f"--metrics-port={urlsplit(str(triton.metrics_url)).port}",
                 f"--access-token={triton.get_access_token()}"],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            (told,) = json.loads(listed)
            assert (told["use"]["workers"], told["use"]["most_workers"]) == (3, 3)
        assert (callers.wrong, callers.lost) == ([], [])
        eventually(lambda: len(worker_processes()) == 1)
        eventually(lambda: described(triton).running_processes == 1)
        # The one that was there first stays.
        assert infer(triton.http_url, "m", 4.0) == [*worker_processes(), 8.0]
        found = samples(triton)
        assert (found["up"], found["down"], found["failed"], found["refused"]) == (2, 2, 0, 0)
    text = caplog.text
    assert re.search(r"'m' \(version 1\) grows from 1 to 2 of 3 worker processes: requests wait longer in Trit", text)
    assert re.search(r"shrinks from 2 to 1 of 3 worker processes: nobody waited for 0\.5 s, and \S+ of them", text)
    assert "is started again in" not in text


def test_no_request_is_lost_while_processes_come_go_and_are_killed(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "_AFTER_FAILURE_S", 0.1)
    chance = random.Random(35)
    with bound(triton):
        for _ in range(2):
            with Callers(triton.http_url) as callers:
                for _ in range(3):
                    eventually(partial(callers.has_answered, callers.answered + 10))
                    # Those that start are among them.
                    for pid in worker_processes():
                        if chance.random() < 0.5:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, signal.SIGKILL)
                eventually(lambda: described(triton).running_processes == 3)
            assert callers.wrong == []
            eventually(lambda: described(triton).running_processes == 1)


def test_processes_that_go_finish_their_requests(triton: Triton) -> None:
    # One caller has every process in turn, so those that end are among them.
    with bound(triton), Callers(triton.http_url, 1) as steady:
        for _ in range(3):
            with Callers(triton.http_url) as callers:
                eventually(lambda: described(triton).running_processes == 3)
            assert (callers.wrong, callers.lost) == ([], [])
            eventually(lambda: described(triton).running_processes == 2)
            assert len(worker_processes()) <= 3
    assert (steady.wrong, steady.lost) == ([], [])


def test_a_process_that_does_not_come_up_is_no_harm(
    triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scaling, "_AFTER_FAILURE_S", 0.1)
    marker = tmp_path / "marker"
    with bound(triton, kwargs={"marker": str(marker)}):
        marker.touch()
        with Callers(triton.http_url) as callers:
            eventually(lambda: samples(triton)["failed"] >= 2)
            assert described(triton).is_ready
            assert triton.is_alive()
            marker.unlink()
            eventually(lambda: len(callers.pids) == 3)
        assert (callers.wrong, callers.lost) == ([], [])
    assert "Model 'm' (version 1) does not grow: the process did not come up, see above." in caplog.text


def test_one_that_failed_before_all_fell_asleep_is_no_harm(
    triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All fall asleep before anybody has noticed that one more did not come up.
    monkeypatch.setattr(scaling.Scaling, "_await_grown", lambda *_: None)
    failed = mock.Mock(side_effect=worker_process._log_failure)
    monkeypatch.setattr(worker_process, "_log_failure", failed)
    marker = tmp_path / "marker"
    with bound(triton, kwargs={"marker": str(marker)}, idle_timeout_s=0.2):
        marker.touch()
        with Callers(triton.http_url) as callers:
            eventually(lambda: failed.called)
        assert (callers.wrong, callers.lost) == ([], [])
        marker.unlink()
        eventually(lambda: is_asleep(triton))
        assert infer(triton.http_url, "m", 4.0)[1] == 8.0


def test_another_process_takes_the_place_of_one_that_is_given_up(triton: Triton) -> None:
    with bound(triton, max_crashes=1):
        (first,) = worker_processes()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: worker_processes() - {first})
        assert infer(triton.http_url, "m", 4.0) == [*worker_processes(), 8.0]


def test_it_sleeps_as_a_whole_and_wakes_with_the_fewest(triton: Triton) -> None:
    with bound(triton, min_copies=2, idle_timeout_s=0.2, shrink_calm_s=600.0):
        with Callers(triton.http_url) as callers:
            eventually(lambda: len(callers.pids) == 3)
        eventually(lambda: is_asleep(triton))
        assert infer(triton.http_url, "m", 4.0)[1] == 8.0
        eventually(lambda: described(triton).is_asleep or len(worker_processes()) == 2)
        with Callers(triton.http_url) as callers:
            eventually(lambda: len(callers.pids) == 3)
    assert (callers.wrong, callers.lost) == ([], [])


def test_it_grows_from_a_parent_that_may_be_killed(triton: Triton) -> None:
    with bound(triton, sleep="parent"):
        with Callers(triton.http_url) as callers:
            eventually(lambda: len(callers.pids) >= 2)
            for pid in parent_processes():
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: described(triton).running_processes == 3)
        assert callers.wrong == []
        eventually(lambda: described(triton).running_processes == 1)
    assert parent_processes() == set()


def test_it_grows_on_a_server_of_somebody_else(triton: Triton) -> None:
    for url in (triton.http_url, triton.grpc_url):
        with (
            RemoteTriton(str(url), access_token=triton.get_access_token()) as remote,
            bound(remote),
            Callers(triton.http_url) as callers,
        ):
            eventually(lambda: len(callers.pids) == 3)
            assert remote.is_alive()
        assert (callers.wrong, callers.lost) == ([], [])


def test_slow_calls_that_wait_are_noticed(triton: Triton) -> None:
    """Eight callers, whose calls take two seconds each, get all processes."""
    with (
        bound(triton, kwargs={"seconds": 2.0}, grow_queue_s=0.1, shrink_calm_s=600.0),
        Callers(triton.http_url) as callers,
    ):
        eventually(lambda: described(triton).running_processes == 3)
    assert (callers.wrong, callers.lost) == ([], [])


def test_calls_that_wait_for_one_that_does_not_end_get_processes(
    triton: Triton, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    gate = tmp_path / "gate"
    with (
        bound(triton, make_large, args=(2.0, 1), kwargs={"gate": str(gate)}, grow_queue_s=0.5, shrink_calm_s=600.0),
        ThreadPoolExecutor(8) as callers,
    ):
        calls = [callers.submit(infer, triton.http_url, "m", WAIT) for _ in range(8)]
        try:
            eventually(lambda: described(triton).running_processes == 3)
            assert not any(each.done() for each in calls)
        finally:
            gate.touch()
        assert [each.result(PATIENCE_S) for each in calls] == [[2 * WAIT]] * 8
    assert re.search(
        r"grows from 1 to 2 of 3 .*: requests wait longer in Triton's queue than 0\.5 s, \S+ s so far", caplog.text
    )


def test_extra_processes_end_when_another_model_needs_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    # Three processes of some 90 MiB each have room, and beside one of them one of 180 MiB.
    with short_home(), Triton(config=local_config(), memory_budget="400MiB") as triton:
        with bound(triton, shrink_calm_s=600.0, kwargs={"mebibytes": 60}), Callers(triton.http_url) as callers:
            eventually(lambda: described(triton).running_processes == 3)
            large = ProcessWorker(make_slow, kwargs={"mebibytes": 150}, starts_asleep=True)
            triton.bind("large", large, X, Y, config=CONFIG)
            # Its own processes are at work all the time, and one of them stays.
            assert infer(triton.http_url, "large", 4.0)[1] == 8.0
            assert infer(triton.http_url, "m", 4.0)[1] == 8.0
            triton.unbind("large")
        assert (callers.wrong, callers.lost) == ([], [])
        assert "shrinks from 3 to 1 of 3 worker processes: another model needs the memory." in caplog.text


def test_where_the_server_tells_no_statistics_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = mock.Mock(side_effect=HttpControl.statistics)
    monkeypatch.setattr(HttpControl, "statistics", lambda *given: asked(*given))
    config = local_config(http_restricted_api="statistics:own-key=own-value")
    with short_home(), Triton(config=config) as triton:
        url, token = str(triton.http_url), triton.get_access_token()
        with RemoteTriton(url, access_token=token) as remote, bound(remote), Callers(url) as callers:
            eventually(lambda: asked.call_count >= 3 and callers.has_answered(20))
            assert len(worker_processes()) == 1
        assert (callers.wrong, callers.lost) == ([], [])
    told = "No model gets more worker processes while requests wait (ProcessWorker.min_copies), as the server does not "
    assert caplog.text.count(told) == 1
    assert "This API is restricted, expecting header 'own-key'" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"min_copies": 0},
            r"min_copies must be at least 1; got 0\. That a model without requests has no process, say",
        ),
        ({"min_copies": 4}, r"min_copies must be at most copies, which is 3; got 4"),
        ({"min_copies": True}, r"min_copies must be an integer of at least 1; got True"),
        ({"grow_queue_s": 0}, r"grow_queue_s must be a finite number of seconds above 0; got 0"),
        ({"shrink_calm_s": -1}, r"shrink_calm_s must be a finite number of seconds above 0; got -1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=problem):
        ProcessWorker(make_slow, copies=3, **options)


@pytest.mark.parametrize("other", [identity, ProcessWorker(make_slow)])
def test_other_workers_beside_them_are_refused(other: Callable[..., Any] | ProcessWorker) -> None:
    triton = Triton(config=local_config())
    with pytest.raises(PyTritonBadParameterError, match=r"'m': ProcessWorker\.min_copies is for a model that one Proc"):
        triton.bind("m", [ProcessWorker(make_slow, copies=2, min_copies=1), other], X, Y)
