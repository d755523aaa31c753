"""What many models on one server cost: `python tools/dev.py bench many_models`.

Each count of models has a process of its own, which binds so many callables in threads, starts a server, lets it rest,
reads its page of metrics, kills it under a `RestartPolicy`, and stops. The table shows the processor time of each step,
of all processes together, and how long the step took.
"""

from __future__ import annotations

import argparse
import http
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.processes import cpu_s, descendants, name_of
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import RestartPolicy, Triton, TritonConfig

STEPS = ("bind", "start", "rest", "scrape", "again", "restart", "stop")
REST_S = 3.0


@batch
def same(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the input."""
    return {"y": x}


def spent_s() -> float:
    """Return the processor time of this process and of all that it has started, in seconds."""
    # That of this one and of those that have ended, and of those that run.
    return sum(os.times()[:4]) + sum(map(cpu_s, descendants(os.getpid())[1:]))


def server_pid() -> int | None:
    """Return the process of tritonserver; None while there is none."""
    return next((pid for pid in descendants(os.getpid()) if name_of(pid) == "tritonserver"), None)


def is_ready(url: str) -> bool:
    """Return whether a server says that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=60.0) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


def measure(count: int) -> None:
    """Do each step once; print its processor time and how long it took, in seconds."""
    at, clock = spent_s(), time.monotonic()

    def step(name: str) -> None:
        nonlocal at, clock
        now, reached = spent_s(), time.monotonic()
        print(name, now - at, reached - clock, flush=True)
        at, clock = spent_s(), time.monotonic()

    config = TritonConfig(http_port=0, grpc_port=0, metrics_port=0, log_verbose=0)
    triton = Triton(config=config, restart=RestartPolicy())
    tensors = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
    for number in range(count):
        triton.bind(f"model{number}", same, *tensors, config=ModelConfig(max_batch_size=8))
    step("bind")
    triton.run()
    step("start")
    time.sleep(REST_S)
    step("rest")
    urls = triton.describe().urls
    for name in ("scrape", "again"):
        with urllib.request.urlopen(urls["metrics"], timeout=60.0) as page:
            lines = page.read().count(b"\n")
        step(name)
    print("lines", lines / count, 0.0, flush=True)
    killed = server_pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    while server_pid() in (killed, None) or not is_ready(urls["http"]):
        time.sleep(0.02)
    step("restart")
    triton.stop()
    step("stop")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 200, 400, 1000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        # In turns, so that a machine that is busy for a while is busy for all counts.
        for count in arguments.counts:
            command = [sys.executable, __file__, "--measure", str(count)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for line in printed.splitlines():
                name, spent, took = line.split()
                found.setdefault((count, name), []).append((float(spent), float(took)))
    print(f"{'models':>8}", *(f"{name:>13}" for name in STEPS), "lines of metrics a model")
    for count in arguments.counts:
        cells = []
        for name in STEPS:
            spent, took = (statistics.median(each) for each in zip(*found[count, name], strict=True))
            cells.append(f"{f'{spent:.2f} ({took:.1f})':>13}")
        print(f"{count:>8}", *cells, f"{statistics.median(each for each, _ in found[count, 'lines']):.0f}")


if __name__ == "__main__":
    main()
