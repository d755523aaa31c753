"""Outputs that a callable fills in the memory that its worker shares with the server, with every kind of worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.outputs import empty_outputs
from pytriton.triton import ProcessWorker, Triton
from support.serving import local_config, running, short_home

Array = np.ndarray[Any, Any]
INPUTS = [Tensor((-1,), np.float32, "x")]
OUTPUTS = [Tensor((-1,), np.float32, "y"), Tensor((-1,), np.float64, "z")]
# Three callers at a time make one batch; none waits for long where fewer come.
BATCHING = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(max_queue_delay_microseconds=20_000))


def fill(x: Array) -> dict[str, Array]:
    outputs = empty_outputs({"z": (x.shape, "f8"), "y": (x.shape, np.float32)})
    np.multiply(x, 2, out=outputs["y"])
    np.add(x, 1, out=outputs["z"])
    return outputs


@batch
def whole(x: Array) -> dict[str, Array]:
    return fill(x)


@batch
async def coroutine(x: Array) -> dict[str, Array]:
    return fill(x)


def listed(requests: Any) -> list[dict[str, Array]]:
    return [fill(request["x"]) for request in requests]


def make_whole() -> Callable[..., Any]:
    return whole


@batch
def steps(x: Array) -> Iterator[dict[str, Array]]:
    for step in range(5):
        yield fill(x + step)


@batch
async def async_steps(x: Array) -> AsyncIterator[dict[str, Array]]:
    for step in range(5):
        yield fill(x + step)


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        yield server


@pytest.mark.parametrize("kind", [whole, coroutine, listed, "process"], ids=["whole", "coroutine", "listed", "process"])
def test_every_caller_gets_its_own(kind: Any, triton: Triton) -> None:
    infer_func = ProcessWorker(f"{__file__}:make_whole") if kind == "process" else kind
    triton.bind("filled", infer_func, INPUTS, OUTPUTS, config=BATCHING)
    assert triton.grpc_url is not None
    url = triton.grpc_url

    def call(caller: int) -> None:
        with ModelClient(url, "filled") as client:
            for number in range(10):
                x = np.arange(300_000 if number % 2 else 30_000, dtype=np.float32) + 1000 * caller + number
                result = client.infer_sample(x)
                assert (result["y"] == 2 * x).all()
                assert (result["z"] == np.float64(x + 1)).all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(3)))
    triton.unbind("filled")


@pytest.mark.parametrize("kind", [steps, async_steps])
def test_every_step_of_a_stream(kind: Any, triton: Triton) -> None:
    triton.bind("steps", kind, INPUTS, OUTPUTS, config=ModelConfig(decoupled=True))
    assert triton.grpc_url is not None
    x = np.arange(300_000, dtype=np.float32)
    with DecoupledModelClient(triton.grpc_url, "steps") as client:
        for step, result in enumerate(client.infer_sample(x)):
            assert (result["y"] == 2 * (x + step)).all()
        assert step == 4
    triton.unbind("steps")


def test_in_process_they_are_arrays_as_any_others() -> None:
    with inprocess.Server() as server:
        server.bind("filled", whole, INPUTS, OUTPUTS)
        x = np.arange(300_000, dtype=np.float32)[None]
        for _ in range(5):
            [response] = server.model("filled").infer(inputs={"x": x})
            assert (np.from_dlpack(response.outputs["y"]) == 2 * x).all()
            assert (np.from_dlpack(response.outputs["z"]) == np.float64(x + 1)).all()


def test_a_unit_test_needs_no_server() -> None:
    [outputs] = whole([{"x": np.ones((1, 3), np.float32)}])
    assert {name: array.tolist() for name, array in outputs.items()} == {"z": [[2, 2, 2]], "y": [[2, 2, 2]]}
    assert {name: array.shape for name, array in empty_outputs({"a": (3, "f4"), "b": ([], "i8")}).items()} == {
        "a": (3,),
        "b": (),
    }
