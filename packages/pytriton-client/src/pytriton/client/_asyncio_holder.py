"""What an asyncio client and its views have in common while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import warnings
from collections.abc import Awaitable, Callable

from ._core.deadline import Deadline
from ._core.spec import ModelSpec
from ._core.startup import Target
from ._transport_aio import AsyncTransport
from .exceptions import PyTritonClientError, PyTritonClientTimeoutError

__all__ = ["Holder"]

# A call that waits for what another call asks may get the other's error a little after its own deadline.
_GRACE_S = 0.05


class Holder:
    """The waits of a client and its views, and a warning when all of them go without having been closed.

    Args:
        text: The client, in words.
        transport: What it sends through.

    Attributes:
        is_closed: Whether ``close`` has been called.
    """

    def __init__(self, text: str, transport: AsyncTransport) -> None:
        self.is_closed = False
        self._text = text
        self._transport = transport
        self._lock = threading.Lock()
        self._pausing: set[asyncio.Future[None]] = set()
        self._asking: dict[asyncio.AbstractEventLoop, asyncio.Future[PyTritonClientError | None]] = {}

    def __del__(self) -> None:
        if not self.is_closed and self._transport.has_connections:
            warnings.warn(f"{self._text} was not closed; await its close()", ResourceWarning, source=self, stacklevel=2)
            self._transport.close_soon()

    def close(self) -> None:
        """End the pauses."""
        with self._lock:
            self.is_closed = True
            pausing = tuple(self._pausing)
        for pause in pausing:
            with contextlib.suppress(RuntimeError):  # of a loop that was closed in the middle of a pause
                pause.get_loop().call_soon_threadsafe(_wake, pause)

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond ``close``."""
        loop = asyncio.get_running_loop()
        pausing: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.is_closed:
                return
            self._pausing.add(pausing)
        timer = loop.call_later(seconds, _wake, pausing)
        try:
            await pausing
        finally:
            timer.cancel()
            with self._lock:
                self._pausing.discard(pausing)

    async def share(self, ask: Callable[[], Awaitable[ModelSpec]], deadline: Deadline, target: Target) -> ModelSpec:
        """Ask the server about the model, but only one task of each event loop at a time.

        The others wait for it. If it is cancelled or fails, the next one asks, unless its own time is up.

        Args:
            ask: Asks, or returns what is known by now.
            deadline: How long to wait for another task.
            target: The model, for errors.
        """
        loop = asyncio.get_running_loop()
        while (asking := self._asking.get(loop)) is not None:
            await asyncio.wait({asking}, timeout=deadline.remaining_s() + _GRACE_S)
            if not asking.done():
                raise _waited_in_vain(deadline, target)
            error = asking.result()
            if error is not None and deadline.remaining_s() <= _GRACE_S:
                raise copy.copy(error)
        asking = self._asking[loop] = loop.create_future()
        failure: PyTritonClientError | None = None
        try:
            return await ask()
        except PyTritonClientError as error:
            failure = error
            raise
        finally:
            del self._asking[loop]
            asking.set_result(failure)


def _wake(pausing: asyncio.Future[None]) -> None:
    if not pausing.done():
        pausing.set_result(None)


def _waited_in_vain(deadline: Deadline, target: Target) -> PyTritonClientTimeoutError:
    return PyTritonClientTimeoutError(
        f"Waited {deadline.timeout_s:g} s at {target.url} for another call that waits for the model {target.model}.",
        url=target.url,
        model_name=target.model_name,
        model_version=target.model_version,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
    )
