"""The models of the soak: callables whose answers tell whether they belong to their request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton

STREAM_FAILS = -1
# A request of the model `slow` that says so hangs for longer than the model may take.
EXECUTION_TIMEOUT_S = 1.0
HANGS_MS = 60_000
# Nothing is given up in a soak: its workers are killed on purpose.
_NEVER = 1_000_000


def make_bytes(generation: int) -> Callable[..., Any]:
    """Add its generation to every byte; `rebind` brings a new one."""

    @batch
    def add(x: Any) -> dict[str, Any]:
        return {"y": x + np.uint8(generation % 256), "generation": np.full((len(x), 1), generation, np.int64)}

    return add


@batch
def turn(text: Any) -> dict[str, Any]:
    """Turn strings round, code point by code point."""
    turned = [[item.decode()[::-1].encode() for item in row] for row in text]
    return {"turned": np.array(turned, dtype=object).reshape(text.shape)}


def make_double() -> Callable[..., Any]:
    """Make the callable of the processes that are killed."""

    @batch
    def double(x: Any) -> dict[str, Any]:
        # Long enough that most kills hit a batch.
        time.sleep(0.02)
        return {"y": x * 2 + 1}

    return double


def make_pause() -> Callable[..., Any]:
    """Pause for as long as the slowest request of a batch says; may hang."""

    @batch
    def pause(ms: Any) -> dict[str, Any]:
        time.sleep(float(ms.max()) / 1000)
        return {"ms": ms}

    return pause


async def wait(requests: Any) -> Any:
    """Wait as long as its requests say, without holding up other batches."""
    await asyncio.sleep(max(int(request["ms"].max()) for request in requests) / 1000)
    return [{"ms": request["ms"]} for request in requests]


def refuse(requests: Any) -> Any:
    """Fail with what it was given."""
    raise ValueError(f"refused <{int(requests[0]['x'].item())}>")


def count(requests: Any) -> Iterator[Any]:
    """Stream `start`, `start + 1`, ... in `n` responses; fails after the first one for `n` of -1."""
    n, start = int(requests[0]["n"].item()), int(requests[0]["start"].item())
    for number in range(start, start + max(n, 1)):
        yield [{"number": np.array([[number]], np.int64)}]
    if n == STREAM_FAILS:
        raise ValueError(f"refused <{start}>")


async def count_async(requests: Any) -> Any:
    """Do what `count` does, as an asynchronous generator."""
    for part in count(requests):
        await asyncio.sleep(0)
        yield part


def processes(name: str, copies: int) -> ProcessWorker:
    """Describe workers in processes of their own, with a factory of this module."""
    return ProcessWorker(f"benchmarks.soak.models:{name}", copies=copies, max_crashes=_NEVER)


def bind_all(triton: Triton) -> None:
    """Bind the models of the soak."""
    row = DynamicBatcher(max_queue_delay_microseconds=500)
    data = [Tensor((-1,), np.uint8, "x")], [Tensor((-1,), np.uint8, "y"), Tensor((1,), np.int64, "generation")]
    triton.bind("bytes", make_bytes(0), *data, config=ModelConfig(max_batch_size=8, batcher=row))
    strings = [Tensor((-1,), bytes, "text")], [Tensor((-1,), bytes, "turned")]
    triton.bind("text", [turn, turn], *strings, config=ModelConfig(max_batch_size=4))
    numbers = [Tensor((-1,), np.float64, "x")], [Tensor((-1,), np.float64, "y")]
    for name, repeatable in (("killed", False), ("repeated", True)):
        config = ModelConfig(max_batch_size=8, repeatable=repeatable, attach_timeout_s=60.0)
        triton.bind(name, processes("make_double", 2), *numbers, config=config)
    pause = [Tensor((1,), np.int32, "ms")], [Tensor((1,), np.int32, "ms")]
    triton.bind("waits", [wait, wait], *pause, config=ModelConfig(max_batch_size=4))
    limited = ModelConfig(max_batch_size=2, execution_timeout_s=EXECUTION_TIMEOUT_S, attach_timeout_s=60.0)
    triton.bind("hangs", processes("make_pause", 2), *pause, config=limited)
    number = [Tensor((1,), np.int64, "x")], [Tensor((1,), np.int64, "y")]
    triton.bind("refuses", refuse, *number, config=ModelConfig(max_batch_size=1))
    stream = [Tensor((1,), np.int64, "n"), Tensor((1,), np.int64, "start")], [Tensor((1,), np.int64, "number")]
    decoupled = ModelConfig(decoupled=True, max_batch_size=1)
    triton.bind("counts", [count, count_async, count], *stream, config=decoupled)
