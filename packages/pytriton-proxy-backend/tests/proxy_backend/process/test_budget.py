"""Who gets the memory of a budget: models without processes, whose sizes the tests say."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.process import budget as budget_module
from pytriton.proxy_backend.process import sleep as sleep_module
from pytriton.proxy_backend.process.budget import Account, AccountState, MemoryBudget, NoRoomError
from pytriton.proxy_backend.process.sleep import Sleep, are_up
from support.waiting import PATIENCE_S, eventually

LIMIT = 100


class Machine:
    """A budget of 100 bytes, and models with a process each."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.up: set[str] = set()
        self.gone: set[str] = set()
        self.asked: list[str] = []
        self.budget = MemoryBudget(LIMIT)
        self.accounts: list[Account] = []

    def add(self, name: str, *, is_movable: bool = True, size: int | None = None) -> Account:
        pid = len(self.accounts) + 1
        account = Account(
            name,
            pids=lambda: [pid] if pid in self.sizes else [],
            is_up=lambda: name in self.up,
            ask_to_sleep=(lambda: self.asked.append(name)) if is_movable else None,
            size=size,
            is_gone=lambda: name in self.gone,
        )
        self.accounts.append(account)
        self.budget.open(account)
        return account

    def take(self, account: Account, size: int | None) -> None:
        """Let the process of a model take so much; `None` is its end."""
        pid = self.accounts.index(account) + 1
        self.sizes.pop(pid, None)
        if size is not None:
            self.sizes[pid] = size

    def come(self, account: Account, size: int) -> None:
        """Let a model come up."""
        assert self.budget.admit(account, 0.0, lambda: False)
        self.take(account, size)
        self.up.add(account.name)
        self.budget.arrive(account)

    def go(self, account: Account) -> None:
        """Let a model fall asleep, and its process end."""
        self.budget.sleep(account)
        self.up.discard(account.name)
        self.take(account, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    machine = Machine()
    monkeypatch.setattr(budget_module, "with_descendants", lambda pid: [pid])
    monkeypatch.setattr(budget_module, "resident_bytes", machine.sizes.get)
    monkeypatch.setattr(budget_module, "proportional_bytes", machine.sizes.get)
    monkeypatch.setattr(budget_module, "_REMEMBERED_S", 0.0)
    # What the thread of the budget does is tested with processes.
    monkeypatch.setattr(MemoryBudget, "_watch", lambda _budget: None)
    yield machine
    for account in machine.accounts:
        machine.budget.close(account)


def test_a_model_that_has_grown_past_the_budget_wakes_again(machine: Machine) -> None:
    grown = machine.add("grown")
    machine.come(grown, 40)
    machine.take(grown, 120)
    machine.go(grown)
    assert grown.size == 120
    fixed = machine.add("fixed", is_movable=False)
    machine.come(fixed, 30)
    # It gets all that there ever is for it.
    assert machine.budget.admit(grown, 0.0, lambda: False)
    assert grown.expected == 70


def test_a_model_that_never_fits_is_refused_at_once(machine: Machine) -> None:
    large = machine.add("large")
    machine.come(large, 80)
    machine.go(large)
    fixed = machine.add("fixed", is_movable=False)
    machine.come(fixed, 30)
    with pytest.raises(NoRoomError, match=r"need 80 B, and of the memory budget of 100 B others have 30 B: fixed 30 B"):
        machine.budget.admit(large, PATIENCE_S, iter([False, True]).__next__)


def test_what_a_predecessor_took_is_a_guess(machine: Machine) -> None:
    follows = machine.add("follows", size=150)
    assert machine.budget.admit(follows, 0.0, lambda: False)
    assert follows.expected == LIMIT


def test_of_processes_that_end_no_size_is_kept(machine: Machine) -> None:
    model = machine.add("model")
    machine.come(model, 40)
    # Killed, and nobody knows it yet.
    machine.take(model, 0)
    machine.budget.arrive(model)
    assert (model.size, model.least_size) == (40, 40)
    machine.take(model, None)
    machine.budget.arrive(model)
    assert (model.size, model.least_size) == (40, 40)
    # It is about to be started again, so nobody else gets its room.
    machine.up.clear()
    other = machine.add("other", size=70)
    model.declined_at = time.monotonic()
    with pytest.raises(NoRoomError, match="model 40 B"):
        machine.budget.admit(other, 0.0, lambda: False)
    # Given up, it needs none.
    machine.gone.add("model")
    assert machine.budget.admit(other, 0.0, lambda: False)


def worker(**facts: Any) -> Any:
    return SimpleNamespace(**{"is_alive": True, "is_asleep": False, "is_warm": True, **facts})


def test_workers_that_are_up() -> None:
    up, given_up, asleep, starting = worker(), worker(is_alive=False), worker(is_asleep=True), worker(is_warm=False)
    assert are_up([up])
    assert are_up([up, given_up, asleep])
    for workers in [], [given_up], [asleep], [up, starting]:
        assert not are_up(workers)


def test_a_start_waits_for_those_that_start(machine: Machine) -> None:
    first, second = machine.add("first"), machine.add("second")
    assert machine.budget.admit(first, 0.0, lambda: False)
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            machine.take(first, 40)
            machine.up.add("first")
            machine.budget.arrive(first)
        return False

    # A request does not wait for that.
    with pytest.raises(NoRoomError):
        machine.budget.admit(second, 0.0, lambda: False)
    assert machine.budget.admit(second, 0.0, look, after_starts=True)
    assert looks == 5
    assert second.expected == 40


def test_a_start_waits_no_longer_than_for_the_first_time(machine: Machine) -> None:
    wakes, second = machine.add("wakes"), machine.add("second", size=90)
    machine.come(wakes, 40)
    machine.go(wakes)
    assert machine.budget.admit(wakes, 0.0, lambda: False)
    with pytest.raises(NoRoomError, match="wakes 40 B"):
        machine.budget.admit(second, 0.0, lambda: False, after_starts=True)
    machine.go(wakes)
    starts = machine.add("starts", size=40)
    assert machine.budget.admit(starts, 0.0, lambda: False)
    machine.take(starts, 30)
    # All of its processes are given up, and one is about to end.
    machine.gone.add("starts")
    with pytest.raises(NoRoomError, match="starts 30 B"):
        machine.budget.admit(second, 0.0, lambda: False, after_starts=True)


def test_a_stop_in_the_thread_that_waits_for_room(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler of a signal does, which holds the lock of the budget then."""
    monkeypatch.setattr(sleep_module, "_JOIN_S", 0.2)
    monkeypatch.setattr(budget_module, "_CLOSE_S", 0.2)
    spec = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0)
    account, waits = machine.add("m"), machine.add("waits")
    warms = threading.Event()
    process = SimpleNamespace(is_alive=True, is_warm=False, is_asleep=False)
    sleep = Sleep(spec, Path("/nowhere"), None, 1.0, machine.budget, account)
    sleep._workers.append(process)  # type: ignore[arg-type]
    arrive = machine.budget.arrive

    def arriving(arrived: Account, *, woken: bool = True) -> None:
        warms.set()
        arrive(arrived, woken=woken)

    monkeypatch.setattr(machine.budget, "arrive", arriving)
    sleep.start()

    def stop() -> bool:
        process.is_warm = True
        assert warms.wait(PATIENCE_S)
        sleep.stop()
        machine.budget.close(waits)
        other = threading.Thread(target=machine.budget.close, args=[account])
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive()
        return False

    assert not machine.budget.admit(waits, PATIENCE_S, stop)
    eventually(lambda: not sleep._thread.is_alive())


def test_nobody_arrives_who_is_stopped(machine: Machine) -> None:
    spec = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0)
    account = machine.add("m")
    machine.come(account, 40)
    machine.go(account)
    sleep = Sleep(spec, Path("/nowhere"), None, 1.0, machine.budget, account)
    sleep.cut()
    sleep._run()
    assert account.state is AccountState.ASLEEP
    assert account.size == 40


def test_memory_that_does_not_come_is_not_waited_for(machine: Machine) -> None:
    hangs, idle, wakes = machine.add("hangs"), machine.add("idle"), machine.add("wakes", size=40)
    machine.come(hangs, 40)
    machine.come(idle, 40)
    idle.awake_since = idle.woke_in_s = 0.0
    machine.budget.sleep(hangs)
    with pytest.raises(NoRoomError):
        machine.budget.admit(wakes, 0.0, lambda: False)
    assert machine.asked == []
    # Its process is still there after a while, so somebody else is asked.
    hangs.leaves_since = float("-inf")
    with pytest.raises(NoRoomError):
        machine.budget.admit(wakes, 0.0, lambda: False)
    assert machine.asked == ["idle"]


def test_ones_own_old_process_makes_no_room(machine: Machine) -> None:
    busy, wakes = machine.add("busy", is_movable=False), machine.add("wakes")
    machine.come(wakes, 40)
    machine.budget.sleep(wakes)
    machine.come(busy, 60)
    machine.take(busy, 61)
    seen = []

    def look() -> bool:
        seen.append(wakes.is_waited_for)
        return len(seen) > 1

    wakes.least_size = 0
    wakes.size = 40
    busy.ask_to_sleep, busy.declined_at = (lambda: None), time.monotonic() + PATIENCE_S
    assert not machine.budget.admit(wakes, PATIENCE_S, look)
    assert seen == [False, False]


def test_a_model_that_is_asked_and_stays_falls_asleep_later(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """The question was taken back in between, and it has no idle time that could be told."""
    caplog.set_level("INFO")
    spec = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0)
    account = machine.add("m")
    sleep = Sleep(spec, Path("/nowhere"), None, 1.0, machine.budget, account)
    machine.come(account, 40)
    sleep._end_workers()
    assert "sleeps: another model needs the memory" in caplog.text


def test_models_that_cannot_sleep_are_none_of_those_that_stay_awake(machine: Machine) -> None:
    machine.budget.min_awake = 1
    machine.come(machine.add("fixed", is_movable=False), 10)
    one, other = machine.add("one"), machine.add("other")
    machine.come(one, 10)
    assert not machine.budget.leave(one)
    machine.come(other, 10)
    assert machine.budget.leave(one)
    assert not machine.budget.leave(other)


def test_a_start_that_hangs_keeps_nobody_else_from_starting(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, second = machine.add("hangs"), machine.add("second")
    assert machine.budget.admit(hangs, 0.0, lambda: False)
    machine.take(hangs, 20)
    # All that there is is its own until its size is known, or it takes too long.
    with pytest.raises(NoRoomError, match="hangs 100 B"):
        machine.budget.admit(second, 0.0, lambda: False)
    monkeypatch.setattr(budget_module, "_LONGEST_START_S", 0.0)
    assert machine.budget.admit(second, 0.0, lambda: False, after_starts=True)
    assert second.expected == 80
    machine.take(second, 40)
    machine.up.add("second")
    machine.budget.arrive(second)
    third = machine.add("third", size=90)
    with pytest.raises(NoRoomError, match=r"hangs 20 B \(waking\)"):
        machine.budget.admit(third, 0.0, lambda: False)
    # When it comes after all, its size counts as that of any other.
    machine.take(hangs, 30)
    machine.up.add("hangs")
    machine.budget.arrive(hangs)
    assert (hangs.size, hangs.state) == (30, AccountState.AWAKE)


def test_processes_beyond_the_fewest_end_before_anybody_sleeps(machine: Machine) -> None:
    first, grown, wakes = machine.add("first"), machine.add("grown"), machine.add("wakes", size=30)
    machine.come(first, 30)
    machine.come(grown, 20)
    machine.take(grown, 60)
    given: list[str] = []
    grown.extra_share = lambda: 2 / 3
    grown.give_back = lambda: given.append("grown")

    def look() -> bool:
        if given and machine.sizes[2] == 60:
            machine.take(grown, 20)
            grown.extra_share = lambda: 0.0
        return False

    assert machine.budget.admit(wakes, PATIENCE_S, look)
    # Once, and the model that was used least recently is left alone.
    assert (given, machine.asked) == (["grown"], [])
