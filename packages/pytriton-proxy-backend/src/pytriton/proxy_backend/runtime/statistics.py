"""What a worker counts: plain numbers that its thread adds to, and a snapshot of them for everybody else."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# An integer of 64 bits has a `bit_length` of at most 64: no index needs a check.
_BUCKETS = 65
_LARGEST_ROWS_EXPONENT = 16
# From 2^10 ns, a microsecond, to 2^37 ns, more than two minutes.
_SECONDS_EXPONENTS = range(10, 38)
# Calls that are noted before they are added up: adding up many at once costs a fraction for each.
_MAX_NOTED = 256

ERROR_KINDS = ("callable", "returned", "output", "memory", "input", "cancelled")


@dataclass(frozen=True)
class Histogram:
    """How often values of some size came.

    Attributes:
        bounds: The upper bounds of the buckets, each included in its bucket, growing; powers of two.
        counts: The number of values in each bucket, not cumulative; one more than bounds, the last for all above.
        sum: All values added up.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


@dataclass(frozen=True)
class WorkerStatistics:
    """What a worker has done since it was made; warm-up does not count.

    The numbers are read one after the other while the worker goes on, so they may be apart by a batch.

    Attributes:
        requests: Requests that were handed to the callable.
        batches: Batches of them, one call each.
        failed_requests: Requests that were answered with an error, by its kind: `callable` (it raised), `returned` (an
            error in the place of a result), `output` (a result that cannot be sent), `memory` (no room in shared
            memory), `input` (a batch that cannot be read), `cancelled` (the caller gave up, and the callable was
            cancelled for it). Every kind is there, with 0 where none came.
        cancelled_requests: Requests of which the worker was told that their callers gave up.
        rows: The sizes of the batches, in rows.
        callable_seconds: The time in the callable, for each batch: until it returned or its coroutine ended; for a
            generator the time inside of it, without that of sending.
        queued_seconds: How long batches lay in the worker's socket until the callable was called, in all.
        input_bytes: Bytes of the inputs.
        output_bytes: Bytes of the outputs that were sent.
    """

    requests: int
    batches: int
    failed_requests: Mapping[str, int]
    cancelled_requests: int
    rows: Histogram
    callable_seconds: Histogram
    queued_seconds: float
    input_bytes: int
    output_bytes: int


def add_statistics(one: WorkerStatistics, other: WorkerStatistics) -> WorkerStatistics:
    """Return what two workers have done together."""
    return WorkerStatistics(
        requests=one.requests + other.requests,
        batches=one.batches + other.batches,
        failed_requests={
            kind: one.failed_requests.get(kind, 0) + count for kind, count in other.failed_requests.items()
        },
        cancelled_requests=one.cancelled_requests + other.cancelled_requests,
        rows=_joined(one.rows, other.rows),
        callable_seconds=_joined(one.callable_seconds, other.callable_seconds),
        queued_seconds=one.queued_seconds + other.queued_seconds,
        input_bytes=one.input_bytes + other.input_bytes,
        output_bytes=one.output_bytes + other.output_bytes,
    )


def _joined(one: Histogram, other: Histogram) -> Histogram:
    counts = tuple(first + second for first, second in zip(one.counts, other.counts, strict=True))
    return Histogram(bounds=one.bounds, counts=counts, sum=one.sum + other.sum)


class Counters:
    """The running numbers; only the worker's thread has something counted."""

    __slots__ = (
        "_calls",
        "_lock",
        "callable_counts",
        "callable_ns",
        "cancelled",
        "failed",
        "input_bytes",
        "output_bytes",
        "queued_ns",
        "requests",
        "row_counts",
        "rows",
    )

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[tuple[int, int, int], int, int, int]] = collections.deque()
        self._lock = threading.Lock()
        self.requests = 0
        self.rows = 0
        self.row_counts = [0] * _BUCKETS
        self.callable_ns = 0
        self.callable_counts = [0] * _BUCKETS
        self.queued_ns = 0
        self.input_bytes = 0
        self.output_bytes = 0
        self.cancelled = 0
        self.failed = dict.fromkeys(ERROR_KINDS, 0)

    def add_call(self, size: tuple[int, int, int], sent_ns: int, called_ns: int, callable_ns: int) -> None:
        """Count one call of the callable. On the way of every batch: it only notes what `_fold` adds up later.

        Args:
            size: Number of requests, rows, and bytes of the inputs of its batch.
            sent_ns: When the proxy backend sent it.
            called_ns: When the callable was called.
            callable_ns: How long it took.
        """
        calls = self._calls
        calls.append((size, sent_ns, called_ns, callable_ns))
        if len(calls) >= _MAX_NOTED:
            self._fold()

    def _fold(self) -> None:
        requests = rows = input_bytes = queued_ns = callable_ns = 0
        # One after the other, so that whoever folds at the same time takes others; the worker may go on to append.
        with self._lock:
            while self._calls:
                (some_requests, some_rows, some_bytes), sent_ns, called_ns, spent_ns = self._calls.popleft()
                requests += some_requests
                rows += some_rows
                input_bytes += some_bytes
                callable_ns += spent_ns
                # A stamp of another clock, or none, says nothing.
                if 0 < sent_ns < called_ns:
                    queued_ns += called_ns - sent_ns
                # The bucket of 2^n is that of everything above 2^(n-1).
                self.row_counts[(some_rows - 1).bit_length() if some_rows else 0] += 1
                self.callable_counts[spent_ns.bit_length()] += 1
            self.requests += requests
            self.rows += rows
            self.input_bytes += input_bytes
            self.queued_ns += queued_ns
            self.callable_ns += callable_ns

    def snapshot(self) -> WorkerStatistics:
        """Return the numbers as they are now."""
        self._fold()
        rows = list(self.row_counts)
        return WorkerStatistics(
            requests=self.requests,
            batches=sum(rows),
            failed_requests=MappingProxyType(dict(self.failed)),
            cancelled_requests=self.cancelled,
            rows=_histogram(rows, range(_LARGEST_ROWS_EXPONENT + 1), 1, self.rows),
            callable_seconds=_histogram(self.callable_counts, _SECONDS_EXPONENTS, 1e-9, self.callable_ns * 1e-9),
            queued_seconds=self.queued_ns * 1e-9,
            input_bytes=self.input_bytes,
            output_bytes=self.output_bytes,
        )


def _histogram(counts: Sequence[int], exponents: range, unit: float, total: float) -> Histogram:
    kept = [counts[exponent] for exponent in exponents]
    kept[0] += sum(counts[: exponents.start])
    return Histogram(
        bounds=tuple(2**exponent * unit for exponent in exponents),
        counts=(*kept, sum(counts[exponents.stop :])),
        sum=total,
    )
