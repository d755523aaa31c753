from __future__ import annotations

import threading
import time

from pytriton.client._core.deadline import Watchdog

NAME = "pytriton-client-watchdog"


class Waiting:
    """Waits until somebody ends it."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def end_wait(self) -> None:
        self.ended.set()


def running() -> bool:
    return NAME in {thread.name for thread in threading.enumerate()}


def test_wait_that_takes_too_long_is_ended() -> None:
    watchdog = Watchdog()
    late, later, never = Waiting(), Waiting(), Waiting()
    begin = time.monotonic()
    watchdog.begin(never, 1e12)
    watchdog.begin(later, 0.4)
    watchdog.begin(late, 0.1)
    assert late.ended.wait(300)
    assert time.monotonic() - begin >= 0.1
    assert later.ended.wait(300)
    assert time.monotonic() - begin >= 0.4
    assert not never.ended.is_set()
    for waiting in (late, later, never):
        watchdog.forget(waiting)
    watchdog.join()
    assert not running()


def test_wait_that_is_over_is_left_alone() -> None:
    watchdog = Watchdog()
    first, second = Waiting(), Waiting()
    for limit_s in (0.1, 1.0, 10.0, 100.0):
        begin = time.monotonic()
        watchdog.begin(first, limit_s)
        watchdog.finish(first)
        watchdog.begin(second, limit_s)
        watchdog.forget(second)
        if time.monotonic() < begin + limit_s:
            break
        first, second = Waiting(), Waiting()
    other = Waiting()
    watchdog.begin(other, 2 * limit_s)
    assert other.ended.wait(300)
    assert not first.ended.is_set()
    assert not second.ended.is_set()
    watchdog.forget(first)
    watchdog.forget(other)
    watchdog.join()
    assert not running()


def test_works_again_after_its_thread_has_ended() -> None:
    watchdog = Watchdog()
    for _ in range(20):
        waiting = Waiting()
        watchdog.begin(waiting, 0.001)
        assert waiting.ended.wait(300)
        watchdog.forget(waiting)
        watchdog.forget(waiting)
    watchdog.join()
    watchdog.join()
    assert not running()
    assert not Watchdog()._thread


def test_ends_a_wait_that_ends_itself_meanwhile() -> None:
    """What is ended may forget itself, or begin another wait, in the thread of the watchdog."""
    watchdog = Watchdog()
    ended = threading.Event()

    class Restless:
        def __init__(self) -> None:
            self.rounds = 0

        def end_wait(self) -> None:
            self.rounds += 1
            if self.rounds < 3:
                watchdog.begin(self, 0.01)
            else:
                watchdog.forget(self)
                watchdog.join()
                ended.set()

    watchdog.begin(Restless(), 0.01)
    assert ended.wait(300)
    watchdog.join()
    assert not running()
