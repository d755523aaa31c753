"""Collects the responses of a model to one batch, in the place of the connection to a server."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

from pytriton.decorators.harness_checks import Result
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import ResponseData, read_responses
from pytriton.testing.errors import ModelError

# A server gives this text for an error without one.
_NO_TEXT = "an error without a text that says why"


class ResponseCollector:
    """Takes the records that a server would get, from any thread; see `Sink` of the workers."""

    can_reschedule = True  # whether a request may be given back to the scheduler
    can_continue = True  # whether more may come after an error

    def __init__(self, count: int, *, decoupled: bool) -> None:
        """Begin."""
        self.responses: list[list[Result | ModelError]] = [[] for _ in range(count)]  # the responses to each request
        self.rescheduled: set[int] = set()  # the requests that were given back
        self._decoupled = decoupled
        self._open = set(range(count))
        self._dropped: collections.deque[tuple[Any, int]] = collections.deque()
        self._changed = threading.Condition()

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """Take a record of responses."""
        block = bytearray(record.layout.length)
        record.write(block, 0, number)
        found = read_responses(memoryview(block), number, len(self.responses), decoupled=self._decoupled)
        with self._changed:
            for response in found:
                self._take(response)
            self._changed.notify_all()

    def _take(self, response: ResponseData) -> None:
        if response.reschedule:
            self.rescheduled.add(response.request)
        elif response.error is not None:
            text = response.error or _NO_TEXT
            self.responses[response.request].append(ModelError(text, ErrorCode(response.code).name))
        elif not response.empty:
            self.responses[response.request].append(Result(response.outputs, response.parameters))
        if response.final:
            self._open.discard(response.request)

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Take an error for all requests that are open."""
        with self._changed:
            for index in self._open:
                self.responses[index].append(ModelError(text, ErrorCode(code).name))
            self._open.clear()
            self._changed.notify_all()

    def executed(self, number: int) -> None:
        """Ignore this: the caller of `execute` knows when it returns."""

    def note_dropped(self, batch: Any, index: int) -> None:
        """Note, in a destructor, that nobody can answer a request any more."""
        self._dropped.append((batch, index))

    def wait(self, timeout_s: float, name: str) -> None:
        """Wait until all requests have their last response."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._dropped:
                batch, index = self._dropped.popleft()
                batch.answer_dropped(index)
            with self._changed:
                if not self._open:
                    return
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"model '{name}': the requests {sorted(self._open)} of a batch of {len(self.responses)} got no "
                        f"last response within {timeout_s:g} s: expected one that is returned by execute, or sent with "
                        "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                    )
                # Deleted senders wake nobody, so they are checked from time to time.
                self._changed.wait(0.01)
