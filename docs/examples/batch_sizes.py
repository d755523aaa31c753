"""What dynamic batching does to 64 requests that come at the same time, as Triton's own statistics tell it.

`python docs/examples/batch_sizes.py` runs the server and its callers, and prints how often the model was called.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

REQUESTS = 64


@batch
def slow_square(x: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Square rows `(n, 1)`; takes 20 ms, however many there are."""
    time.sleep(0.02)
    return {"y": x * x}


def model_statistics(triton: Triton, name: str) -> dict[str, Any]:
    """Ask the server what it did for a model. The token is needed because this tells about the requests of others."""
    headers = {"triton-access-token": triton.get_access_token() or ""}
    request = urllib.request.Request(f"{triton.http_url}/v2/models/{name}/stats", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        statistics: dict[str, Any] = json.load(answer)["model_stats"][0]
    return statistics


def main() -> None:
    """Serve the function with and without batching, send the same requests to both."""
    inputs, outputs = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")]
    configs = {
        "one_by_one": ModelConfig(max_batch_size=1),
        "batched": ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=1000)),
    }
    with Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0)) as triton:
        for name, config in configs.items():
            triton.bind(name, slow_square, inputs, outputs, config=config)
        for name in configs:
            with ModelClient(triton.http_url or "", name) as client, ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(client.infer_sample, [[number] for number in range(REQUESTS)]))
            assert [answer["y"][0] for answer in answers] == [number**2 for number in range(REQUESTS)]
            statistics = model_statistics(triton, name)
            print(f"{name}: {statistics['inference_count']} requests in {statistics['execution_count']} calls")


if __name__ == "__main__":
    main()
