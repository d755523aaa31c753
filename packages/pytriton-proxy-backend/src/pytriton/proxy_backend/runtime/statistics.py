"""What a worker counts: plain numbers that its thread adds to, and a snapshot of them for everybody else."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .meters import Meters

# An integer of 64 bits has a `bit_length` of at most 64: no index needs a check.
_BUCKETS = 65
_LARGEST_ROWS_EXPONENT = 16
# From 2^10 ns, a microsecond, to 2^37 ns, more than two minutes.
_SECONDS_EXPONENTS = range(10, 38)

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


# Where the running numbers are in `Counters.numbers`, as the accelerator has them, too.
_REQUESTS, _ROWS, _INPUT_BYTES, _OUTPUT_BYTES, _CALLABLE_NS, _QUEUED_NS, _ROW_COUNTS = range(7)
_CALLABLE_COUNTS = _ROW_COUNTS + _BUCKETS


class Counters:
    """The running numbers.

    Attributes:
        meters: Who is told of everything as well; `None` where nobody asks.
        numbers: Most of them, in one place, where the accelerator adds to them as well.
        cancelled: Requests of which somebody said that their callers gave up.
        failed: Requests that were answered with an error, by its kind.
    """

    __slots__ = ("_lock", "_parts", "cancelled", "failed", "meters", "numbers")

    def __init__(self) -> None:
        self.meters: Meters | None = None
        self.numbers = _zeros()
        self._parts: list[array[int]] = []
        # The instances of a model in process are threads that count in one place.
        self._lock = threading.Lock()
        self.cancelled = 0
        self.failed = dict.fromkeys(ERROR_KINDS, 0)

    def add_call(self, size: tuple[int, int, int], sent_ns: int, called_ns: int, callable_ns: int) -> None:
        """Count one call of the callable.

        Args:
            size: Number of requests, rows, and bytes of the inputs of its batch.
            sent_ns: When the proxy backend sent it.
            called_ns: When the callable was called.
            callable_ns: How long it took.
        """
        requests, rows, input_bytes = size
        numbers = self.numbers
        with self._lock:
            numbers[_REQUESTS] += requests
            numbers[_ROWS] += rows
            numbers[_INPUT_BYTES] += input_bytes
            numbers[_CALLABLE_NS] += callable_ns
            # A stamp of another clock, or none, says nothing.
            if 0 < sent_ns < called_ns:
                numbers[_QUEUED_NS] += called_ns - sent_ns
            # The bucket of 2^n is that of everything above 2^(n-1).
            numbers[_ROW_COUNTS + ((rows - 1).bit_length() if rows else 0)] += 1
            numbers[_CALLABLE_COUNTS + callable_ns.bit_length()] += 1
        if self.meters is not None:
            self.meters.add_call(requests, rows, called_ns - sent_ns if 0 < sent_ns < called_ns else None, callable_ns)

    def add_failed(self, kind: str, requests: int = 1) -> None:
        """Count requests that get an error."""
        self.failed[kind] += requests
        if self.meters is not None:
            self.meters.add_failed(kind, requests)

    def add_cancelled(self) -> None:
        """Count a request whose caller gave up."""
        self.cancelled += 1
        if self.meters is not None:
            self.meters.add_cancelled()

    def add_output(self, size: int) -> None:
        """Count bytes of outputs; less than 0 takes back what was counted."""
        with self._lock:
            self.numbers[_OUTPUT_BYTES] += size

    def add_part(self) -> array[int]:
        """Return numbers in which one accelerator alone counts, which takes no lock."""
        part = _zeros()
        with self._lock:
            self._parts.append(part)
        return part

    def end_part(self, part: array[int]) -> None:
        """Keep what was counted in a part in which nobody counts any more."""
        with self._lock:
            self._parts = [other for other in self._parts if other is not part]
            for place, number in enumerate(part):
                self.numbers[place] += number

    def snapshot(self) -> WorkerStatistics:
        """Return the numbers as they are now."""
        with self._lock:
            numbers = [sum(counts) for counts in zip(self.numbers, *self._parts, strict=True)]
        rows = numbers[_ROW_COUNTS:_CALLABLE_COUNTS]
        return WorkerStatistics(
            requests=numbers[_REQUESTS],
            batches=sum(rows),
            failed_requests=MappingProxyType(dict(self.failed)),
            cancelled_requests=self.cancelled,
            rows=_histogram(rows, range(_LARGEST_ROWS_EXPONENT + 1), 1, numbers[_ROWS]),
            callable_seconds=_histogram(
                numbers[_CALLABLE_COUNTS:], _SECONDS_EXPONENTS, 1e-9, numbers[_CALLABLE_NS] * 1e-9
            ),
            queued_seconds=numbers[_QUEUED_NS] * 1e-9,
            input_bytes=numbers[_INPUT_BYTES],
            output_bytes=numbers[_OUTPUT_BYTES],
        )


def _zeros() -> array[int]:
    return array("Q", bytes(8 * (_CALLABLE_COUNTS + _BUCKETS)))


def _histogram(counts: Sequence[int], exponents: range, unit: float, total: float) -> Histogram:
    kept = [counts[exponent] for exponent in exponents]
    kept[0] += sum(counts[: exponents.start])
    return Histogram(
        bounds=tuple(2**exponent * unit for exponent in exponents),
        counts=(*kept, sum(counts[exponents.stop :])),
        sum=total,
    )
