"""Streams that pause, since their callers do not take what they were sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..protocol.worker import WorkerProtocol
from ..wire.layout import Capability

# After how many responses a worker that reads nothing else meanwhile looks for messages: it costs a system call.
_LOOK_EVERY = 16


class PacedConnection(ABC):
    """What a connection of a worker knows of streams that pause, see `runtime.results.steps.Pacing`."""

    protocol: WorkerProtocol[Any]
    _unlooked = 0  # responses since it was looked whether a stream is to pause

    @property
    def pacing(self) -> PacedConnection | None:
        """What says which streams are to pause; `None` if the proxy backend does not."""
        return self if self.protocol.welcome.capabilities & Capability.PACE else None

    def must_wait(self, number: int) -> bool:
        """Return whether a batch must get no more responses for now."""
        return self.protocol.must_pause(number)

    def when_resumed(self, number: int, then: Callable[[], object]) -> None:
        """Call `then` as soon as a batch that waits may go on, in the thread that reads the connection."""
        self.protocol.resumptions[number] = then

    def resume_next(self, number: int) -> None:
        """Let the next of those that wait go on: a batch that was told to go on, or has ended, calls this."""
        self.protocol.resumptions.pop(number, None)
        self.protocol.resume_next()

    def wait_taken(self, number: int, is_given_up: Callable[[], bool]) -> None:
        """Wait until the callers of a batch take what they were sent, or `is_given_up` returns true."""
        self._unlooked += 1
        if self._unlooked >= _LOOK_EVERY:
            self._unlooked = 0
            self._read_acknowledgements()
        while self.protocol.must_pause(number) and not is_given_up():
            self._wait_for_room()

    @abstractmethod
    def _read_acknowledgements(self) -> None: ...

    @abstractmethod
    def _wait_for_room(self) -> float: ...
