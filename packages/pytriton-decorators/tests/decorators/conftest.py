"""Fixtures of the tests of pytriton-decorators."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.model_config import Tensor
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


class FakeRequest:
    """A request as the server hands it out: mapping methods over `data`, but no registered Mapping."""

    def __init__(self, data: dict[str, Any], parameters: dict[str, Any] | None = None) -> None:
        self.data = data
        self.parameters = parameters or {}

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()


@pytest.fixture
def request_type() -> type[FakeRequest]:
    return FakeRequest


@pytest.fixture
def make_requests() -> Callable[..., list[dict[str, Any]]]:
    """Makes requests with the inputs `a` and `b` of the given numbers of rows; every value occurs once."""

    def make(*sizes: int) -> list[dict[str, Any]]:
        requests = []
        start = 0
        for size in sizes:
            a = np.arange(start, start + size, dtype=np.float32).reshape(size, 1)
            requests.append({"a": a, "b": a * 100})
            start += size
        return requests

    return make


@pytest.fixture
def model_config() -> TritonModelConfig:
    outputs = [Tensor((1,), np.float32, "total"), Tensor((1,), np.float32, "difference")]
    return TritonModelConfig(
        "adder",
        outputs=[TensorSpec(str(output.name), output.shape, output.dtype) for output in outputs],
    )


@pytest.fixture
def drain() -> Callable[[Any], list[Any]]:
    """Runs what a callable of any kind returned to its end and gives the list of its results."""

    async def drain_async(result: Any) -> list[Any]:
        if inspect.isawaitable(result):
            return [await result]
        return [step async for step in result]

    def run(result: Any) -> list[Any]:
        if inspect.isawaitable(result) or inspect.isasyncgen(result):
            return asyncio.run(drain_async(result))
        if inspect.isgenerator(result):
            return list(result)
        return [result]

    return run
