"""The signals that end a command, as an event."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from .forks import call_in_child


class StopSignals:
    """SIGINT and SIGTERM as an event; a second signal has its usual effect."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        # A process that a callable forks must end by these signals.
        call_in_child(self, StopSignals._restore)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._restore()
        self.wanted.set()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
