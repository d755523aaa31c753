"""Whoever cancels a call of an asyncio client gets its own cancellation back, by any means to cancel that there are."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from pytriton.client import AsyncioDecoupledModelClient, AsyncioModelClient
from pytriton.client.exceptions import PyTritonClientClosedError
from pytriton.model_config import ModelConfig
from pytriton.triton import Triton
from support.callables import X, Y, identity
from support.clients import address_of
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, drive, eventually_async

Call = Callable[[], Coroutine[Any, Any, Any]]

go_on = threading.Event()
has_begun = threading.Event()


def held(requests: Any) -> Any:
    """Waits where the input is above zero."""
    if requests[0]["x"].any():
        has_begun.set()
        assert go_on.wait(PATIENCE_S)
    return identity(requests)


def held_stream(requests: Any) -> Iterator[Any]:
    yield held(requests)


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config())
        server.bind("held", [held] * 4, X, Y, config=ModelConfig(batching=False))
        server.bind("stream", [held_stream] * 4, X, Y, config=ModelConfig(batching=False, decoupled=True))
        with running(server):
            yield server
            go_on.set()


async def begun() -> None:
    await eventually_async(has_begun.is_set)


async def by_anyio_move_on(call: Call) -> None:
    with anyio.move_on_after(PATIENCE_S) as scope:
        async with anyio.create_task_group() as group:

            async def expire() -> None:
                await begun()
                scope.deadline = anyio.current_time()

            group.start_soon(expire)
            await call()
    assert scope.cancelled_caught


async def by_anyio_fail(call: Call) -> None:
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.2):
            await call()


async def by_anyio_scope(call: Call) -> None:
    with anyio.CancelScope() as scope:
        waiting = asyncio.ensure_future(begun())
        waiting.add_done_callback(lambda _: scope.cancel())
        await call()
    assert scope.cancelled_caught


async def by_anyio_group(call: Call) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await begun()
        group.cancel_scope.cancel()


async def by_nested_scopes(call: Call) -> None:
    with anyio.CancelScope() as outer:
        with anyio.CancelScope() as inner:
            waiting = asyncio.ensure_future(begun())
            waiting.add_done_callback(lambda _: inner.cancel())
            await call()
        assert inner.cancelled_caught
        await asyncio.sleep(0)
    assert not outer.cancelled_caught


async def by_message(call: Call) -> None:
    task = asyncio.ensure_future(call())
    await begun()
    task.cancel("why")
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    # Before Python 3.11, asyncio itself loses it on the way between two tasks.
    assert caught.value.args == ("why",) or sys.version_info < (3, 11)


async def by_wait_for(call: Call) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call(), 0.2)


async def by_timeout(call: Call) -> None:
    make: Any = getattr(asyncio, "timeout", None)
    if make is None:  # before Python 3.11
        return

    async def timed_out() -> None:
        async with make(None) as scope:
            waiting = asyncio.ensure_future(begun())
            waiting.add_done_callback(lambda _: scope.reschedule(0))
            await call()

    with pytest.raises(TimeoutError):
        await timed_out()


async def by_task_group(call: Call) -> None:
    make: Any = getattr(asyncio, "TaskGroup", None)
    if make is None:  # before Python 3.11
        return
    tasks: list[asyncio.Task[Any]] = []

    async def grouped() -> None:
        async with make() as group:
            tasks.append(group.create_task(call()))
            await begun()
            raise ValueError("of the group")

    with pytest.raises(Exception, match="unhandled errors") as caught:
        await grouped()
    assert tasks[0].cancelled()
    assert [str(error) for error in getattr(caught.value, "exceptions", ())] == ["of the group"]


WAYS = {name: function for name, function in list(globals().items()) if name.startswith("by_")}


@pytest.mark.parametrize("kind", ["one", "stream"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_cancelled_call(triton: Triton, protocol: str, kind: str) -> None:
    async def check(client: Any, way: str, size: int) -> None:
        async def call(value: float = 1.0) -> Any:
            x = np.full(size, value, np.float32)
            if kind == "stream":
                results = [result["y"] async for result in client.infer_sample(x)]
                return results[0]
            return (await client.infer_sample(x))["y"]

        go_on.clear()
        has_begun.clear()
        await asyncio.wait_for(WAYS[way](call), PATIENCE_S)
        go_on.set()
        # Neither the client nor the task has anything of it left.
        assert not (await call(0.0)).any()

    async def main() -> None:
        make, model = {"one": (AsyncioModelClient, "held"), "stream": (AsyncioDecoupledModelClient, "stream")}[kind]
        async with make(address_of(triton, protocol), model) as client:
            for size in (2, 100_000):
                for way in WAYS:
                    await check(client, way, size)

    drive(main)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_is_closed_is_no_cancellation(triton: Triton, protocol: str) -> None:
    go_on.clear()
    has_begun.clear()

    async def main() -> None:
        client = AsyncioModelClient(address_of(triton, protocol), "held")
        call = asyncio.ensure_future(client.infer_sample(np.ones(2, np.float32)))
        await begun()
        await client.close()
        with pytest.raises(PyTritonClientClosedError):
            await call
        go_on.set()

    drive(main)
