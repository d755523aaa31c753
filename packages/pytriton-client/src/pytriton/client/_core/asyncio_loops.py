"""Objects that a client has once for each event loop, such as its connections.

A client may be made where no loop runs, and serve one loop after the other, or several in different threads at the same
time. Its connections cannot: each belongs to the loop that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from .forks import Lock

State = TypeVar("State")


class LoopsClosedError(Exception):
    """``PerLoop.close`` has been called."""


class PerLoop(Generic[State]):
    """Makes an object for each event loop, and closes it in that loop.

    ``asyncio.run`` closes the asynchronous generators of a loop before the loop itself, so a generator that waits for
    this closes the object. A client can then serve another loop.
    """

    def __init__(self, make: Callable[[], State], close: Callable[[State], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._lock = Lock()
        self._entries: dict[asyncio.AbstractEventLoop, tuple[State, AsyncGenerator[None, None]]] = {}
        self.is_closed = False

    async def get(self) -> State:
        """Return the object of the running loop, made at the first call.

        Raises ``LoopsClosedError`` after ``close``.
        """
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is None:
            entry = self._add(loop)
            await entry[1].__anext__()  # runs the generator up to its yield, which takes no wait
        return entry[0]

    def _add(self, loop: asyncio.AbstractEventLoop) -> tuple[State, AsyncGenerator[None, None]]:
        with self._lock:
            if self.is_closed:
                raise LoopsClosedError
            for other in [known for known in self._entries if known.is_closed()]:
                del self._entries[other]
            state = self._make()
            entry = self._entries[loop] = (state, self._until_loop_ends(loop, state))
            return entry

    async def _until_loop_ends(self, loop: asyncio.AbstractEventLoop, state: State) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._entries.pop(loop, None)
            await self._close(state)

    @property
    def is_any_open(self) -> bool:
        """Whether there is an object for a loop that is not closed."""
        return any(not loop.is_closed() for loop in tuple(self._entries))

    def close_soon(self) -> None:
        """Have each loop close its object, without waiting for that."""
        for loop, (_, ending) in self._take_all().items():
            _close_in(loop, ending)

    async def close(self) -> None:
        """Close the object of the running loop, and have other loops close theirs. A second call does nothing."""
        running = asyncio.get_running_loop()
        for loop, (_, ending) in self._take_all().items():
            if loop is running:
                await ending.aclose()
            else:
                _close_in(loop, ending)

    def _take_all(self) -> dict[asyncio.AbstractEventLoop, tuple[State, AsyncGenerator[None, None]]]:
        with self._lock:
            self.is_closed = True
            entries, self._entries = self._entries, {}
        return entries


def _close_in(loop: asyncio.AbstractEventLoop, ending: AsyncGenerator[None, None]) -> None:
    if not loop.is_closed():
        with contextlib.suppress(RuntimeError):  # the loop may have been closed in the meantime
            loop.call_soon_threadsafe(_close_soon, ending)


def _close_soon(ending: AsyncGenerator[None, None]) -> None:
    task = asyncio.ensure_future(ending.aclose())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


# An event loop has only weak references to its tasks.
_closing: set[asyncio.Future[None]] = set()
