"""What `bench` measures: calls of a model by more and more callers at once, each of which waits for its answers."""

import collections
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError

_TITLES = ("CALLERS", "REQUESTS/S", "P50 MS", "P90 MS", "P99 MS", "ERRORS")
_WIDTHS = tuple(max(len(title), 10) for title in _TITLES)
# A pause after an error, so that a caller who is refused does not call all the time.
_AFTER_ERROR_S = 0.01
_SEED = 1
_CHART_COLUMNS = 60
_CHART_ROWS = 12
# A caller that uses more of a processor than this measures itself, not the server.
_BUSY = 0.9

Call = Callable[[], object]


@dataclass
class Level:
    """What came of a number of callers."""

    callers: int  # how many called at once
    seconds: float = 0.0  # how long
    latencies_ms: list[float] = field(default_factory=list)  # of each request that succeeded, in milliseconds
    errors: "collections.Counter[str]" = field(default_factory=collections.Counter)  # how many requests failed, by kind
    busy: float = 0.0  # how much of one processor this process used

    @property
    def rate(self) -> float:
        """Requests that succeeded, in a second."""
        return len(self.latencies_ms) / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float | None:
        """Return the time in which this percentage of requests was answered; None without requests."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None


def make_inputs(spec: ModelSpec, batch_size: int | None) -> dict[str, Any]:
    """Return random inputs for a model, without optional ones. Variable dimensions have the length 1."""
    generator = np.random.default_rng(_SEED)
    axis = () if batch_size is None else (batch_size,)
    made = {}
    for tensor in spec.inputs:
        if not tensor.optional:
            shape = (*axis, *(1 if size < 0 else size for size in tensor.shape))
            made[tensor.name] = _make_array(tensor, shape, generator)
    return made


def measure(
    connect: Callable[[], AbstractContextManager[Call]], callers: int, duration_s: float, level: Level | None = None
) -> Level:
    """Call from several threads at once, each with its own connection.

    The results are written to `level`, even after an interrupt, and errors of the client are counted.
    """
    level = Level(callers) if level is None else level
    stop = threading.Event()
    ready = threading.Barrier(callers + 1)
    lock = threading.Lock()

    def call_on() -> None:
        latencies: list[float] = []
        errors: collections.Counter[str] = collections.Counter()

        def once() -> None:
            began = time.perf_counter()
            try:
                call()
            except PyTritonClientError as error:
                errors[describe_error(error)] += 1
                stop.wait(_AFTER_ERROR_S)
            else:
                latencies.append((time.perf_counter() - began) * 1000)

        try:
            with connect() as call:
                # The first request opens the connection; it counts only if it fails.
                once()
                latencies.clear()
                ready.wait()
                while not stop.is_set():
                    once()
        except threading.BrokenBarrierError:
            pass  # interrupted before the start
        finally:
            with lock:
                level.latencies_ms += latencies
                level.errors += errors

    threads = [threading.Thread(target=call_on, name="pytriton-bench", daemon=True) for _ in range(callers)]
    began = time.perf_counter()
    used = time.process_time()
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        began, used = time.perf_counter(), time.process_time()
        stop.wait(duration_s)
    finally:
        stop.set()
        ready.abort()
        for thread in threads:
            # A thread whose start was interrupted ends by itself.
            if thread.is_alive():
                thread.join()
        # This includes the requests that were in flight.
        level.seconds = time.perf_counter() - began
        level.busy = (time.process_time() - used) / level.seconds
    return level


def describe_error(error: PyTritonClientError) -> str:
    """Return the kind of an error: its class, and the status that the server gave."""
    kind = type(error).__name__.removeprefix("PyTritonClient").removesuffix("Error")
    said = str(error)
    if isinstance(error, PyTritonClientInferenceServerError):
        kind = f"{kind} {error.status or ''}".rstrip()
        said = error.server_message or said
    line = " ".join(said.split())
    return f"{kind}: {line if line.isprintable() else ascii(line)}"


def table_row(level: Level | None) -> str:
    """Return the row of a level; None is the titles."""
    cells: Sequence[str] = _TITLES
    if level is not None:
        times = [level.percentile_ms(percent) for percent in (50, 90, 99)]
        shown = ["-" if each is None else f"{each:,.2f}" for each in times]
        cells = (str(level.callers), f"{level.rate:,.1f}", *shown, f"{level.errors.total():,}")
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def as_table(levels: Sequence[Level]) -> Iterator[str]:
    """Yield the lines after the table: a chart, the errors by kind, and what limits the figures."""
    measured = [level for level in levels if level.latencies_ms]
    if len(measured) > 1:
        yield ""
        yield from draw_chart(measured)
    errors: collections.Counter[str] = sum((level.errors for level in levels), collections.Counter())
    if errors:
        yield "\nErrors:"
        yield from (f"{count:>8,}  {kind}" for kind, count in errors.most_common())
    if any(level.busy > _BUSY for level in levels):
        yield "\nThis program was busy itself, and may be what was measured: the server may do more."


def as_json(levels: Sequence[Level], **facts: Any) -> str:
    """Return the measurement as JSON."""
    told = [
        {
            "callers": level.callers,
            "seconds": round(level.seconds, 3),
            "requests_per_s": round(level.rate, 3),
            "requests": len(level.latencies_ms),
            "latency_ms": {f"p{percent}": level.percentile_ms(percent) for percent in (50, 90, 99)},
            "errors": dict(level.errors),
            "caller_busy": round(level.busy, 3),
        }
        for level in levels
    ]
    return json.dumps({**facts, "levels": told}, indent=2)


def draw_chart(levels: Sequence[Level]) -> Iterator[str]:
    """Yield the lines of a chart: requests in a second from left to right, milliseconds upwards."""
    points = [
        (level.rate, level.percentile_ms(percent) or 0.0, mark)
        # The median is drawn last, on top if both are at one place.
        for percent, mark in ((99, "x"), (50, "o"))
        for level in levels
    ]
    most_rate = max(rate for rate, _, _ in points)
    most_ms = max(latency for _, latency, _ in points)
    grid = [[" "] * (_CHART_COLUMNS + 1) for _ in range(_CHART_ROWS + 1)]
    for rate, latency, mark in points:
        row = _CHART_ROWS - round(latency / most_ms * _CHART_ROWS)
        grid[row][round(rate / most_rate * _CHART_COLUMNS)] = mark
    width = len(f"{most_ms:,.2f}")
    for number, cells in enumerate(grid):
        label = f"{most_ms:,.2f}" if number == 0 else "0" if number == _CHART_ROWS else ""
        yield f"{label:>{width}} |{''.join(cells)}".rstrip()
    yield f"{'ms':>{width}} +{'-' * (_CHART_COLUMNS + 1)}"
    yield f"{'':>{width}}  0{f'{most_rate:,.0f} requests/s':>{_CHART_COLUMNS}}"
    yield f"{'':>{width}}  o p50   x p99"


def _make_array(tensor: TensorSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    kind = tensor.datatype
    if kind == "BYTES":
        return np.full(shape, b"hello", dtype=object)
    if kind == "BOOL":
        return generator.random(shape) < 0.5
    if kind.startswith(("FP", "BF")):
        return generator.random(shape).astype(tensor.dtype)
    return generator.integers(0, 100, shape).astype(tensor.dtype)
