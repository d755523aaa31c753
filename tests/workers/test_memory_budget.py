"""Models that share a memory budget: who wakes gets the memory of who was used least recently."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend.process import budget as budget_module
from pytriton.proxy_backend.process.budget import Account, MemoryBudget
from pytriton.proxy_backend.settings import read_size
from pytriton.proxy_backend.system.processes import proportional_bytes, with_descendants
from pytriton.proxy_backend.transport.activity import ask_activity
from pytriton.server.errors import TritonModelLoadError, TritonServerStartError
from pytriton.server.models import workers as workers_module
from pytriton.server.models.workers import StartCancelled
from pytriton.triton import ProcessWorker, RemoteTriton, Triton, TritonSecurityConfig
from support import process_models
from support.callables import X, Y, identity
from support.http import call, infer, tensor
from support.process_models import GROW, PID, WAIT
from support.python_models import processes
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

MIB = 1 << 20
# A worker process has so much beside its weights, about.
SELF_MIB = 38


def worker_processes() -> list[int]:
    return list(processes("worker_main", os.getpid()))


def parent_processes() -> list[int]:
    return list(processes("parent_main", os.getpid()))


def used_bytes() -> int:
    """Return what all worker processes and their parents take right now, measured anew."""
    pids = {each for pid in (*worker_processes(), *parent_processes()) for each in with_descendants(pid)}
    return sum(proportional_bytes(pid) or 0 for pid in pids)


def fits(limit: int) -> bool:
    return used_bytes() <= 1.05 * limit


def asleep(triton: Triton) -> set[str]:
    return {model.name for model in triton.describe().models if model.is_asleep}


def is_asleep(triton: Triton, name: str) -> bool:
    """Whether that model sleeps, and no other one."""
    return asleep(triton) == {name}


def was_used(account: Account, since: float) -> bool:
    return account.last_used > since


@contextlib.contextmanager
def serving(budget: str | int, **settings: Any) -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config(), memory_budget=budget, **settings)
        try:
            with running(triton):
                yield triton
        finally:
            triton.stop()
        assert worker_processes() == []


def bind(
    triton: Any, name: str, factor: float, mebibytes: int, *, attach_timeout_s: float = PATIENCE_S, **more: Any
) -> None:
    gate = more.pop("gate", None)
    worker = ProcessWorker(
        process_models.make_large, [factor, mebibytes], {"gate": gate}, max_crashes=1000, crash_window_s=0.1, **more
    )
    triton.bind(name, worker, X, Y, config=ModelConfig(attach_timeout_s=attach_timeout_s))


def test_a_dozen_models_and_the_memory_of_four(caplog: pytest.LogCaptureFixture) -> None:
    """Zipf callers, while workers are killed: nothing is lost, nothing is wrong, and the budget is kept."""
    caplog.set_level(logging.INFO, "pytriton")
    limit = 4 * (40 + SELF_MIB) * MIB
    chance = random.Random(35)
    factors = {f"m{number}": float(number + 2) for number in range(12)}
    shares = [1 / (place + 1) for place in range(12)]
    over = threading.Event()
    samples: list[int] = []
    told: list[str] = []

    def sample() -> None:
        while not over.wait(0.05):
            samples.append(used_bytes())

    def kill() -> None:
        for _ in range(6):
            if over.wait(chance.uniform(0.3, 1.5)):
                return
            if pids := worker_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)

    def ask(name: str, value: float) -> bool:
        answer = infer(triton.http_url, name, value)
        if isinstance(answer, str):
            told.append(answer)
        else:
            assert answer == [value * factors[name]]
        return True

    with serving(limit) as triton:
        for name, factor in factors.items():
            bind(triton, name, factor, 40)
        # All are ready, and most of them asleep.
        assert len(asleep(triton)) >= 12 - limit // (40 * MIB)
        assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 200
        helpers = [threading.Thread(target=each) for each in (sample, kill)]
        for each in helpers:
            each.start()
        try:
            with ThreadPoolExecutor(4) as callers:
                wanted = chance.choices(list(factors), shares, k=120) + list(factors)
                values = [float(chance.randrange(1, 1000)) for _ in wanted]
                assert sum(callers.map(ask, wanted, values)) == 132
        finally:
            over.set()
            for each in helpers:
                each.join()
    assert all("was lost" in text for text in told), told
    assert len(told) <= 6 * 4
    assert "another model needs the memory" in caplog.text
    assert len(samples) > 10
    assert max(samples) <= 1.05 * limit, [size // MIB for size in sorted(samples)[-5:]]


def test_who_was_used_least_recently_makes_room() -> None:
    with serving(2 * (60 + SELF_MIB) * MIB) as triton:
        for number, name in enumerate("abc"):
            bind(triton, name, number + 2.0, 60)
        assert asleep(triton) == {"a"}
        for name, sleeper in ("b", "a"), ("a", "c"), ("c", "b"):
            asked = time.monotonic()
            assert infer(triton.http_url, name, 3.0) == [3.0 * ("abc".index(name) + 2)]
            eventually(partial(is_asleep, triton, sleeper))
            account = triton._models[name, 1].workers._account
            assert account is not None
            # That is noted twice a second.
            eventually(partial(was_used, account, asked))


def test_parents_of_models_that_sleep_make_room_too() -> None:
    """Three models with a parent each, room for one with its parent: the one used least recently ends altogether."""
    limit = (60 + 3 * SELF_MIB) * MIB
    with serving(limit) as triton:
        for number, name in enumerate("abc"):
            bind(triton, name, number + 2.0, 60, idle_timeout_s=600, sleep="parent")
        for name in "abcba":
            assert infer(triton.http_url, name, 3.0) == [3.0 * ("abc".index(name) + 2)]
            eventually(partial(fits, limit))
        # A parent that stays, and whose model sleeps, is counted.
        assert len(parent_processes()) >= 1
    assert parent_processes() == []


def test_of_models_that_are_bound_before_the_start_as_many_begin_awake_as_have_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with short_home():
        triton = Triton(config=local_config(), memory_budget=2 * (60 + SELF_MIB) * MIB)
        for number in range(5):
            bind(triton, f"m{number}", number + 2.0, 60, pinned=number == 4)
        triton.check()
        with running(triton):
            # The others were never started, and nobody was, to be put to sleep for another one that is not pinned.
            assert asleep(triton) >= {"m2", "m3"}
            assert len(worker_processes()) <= 2
            assert not any("Model 'm2'" in each or "Model 'm3'" in each for each in caplog.messages if "sleeps" in each)
            assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 200
            for number in range(5):
                assert infer(triton.http_url, f"m{number}", 3.0) == [3.0 * (number + 2)]
    assert worker_processes() == []


def test_a_model_that_never_fits_is_refused_with_sizes() -> None:
    with serving("160MiB") as triton:
        with pytest.raises(TritonModelLoadError, match=r"need 2\d\d MiB, more than the memory budget of 160 MiB"):
            bind(triton, "large", 2.0, 200)
        assert worker_processes() == []
        bind(triton, "fixed", 2.0, 70, pinned=True)
        reason = (
            r"need \d+ MiB, and of the memory budget of 160 MiB others have [\d.]+ MiB: fixed [\d.]+ MiB \(pinned\)"
        )
        with pytest.raises(TritonModelLoadError, match=reason):
            bind(triton, "beside", 3.0, 100)
        bind(triton, "small", 3.0, 10)
        assert infer(triton.http_url, "small", 3.0) == [9.0]
        assert infer(triton.http_url, "fixed", 3.0) == [6.0]


def test_a_start_may_take_longer_than_others_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much the first model takes is not known before it is there, so the second one waits for it."""
    monkeypatch.setattr(workers_module, "_ROOM_S", 0.1)
    gate = tmp_path / "gate"

    def open_gate() -> None:
        eventually(worker_processes)
        time.sleep(1.0)
        gate.touch()

    with short_home(), ThreadPoolExecutor(1) as helper:
        triton = Triton(config=local_config(), memory_budget="400MiB")
        triton.bind("slow", ProcessWorker(process_models.make, [2.0], {"gate": str(gate)}), X, Y)
        triton.bind("other", ProcessWorker(process_models.make, [3.0]), X, Y)
        opening = helper.submit(open_gate)
        with running(triton):
            opening.result()
            assert infer(triton.http_url, "slow", 3.0) == [6.0]
            assert infer(triton.http_url, "other", 3.0) == [9.0]
    assert worker_processes() == []


def test_a_stop_by_a_signal_while_the_start_waits_for_room(tmp_path: Path) -> None:
    """The handler of the program calls `stop` in the thread that waits."""

    def interrupt() -> None:
        eventually(worker_processes)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)

    with short_home(), ThreadPoolExecutor(1) as helper:
        triton = Triton(config=local_config(), memory_budget="400MiB")
        triton.bind("slow", ProcessWorker(process_models.make, [2.0], {"gate": str(tmp_path / "gate")}), X, Y)
        triton.bind("other", ProcessWorker(process_models.make, [3.0]), X, Y)
        before = signal.signal(signal.SIGUSR1, lambda *_: triton.stop())
        try:
            interrupting = helper.submit(interrupt)
            with pytest.raises(TritonServerStartError):
                triton.run()
            interrupting.result()
        finally:
            signal.signal(signal.SIGUSR1, before)
            triton.stop()
    assert worker_processes() == []


def test_what_a_model_took_is_known_when_it_is_stopped() -> None:
    with short_home():
        triton = Triton(config=local_config(), memory_budget=(60 + SELF_MIB + 20) * MIB)
        bind(triton, "a", 2.0, 60)
        bind(triton, "b", 3.0, 60)
        for _ in range(2):
            with running(triton):
                # There is room for one of them; the other one is not started before it is called.
                assert asleep(triton) == {"b"}
                assert infer(triton.http_url, "b", 3.0) == [9.0]
                eventually(partial(is_asleep, triton, "a"))
            for model in triton._models.values():
                assert 60 * MIB < (model.workers.memory_bytes or 0) < 120 * MIB


def test_a_model_of_the_start_that_never_fits_is_refused() -> None:
    with short_home():
        triton = Triton(config=local_config(), memory_budget="160MiB")
        bind(triton, "small", 2.0, 10)
        bind(triton, "large", 2.0, 200)
        with pytest.raises(TritonModelLoadError, match=r"'large'.*more than the memory budget of 160 MiB"):
            triton.run()
        triton.stop()
    assert worker_processes() == []


def test_requests_that_find_no_room_are_told_the_sizes_and_later_ones_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    body = {"inputs": [tensor("x", 3.0)]}
    told = r"need [\d.]+ MiB, and of the memory budget of \d+ MiB others have [\d.]+ MiB: busy [\d.]+ MiB \(busy\)"

    def ask(_number: int) -> tuple[int, Any]:
        return call(triton.http_url, "POST", "/v2/models/other/infer", body)

    with (
        serving((60 + SELF_MIB + 20) * MIB) as triton,
        ThreadPoolExecutor(8) as callers,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(gate.touch)
        bind(triton, "other", 3.0, 60, attach_timeout_s=1.0)
        bind(triton, "busy", 2.0, 60, gate=str(gate))
        waiting = callers.submit(infer, triton.http_url, "busy", WAIT)
        eventually(lambda: asleep(triton) == {"other"})
        for _ in range(2):
            for status, answer in callers.map(ask, range(5)):
                assert status == 503
                assert re.search(told, answer["error"]), answer
            assert call(triton.http_url, "GET", "/v2/models/other/ready")[0] == 200
        gate.touch()
        assert waiting.result() == [2.0 * WAIT]
        eventually(lambda: infer(triton.http_url, "other", 3.0) == [9.0])
        eventually(lambda: asleep(triton) == {"busy"})
    assert "Model 'other' (version 1) cannot wake: its worker processes need" in caplog.text


def test_a_model_that_grows_puts_others_to_sleep_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    with serving(2 * (60 + SELF_MIB) * MIB) as triton:
        bind(triton, "idle", 3.0, 30)
        bind(triton, "grows", 2.0, 60, pinned=True)
        assert asleep(triton) == set()
        assert infer(triton.http_url, "grows", GROW) == [2.0 * GROW]
        eventually(lambda: asleep(triton) == {"idle"})
        assert infer(triton.http_url, "grows", GROW) == [2.0 * GROW]
        told = f"more than the memory budget of {2 * (60 + SELF_MIB)} MiB, and none that has nothing to do is left"
        eventually(lambda: told in caplog.text)
        time.sleep(2.5 * budget_module._WATCH_S)  # some looks more
    assert caplog.text.count(told) == 1


def test_the_least_number_of_models_that_stay_awake() -> None:
    with serving("1GiB", min_awake=2) as triton:
        for number in range(3):
            bind(triton, f"m{number}", number + 2.0, 10, idle_timeout_s=0.3)
        eventually(lambda: asleep(triton) == {"m0"})
        assert infer(triton.http_url, "m0", 3.0) == [6.0]
        eventually(lambda: asleep(triton) == {"m1"})
        (pid,) = infer(triton.http_url, "m0", PID)
        time.sleep(1.0)
        assert infer(triton.http_url, "m0", PID) == [pid]


def test_a_model_is_rebound_under_a_budget() -> None:
    with serving(2 * (60 + SELF_MIB) * MIB) as triton:
        bind(triton, "a", 2.0, 60)
        bind(triton, "b", 3.0, 60)
        triton.rebind("b", ProcessWorker(process_models.make_large, [5.0, 60]))
        assert infer(triton.http_url, "b", 3.0) == [15.0]
        assert infer(triton.http_url, "a", 3.0) == [6.0]
        eventually(lambda: used_bytes() <= 2 * (60 + SELF_MIB) * MIB)


def test_a_pinned_model_of_more_than_half_the_budget_is_rebound() -> None:
    with serving("160MiB") as triton:
        bind(triton, "fixed", 2.0, 70, pinned=True)
        triton.rebind("fixed", ProcessWorker(process_models.make_large, [3.0, 80], pinned=True))
        assert infer(triton.http_url, "fixed", 3.0) == [9.0]
        with pytest.raises(TritonModelLoadError, match=r"need \d+ MiB, more than the memory budget of 160 MiB"):
            triton.rebind("fixed", ProcessWorker(process_models.make_large, [4.0, 200], pinned=True))
        assert infer(triton.http_url, "fixed", 3.0) == [9.0]


def test_a_rebind_of_a_busy_model_needs_room_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_ROOM_S", 0.5)
    gate = tmp_path / "gate"
    with serving("160MiB") as triton, ThreadPoolExecutor(1) as caller:
        bind(triton, "busy", 2.0, 70, gate=str(gate))
        endpoint = triton._models["busy", 1].endpoint(triton._workspace.endpoints_path)
        waiting = caller.submit(infer, triton.http_url, "busy", WAIT)
        try:
            eventually(lambda: (found := ask_activity(endpoint, PATIENCE_S)) is not None and found.in_flight == 1)
            with pytest.raises(TritonModelLoadError, match="unbind the model first, or raise the budget"):
                triton.rebind("busy", ProcessWorker(process_models.make_large, [3.0, 70]))
        finally:
            gate.touch()
        assert waiting.result() == [2.0 * WAIT]


def test_a_remote_server_has_a_budget_of_its_own() -> None:
    security = TritonSecurityConfig(restricted_endpoints=[])
    with short_home(), contextlib.ExitStack() as stack:
        triton = stack.enter_context(running(Triton(config=local_config(), security_config=security)))
        remote = stack.enter_context(RemoteTriton(str(triton.http_url), memory_budget=(60 + SELF_MIB + 20) * MIB))
        bind(remote, "a", 2.0, 60)
        bind(remote, "b", 3.0, 60)
        for name, factor in ("a", 2.0), ("b", 3.0), ("a", 2.0):
            assert infer(triton.http_url, name, 3.0) == [3.0 * factor]
            assert len(worker_processes()) <= 2
    assert worker_processes() == []


@pytest.mark.parametrize("value", ["lots", "-1GiB", -1, 0, "0", "15MiB", True, 1.5, "2 apples", "99999999TiB"])
def test_a_budget_that_is_none(value: Any) -> None:
    for make in (lambda: Triton(memory_budget=value), lambda: RemoteTriton("localhost", memory_budget=value)):
        with pytest.raises(PyTritonBadParameterError, match=r"Triton\.memory_budget must be a number of bytes"):
            make()


def test_a_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PYTRITON_MEMORY_BUDGET", "lots")
    with pytest.raises(PyTritonBadParameterError, match="environment variable PYTRITON_MEMORY_BUDGET must be"):
        Triton()
    monkeypatch.setenv("PYTRITON_MEMORY_BUDGET", "2GiB")
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    # It may be that of a machine, where other programs have worker processes.
    triton.check()
    assert "PYTRITON_MEMORY_BUDGET has no effect: none of the bound models is served by" in caplog.text
    monkeypatch.delenv("PYTRITON_MEMORY_BUDGET")
    triton = Triton(config=local_config(), memory_budget="2GiB")
    triton.bind("m", identity, X, Y)
    with pytest.raises(PyTritonBadParameterError, match="memory_budget is for models in processes of their own"):
        triton.check()


def test_what_a_budget_cannot_count_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    config = local_config(model_repository=tmp_path, python_models="stub")
    triton = Triton(config=config, memory_budget="2GiB")
    triton.bind("m", identity, X, Y)
    told = (
        rf"none of those that are there is served by processes: 'm', what is in {re.escape(str(tmp_path))}\. Give them"
    )
    with pytest.raises(PyTritonBadParameterError, match=told):
        triton.check()
    triton.bind("process", ProcessWorker(process_models.make), X, Y)
    triton.check()
    assert f"The memory budget does not count 'm', what is in {tmp_path}: no processes of their own." in caplog.text
    # Processes of ours run a `model.py`, and count.
    triton = Triton(config=local_config(model_repository=tmp_path, python_models="workers"), memory_budget="2GiB")
    triton.bind("m", identity, X, Y)
    triton.check()


def test_a_server_that_runs_goes_on_without_its_last_process() -> None:
    with short_home(), running(Triton(config=local_config(), memory_budget="400MiB")) as triton:
        triton.bind("process", ProcessWorker(process_models.make, [2.0]), X, Y)
        triton.bind("thread", identity, X, Y)
        triton.unbind("process")
        triton.run()
        assert infer(triton.http_url, "thread", 3.0) == [3.0]


@pytest.mark.parametrize("value", [-1, "2", True, 1.0])
def test_a_least_number_that_is_none(value: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Triton\.min_awake must be an integer of at least 0"):
        Triton(min_awake=value)


def test_settings_for_workers_that_are_not_there() -> None:
    triton = Triton(config=local_config(), min_awake=1)
    triton.bind("m", ProcessWorker(process_models.make, pinned=True), X, Y)
    for step in (triton.check, triton.run):
        with pytest.raises(PyTritonBadParameterError, match=r"min_awake is for models.*none of those.*may sleep"):
            step()
    with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.pinned must be False where idle_timeout_s"):
        ProcessWorker(process_models.make, pinned=True, idle_timeout_s=5)
    with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.pinned must be True or False"):
        ProcessWorker(process_models.make, pinned=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("1.5 GB", 1_500_000_000),
        ("500M", 500_000_000),
        ("64Mi", 64 << 20),
        ("7", 7),
        (9, 9),
        ("3k", 3000),
    ],
)
def test_sizes_of_memory(text: Any, size: int) -> None:
    assert read_size(text) == size


def test_a_budget_wins_over_one_more_process_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    with serving("250MiB") as triton:
        growing = ProcessWorker(
            process_models.make_slow, kwargs={"mebibytes": 60}, copies=3, min_copies=1, grow_queue_s=0.01
        )
        triton.bind("m", growing, X, Y)
        told = "Model 'm' (version 1) stays with 2 of 3 worker processes, as the memory budget has no room for one"
        with ThreadPoolExecutor(8) as callers:
            while told not in caplog.text:
                for answer in callers.map(lambda value: infer(triton.http_url, "m", value), map(float, range(32))):
                    assert isinstance(answer, list), answer
        assert len(worker_processes()) == 2
        assert used_bytes() < 250 * MIB


@contextlib.contextmanager
def full(budget: MemoryBudget) -> Iterator[None]:
    """Take all that a budget has."""
    account, limit = Account("large", pids=lambda: [os.getpid()], is_up=lambda: True), budget.limit_bytes
    budget.open(account)
    budget.limit_bytes = 16 * MIB
    try:
        yield
    finally:
        budget.limit_bytes = limit
        budget.close(account)


def test_workers_that_move_wait_for_room_or_until_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_home(), running(Triton(config=local_config())) as there:
        url, token = str(there.http_url), there.get_access_token()
        with RemoteTriton(url, access_token=token, memory_budget="1GiB") as remote:
            bind(remote, "m", 2.0, 1, pinned=True)
            session, (model,) = remote._life.session, remote._models.values()
            assert session is not None
            with full(model.budget):
                # Somebody wants the server stopped.
                with pytest.raises(StartCancelled):
                    session.deployment.move_workers(model, None, lambda: True)
                monkeypatch.setattr(workers_module, "_ROOM_S", 0.1)
                with pytest.raises(TritonModelLoadError, match="its worker processes need"):
                    session.deployment.move_workers(model, None, lambda: False)
                assert not model.workers.are_there
            # Whoever looks after the models starts them when there is room.
            eventually(remote.is_alive)
            assert infer(url, "m", 3.0) == [6.0]
            with full(model.budget):
                monkeypatch.setattr(workers_module, "_ROOM_S", 100 * PATIENCE_S)
                model.stop_workers(1.0)
                account = eventually(partial(account_that_waits, model.budget))
                assert account.name == "m"
                remote.stop()
        assert worker_processes() == []


def account_that_waits(budget: MemoryBudget) -> Account | None:
    return next((each for each in budget._waiting), None)


def test_what_models_under_a_budget_take_is_to_be_seen() -> None:
    config = local_config(allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1")
    with short_home(), running(Triton(config=config, memory_budget="150MiB")) as triton:
        bind(triton, "a", 2.0, 60)
        bind(triton, "b", 3.0, 60)
        triton.bind("thread", identity, X, Y)
        assert infer(triton.http_url, "a", 3.0) == [6.0]
        eventually(partial(is_asleep, triton, "b"))
        metrics = urlsplit(str(triton.metrics_url))
        page = call(f"http://{metrics.netloc}", "GET", "/metrics")[1]
        lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("pytriton_m")]
        found = {name: float(value) for name, _, value in lines}
        a, b = '{model="a",version="1"}', '{model="b",version="1"}'
        assert 60 * MIB < found[f"pytriton_model_memory_bytes{a}"] < 120 * MIB
        eventually(lambda: used_bytes() < 120 * MIB)
        assert found[f"pytriton_model_wake_seconds_count{a}"] == 1
        assert found[f"pytriton_model_wake_seconds_count{b}"] == 0
        assert found[f"pytriton_model_wakes_refused_total{a}"] == 0
        assert abs(found[f"pytriton_model_last_used_timestamp_seconds{a}"] - time.time()) < PATIENCE_S
        assert found["pytriton_memory_budget_bytes"] == 150 * MIB
        assert found["pytriton_memory_budget_used_bytes"] >= found[f"pytriton_model_memory_bytes{a}"]
        # Nothing is said of a model that never sleeps.
        assert 'pytriton_model_memory_bytes{model="thread"' not in page
        told = triton.describe()
        assert told.memory_budget_bytes == 150 * MIB
        first, second, third = told.models
        assert (first.wake_ups, second.wake_ups, third.wake_ups) == (1, 0, 0)
        assert first.wake_p50_s is not None
        assert third.memory_bytes is None
        assert re.search(r"ready, \d+(\.\d)? MiB, woken 1 time in \S+ s \(p95 \S+ s\), ", str(told))
        assert re.search(r"memory of worker processes: [\d.]+ MiB of 150 MiB$", str(told))
        listed = subprocess.run(
            # The command finds the token and the port of the metrics where the server has left them.
            [sys.executable, "-m", "pytriton", "models", str(triton.http_url)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert re.search(r"^a +READY .* 1 of 1 +[\d.]+ MiB +\d+ (s|min) ago +1 x \S+ s  ", listed, re.MULTILINE), listed
        assert re.search(r"^b +ASLEEP .* 0 of 1 +- +\d+ (s|min) ago +-  ", listed, re.MULTILINE), listed
        assert re.search(r"^thread +READY .* - +- +- +-  ", listed, re.MULTILINE), listed
