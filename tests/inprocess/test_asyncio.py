"""Inference in process from asyncio: iterators in any loop, cancellation, time limits, queues."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.inprocess import (
    CancelledError,
    InferenceResponse,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Server,
    TimedOutError,
)
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from support.callables import double
from support.waiting import PATIENCE_S, eventually

entered = threading.Event()
release = threading.Event()
left: queue.SimpleQueue[str] = queue.SimpleQueue()


def fail(requests: list[Request]) -> list[Any]:
    raise ValueError("bad luck")


def wait(requests: list[Request]) -> list[Any]:
    assert release.wait(PATIENCE_S)
    return double(requests)


def patient(requests: list[Request]) -> list[Any]:
    """Waits for its cancellation."""
    entered.set()
    eventually(requests[0].is_cancelled)
    left.put("cancelled")
    return double(requests)


async def count(requests: list[Request]) -> AsyncIterator[list[Any]]:
    for number in range(int(requests[0]["x"].item())):
        await asyncio.sleep(0)
        yield [{"y": np.full(1, number, np.float32)}]


async def endless(requests: list[Request]) -> AsyncIterator[list[Any]]:
    try:
        while True:
            yield [{"y": np.zeros(1, np.float32)}]
            await asyncio.sleep(0.001)
    finally:
        left.put("closed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    x, y = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
    with Server() as running:
        for infer in (double, fail, wait, patient):
            running.bind(infer.__name__, infer, x, y, config=ModelConfig(batching=False))
        for stream in (count, endless):
            running.bind(stream.__name__, stream, x, y, config=ModelConfig(batching=False, decoupled=True))
        yield running


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    entered.clear()
    release.clear()
    yield
    release.set()


def value_of(response: InferenceResponse) -> float:
    return float(np.asarray(response.outputs["y"]).item())


async def entered_by_now() -> None:
    assert await asyncio.to_thread(entered.wait, PATIENCE_S)


async def next_left() -> str:
    return await asyncio.to_thread(left.get, True, PATIENCE_S)


def test_one_answer_and_many(server: Server) -> None:
    async def run() -> None:
        response = await anext(server.model("double").async_infer(inputs={"x": [3]}, request_id="r"))
        assert value_of(response) == 6
        assert response.request_id == "r"
        responses = [item async for item in server.model("count").async_infer(inputs={"x": [4]})]
        assert [value_of(item) for item in responses if item.outputs] == [0, 1, 2, 3]
        assert [item.final for item in responses] == [False] * (len(responses) - 1) + [True]

    asyncio.run(run())


def test_many_at_once_get_their_own_answers(server: Server) -> None:
    async def one(number: int) -> float:
        return value_of(await anext(server.model("double").async_infer(inputs={"x": [number]})))

    async def stream(number: int) -> int:
        return len([item async for item in server.model("count").async_infer(inputs={"x": [number]}) if item.outputs])

    async def run() -> None:
        assert await asyncio.gather(*map(one, range(200))) == [2 * number for number in range(200)]
        assert await asyncio.gather(*map(stream, range(20))) == list(range(20))

    asyncio.run(run())


def test_an_iterator_is_made_without_a_loop_and_used_in_any(server: Server) -> None:
    responses = server.model("count").async_infer(inputs={"x": [3]})
    values = []

    async def take() -> None:
        values.append(value_of(await anext(responses)))

    for _ in range(3):
        asyncio.run(take())
    assert values == [0, 1, 2]

    async def rest() -> list[InferenceResponse]:
        return [item async for item in responses]

    assert all(item.final for item in asyncio.run(rest()))
    assert asyncio.run(rest()) == []


def test_errors_are_raised_at_the_call_or_with_their_response(server: Server) -> None:
    async def run() -> None:
        with pytest.raises(InvalidArgumentError, match="FP64") as refused:
            server.model("double").async_infer(inputs={"x": np.ones(1)})
        assert refused.value.where == "model 'double', input 'x'"
        with pytest.raises(NotFoundError):
            server.model("nowhere").async_infer(inputs={"x": [1]})
        with pytest.raises(InternalError, match="bad luck") as failed:
            await anext(server.model("fail").async_infer(inputs={"x": [1]}))
        assert isinstance(failed.value.args[-1], InferenceResponse)
        response = await anext(server.model("fail").async_infer(inputs={"x": [1]}, raise_on_error=False))
        assert isinstance(response.error, InternalError)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["task", "wait_for"])
def test_a_task_that_is_cancelled_cancels_the_request(server: Server, how: str) -> None:
    async def run() -> None:
        responses = server.model("patient").async_infer(inputs={"x": [1]})
        if how == "task":
            task = asyncio.ensure_future(anext(responses))
            await entered_by_now()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await entered_by_now()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(responses), 0.1)
        assert await next_left() == "cancelled"
        with pytest.raises(CancelledError):
            await anext(responses)

    asyncio.run(run())


def test_cancel_from_another_thread_ends_the_wait(server: Server) -> None:
    async def run() -> None:
        responses = server.model("patient").async_infer(inputs={"x": [1]})

        def cancel() -> None:
            entered.wait(PATIENCE_S)
            responses.cancel()

        asyncio.get_running_loop().run_in_executor(None, cancel)
        with pytest.raises(CancelledError):
            await anext(responses)
        assert await next_left() == "cancelled"
        with pytest.raises(StopAsyncIteration):
            await anext(responses)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["break", "aclose", "async with"])
def test_an_iteration_that_is_left_cancels_its_request(server: Server, how: str) -> None:
    async def run() -> None:
        responses = server.model("endless").async_infer(inputs={"x": [1]})
        if how == "break":
            async for _ in responses:
                break
        elif how == "aclose":
            await anext(responses)
            await responses.aclose()
        else:
            async with responses:
                await anext(responses)
        del responses
        gc.collect()
        assert await next_left() == "closed"

    asyncio.run(run())


def test_a_wait_for_a_response_has_a_limit_and_can_go_on(server: Server) -> None:
    async def run() -> None:
        responses = server.model("wait").async_infer(inputs={"x": [5]}, response_timeout_s=0.05)
        with pytest.raises(TimedOutError, match=r"0\.05 s.*model 'wait'"):
            await anext(responses)
        release.set()
        while True:
            with contextlib.suppress(TimedOutError):
                assert value_of(await anext(responses)) == 10
                return

    asyncio.run(run())


@pytest.mark.parametrize("limit", [0, 2])
def test_an_asyncio_queue_gets_all_responses(server: Server, limit: int) -> None:
    async def run() -> None:
        responses: asyncio.Queue[InferenceResponse] = asyncio.Queue(limit)
        server.model("count").async_infer(inputs={"x": [5]}, response_queue=responses)
        gc.collect()
        got: list[InferenceResponse] = []
        while not got or not got[-1].final:
            got.append(await asyncio.wait_for(responses.get(), PATIENCE_S))
        assert [value_of(item) for item in got if item.outputs] == [0, 1, 2, 3, 4]

    asyncio.run(run())


def test_an_asyncio_queue_needs_a_loop_and_async_infer(server: Server) -> None:
    async def make() -> asyncio.Queue[Any]:
        return asyncio.Queue()

    target = asyncio.run(make())
    with pytest.raises(InvalidArgumentError, match="event loop"):
        server.model("double").async_infer(inputs={"x": [1]}, response_queue=target)
    with pytest.raises(InvalidArgumentError, match="SimpleQueue"):
        server.model("double").infer(inputs={"x": [1]}, response_queue=target)


def test_a_loop_that_is_closed_while_a_response_comes_harms_nobody(server: Server) -> None:
    async def leave() -> Any:
        responses = server.model("wait").async_infer(inputs={"x": [1]})
        task = asyncio.ensure_future(anext(responses))
        await asyncio.sleep(0)
        # The loop ends, and with it the wait.
        del task
        return responses

    responses = asyncio.run(leave())
    release.set()

    async def take() -> None:
        # The end of the first loop cancelled the task that waited, and so the request.
        with pytest.raises(CancelledError):
            await anext(responses)

    asyncio.run(take())
    asyncio.run(_still_there(server))


async def _still_there(server: Server) -> None:
    assert value_of(await anext(server.model("double").async_infer(inputs={"x": [1]}))) == 2
