"""What belongs to an event loop, for a client that belongs to none.

A client may be made where no loop runs, and serve one loop after the other, or several in different threads at the same
time; its connections cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["LoopsClosedError", "PerLoop"]

State = TypeVar("State")


class LoopsClosedError(Exception):
    """What belonged to event loops has been closed."""


class PerLoop(Generic[State]):
    """What is made once for each event loop, and closed by it.

    ``asyncio.run`` closes the asynchronous generators of its loop before it closes the loop. One that only waits for
    that is how the loop's connections are closed with it, where the client lives on to serve another loop.

    Args:
        make: Makes it; called while the loop runs.
        close: Closes it; awaited in its loop.

    Attributes:
        is_closed: Whether ``close`` has been called.
    """

    def __init__(self, make: Callable[[], State], close: Callable[[State], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._entries: dict[asyncio.AbstractEventLoop, tuple[State, AsyncGenerator[None, None]]] = {}
        self.is_closed = False

    async def get(self) -> State:
        """Return that of the running loop.

        Raises:
            LoopsClosedError: ``close`` has been called.
        """
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is None:
            entry = self._add(loop)
            await entry[1].__anext__()  # as far as its yield; nothing waits in between
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
        """Whether there is one in a loop that is not closed."""
        return any(not loop.is_closed() for loop in tuple(self._entries))

    def close_soon(self) -> None:
        """Let each loop close its own, without waiting for that."""
        for loop, (_, ending) in self._take_all().items():
            _close_in(loop, ending)

    async def close(self) -> None:
        """Close that of the running loop, and let the other loops close theirs. A second call does nothing."""
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
        with contextlib.suppress(RuntimeError):  # it may be closed by now
            loop.call_soon_threadsafe(_close_soon, ending)


def _close_soon(ending: AsyncGenerator[None, None]) -> None:
    task = asyncio.ensure_future(ending.aclose())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


# The event loop itself keeps no hold of its tasks.
_closing: set[asyncio.Future[None]] = set()
