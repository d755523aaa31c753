"""The counters of a worker: every call once, in its bucket, whoever looks at them meanwhile."""

import threading

import pytest

from pytriton.proxy_backend import WorkerStatistics
from pytriton.proxy_backend.runtime.statistics import Counters


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
