"""What a server in process costs: `python benchmarks/inprocess.py`, in an environment with pytriton-server.

One run measures all of it, with the same callables bound in both ways:

* the latency of one caller with float32[1,4]: in process, and through `Triton` and HTTP, once over a bare socket, the
  least that any client can cost, and once with `ModelClient`. They take turns, so that a machine that is busy for a
  while is busy for all of them. Others can only add to a median, so the table has the best round, too;
* a tensor of 64 MiB in: how long it takes, and whether the callable gets the caller's own memory;
* resident memory over calls of 1 MiB in and 1 MiB out;
* threads that send different numbers and compare every answer.

The exit code is 1 where an answer was wrong, an input was copied or memory grew. A latency above its target is marked,
but is no failure: it depends on the machine and on who else uses it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.wires import BareSocket, HttpRequest
from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

Array = npt.NDArray[Any]
Call = Callable[[], Any]

IN_PROCESS = "in process"
BARE_HTTP = "Triton, HTTP, bare socket"
FLOOR_US, AIM_US = 90.0, 70.0
FLOOR_RATIO, AIM_RATIO = 2.0, 4.0
LARGE_BYTES = 64 << 20
MEDIUM_BYTES = 1 << 20
# What an allocator may still take after the warm-up; 10,000 calls that lose one page each would take 39 MiB.
ALLOWED_GROWTH_MIB = 16.0
_START_TIMEOUT_S = 60.0
_MIB = 1 << 20
_BODY = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1.5,1.5,1.5,1.5]}]}'
_REQUEST = HttpRequest("/v2/models/same/infer", {}, _BODY)


@dataclass
class Report:
    """What was found."""

    # For each way to call, the median of each round, in microseconds.
    latencies_us: dict[str, list[float]] = field(default_factory=dict)
    large_ms: float = 0.0  # median time of a call with 64 MiB, in milliseconds
    large_is_shared: bool = False  # whether the callable got the caller's memory each time
    calls_of_1_mib: int = 0  # how many there were
    # Resident memory after the warm-up and after each tenth of these calls.
    rss_mib: list[float] = field(default_factory=list)
    threads: int = 0  # how many asked at the same time
    calls_of_threads: int = 0  # how many calls they made together
    mixed_up: int = 0  # how many of the answers were somebody else's
    threads_per_s: float = 0.0  # their calls per second

    @property
    def growth_mib(self) -> float:
        """How much resident memory grew after the warm-up, in MiB."""
        return self.rss_mib[-1] - self.rss_mib[0]

    @property
    def failures(self) -> list[str]:
        """What must not be, on no machine."""
        found = []
        if not self.large_is_shared:
            found.append("the callable got a copy of the large input")
        if self.growth_mib > ALLOWED_GROWTH_MIB:
            found.append(f"memory grew by {self.growth_mib:.0f} MiB in {self.calls_of_1_mib} calls")
        if self.mixed_up:
            found.append(f"{self.mixed_up} answers were mixed up")
        return found


@batch
def same(x: Array) -> dict[str, Array]:
    """Give back what it gets: what is measured is the way there and back."""
    return {"y": x}


class First:
    """A callable that looks at its input only, and remembers where that was."""

    def __init__(self) -> None:
        self.address = 0

    def __call__(self, requests: Any) -> list[dict[str, Array]]:
        x = requests[0]["x"]
        self.address = x.__array_interface__["data"][0]
        return [{"y": x[:, :1].copy()}]


def tensors() -> tuple[list[Tensor], list[Tensor]]:
    """Return the input and the output of every model here."""
    return [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]


@contextmanager
def over_http() -> Iterator[str]:
    """Serve `same` in the ordinary way.

    Yields:
        The address of the server.
    """
    config = TritonConfig(http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False)
    with Triton(config=config) as triton:
        triton.bind("same", same, *tensors())
        yield triton.http_url or ""


@contextmanager
def in_process(first: First) -> Iterator[inprocess.Server]:
    """Serve the models in this process."""
    with inprocess.Server() as server:
        server.bind("same", same, *tensors())
        server.bind("same_at_once", same, *tensors(), config=ModelConfig(batcher=None))
        server.bind("first", first, *tensors(), config=ModelConfig(batcher=None))
        yield server


def infer(model: inprocess.Model, x: Array) -> Array:
    """Ask once."""
    return np.from_dlpack(next(model.infer(inputs={"x": x})).outputs["y"])


def time_calls(call: Call, calls: int) -> float:
    """Return the median time of a call, in microseconds."""
    found = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin)
    return statistics.median(found) / 1e3


def measure_latency(server: inprocess.Server, url: str, report: Report, rounds: int, calls: int) -> None:
    """Let all ways to call take turns."""
    x = np.full((1, 4), 1.5, np.float32)
    model, at_once = server.model("same"), server.model("same_at_once")
    loop = asyncio.new_event_loop()

    async def many() -> float:
        found = []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            await anext(model.async_infer(inputs={"x": x}))
            found.append(time.perf_counter_ns() - begin)
        return statistics.median(found) / 1e3

    with ExitStack() as stack:
        stack.callback(loop.close)
        client = stack.enter_context(ModelClient(url, "same"))
        connection = stack.enter_context(closing(BareSocket(int(url.rpartition(":")[2]), _START_TIMEOUT_S)))

        def over_socket() -> None:
            connection.post(_REQUEST)
            if b'"data":[1.5,1.5,1.5,1.5]' not in bytes(connection.body):
                raise ValueError(f"expected the values that were sent, received {bytes(connection.body)!r}")

        ways: dict[str, Callable[[], float]] = {
            IN_PROCESS: lambda: time_calls(lambda: infer(model, x), calls),
            "in process, no dynamic batching": lambda: time_calls(lambda: infer(at_once, x), calls),
            "in process, asyncio": lambda: loop.run_until_complete(many()),
            BARE_HTTP: lambda: time_calls(over_socket, calls),
            "Triton, HTTP, ModelClient": lambda: time_calls(lambda: client.infer_batch(x), calls),
        }
        for way in ways.values():
            way()  # warm-up
        for _ in range(rounds):
            for name, way in ways.items():
                report.latencies_us.setdefault(name, []).append(way())


def measure_large(server: inprocess.Server, first: First, report: Report, calls: int) -> None:
    """Send 64 MiB, from memory that is the caller's."""
    x = np.zeros((1, LARGE_BYTES // 4), np.float32)
    model = server.model("first")
    shared = []
    times = []
    for number in range(calls):
        x[0, 0] = number
        begin = time.perf_counter()
        answer = infer(model, x)
        times.append(time.perf_counter() - begin)
        shared.append(first.address == x.__array_interface__["data"][0] and float(answer[0, 0]) == number)
    report.large_is_shared = all(shared)
    report.large_ms = statistics.median(times) * 1e3


def resident_mib() -> float:
    """Return the resident memory of this process, in MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB


def measure_memory(server: inprocess.Server, report: Report, calls: int) -> None:
    """Send 1 MiB again and again, in arrays that are new each time."""
    model = server.model("same")

    def some(count: int) -> None:
        for number in range(count):
            answer = infer(model, np.full((1, MEDIUM_BYTES // 4), number, np.float32))
            report.mixed_up += float(answer[0, -1]) != number

    some(max(1, calls // 10))
    report.rss_mib.append(resident_mib())
    for _ in range(10):
        some(calls // 10)
        report.rss_mib.append(resident_mib())
    report.calls_of_1_mib = calls // 10 * 10


def measure_threads(server: inprocess.Server, report: Report, threads: int, calls: int) -> None:
    """Let threads send different numbers at the same time."""
    model = server.model("same")
    wrong = [0] * threads

    def ask(thread: int) -> None:
        for number in range(calls):
            x = np.array([[thread, number, number + 1, thread]], np.float32)
            wrong[thread] += not np.array_equal(infer(model, x), x)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    report.threads, report.calls_of_threads = threads, threads * calls
    report.threads_per_s = threads * calls / (time.perf_counter() - begin)
    report.mixed_up += sum(wrong)


def mark(value: float, floor: float, aim: float) -> str:
    """Say how a number that should be high stands to its targets."""
    return "aim" if value >= aim else "floor" if value >= floor else "missed"


def render(report: Report) -> str:
    """Write the tables."""
    bests = {name: min(rounds) for name, rounds in report.latencies_us.items()}
    ours, http = (statistics.median(report.latencies_us[name]) for name in (IN_PROCESS, BARE_HTTP))
    ratio = http / ours
    lines = [f"{'float32[1,4], one caller, us':34}{'median':>9}{'best round':>12}{'spread':>9}"]
    for name, rounds in report.latencies_us.items():
        middle = statistics.median(rounds)
        lines.append(f"{name:34}{middle:9.0f}{bests[name]:12.0f}{(max(rounds) - min(rounds)) / 2 / middle:9.0%}")
    growth = f"{report.growth_mib:+.1f} MiB in {report.calls_of_1_mib} calls"
    asked = f"{report.mixed_up} of {report.calls_of_threads} mixed up, {report.threads_per_s:,.0f} calls/s"
    large = "the caller's memory" if report.large_is_shared else "a copy"
    rows: Sequence[tuple[str, str, str, str]] = [
        (
            "one caller, in process",
            f"{ours:.0f} us",
            f"{FLOOR_US:.0f} us, {AIM_US:.0f} us",
            mark(-ours, -FLOOR_US, -AIM_US),
        ),
        (
            "HTTP over in process",
            f"{ratio:.1f}x",
            f"{FLOOR_RATIO:.0f}x, {AIM_RATIO:.0f}x",
            mark(ratio, FLOOR_RATIO, AIM_RATIO),
        ),
        ("64 MiB in", f"{large}, {report.large_ms:.2f} ms", "no copy", "met" if report.large_is_shared else "missed"),
        ("1 MiB in and out", growth, "flat", "met" if report.growth_mib <= ALLOWED_GROWTH_MIB else "missed"),
        (f"{report.threads} threads", asked, "0", "missed" if report.mixed_up else "met"),
    ]
    lines += ["", f"{'':24}{'found':40}{'floor, aim':16}reached"]
    lines += [f"{what:24}{found:40}{target:16}{reached}" for what, found, target, reached in rows]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> Report:
    """Measure everything once."""
    report, first = Report(), First()
    with over_http() as url, in_process(first) as server:
        measure_latency(server, url, report, options.rounds, options.calls)
        measure_large(server, first, report, options.large_calls)
        measure_memory(server, report, options.memory_calls)
        measure_threads(server, report, options.threads, options.thread_calls)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of the latencies (%(default)s)")
    parser.add_argument("--calls", type=int, default=1000, help="in each round (%(default)s)")
    parser.add_argument("--large-calls", type=int, default=20, help="with 64 MiB (%(default)s)")
    parser.add_argument("--memory-calls", type=int, default=10_000, help="with 1 MiB (%(default)s)")
    parser.add_argument("--threads", type=int, default=8, help="that ask at the same time (%(default)s)")
    parser.add_argument("--thread-calls", type=int, default=10_000, help="of each thread (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the numbers")
    options = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    report = run(options)
    print(render(report))
    print(f"\n{os.cpu_count()} cores; load before {before:.1f}, after {os.getloadavg()[0]:.1f}; numpy {np.__version__}")
    if options.json is not None:
        options.json.write_text(json.dumps({**asdict(report), "failures": report.failures}))
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
