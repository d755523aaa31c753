"""The waits of an asyncio client, which all of its views share."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import warnings
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ._core.deadline import Deadline
from ._core.forks import Lock
from ._core.startup import Target
from ._transport import AsyncTransport
from .exceptions import PyTritonClientError, PyTritonClientTimeoutError

Answer = TypeVar("Answer")

# Seconds that a call waits beyond its own deadline for another task that asks the same question: the deadline of that
# task may be the same, and its answer is then about to come.
_MARGIN_S = 0.05


class Waits:
    """Pauses and shared questions of a client and its views.

    Python warns if they are garbage-collected before ``close``.
    """

    def __init__(self, text: str, transport: AsyncTransport) -> None:
        self.is_closed = False
        self._text = text
        self._transport = transport
        self._lock = Lock()
        self._pauses: set[asyncio.Future[None]] = set()
        self._questions: dict[asyncio.AbstractEventLoop, asyncio.Future[PyTritonClientError | None]] = {}

    def __del__(self) -> None:
        if not self.is_closed and self._transport.has_connections:
            warnings.warn(f"{self._text} was not closed; await its close()", ResourceWarning, source=self, stacklevel=2)
            self._transport.close_soon()

    def close(self) -> None:
        """End all pauses."""
        with self._lock:
            self.is_closed = True
            pauses = tuple(self._pauses)
        for pause in pauses:
            with contextlib.suppress(RuntimeError):  # the loop was closed during the pause
                pause.get_loop().call_soon_threadsafe(_wake, pause)

    async def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until ``close`` is called."""
        loop = asyncio.get_running_loop()
        pause_end: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.is_closed:
                return
            self._pauses.add(pause_end)
        timer = loop.call_later(seconds, _wake, pause_end)
        try:
            await pause_end
        finally:
            timer.cancel()
            with self._lock:
                self._pauses.discard(pause_end)

    async def share(self, ask: Callable[[], Awaitable[Answer]], deadline: Deadline, target: Target) -> Answer:
        """Ask the server about the model, from one task of each event loop at a time.

        The other tasks wait for it; if it is cancelled or fails, the next one asks, unless its deadline has passed.
        """
        loop = asyncio.get_running_loop()
        while (question := self._questions.get(loop)) is not None:
            await asyncio.wait({question}, timeout=deadline.remaining_s() + _MARGIN_S)
            if not question.done():
                raise _other_call_timeout_error(deadline, target)
            error = question.result()
            if error is not None and deadline.remaining_s() <= _MARGIN_S:
                raise copy.copy(error)
        question = self._questions[loop] = loop.create_future()
        failure: PyTritonClientError | None = None
        try:
            return await ask()
        except PyTritonClientError as error:
            failure = error
            raise
        finally:
            del self._questions[loop]
            question.set_result(failure)


def _wake(pause_end: asyncio.Future[None]) -> None:
    if not pause_end.done():
        pause_end.set_result(None)


def _other_call_timeout_error(deadline: Deadline, target: Target) -> PyTritonClientTimeoutError:
    return PyTritonClientTimeoutError(
        f"Waited {deadline.timeout_s:g} s at {target.url} for another call that waits for the model {target.model}.",
        **target.fields,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
    )
