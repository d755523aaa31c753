"""Calls an inference callable of any kind in a unit test and iterates over its results.

A generator, ordinary or asynchronous, gives one step for each value that it yields; any other callable gives one step.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, Final

from pytriton.exceptions import PyTritonRuntimeError

_END: Final = object()


def steps(call: Callable[[], Any], context: Context) -> Generator[Any, None, None]:
    """Call a callable of any kind from code that is not asynchronous, and yield its result or every step of it.

    A generator runs only while a step is asked for; closing this iterator closes it. An asynchronous callable is an
    error while an event loop runs in this thread.
    """
    returned = context.run(call)
    if not inspect.isawaitable(returned) and not isinstance(returned, AsyncIterator):
        yield from _plain_steps(returned, context)
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        yield from _looped_steps(returned, context)
        return
    if inspect.iscoroutine(returned):
        returned.close()
    raise PyTritonRuntimeError(
        "The callable is asynchronous, and an event loop is running in this thread already. Use `infer_async` or "
        "`stream_async` of the harness here."
    )


async def steps_async(call: Callable[[], Any], context: Context) -> AsyncGenerator[Any, None]:
    """Do the same within a running event loop."""
    async with aclosing(_resolved_steps(context.run(call), context)) as found:
        async for step in found:
            yield step


def _looped_steps(returned: Any, context: Context) -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    found = _resolved_steps(returned, context)
    try:
        while True:
            step = loop.run_until_complete(anext(found, _END))
            if step is _END:
                return
            yield step
    finally:
        try:
            loop.run_until_complete(found.aclose())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _resolved_steps(returned: Any, context: Context) -> AsyncGenerator[Any, None]:
    if inspect.isawaitable(returned):
        returned = await context.run(asyncio.ensure_future, _awaited(returned))
    if isinstance(returned, AsyncIterator):
        async with aclosing(_in_one_task(returned, context)) as found:
            async for step in found:
                yield step
        return
    for step in _plain_steps(returned, context):
        yield step


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _in_one_task(source: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
    """Run an asynchronous generator to its end in one task, as the server does."""
    found: list[Any] = []
    asked = asyncio.Event()
    answered = asyncio.Event()

    async def pump() -> None:
        try:
            async for item in source:
                found.append(item)
                answered.set()
                await asked.wait()
                asked.clear()
        finally:
            answered.set()
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    task = context.run(asyncio.ensure_future, pump())
    try:
        while True:
            await answered.wait()
            answered.clear()
            if not found:
                break
            yield found.pop()
            asked.set()
        # The task has ended or failed.
        await task
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _plain_steps(returned: Any, context: Context) -> Iterator[Any]:
    if not isinstance(returned, Iterator):
        yield returned
        return
    try:
        while (step := context.run(next, returned, _END)) is not _END:
            yield step
    finally:
        close = getattr(returned, "close", None)
        if close is not None:
            context.run(close)
