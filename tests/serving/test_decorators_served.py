"""Stacks of decorators under the real server: what a callable gets there, and what its callers get back."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import wrapt

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import (
    ConstantPadder,
    TritonContext,
    batch,
    fill_optionals,
    first_value,
    get_model_config,
    get_requests,
    get_row_requests,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

Array = np.ndarray[Any, Any]

INPUTS = [
    Tensor((2,), np.float32, "x"),
    Tensor((1,), np.float32, "t", optional=True),
    Tensor((1,), np.int64, "extra", optional=True),
]
OUTPUTS = [Tensor((2,), np.float32, "y"), Tensor((1,), np.int64, "rows")]
# Long enough for callers that start together to share a batch, mostly; nothing here depends on it.
BATCHER = DynamicBatcher(max_queue_delay_microseconds=50_000, preferred_batch_size=[4])
CONFIG = ModelConfig(max_batch_size=8, batcher=BATCHER)
DECOUPLED = ModelConfig(max_batch_size=8, batcher=BATCHER, decoupled=True)

DEFAULT = np.array([5], np.float32)
cancelled = threading.Event()


def work(x: Array, t: Array, extra: Array | None = None) -> list[Array]:
    """Row by row, so that grouping and padding cannot be seen in the result, the number of rows apart."""
    requests = get_row_requests()
    if len(requests) != len(x):
        raise ValueError(f"{len(requests)} requests for {len(x)} rows")
    scale = np.array([[request.parameters.get("scale", 1)] for request in requests], np.float32)
    return [(x + t) * scale, np.full((len(x), 1), len(x))]


@triton_context
@fill_optionals(t=DEFAULT)
@group_by_keys
@batch
@group_by_values("t")
@first_value("t")
@pad_batch
def everything(x: Array, t: Array, extra: Array | None = None, triton_context: TritonContext | None = None) -> Any:
    if triton_context is None or not all(isinstance(request, Request) for request in triton_context.requests):
        raise ValueError("expected the context and its requests")
    if triton_context.model_configs[everything].model_name != "everything":
        raise ValueError("expected the configuration of this model")
    return work(x, t, extra)


@group_by_keys
@fill_optionals(t=DEFAULT)
@batch
@pad_batch
@group_by_values("t")
@first_value("t")
async def everything_async(x: Array, t: Array, extra: Array | None = None) -> Any:
    await asyncio.sleep(0)
    return work(x, t, extra)


class Model:
    def __init__(self, offset: float) -> None:
        self.offset = offset

    @fill_optionals(t=DEFAULT)
    @batch
    @pad_batch
    @triton_context
    def infer(self, x: Array, t: Array, triton_context: TritonContext) -> Any:
        if triton_context.model_configs[self.infer] is not get_model_config(self.infer):
            raise ValueError("expected the configuration of this model")
        return {"y": x + t + self.offset, "rows": np.full((len(x), 1), len(x))}

    @batch
    @group_by_values("t", pad_fn=ConstantPadder(-1))
    @first_value("t")
    def stream(self, x: Array, t: Array) -> Iterator[Any]:
        """As many responses as `t` says, for the rows of each `t` on their own."""
        for step in range(int(t)):
            yield {"y": np.full((len(x), step + 1), step, np.float32)}

    @group_by_keys
    @batch
    @group_by_values("t")
    @first_value("t")
    async def stream_async(self, x: Array, t: Array, extra: Array | None = None) -> AsyncIterator[Any]:
        for step in range(int(t)):
            await asyncio.sleep(0)
            yield {"y": x + step}


@fill_optionals(t=DEFAULT)
@batch
def until_cancelled(x: Array, t: Array) -> Iterator[Any]:
    # The request that lacked an input is a copy: it has to hear of its caller all the same.
    while not get_requests()[0].is_cancelled():
        time.sleep(0.01)
        yield {"y": x}
    cancelled.set()


@fill_optionals(t=DEFAULT)
@sample
@triton_context
def single(x: Array, t: Array, triton_context: TritonContext) -> Any:
    (request,) = triton_context.requests
    return Response({"y": x + t}, {"scale": request.parameters["scale"]})


@batch
@first_value("t")
def picky(x: Array, t: float) -> Any:
    return {"y": x * t}


@wrapt.decorator
def foreign(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Somebody else's decorator, which hands on every attribute of what it wraps."""
    return [{"y": result["y"] + 1000} for result in wrapped(*args, **kwargs)]


@foreign
@batch
def wrapped_by_others(x: Array, **others: Array) -> dict[str, Array]:
    return {"y": x}


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    model = Model(100)
    y = [Tensor((-1,), np.float32, "y")]
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("everything", everything, INPUTS, OUTPUTS, config=CONFIG, strict=True)
        triton.bind("everything_async", everything_async, INPUTS, OUTPUTS, config=CONFIG, strict=True)
        triton.bind("method", model.infer, INPUTS[:2], OUTPUTS, config=CONFIG, strict=True)
        triton.bind("stream", model.stream, INPUTS[:2], y, config=DECOUPLED)
        triton.bind("stream_async", model.stream_async, INPUTS, y, config=DECOUPLED)
        triton.bind("until_cancelled", until_cancelled, INPUTS, y, config=DECOUPLED)
        triton.bind("single", single, INPUTS, y, config=ModelConfig(batching=False))
        triton.bind("picky", picky, INPUTS, y, config=CONFIG)
        triton.bind("wrapped_by_others", wrapped_by_others, INPUTS, y, config=CONFIG)
        with running(triton):
            yield triton


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Makes calls in threads that start together."""
    barrier = threading.Barrier(len(calls))

    def make(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(make, calls))


@pytest.mark.parametrize("model", ["everything", "everything_async"])
def test_requests_of_every_kind_in_shared_batches(model: str, triton: Triton) -> None:
    cases: list[dict[str, Any]] = []
    for number in range(12):
        rows = 1 + number % 2
        case: dict[str, Any] = {"x": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) + 10 * number}
        if number % 3:
            case["t"] = np.full((rows, 1), number % 3, np.float32)
        if number % 4 == 1:
            case["extra"] = np.ones((rows, 1), np.int64)
        cases.append(case)
    with ModelClient(str(triton.http_url), model) as client:
        client.wait_for_model(30)
        for _ in range(3):
            results = at_once(
                [
                    functools.partial(client.infer_batch, parameters={"scale": number + 1}, **case)
                    for number, case in enumerate(cases)
                ]
            )
            for number, (case, result) in enumerate(zip(cases, results, strict=True)):
                np.testing.assert_array_equal(result["y"], (case["x"] + case.get("t", DEFAULT)) * (number + 1))
                if model == "everything":
                    # Every group was filled up to a preferred size.
                    assert set(result["rows"].ravel().tolist()) <= {4, 8}


def test_a_method(triton: Triton) -> None:
    with ModelClient(str(triton.http_url), "method") as client:
        result = client.infer_batch(x=np.array([[1, 2]], np.float32))
        assert (result["y"].tolist(), result["rows"].tolist()) == ([[106, 107]], [[4]])
        result = client.infer_batch(x=np.zeros((5, 2), np.float32), t=np.ones((5, 1), np.float32))
        assert (result["y"].tolist(), result["rows"].tolist()) == ([[101, 101]] * 5, [[8]] * 5)


@pytest.mark.parametrize("model", ["stream", "stream_async"])
def test_streams_of_different_lengths_in_shared_batches(model: str, triton: Triton) -> None:
    lengths = [3, 1, 2, 3, 5, 1]
    with DecoupledModelClient(str(triton.grpc_url), model) as client:
        client.wait_for_model(30)

        def count(length: int) -> list[Any]:
            x, t = np.zeros((1, 2), np.float32), np.array([[length]], np.float32)
            return [result["y"].tolist() for result in client.infer_batch(x=x, t=t)]

        for _ in range(2):
            answers = at_once([functools.partial(count, length) for length in lengths])
            for length, answer in zip(lengths, answers, strict=True):
                assert len(answer) == length
                for step, (values,) in enumerate(answer):
                    if model == "stream_async":
                        assert values == [step, step]
                    else:
                        # Filled up where a group with another width had its step at the same time.
                        assert values[: step + 1] == [step] * (step + 1)
                        assert set(values[step + 1 :]) <= {-1}


def test_cancellation_reaches_a_request_that_was_filled_up(triton: Triton) -> None:
    cancelled.clear()
    with DecoupledModelClient(str(triton.grpc_url), "until_cancelled") as client:
        responses = client.infer_batch(x=np.zeros((1, 2), np.float32))
        assert next(responses)["y"].shape == (1, 2)
        responses.close()
    assert cancelled.wait(PATIENCE_S)


def test_a_decorator_of_somebody_else_above_ours_is_called(triton: Triton) -> None:
    with ModelClient(str(triton.http_url), "wrapped_by_others") as client:
        np.testing.assert_array_equal(client.infer_batch(x=np.ones((1, 2), np.float32))["y"], [[1001, 1001]])


def test_without_batching(triton: Triton) -> None:
    with ModelClient(str(triton.http_url), "single") as client:
        x = np.array([1, 2], np.float32)
        result = client.infer_sample(x=x, parameters={"scale": 7})
        np.testing.assert_array_equal(result["y"], x + 5)
        assert result.parameters["scale"] == 7


def test_an_error_says_what_to_do(triton: Triton) -> None:
    x, t = np.ones((2, 2), np.float32), np.array([[1], [2]], np.float32)
    with ModelClient(str(triton.http_url), "picky") as client:
        with pytest.raises(
            PyTritonClientInferenceServerError, match=r"all 2 rows of input 't' to be equal.*group_by_values"
        ):
            client.infer_batch(x=x, t=t)
        np.testing.assert_array_equal(client.infer_batch(x=x, t=t * 0 + 3)["y"], x * 3)
