"""What the response cache costs and saves: `python benchmarks/response_cache.py`.

One server has the same model with and without a cache, called over HTTP by one caller. Requests to them take turns, so
that a machine that is busy for a while is busy for all of them: one that the cache answers, one that it has not seen,
and one to the model without. The table shows medians, and the medians of the ratios to the model without in the same
turn.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

SIZES = {"4 bytes": 1, "1 MiB": 1 << 18}
BUDGET = 1 << 28


@batch
def same(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the input."""
    return {"y": x}


def measure(clients: dict[str, ModelClient], size: int, turns: int) -> dict[str, list[float]]:
    """Return the times of requests of each kind, in seconds."""
    fresh = itertools.count(1)
    array = np.zeros(size, np.float32)
    kinds = [("none", "plain"), ("hit", "cached"), ("miss", "cached")]
    times: dict[str, list[float]] = {kind: [] for kind, _ in kinds}
    for turn in range(turns + 50):
        for kind, model in kinds[:: 1 if turn % 2 else -1]:
            array[0] = next(fresh) if kind == "miss" else 0
            began = time.perf_counter()
            clients[model].infer_sample(x=array)
            if turn >= 50:
                times[kind].append(time.perf_counter() - began)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1000)
    turns = parser.parse_args().turns
    tensors = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
    config = TritonConfig(http_port=0, grpc_port=0, allow_metrics=False, cache_config=[f"local,size={BUDGET}"])
    with Triton(config=config) as triton:
        triton.bind("plain", same, *tensors, config=ModelConfig())
        triton.bind("cached", same, *tensors, config=ModelConfig(response_cache=True))
        clients = {name: ModelClient(str(triton.http_url), name) for name in ("plain", "cached")}
        for size, elements in SIZES.items():
            times = measure(clients, elements, turns)
            for kind, found in times.items():
                ratios = [mine / plain for mine, plain in zip(found, times["none"], strict=True)]
                middle = statistics.median(found) * 1e6
                print(f"{size:8} {kind:5} {middle:8.0f} us  {statistics.median(ratios):.2f} of the model without")
        for client in clients.values():
            client.close()


if __name__ == "__main__":
    main()
