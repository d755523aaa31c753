"""The workers of all models are stopped at the same time, whatever becomes of the threads that do it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pytriton.server.lifecycle.deployment import _stop_at_once
from support.waiting import PATIENCE_S


def models(count: int, stop: Any) -> list[Any]:
    return [
        SimpleNamespace(name=f"m{number}", stop_workers=lambda limit_s, number=number: stop(number, limit_s))
        for number in range(count)
    ]


def test_all_are_stopped_together() -> None:
    meeting = threading.Barrier(20)
    _stop_at_once(models(20, lambda _number, _limit_s: meeting.wait(PATIENCE_S)), 2.0)


def test_where_no_thread_can_be_started_all_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 2:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    _stop_at_once(models(12, lambda number, _limit_s: stopped.append(number)), 2.0)
    assert sorted(stopped) == list(range(12))


@pytest.mark.parametrize("count", [4, 12])
def test_an_error_is_raised_when_all_are_stopped(count: int) -> None:
    stopped = []

    def stop(number: int, _limit_s: float) -> None:
        if number == 1:
            raise OSError("the description cannot be removed")
        stopped.append(number)

    with pytest.raises(OSError, match="cannot be removed"):
        _stop_at_once(models(count, stop), 2.0)
    assert sorted(stopped) == [number for number in range(count) if number != 1]


@pytest.mark.parametrize(("timeout_s", "least", "most"), [(0.0, 0.0, 0.0), (0.2, 0.3, 0.5), (2.0, 2.1, 2.3)])
def test_idle_ones_get_a_moment_each(timeout_s: float, least: float, most: float) -> None:
    limits = []
    _stop_at_once(models(20, lambda _number, limit_s: limits.append(limit_s)), timeout_s)
    assert all(least <= limit_s <= most for limit_s in limits)


def test_a_few_are_stopped_by_this_thread() -> None:
    threads = []
    _stop_at_once(models(3, lambda _number, _limit_s: threads.append(threading.current_thread())), 2.0)
    assert threads == [threading.current_thread()] * 3
