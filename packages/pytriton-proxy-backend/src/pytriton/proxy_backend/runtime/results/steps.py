"""The steps of generators: whether the next one waits, when others have their turn, and how they are closed."""

from __future__ import annotations

import logging
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from ...rota import rota_of
from ..texts import told_trace

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)


class _Nothing:
    """Marks the end of a generator."""


NOTHING = _Nothing()

# How long a generator that does not wait may keep its event loop from others.
TURN_NS = 500_000
# How many of those go on in one turn of the loop.
_MOST_IN_A_TURN = 2


class Pacing(Protocol):
    """Says which streams are to pause, since their callers do not take what they were sent."""

    def must_wait(self, number: int) -> bool:
        """Return whether a batch must get no more responses for now."""

    def wait_taken(self, number: int, is_given_up: Callable[[], bool]) -> None:
        """Wait until a batch may get more responses, or nobody wants it."""

    def when_resumed(self, number: int, then: Callable[[], object]) -> None:
        """Call `then` once when a batch may get more responses; it may have to wait again then."""

    def resume_next(self, number: int) -> None:
        """Let the next of those that wait go on: a batch that was told to go on, or has ended, calls this."""


class Turns:
    """Says when a generator has to give way, to others on its event loop or to its callers.

    One that does not wait by itself would leave the others no time. To give way after each response would cost more
    than many a response does.

    Args:
        loop: The event loop.
        pacing: Says which streams are to pause; `None` if nothing does.
        number: The batch of the generator.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pacing: Pacing | None = None, number: int = 0) -> None:
        self._loop = loop
        self._pacing = pacing
        self._number = number
        self._since_ns = 0  # since when the loop has not turned, as far as this is known
        self._turn = -1  # the turn of the loop at that time; -1 before the first response
        self._rota = rota_of(loop)

    def is_due(self) -> bool:
        """Return whether the loop has not turned for `TURN_NS`, or the callers do not take what they were sent.

        After the first response it is due in any case.
        """
        if self._pacing is not None and self._pacing.must_wait(self._number):
            return True
        if monotonic_ns() - self._since_ns < TURN_NS:
            return False
        if self._turn >= 0 and self._turn != self._rota.turn(self._loop):
            # The generator has waited meanwhile.
            self._begin()
            return False
        return True

    async def give_way(self) -> None:
        """Let the loop turn, and the callers take what they were sent."""
        await self._rota.next_turn(_MOST_IN_A_TURN)
        while self._pacing is not None and self._pacing.must_wait(self._number):
            resumed = self._loop.create_future()
            self._pacing.when_resumed(self._number, partial(_resume, resumed))
            try:
                await resumed
            finally:
                # Streams are resumed one by one, because there may be room for one only.
                self._pacing.resume_next(self._number)
        self._begin()

    def _begin(self) -> None:
        """Measure from now on how long the loop has not turned."""
        self._since_ns = monotonic_ns()
        self._turn = self._rota.turn(self._loop)


def _resume(resumed: asyncio.Future[None]) -> None:
    # Its stream may have ended before.
    if not resumed.done():
        resumed.set_result(None)


class StepTime:
    """Measures how long a step of a generator has had the event loop, without the time in which it waited."""

    __slots__ = ("_before_ns", "_since_ns")

    def __init__(self) -> None:
        self._before_ns = 0  # before it waited
        self._since_ns = 0  # when it began, or went on

    def begin(self) -> None:
        """Measure a step that begins."""
        self._before_ns, self._since_ns = 0, monotonic_ns()

    def wait(self) -> None:
        """Leave out what follows until `go_on`."""
        self._before_ns = monotonic_ns() - self._since_ns

    def go_on(self) -> None:
        """Measure what follows a wait; the time between the first wait and the last one is left out."""
        self._since_ns = monotonic_ns()

    def is_long(self) -> bool:
        """Return whether it has been `TURN_NS` and more."""
        return self._before_ns + monotonic_ns() - self._since_ns >= TURN_NS


async def next_of(results: AsyncGenerator[Any, Any], before_wait: Callable[[], None], time: StepTime) -> Any:
    """Return what a generator gives next, or `NOTHING`; `before_wait` is called where it waits first."""
    time.begin()
    step: Any = results.__anext__()
    try:
        waits_for = step.send(None)
    except StopIteration as given:
        return given.value
    except StopAsyncIteration:
        return NOTHING
    time.wait()
    try:
        before_wait()
    except BaseException:
        import asyncio

        # It cannot be closed while it waits. Whatever it answers, the first error is the one to tell.
        with suppress(Exception, asyncio.CancelledError):
            if isinstance(waits_for, asyncio.Future) and waits_for.cancel():
                # It ends as it does where the task is cancelled, and with it what nobody else waits for.
                await _rest_of(step, waits_for)
            else:
                await _rest_of(step, waits_for, asyncio.CancelledError())
        raise
    try:
        return await _rest_of(step, waits_for, time=time)
    except StopAsyncIteration:
        return NOTHING


def close(results: Generator[Any, Any, Any], model_name: str) -> None:
    """End a generator, so that its `finally` blocks have run; of one that came to its end this costs nothing."""
    try:
        results.close()
    except Exception as error:
        _log_close(error, model_name)


async def close_async(results: AsyncGenerator[Any, Any], model_name: str) -> None:
    """End an asynchronous generator, see `close`."""
    try:
        await results.aclose()
    except Exception as error:
        _log_close(error, model_name)


async def stepped(results: Generator[Any, Any, Any], model_name: str) -> AsyncGenerator[Any, None]:
    """Step a generator on an event loop, whose other streams go on while its callers take nothing."""
    try:
        # In a list: nothing here may refer to a response once it is given.
        while (given := [next(results, NOTHING)])[0] is not NOTHING:
            yield given.pop()
    finally:
        close(results, model_name)


def _log_close(error: Exception, model_name: str) -> None:
    # Its callers have their answers, or get the error that it is closed for.
    logger.warning("model %s: closing the generator failed\n%s", model_name, told_trace(error))
    error.__traceback__ = None


@types.coroutine
def _rest_of(
    step: Awaitable[Any],
    waits_for: Any,
    thrown: BaseException | None = None,
    time: StepTime | None = None,
) -> Generator[Any, Any, Any]:
    """Go on with a step of an asynchronous generator that has begun to wait, and return what it gives.

    The first `send` of the step has returned `waits_for`, which is for the event loop. What is `thrown` is raised in
    the generator in place of its waiting.
    """
    running: Any = step
    sent = None
    while True:
        if thrown is None:
            try:
                sent = yield waits_for
            except BaseException as error:
                thrown = error
            if time is not None:
                time.go_on()
        try:
            waits_for = running.send(sent) if thrown is None else running.throw(thrown)
        except StopIteration as given:
            return given.value
        finally:
            # The frames of its traceback refer to this one.
            thrown = None
