"""Calls of a model in the process of the caller: `python inprocess_calls.py KIND REPOSITORY SECONDS WIDTH CALLERS`.

KIND is `bound` for a callable of this process, `stub` for the `model.py` in REPOSITORY in Triton's Python backend, as
NVIDIA's own in-process API is used. Prints a line of JSON: calls per second, latencies, processor time.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import Any

import numpy as np

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.model_config import Tensor

WARM_UP_CALLS = 5


@batch
def same(a: Any) -> dict[str, Any]:
    """Give back what it gets."""
    return {"y": a}


def main() -> None:
    """Measure one way with one size and so many callers."""
    kind, repository, seconds, width, callers = sys.argv[1:]
    with inprocess.Server(model_repository=repository if kind == "stub" else []) as server:
        if kind == "bound":
            server.bind("same", same, [Tensor((-1,), np.float32, "a")], [Tensor((-1,), np.float32, "y")])
        print(json.dumps(measure(server.model("same"), float(seconds), int(width), int(callers))))


def measure(model: Any, seconds: float, width: int, callers: int) -> dict[str, float]:
    """Call until the time is over, in so many threads, each with values of its own."""
    times: list[float] = []
    wrong: list[int] = []
    ready = threading.Barrier(callers + 1)

    def ask(number: int) -> None:
        x = np.full((1, width), number, np.float32)

        def call() -> None:
            y = np.from_dlpack(next(model.infer(inputs={"a": x})).outputs["y"])
            if y.shape != x.shape or y[0, 0] != number or y[0, -1] != number:
                wrong.append(number)

        for _ in range(WARM_UP_CALLS):
            call()
        ready.wait()
        end = time.perf_counter() + seconds
        mine: list[float] = []
        while (now := time.perf_counter()) < end or not mine:
            call()
            mine.append(time.perf_counter() - now)
        times.extend(mine)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    ready.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if wrong:
        sys.exit(f"{len(wrong)} answers were wrong")
    p99 = statistics.quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]
    return {
        "requests/s": len(times) / wall,
        "p50 us": statistics.median(times) * 1e6,
        "p99 us": p99 * 1e6,
        "CPU us/call": cpu / len(times) * 1e6,
    }


if __name__ == "__main__":
    main()
