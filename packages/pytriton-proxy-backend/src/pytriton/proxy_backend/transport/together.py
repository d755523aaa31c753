"""Records of several streams that are sent in one message, because each message wakes the proxy backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..errors import ArenaFullError
from ..protocol.worker import WorkerProtocol
from ..wire.layout import Capability
from ..wire.limits import ACKNOWLEDGED_LATER_BYTES
from ..wire.record import Record
from .arena import OwnedBlock

_MOST_RECORDS = 64


class TogetherConnection(ABC):
    """What a connection of a worker knows of records that wait for others, see `runtime.service.Together`."""

    protocol: WorkerProtocol[Any]

    def __init__(self) -> None:
        self._kept: list[tuple[int, Record]] = []
        self._kept_bytes = 0
        self._schedule: Callable[[], object] = _nothing
        # Batches of which a record found no room after it was taken; they get this error with what comes next.
        self._unsent: dict[int, ArenaFullError] = {}

    def together(self, schedule: Callable[[], object]) -> TogetherConnection | None:
        """Return what takes records; `None` if the proxy backend does not take several in one message.

        `schedule` is called when records wait, and has `flush` called soon.
        """
        if not self.protocol.welcome.capabilities & Capability.TOGETHER:
            return None
        self._schedule = schedule
        return self

    def respond_soon(self, number: int, record: Record) -> None:
        """Keep a record of a batch that goes on until `flush`; nothing may refer to arrays in it."""
        self._check_sent(number)
        if not self._kept:
            self._schedule()
        self._kept.append((number, record))
        self._kept_bytes += record.layout.length
        if len(self._kept) >= _MOST_RECORDS or self._kept_bytes > ACKNOWLEDGED_LATER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the records that are kept."""
        if not self._kept:
            return
        kept, self._kept, length, self._kept_bytes = self._kept, [], self._kept_bytes, 0
        if len(kept) > 1 and length <= ACKNOWLEDGED_LATER_BYTES:
            try:
                block = self._room_for(length)
            except ArenaFullError:
                pass  # one alone may find room
            else:
                at = block.offset
                for number, record in kept:
                    record.write(block.memory, at, number)
                    at += record.layout.length
                self._send_all([self.protocol.respond_together(block, length)])
                return
        for number, record in kept:
            if number not in self._unsent:
                try:
                    self.respond(number, record, done=False)
                except ArenaFullError as error:
                    self._unsent[number] = error

    def _check_sent(self, number: int) -> None:
        if number in self._unsent:
            raise self._unsent[number]

    @abstractmethod
    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """See `Link.respond`."""

    @abstractmethod
    def _room_for(self, length: int) -> OwnedBlock: ...

    @abstractmethod
    def _send_all(self, packets: list[bytes]) -> None: ...


def _nothing() -> None:
    """Do what nobody has asked for."""
