"""Turns of an event loop for streams that always have something to do, beside those that wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import asyncio


class Rota:
    """Lets a few tasks go on in each turn of an event loop, of those that gave way; the others wait in a queue.

    If all of them went on in the same turn, whatever else the loop serves, such as the timer of a stream that waits,
    would come after all of them. If one went on alone, each turn would cost as much for less: what several streams
    give in one turn is sent in one message.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._is_counting = False  # whether the next turn of the loop is to be counted
        self._given = 0  # how many tasks are to go on in the next turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    def turn(self, loop: asyncio.AbstractEventLoop) -> int:
        """Return the number of the loop's turn, among those in which this was asked."""
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._count)
        return self._turn

    def _count(self) -> None:
        self._is_counting = False
        self._turn += 1

    async def next_turn(self, most: int) -> None:
        """Wait until the task may go on: not before the next turn of the loop, in which `most` tasks may."""
        import asyncio

        if self._given < most:
            self._given += 1
            try:
                await asyncio.sleep(0)
            finally:
                self._hand_on()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        finally:
            # One that was cancelled or closed while it waited has no turn to hand on.
            if not (turn.cancel() or turn.cancelled()):
                self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._given -= 1


# Loops in several threads have one each.
_ROTAS: WeakKeyDictionary[asyncio.AbstractEventLoop, Rota] = WeakKeyDictionary()


def rota_of(loop: asyncio.AbstractEventLoop) -> Rota:
    """Return the rota that all streams of a loop share."""
    rota = _ROTAS.get(loop)
    if rota is None:
        rota = _ROTAS[loop] = Rota()
    return rota
