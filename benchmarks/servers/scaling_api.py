"""A model that needs the processor: the same file serves ours and nvidia-pytriton, which knows no process workers.

Every call runs the same loop of pure Python, so that it takes the same processor time wherever it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def spin(rounds: int) -> int:
    """Keep the interpreter busy."""
    value = 1
    for _ in range(rounds):
        value = (value * 48271) % 2147483647
    return value


def make(rounds: int) -> Callable[..., Any]:
    """Make a callable that spins once per batch."""

    def infer(requests: Any) -> Any:
        spin(rounds)
        return [{"y": request.data["x"]} if hasattr(request, "data") else {"y": request["x"]} for request in requests]

    return infer


def run_alone(rounds: int, seconds: float) -> None:
    """Print how often the loop runs in a second."""
    started = time.perf_counter()
    count = 0
    while time.perf_counter() < started + seconds:
        spin(rounds)
        count += 1
    print(count / (time.perf_counter() - started))


def main() -> None:
    """Serve it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["threads", "processes", "alone"])
    parser.add_argument("workers", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("http_port", type=float, help="for alone: how long, in seconds")
    options = parser.parse_args()
    if options.kind == "alone":
        run_alone(options.rounds, options.http_port)
        return
    infer_func: Any = [make(options.rounds) for _ in range(options.workers)]
    if options.kind == "processes":
        from pytriton.triton import ProcessWorker

        infer_func = ProcessWorker(make, (options.rounds,), copies=options.workers)
    config = TritonConfig(
        http_address="127.0.0.1", http_port=int(options.http_port), allow_grpc=False, allow_metrics=False
    )
    triton = Triton(config=config)
    triton.bind(
        model_name="spin",
        infer_func=infer_func,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(1,))],
        outputs=[Tensor(name="y", dtype=np.float32, shape=(1,))],
        # One call for each request.
        config=ModelConfig(max_batch_size=1),
    )
    triton.run()
    triton.serve()


if __name__ == "__main__":
    main()
