"""The counters of a worker: every call once, in its bucket, whoever looks at them meanwhile."""

import os
import random
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytriton.proxy_backend import WorkerStatistics
from pytriton.proxy_backend.runtime import statistics
from pytriton.proxy_backend.runtime.statistics import (
    COUNTERS_BYTES,
    ERROR_KINDS,
    Counters,
    FirstResponses,
    Histogram,
    add_statistics,
    read_statistics,
)
from pytriton.proxy_backend.wire.response import ResponseData

Event = tuple[str, tuple[Any, ...]]


def test_nothing_yet() -> None:
    found = Counters().snapshot()
    assert (found.requests, found.batches, found.rows.count, found.callable_seconds.count) == (0, 0, 0, 0)
    assert len(found.rows.counts) == len(found.rows.bounds) + 1
    assert list(found.callable_seconds.bounds) == sorted(found.callable_seconds.bounds)


def test_every_size_is_in_its_bucket() -> None:
    for rows, bound in ((0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (65_536, 65_536)):
        counters = Counters()
        counters.add_call((1, rows, 0), 0, 0, 0)
        found = counters.snapshot().rows
        assert (found.counts[found.bounds.index(bound)], found.count, found.sum) == (1, 1, rows)
    counters.add_call((1, 65_537, 0), 0, 0, 0)
    assert counters.snapshot().rows.counts[-1] == 1


def test_every_duration_is_in_its_bucket() -> None:
    counters = Counters()
    for nanoseconds in (0, 1, 1000, 1_000_000, 10**9, 10**12):
        counters.add_call((1, 1, 0), 0, 0, nanoseconds)
    found = counters.snapshot().callable_seconds
    assert found.count == 6
    assert abs(found.sum - 1001.001001001) < 1e-6
    assert (found.counts[0], found.counts[-1]) == (3, 1)
    for seconds, place in ((1e-3, 3), (1.0, 4)):
        upper = next(index for index, bound in enumerate(found.bounds) if bound >= seconds)
        assert sum(found.counts[: upper + 1]) == place + 1


@pytest.mark.parametrize("nanoseconds", [1_100_000, 5_000_000, 70_000_000, 300_000_000, 4_000_000_000, 16_000_000_000])
def test_a_duration_is_told_within_a_quarter(nanoseconds: int) -> None:
    counters = Counters()
    counters.add_call((1, 1, 0), 0, 0, nanoseconds)
    found = counters.snapshot().callable_seconds
    place = found.counts.index(1)
    low, high = found.bounds[place - 1], found.bounds[place]
    assert low <= nanoseconds * 1e-9 <= high <= 1.2501 * low


def test_a_bucket_ends_where_its_bound_says() -> None:
    ends = list(statistics._second_ends())
    assert [bound for _, bound in ends] == list(Counters().snapshot().callable_seconds.bounds)
    for end, bound in ends:
        bound_ns = round(bound * 1e9)
        assert statistics._place_of(bound_ns - 1) < end <= statistics._place_of(bound_ns)
    # A power of two is joined below 2^20 ns and above 2^34 ns, and in quarters between.
    assert [round(bound * 1e9) for _, bound in ends] == sorted(
        {2**exponent for exponent in range(10, 38)}
        | {2**exponent // 4 * (4 + part) for exponent in range(20, 34) for part in range(4)}
    )


def test_stamps_of_another_clock_count_for_nothing() -> None:
    counters = Counters()
    for sent_ns, called_ns in ((0, 10**15), (5, 4), (10, 110)):
        counters.add_call((1, 1, 0), sent_ns, called_ns, 1)
    assert abs(counters.snapshot().queued_seconds - 100e-9) < 1e-15


def test_no_call_is_lost_or_counted_twice() -> None:
    counters = Counters()
    calls = 20_000
    seen: list[WorkerStatistics] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(counters.snapshot())

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for _ in range(calls):
        counters.add_call((2, 3, 4), 1, 2, 5)
    done.set()
    for watcher in watchers:
        watcher.join()
    found = counters.snapshot()
    assert (found.requests, found.batches, found.rows.sum, found.input_bytes) == (
        2 * calls, calls, 3 * calls, 4 * calls,
    )  # fmt: skip
    assert found.callable_seconds.count == calls
    assert all(snapshot.requests <= 2 * calls for snapshot in seen)


# ---- against a model of them ---------------------------------------------------------------------------------------


def events(generator: random.Random, count: int) -> list[Event]:
    """Return what a worker may count, with sizes and times around the bounds of buckets."""

    def near_power(most: int) -> int:
        return max(0, (1 << generator.randrange(most)) + generator.choice((-1, 0, 1)))

    def time_ns() -> int:
        return near_power(42) * generator.choice((4, 5, 6, 7)) // 4

    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "add_call": lambda: (
            (generator.randrange(9), near_power(18), generator.randrange(10**6)),
            generator.choice((0, 5, 10, 11)),
            10,
            time_ns(),
        ),
        "add_cost": lambda: (near_power(26), generator.randrange(100)),
        "add_first_response": lambda: (time_ns(),),
        "add_failed": lambda: (generator.choice(ERROR_KINDS), generator.randrange(1, 5)),
        "add_cancelled": lambda: (),
        "add_output": lambda: (generator.randrange(10**6),),
    }
    names = list(made)
    return [(name, made[name]()) for name in generator.choices(names, k=count)]


def counted(happened: Iterable[Event], counters: Counters) -> Counters:
    for name, values in happened:
        getattr(counters, name)(*values)
    return counters


def expected(happened: Iterable[Event]) -> WorkerStatistics:
    """Return what should be counted, from the lists of all that happened."""
    of: dict[str, list[tuple[Any, ...]]] = {}
    for name, values in happened:
        of.setdefault(name, []).append(values)
    calls = of.get("add_call", [])
    empty = Counters().snapshot()

    def sizes(bounds: tuple[float, ...], values: list[int]) -> Histogram:
        counts = [0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        return Histogram(bounds, tuple(counts), sum(values))

    def times(bounds: tuple[float, ...], values: list[int]) -> Histogram:
        counts = [0] * (len(bounds) + 1)
        bounds_ns = [round(bound * 1e9) for bound in bounds]
        for value in values:
            counts[bisect_right(bounds_ns, value)] += 1
        return Histogram(bounds, tuple(counts), sum(values) * 1e-9)

    failed = dict.fromkeys(ERROR_KINDS, 0)
    for kind, requests in of.get("add_failed", []):
        failed[kind] += requests
    costs = of.get("add_cost", [])
    return WorkerStatistics(
        requests=sum(size[0] for size, *_ in calls),
        batches=len(calls),
        failed_requests=failed,
        cancelled_requests=len(of.get("add_cancelled", [])),
        rows=sizes(empty.rows.bounds, [size[1] for size, *_ in calls]),
        callable_seconds=times(empty.callable_seconds.bounds, [each[3] for each in calls]),
        first_response_seconds=times(
            empty.callable_seconds.bounds, [waited for (waited,) in of.get("add_first_response", [])]
        ),
        queued_seconds=sum(called - sent for _, sent, called, _ in calls if 0 < sent < called) * 1e-9,
        input_bytes=sum(size[2] for size, *_ in calls),
        output_bytes=sum(size for (size,) in of.get("add_output", [])),
        costs=sizes(empty.costs.bounds, [cost for cost, _ in costs]),
        padding=sum(padding for _, padding in costs),
    )


@contextmanager
def memory_of_two_processes() -> Iterator[int]:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, COUNTERS_BYTES)
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_counted_is_what_happened(seed: int) -> None:
    generator = random.Random(seed)
    one, other = events(generator, 300), events(generator, generator.randrange(300))
    with memory_of_two_processes() as file:
        assert read_statistics(file) == expected([])
        counters = counted(one, Counters(file))
        assert counters.snapshot() == read_statistics(file) == expected(one)
        # What a forked child counts is its own.
        counters.leave()
        counted(other, counters)
        assert read_statistics(file) == expected(one)
        assert counters.snapshot() == expected(one + other)
    assert_same(add_statistics(expected(one), expected(other)), expected(one + other))
    with pytest.raises(TypeError):
        counters.snapshot().failed_requests["callable"] = 1  # type: ignore[index] # that is what is tried


def assert_same(one: WorkerStatistics, other: WorkerStatistics) -> None:
    """Compare two, whose seconds were added up in another order."""
    for name, value in vars(one).items():
        if isinstance(value, Histogram):
            assert (value.bounds, value.counts) == (getattr(other, name).bounds, getattr(other, name).counts)
            value, expected_value = value.sum, getattr(other, name).sum
        else:
            expected_value = getattr(other, name)
        assert value == (pytest.approx(expected_value) if isinstance(value, float) else expected_value)


def test_what_a_process_counts_outlives_its_memory() -> None:
    with memory_of_two_processes() as file:
        counted([("add_call", ((3, 5, 40), 10, 20, 3_000_000)), ("add_cancelled", ())], Counters(file))
        os.ftruncate(file, 12)
        found = read_statistics(file)
        assert (found.requests, found.cancelled_requests) == (3, 0)


def test_parts_are_counted_until_they_end_and_after_it() -> None:
    """Each lane of an accelerator adds to a part of its own, without a lock."""
    calls = [event for event in events(random.Random(6), 300) if event[0] in ("add_call", "add_output")]
    counters = counted(calls[:20], Counters())
    address, count = counters.accelerated
    assert address
    parts = []
    for begin in (20, 50):
        part = counters.add_part()
        assert list(part) == [0] * count
        part[:] = array("Q", counted(calls[begin : begin + 30], Counters())._numbers[:count])
        parts.append(part)
    assert counters.snapshot() == expected(calls[:80])
    for part in parts:
        counters.end_part(part)
        assert counters.snapshot() == expected(calls[:80])
    counted(calls[80:], counters)
    assert counters.snapshot() == expected(calls)


def test_the_first_response_of_each_request_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "monotonic_ns", lambda: 1500)
    counters = Counters()
    firsts = FirstResponses(counters, 2)
    for responses, count in (
        ([ResponseData(0, error="so"), ResponseData(1, empty=True)], 0),
        ([ResponseData(0), ResponseData(0)], 1),
        ([ResponseData(0), ResponseData(1)], 2),
        ([ResponseData(1)], 2),
    ):
        firsts.note(responses, 500)
        found = counters.snapshot().first_response_seconds
        assert found.count == count
        assert found.sum == pytest.approx(count * 1e-6)


class Heard:
    """Meters that keep what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.calls.append((name, *values))


def test_meters_are_told_of_what_is_counted() -> None:
    counters = Counters()
    counters.meters = heard = Heard()  # type: ignore[assignment] # it has all of its methods
    for sent_ns in (0, 1, 10, 11):
        counters.add_call((2, 5, 40), sent_ns, 10, 3)
    counters.add_first_response(7)
    counters.add_failed("callable")
    counters.add_cancelled()
    assert heard.calls == [
        *[("add_call", 2, 5, queued_ns, 3) for queued_ns in (None, 9, None, None)],
        ("add_first_response", 7), ("add_failed", "callable", 1), ("add_cancelled",),
    ]  # fmt: skip
