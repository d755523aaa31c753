"""What a worker counts: plain numbers that its thread adds to, and a snapshot of them for everybody else.

Those of a process lie in memory that its parent has as well: what was counted stays counted, however the process ends.
"""

from __future__ import annotations

import mmap
import operator
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from time import monotonic_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..wire.limits import COUNTED_BUCKETS as _BUCKETS
from ..wire.limits import COUNTED_PARTS as _PARTS

if TYPE_CHECKING:
    from ..wire.response import ResponseData
    from .meters import Meters

_LARGEST_ROWS_EXPONENT = 16
# Up to 16 million; a histogram of them has few buckets, because what counts is their sum beside that of the padding.
_COSTS_EXPONENTS = range(4, 25, 2)
# From 2^10 ns, a microsecond, to 2^37 ns, more than two minutes. Between 1 ms and 17 s all buckets are reported, so a
# quantile is wrong by a quarter at most; elsewhere the buckets of a power are joined.
_SECONDS_EXPONENTS = range(10, 38)
_FINE_EXPONENTS = range(21, 35)

ERROR_KINDS = ("callable", "returned", "output", "memory", "input", "cancelled")


@dataclass(frozen=True)
class Histogram:
    """How often values of some size came.

    Attributes:
        bounds: The upper bounds of the buckets, each included in its bucket, growing: powers of two, and between some
            of them quarters of the way to the next.
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
            memory), `input` (a batch that cannot be read, counted as one), `cancelled` (the caller gave up, and the
            callable was cancelled for it). Every kind is there, with 0 if none came.
        cancelled_requests: Requests of which the worker was told that nobody waits for them any more: their callers
            gave up, or they took longer than the execution timeout.
        rows: The sizes of the batches, in rows.
        callable_seconds: The time in the callable, for each batch: until it returned or its coroutine ended; for a
            generator the time inside of it, without that of sending.
        first_response_seconds: Of a decoupled model, the time from the call of the callable to the first response of a
            request, for each request that has got one.
        queued_seconds: How long batches lay in the worker's socket until the callable was called, in all.
        input_bytes: Bytes of the inputs.
        output_bytes: Bytes of the outputs that were sent.
        costs: What the batches cost, each with its padding, in the unit of `Cost.limit`; empty for a model without a
            cost.
        padding: How much of that was padding, in all.
    """

    requests: int
    batches: int
    failed_requests: Mapping[str, int]
    cancelled_requests: int
    rows: Histogram
    callable_seconds: Histogram
    first_response_seconds: Histogram
    queued_seconds: float
    input_bytes: int
    output_bytes: int
    costs: Histogram
    padding: int


def add_statistics(one: WorkerStatistics, other: WorkerStatistics) -> WorkerStatistics:
    """Return the sum of the counts of two workers."""
    names = [field.name for field in fields(WorkerStatistics)]
    return WorkerStatistics(**{name: _sum(getattr(one, name), getattr(other, name)) for name in names})


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Histogram):
        counts = tuple(map(operator.add, one.counts, other.counts))
        return Histogram(bounds=one.bounds, counts=counts, sum=one.sum + other.sum)
    if isinstance(one, Mapping):
        return {kind: one.get(kind, 0) + count for kind, count in other.items()}
    return one + other


# The places of the running numbers in `Counters.numbers`. The accelerator has those up to `_ACCELERATED`, too.
_REQUESTS, _ROWS, _INPUT_BYTES, _OUTPUT_BYTES, _CALLABLE_NS, _QUEUED_NS, _ROW_COUNTS = range(7)
_CALLABLE_COUNTS = _ROW_COUNTS + _BUCKETS
_ACCELERATED = _FIRST_NS = _CALLABLE_COUNTS + _BUCKETS * _PARTS
_FIRST_COUNTS = _FIRST_NS + 1
_CANCELLED = _FIRST_COUNTS + _BUCKETS * _PARTS
_PADDING = _CANCELLED + 1
_COST = _PADDING + 1
_COST_COUNTS = _COST + 1
_FAILED = _COST_COUNTS + _BUCKETS
_COUNT = _FAILED + len(ERROR_KINDS)

COUNTERS_BYTES = 8 * _COUNT
"""The memory that counters take."""


class Counters:
    """The running numbers."""

    __slots__ = ("_left", "_lock", "_numbers", "_parts", "accelerated", "meters")

    def __init__(self, file: int | None = None) -> None:
        self.meters: Meters | None = None  # who is told of everything as well; `None` if nobody asks
        # A view keeps its memory alive.
        memory = bytearray(COUNTERS_BYTES) if file is None else mmap.mmap(file, COUNTERS_BYTES)
        self._numbers = memoryview(memory).cast("Q")
        self._left: memoryview | None = None
        address: int = np.frombuffer(self._numbers, np.uint64).__array_interface__["data"][0]
        # Address and number of those numbers that the accelerator adds to as well; it must not outlive this.
        self.accelerated = address, _ACCELERATED
        self._parts: list[array[int]] = []
        # In process, the instances of a model are threads that share these numbers.
        self._lock = threading.Lock()

    def add_call(self, size: tuple[int, int, int], sent_ns: int, called_ns: int, callable_ns: int) -> None:
        """Count one call of the callable."""
        requests, rows, input_bytes = size
        numbers = self._numbers
        with self._lock:
            numbers[_REQUESTS] += requests
            numbers[_ROWS] += rows
            numbers[_INPUT_BYTES] += input_bytes
            numbers[_CALLABLE_NS] += callable_ns
            # A time stamp of another clock, or none, is useless.
            if 0 < sent_ns < called_ns:
                numbers[_QUEUED_NS] += called_ns - sent_ns
            # The bucket 2^n counts everything above 2^(n-1).
            numbers[_ROW_COUNTS + ((rows - 1).bit_length() if rows else 0)] += 1
            numbers[_CALLABLE_COUNTS + _place_of(callable_ns)] += 1
        if self.meters is not None:
            self.meters.add_call(requests, rows, called_ns - sent_ns if 0 < sent_ns < called_ns else None, callable_ns)

    def add_cost(self, cost: int, padding: int) -> None:
        """Count what a batch costs, and how much of that is padding."""
        with self._lock:
            self._numbers[_COST] += cost
            self._numbers[_PADDING] += padding
            self._numbers[_COST_COUNTS + (cost - 1).bit_length()] += 1

    def add_first_response(self, waited_ns: int) -> None:
        """Count the first response of a request to a decoupled model, so long after the callable was called."""
        with self._lock:
            self._numbers[_FIRST_NS] += waited_ns
            self._numbers[_FIRST_COUNTS + _place_of(waited_ns)] += 1
        if self.meters is not None:
            self.meters.add_first_response(waited_ns)

    def add_failed(self, kind: str, requests: int = 1) -> None:
        """Count requests that get an error."""
        with self._lock:
            self._numbers[_FAILED + ERROR_KINDS.index(kind)] += requests
        if self.meters is not None:
            self.meters.add_failed(kind, requests)

    def add_cancelled(self) -> None:
        """Count a request that its caller cancelled."""
        with self._lock:
            self._numbers[_CANCELLED] += 1
        if self.meters is not None:
            self.meters.add_cancelled()

    def add_output(self, size: int) -> None:
        """Count bytes of outputs; a negative number takes counted ones back."""
        with self._lock:
            self._numbers[_OUTPUT_BYTES] += size

    def add_part(self) -> array[int]:
        """Return numbers for a single accelerator, which counts without a lock."""
        part = array("Q", bytes(8 * _ACCELERATED))
        with self._lock:
            self._parts.append(part)
        return part

    def end_part(self, part: array[int]) -> None:
        """Keep the counts of a part that is not used any more."""
        with self._lock:
            self._parts = [other for other in self._parts if other is not part]
            for place, number in enumerate(part):
                self._numbers[place] += number

    def leave(self) -> None:
        """In a forked child, count in memory that the parent of this process does not read."""
        self._lock = threading.Lock()
        # The accelerator uses its address.
        self._left = self._numbers
        self._numbers = memoryview(bytearray(self._numbers)).cast("Q")

    def snapshot(self) -> WorkerStatistics:
        """Return the numbers as they are now."""
        with self._lock:
            numbers = self._numbers.tolist()
            for part in self._parts:
                for place, number in enumerate(part):
                    numbers[place] += number
        return _statistics(numbers)


class FirstResponses:
    """The requests of a batch for a decoupled model that have no response yet, and how long they wait."""

    __slots__ = ("_counters", "_waiting")

    def __init__(self, counters: Counters, count: int) -> None:
        self._counters = counters
        self._waiting = set(range(count))

    def note(self, responses: Sequence[ResponseData], began_ns: int) -> None:
        """Count those of these responses that are the first of their request; errors and empty ends do not count."""
        if not self._waiting:
            return
        waited_ns = monotonic_ns() - began_ns
        for response in responses:
            if response.has_outputs and response.request in self._waiting:
                self._waiting.remove(response.request)
                self._counters.add_first_response(waited_ns)


def read_statistics(file: int) -> WorkerStatistics:
    """Return the counts in a file, to which another process may still add."""
    # Read and not mapped, because the process that counts could shorten the file.
    return _statistics(array("Q", os.pread(file, COUNTERS_BYTES, 0).ljust(COUNTERS_BYTES, b"\0")))


def _statistics(numbers: Sequence[int]) -> WorkerStatistics:
    rows = numbers[_ROW_COUNTS:_CALLABLE_COUNTS]
    return WorkerStatistics(
        requests=numbers[_REQUESTS],
        batches=sum(rows),
        failed_requests=MappingProxyType(dict(zip(ERROR_KINDS, numbers[_FAILED:], strict=True))),
        cancelled_requests=numbers[_CANCELLED],
        rows=_histogram(rows, _ROWS_ENDS, _ROWS_BOUNDS, numbers[_ROWS]),
        callable_seconds=_histogram_of_seconds(numbers, _CALLABLE_NS, _CALLABLE_COUNTS),
        first_response_seconds=_histogram_of_seconds(numbers, _FIRST_NS, _FIRST_COUNTS),
        queued_seconds=numbers[_QUEUED_NS] * 1e-9,
        input_bytes=numbers[_INPUT_BYTES],
        output_bytes=numbers[_OUTPUT_BYTES],
        costs=_histogram(numbers[_COST_COUNTS:_FAILED], _COSTS_ENDS, _COSTS_BOUNDS, numbers[_COST]),
        padding=numbers[_PADDING],
    )


def _place_of(number: int) -> int:
    """Return the bucket of a time, by its highest bit and the two bits after it."""
    length = number.bit_length()
    return length * _PARTS + ((number >> (length - 3)) % _PARTS if length > 2 else 0)


def _second_ends() -> Iterator[tuple[int, float]]:
    """Yield the last place of each bucket of times among the counts, and its upper bound."""
    for exponent in _SECONDS_EXPONENTS:
        for part in range(1, _PARTS + 1):
            if part == _PARTS or exponent in _FINE_EXPONENTS:
                yield exponent * _PARTS + part, (_PARTS + part) * 2 ** (exponent - 1) / _PARTS * 1e-9


_ROWS_BOUNDS = tuple(float(2**exponent) for exponent in range(_LARGEST_ROWS_EXPONENT + 1))
_ROWS_ENDS = tuple(range(1, len(_ROWS_BOUNDS) + 1))
_COSTS_BOUNDS = tuple(float(2**exponent) for exponent in _COSTS_EXPONENTS)
_COSTS_ENDS = tuple(exponent + 1 for exponent in _COSTS_EXPONENTS)
_SECONDS_ENDS, _SECONDS_BOUNDS = zip(*_second_ends(), strict=True)


def _histogram_of_seconds(numbers: Sequence[int], total: int, first: int) -> Histogram:
    counts = numbers[first : first + _BUCKETS * _PARTS]
    return _histogram(counts, _SECONDS_ENDS, _SECONDS_BOUNDS, numbers[total] * 1e-9)


def _histogram(counts: Sequence[int], ends: Sequence[int], bounds: tuple[float, ...], total: float) -> Histogram:
    begins = (0, *ends)
    kept = (sum(counts[begin:end]) for begin, end in zip(begins, (*ends, len(counts)), strict=True))
    return Histogram(bounds=bounds, counts=tuple(kept), sum=total)
