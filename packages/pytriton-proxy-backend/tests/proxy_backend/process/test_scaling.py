"""When a model gets one worker process more, and when one fewer: the rule by itself, with a clock of the test's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.process.scaling import LOOK_S, Scaling, ScalingCounts, ScalingLimits, ScalingRule
from pytriton.proxy_backend.transport.activity import EndpointActivity

CALM_S = 30.0
LIMITS = ScalingLimits(fewest=1, grow_queue_s=0.1, shrink_calm_s=CALM_S)
LATE_S, IN_TIME_S = 0.5, 0.01


def changes_of(looks: Iterable[tuple[float, int, float | None]], running: int = 1) -> list[tuple[float, int]]:
    """Return when a rule wants more or fewer, where every wish comes true at once.

    Args:
        looks: The time, how many workers are busy, and how long requests waited.
        running: How many workers there are in the beginning.
    """
    rule, found = ScalingRule(LIMITS, 0.0), []
    for now, busy, wait_s in looks:
        if change := rule.look(now, running, min(busy, running), wait_s):
            running += change
            rule.change(now, running, by_one=change)
            found.append((now, change))
    return found


def every_look(
    seconds: float, busy: int, wait_s: float | None, since: float = 0.0
) -> list[tuple[float, int, float | None]]:
    return [(since + (number + 1) * LOOK_S, busy, wait_s) for number in range(int(seconds / LOOK_S))]


def test_workers_are_added_one_by_one_while_requests_wait() -> None:
    times = [now for now, change in changes_of(every_look(5.0, 9, LATE_S)) if change == 1]
    assert times == [1.5, 3.0, 4.5]


@pytest.mark.parametrize(
    "looks",
    [
        # A burst: requests waited in one look, and nobody comes after them.
        [(0.5, 1, LATE_S), (1.0, 0, None), (1.5, 0, None), (2.0, 1, LATE_S), (2.5, 0, None), (3.0, 0, None)],
        # A slow request that nobody waits for.
        every_look(20.0, 1, None),
        # Requests that wait a little.
        every_look(20.0, 1, 0.09),
        # One that waited, and others that did not.
        [(0.5, 1, LATE_S), (1.0, 1, IN_TIME_S), (1.5, 1, LATE_S), (2.0, 1, IN_TIME_S)],
    ],
)
def test_what_does_not_last_adds_none(looks: list[tuple[float, int, float | None]]) -> None:
    assert changes_of(looks) == []


def test_slow_requests_that_waited_count_until_the_next_are_answered() -> None:
    looks = [(0.5, 1, LATE_S), *((0.5 + (number + 1) * LOOK_S, 1, None) for number in range(10))]
    assert changes_of(looks)[0] == (1.5, 1)


def test_workers_end_one_by_one_when_it_was_calm() -> None:
    first, second = changes_of(every_look(80.0, 0, None), running=3)
    assert (first[1], second[1]) == (-1, -1)
    # What was busy before counts for a while, then it has to be calm.
    assert CALM_S <= first[0] <= 1.5 * CALM_S
    assert CALM_S <= second[0] - first[0] <= 1.5 * CALM_S


@pytest.mark.parametrize("looks", [every_look(300.0, 1, IN_TIME_S), every_look(300.0, 0, 0.06)])
def test_none_ends_while_the_others_would_be_too_few(looks: list[tuple[float, int, float | None]]) -> None:
    assert changes_of(looks, running=2) == []


def served(load: Callable[[float], float], seconds: float, most: int = 4) -> Iterator[tuple[float, int]]:
    """Serve a load, counted in workers, and yield when there is one more or one fewer."""
    rule, running, backlog_s = ScalingRule(LIMITS, 0.0), 1, 0.0
    for number in range(1, int(seconds / LOOK_S)):
        now = number * LOOK_S
        wait_s = backlog_s / running
        work_s = backlog_s + load(now) * LOOK_S
        done_s = min(work_s, running * LOOK_S)
        backlog_s = min(work_s - done_s, 5.0)
        # Of a fraction of a worker it is seen at some looks that it is busy.
        busy = math.floor(done_s / LOOK_S + (number * 0.618) % 1.0)
        change = rule.look(now, running, busy, wait_s if done_s else None)
        if (change > 0 and running < most) or change < 0:
            running += change
            rule.change(now, running, by_one=change)
            yield now, change


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9, 1.3, 1.75, 2.5, 3.2])
def test_a_steady_load_comes_to_rest(load: float) -> None:
    changes = list(served(lambda _: load, 3600.0))
    assert len(changes) <= 2 + math.ceil(load)
    assert all(now < 600.0 for now, _ in changes)


@pytest.mark.parametrize("period_s", [4.0, 20.0, 60.0, 120.0, 240.0])
def test_a_load_that_comes_and_goes_makes_few_processes_come_and_go(period_s: float) -> None:
    hours = 4
    changes = list(served(lambda now: 1.6 if now % period_s < period_s / 2 else 0.05, hours * 3600.0))
    periods = hours * 3600.0 / period_s
    # The calm that is asked for doubles up to 16 times, so it is longer than such a period in the end.
    assert len(changes) <= 12, (len(changes), periods)


def test_a_load_that_rests_for_long_gives_its_processes_back() -> None:
    changes = list(served(lambda now: 1.6 if now % 7200.0 < 600.0 else 0.05, 6 * 3600.0))
    # What had waited for the second one calls for a third.
    assert [change for _, change in changes] == [1, 1, -1, -1] * 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 5), st.one_of(st.none(), st.sampled_from([0.0, 0.06, LATE_S]))),
        max_size=60,
    )
)
def test_nothing_changes_without_its_reason(stretches: list[tuple[int, int, float | None]]) -> None:
    looks: list[tuple[float, int, float | None]] = []
    for count, busy, wait_s in stretches:
        looks += every_look(count * LOOK_S, busy, wait_s, since=looks[-1][0] if looks else 0.0)
    running, last = 1, 0.0
    for now, change in changes_of(looks):
        since = [look for look in looks if last < look[0] <= now]
        if change > 0:
            assert sum(wait_s == LATE_S for _, _, wait_s in since) >= 1
            assert now - last >= 1.0
        else:
            assert running > LIMITS.fewest
            assert now - last >= CALM_S
            assert not any(wait_s in (0.06, LATE_S) for when, _, wait_s in since if when > now - CALM_S)
        running, last = running + change, now
    assert running >= LIMITS.fewest


class OneQueue:
    """A queue whose numbers the test sets."""

    def __init__(self) -> None:
        self.left, self.waited_s, self.waiting = 0, 0.0, 0
        self.asked = 0
        """How often it was asked who waits, which costs the server a page of metrics."""

    def times(self) -> tuple[int, float]:
        return self.left, self.waited_s

    def pending(self) -> int:
        self.asked += 1
        return self.waiting


def waits(queue: OneQueue) -> Callable[[float, int], float | None]:
    """Return what finds how long requests have waited, by the time and how many batches are in flight."""
    scaled = Scaling(cast("ModelSpec", SimpleNamespace(name="m", version=1)), LIMITS, queue, ScalingCounts())
    return lambda now, in_flight: scaled._wait_s(EndpointActivity(in_flight=in_flight, taken=1), now)


def test_requests_that_wait_while_none_leaves_the_queue_have_waited_since_then() -> None:
    queue = OneQueue()
    wait_s = waits(queue)
    assert wait_s(0.0, 1) is None  # there is nothing to compare with yet
    assert wait_s(1.0, 1) is None
    queue.waiting = 2
    # Looks that come soon after each other must not make a long wait seem a short one.
    assert [wait_s(now, 1) for now in (2.0, 2.05, 2.5, 7.0)] == [None, None, 0.5, 5.0]
    # Two leave it, and others come.
    queue.left, queue.waited_s = 2, 11.0
    assert wait_s(8.0, 1) == 5.5
    assert [wait_s(now, 1) for now in (9.0, 10.0)] == [None, 1.0]
    queue.waiting = 0
    assert wait_s(11.0, 1) is None
    queue.waiting = 1
    assert [wait_s(now, 1) for now in (12.0, 13.0)] == [None, 1.0]


def test_nobody_is_asked_who_waits_while_requests_leave_the_queue_or_none_is_there() -> None:
    queue = OneQueue()
    wait_s = waits(queue)
    for now in range(5):
        queue.left += 1
        wait_s(float(now), 1)
    wait_s(5.0, 0)
    wait_s(6.0, 0)
    assert queue.asked == 0
