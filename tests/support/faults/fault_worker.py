"""A worker in a process of its own, for tests that kill or stop it.

Called with a socket, a model, a callable of this file, and `decoupled` or `starved` where that is so. It prints
`attached`, and then a line for each batch that its callable gets. A line on its input lets go of what it holds.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker

F4 = np.dtype("float32")
Batch = list[Any]
released = threading.Event()
ballast: list[int] = []
# Held while descriptors are taken, so that none are taken any more once they were given back.
changing = threading.Lock()


def say(*words: object) -> None:
    """Print a line in one piece."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def double(requests: Batch) -> Batch:
    """Answer at once."""
    say("got", len(requests))
    return [{"y": request["x"] * 2} for request in requests]


def held(requests: Batch) -> Batch:
    """Answer when it is let go."""
    say("got", len(requests))
    released.wait()
    return [{"y": request["x"] * 2} for request in requests]


async def double_async(requests: Batch) -> Batch:
    """Answer at once, many batches at a time."""
    say("got", len(requests))
    return [{"y": request["x"] * 2} for request in requests]


async def held_async(requests: Batch) -> Batch:
    """Likewise, many batches at a time."""
    say("got", len(requests))
    while not released.is_set():
        await asyncio.sleep(0.01)
    return [{"y": request["x"] * 2} for request in requests]


def stream(requests: Batch) -> Iterator[Batch]:
    """Return as many responses as the request says, and then holds the last one back."""
    say("got", len(requests))
    for step in range(int(requests[0]["x"][0, 0])):
        yield [{"y": np.array([[step]], F4)} for _ in requests]
    say("gave all")
    released.wait()


async def stream_async(requests: Batch) -> AsyncIterator[Batch]:
    """Likewise, many at a time."""
    say("got", len(requests))
    for step in range(int(requests[0]["x"][0, 0])):
        yield [{"y": np.array([[step]], F4)} for _ in requests]
    say("gave all")
    while not released.is_set():
        await asyncio.sleep(0.01)


def take_descriptors() -> None:
    """Leave this process without a descriptor."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            ballast.append(os.dup(0))
    except OSError:
        return


def give_descriptors() -> None:
    """Take that back."""
    while ballast:
        os.close(ballast.pop())


def large_without_descriptors(requests: Batch) -> Batch:
    """Return 2 MiB for each request, which need a new segment and with it a descriptor that is not there."""
    say("got", len(requests))
    with changing:
        if not released.is_set():
            take_descriptors()
    return [{"y": np.zeros((1, 1 << 19), F4)} for _ in requests]


def main() -> None:
    """Serve the model that the command line names."""
    endpoint, model, name, *options = sys.argv[1:]
    tensor = TensorSpec(name="x", dtype=F4, shape=(-1,))
    spec = ModelSpec(
        name=model,
        version=1,
        inputs=(tensor,),
        outputs=(TensorSpec(name="y", dtype=F4, shape=(-1,)),),
        batching=True,
        max_batch_size=8,
        decoupled="decoupled" in options,
    )
    if "starved" in options:
        take_descriptors()
    worker = Worker(globals()[name], spec, Path(endpoint))
    worker.start()
    if "starved" in options:
        say("starved")
        sys.stdin.readline()
        give_descriptors()
    worker.wait_attached(600.0)
    say("attached")
    sys.stdin.readline()
    with changing:
        released.set()
        give_descriptors()
    # Its end is the end of the input.
    sys.stdin.readline()
    worker.stop(10.0)


if __name__ == "__main__":
    main()
