"""Models for worker processes: factories, whose callables do what the value of a request tells them; type hints."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, batch, model
from pytriton.exceptions import PyTritonUnrecoverableError

DIE, RAISE, NEVER_AGAIN, PID, HANG, EXIT, STOPPED = -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0


def make(
    factor: float = 2.0, *, marker: str | None = None, child: bool = False, gate: str | None = None
) -> Callable[..., Any]:
    """Multiply.

    Args:
        factor: By this number.
        marker: A file; while it is there, the factory kills its process.
        child: Whether the process starts another one.
        gate: A file; the factory waits until it is there.
    """
    print("made with", factor, os.environ.get("COLOUR"), os.getcwd())
    logging.getLogger("weights").error("loaded")
    if marker is not None and os.path.exists(marker):
        os.kill(os.getpid(), signal.SIGKILL)
    while gate is not None and not os.path.exists(gate):
        time.sleep(0.01)
    if child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "grandchild-of-a-worker"])

    @batch
    def infer(x: Any) -> dict[str, Any]:
        value = float(x.flat[0])
        if value == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == RAISE:
            raise ValueError("this value is bad")
        if value == NEVER_AGAIN:
            raise PyTritonUnrecoverableError("the device is gone")
        if value == PID:
            return {"y": x * 0 + os.getpid()}
        if value == HANG:
            time.sleep(600)
        if value == EXIT:
            os._exit(3)
        if value == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
            # It may take effect a moment later.
            time.sleep(600)
        return {"y": x * np.float32(factor)}

    return infer


def make_slow(seconds: float = 0.05, *, marker: str | None = None, mebibytes: int = 0) -> Callable[..., Any]:
    """Return the process and the double of a value, one request at a time.

    Args:
        seconds: How long that takes.
        marker: A file; while it is there, the factory kills its process.
        mebibytes: How much memory the weights take.
    """
    if marker is not None and os.path.exists(marker):
        os.kill(os.getpid(), signal.SIGKILL)
    weights = np.full(max(1, mebibytes << 18), 2, np.float32)

    def infer(requests: Any) -> list[dict[str, Any]]:
        time.sleep(seconds * len(requests))
        return [{"y": np.array([[os.getpid(), each["x"].flat[0] * weights[-1]]], np.float32)} for each in requests]

    return infer


GROW, WAIT = -8.0, -9.0


def make_large(factor: float, mebibytes: int, *, gate: str | None = None) -> Callable[..., Any]:
    """Multiply, with weights that take their memory.

    Args:
        factor: By this number, which is what all weights are.
        mebibytes: How much the weights take, and what is kept for each request with the value GROW.
        gate: A file; a request with the value WAIT waits until it is there.
    """
    weights = [np.full(mebibytes << 18, factor, np.float32)]

    @batch
    def infer(x: Any) -> dict[str, Any]:
        value = float(x.flat[0])
        if value == PID:
            return {"y": x * 0 + os.getpid()}
        if value == GROW:
            weights.append(weights[0].copy())
        while value == WAIT and gate is not None and not os.path.exists(gate):
            time.sleep(0.01)
        return {"y": x * weights[-1][int(abs(value)) * 1009 % weights[-1].size]}

    return infer


def make_from_file(path: str, *, words: bool = False) -> Callable[..., Any]:
    """Multiply by the number in a file; or, for each element of a stream, say a word."""
    with open(path, encoding="utf-8") as file:
        factor = np.float32(file.read())
    if words:

        async def infer(requests: Any) -> AsyncIterator[Any]:
            for number in range(3):
                yield [{"y": np.array([[f"word {number} of {factor}".encode()]], object)} for _ in requests]

        return infer

    @batch
    def multiply(x: Any) -> dict[str, Any]:
        return {"y": x * factor}

    return multiply


def make_counting() -> Callable[..., Any]:
    """Count what comes with `prometheus_client`, which only this factory imports."""
    from prometheus_client import Counter, Gauge

    numbers = Counter("pytriton_test_numbers", "Numbers that came", ["sign"])
    last = Gauge("pytriton_test_last", "The last number")

    @batch
    def infer(x: Any) -> dict[str, Any]:
        numbers.labels("minus" if x.flat[0] < 0 else "plus").inc(x.size)
        last.set(x.flat[0])
        return {"y": x}

    return infer


def make_async() -> Callable[..., Any]:
    """Answer with three responses for each request, the last of which has the process id."""

    async def infer(requests: Any) -> AsyncIterator[Any]:
        for part in (1, 2, os.getpid()):
            await asyncio.sleep(0)
            yield [{"y": request.data["x"] * 0 + part} for request in requests]

    return infer


def make_traced() -> Callable[..., Any]:
    """Answer with what came, inside of a span of its own."""

    def infer(requests: Any) -> Any:
        with requests[0].traced_span("own"):
            return requests

    return infer


class Model:
    """A class that is its own factory."""

    def __init__(self, path: str) -> None:
        """Note every call in a file."""
        self._path = path

    def __call__(self, requests: Any) -> Any:
        """Write the number of the requests."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {len(requests)} {requests[0].data['x'].tolist()}\n")
        return [{"y": request.data["x"]} for request in requests]


def fail() -> Callable[..., Any]:
    """Make nothing."""
    raise RuntimeError("there are no weights")


def fall() -> Callable[..., Any]:
    """End the process."""
    print("the last words")
    os._exit(7)


def make_nothing() -> int:
    """Make something else."""
    return 7


# ---- of type hints ---------------------------------------------------------------------------------------------------

Vector = Annotated[NDArray[np.float32], Shape(-1)]
Rows = Annotated[NDArray[np.float32], Shape("batch", -1)]


@model(max_batch_size=64)
def softmax(logits: Vector) -> Vector:
    exponents = np.exp(logits)
    exponents /= exponents.sum()
    return exponents


@model(batched=True, max_batch_size=64)
def softmax_batch(logits: Rows) -> Rows:
    exponents = np.exp(logits)
    exponents /= exponents.sum(axis=1, keepdims=True)
    return exponents


class Facts(NamedTuple):
    text: str
    raw: bytes
    number: int
    share: float
    known: bool
    words: list[str]


@model
async def describe(text: str, raw: bytes, count: int, known: bool = True, share: float | None = None) -> Facts:
    await asyncio.sleep(0)
    return Facts(text + "!", raw[::-1], count + 1, -1.0 if share is None else share, not known, text.split())


@model
def count(up_to: int) -> Iterator[int]:
    yield from range(up_to)


@model
async def count_async(up_to: int) -> AsyncIterator[int]:
    for number in range(up_to):
        await asyncio.sleep(0)
        yield number


@model(name="greeter", max_batch_size=8)
class Greeter:
    """Greets, and says who does so."""

    made = 0

    def __init__(self, greeting: str = "Hello") -> None:
        type(self).made += 1
        self.greeting = greeting

    def __call__(self, name: str) -> str:
        if not name:
            raise ValueError("nobody to greet")
        return f"{self.greeting}, {name}, from {os.getpid()}"


@model(name="needs")
class Needs:
    """Cannot be made without arguments."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, x: float) -> float:
        return x
