"""Large inputs that a callable returns, as they are or changed: they are not copied, and every caller gets its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton
from support.serving import local_config, running, short_home

Array = np.ndarray[Any, Any]
INPUTS = [Tensor((-1,), np.float32, "x"), Tensor((-1,), np.int32, "n")]
OUTPUTS = [Tensor((-1,), np.float32, "y"), Tensor((-1,), np.int32, "m")]
# Three callers at a time make one batch; none waits for long where fewer come.
BATCHING = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(max_queue_delay_microseconds=20_000))


@batch
def changed(x: Array, n: Array) -> dict[str, Array]:
    x *= 2
    return {"y": x, "m": n}


def listed(requests: Any) -> list[dict[str, Array]]:
    for request in requests:
        request["x"] *= 2
    return [{"y": request["x"], "m": request["n"]} for request in requests]


class Kept:
    """Keeps every third input, and spoils what it has kept with the next call."""

    def __init__(self) -> None:
        self.kept: Array | None = None
        self.calls = 0

    @batch
    def infer(self, x: Array, n: Array) -> dict[str, Array]:
        if self.kept is not None:
            self.kept[...] = -1
            self.kept = None
        x *= 2
        self.calls += 1
        if self.calls % 3 == 0:
            self.kept = x
        return {"y": x, "m": n}


def make_changed() -> Callable[..., Any]:
    return changed


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("kind", ["changed", "listed", "kept", "process"])
def test_every_caller_gets_its_own(kind: str, protocol: str, triton: Triton) -> None:
    infer_func: Any = {
        "changed": changed,
        "listed": listed,
        "kept": Kept().infer,
        "process": ProcessWorker(f"{__file__}:make_changed"),
    }[kind]
    triton.bind("passed_on", infer_func, INPUTS, OUTPUTS, config=BATCHING)
    url = getattr(triton, f"{protocol}_url")

    def call(caller: int) -> None:
        with ModelClient(url, "passed_on") as client:
            for number in range(12):
                # Large and small ones, so that batches of one caller or of several are above and below what is copied.
                size = (700_000, 300_000, 30_000)[number % 3]
                x = np.arange(size, dtype=np.float32) + 1000 * caller + number
                n = np.arange(size // 2, dtype=np.int32) + caller
                result = client.infer_sample(x, n)
                assert (result["y"] == 2 * x).all()
                assert (result["m"] == n).all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(3)))
    triton.unbind("passed_on")
