"""What a worker process logs and writes, in the log of its parent."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from ..runtime.access import ACCESS_LOGGER
from ..runtime.records import TEXT_FORMAT, WORKER_FIELD, record_of
from ..system.threads import call_safely

__all__ = ["LOG_RATE_VARIABLE", "TAIL_LINES", "WORKER_LOGGER", "Allowance", "ProcessLog"]

LOG_RATE_VARIABLE = "PYTRITON_WORKER_LOG_RATE"
"""Environment variable: how many lines and records of each worker process are logged per second; 0 is no limit."""

TAIL_LINES = 50
"""How many lines are kept for errors."""

WORKER_LOGGER = "pytriton.worker."
"""The prefix of the loggers of worker processes; `<model>.<number>` follows."""

_RATE = 1000
# The size of an allowed burst, such as while a model is loaded, in seconds of the rate.
_BURST_S = 10.0
_SAY_AGAIN_S = 1.0

logger = logging.getLogger(__name__)
_formatter = logging.Formatter(TEXT_FORMAT)


class Allowance:
    """Limits what is taken from another process: `rate` pieces a second (0 is no limit), and more for a short time."""

    def __init__(self, rate: int = _RATE) -> None:
        self.rate = rate
        """How many pieces per second; 0 is no limit."""
        self.left_out = 0
        """How many pieces were left out since the last report."""
        self._room = rate * _BURST_S
        self._room_at = time.monotonic()
        self._told_at = -_SAY_AGAIN_S

    def has_room(self) -> bool:
        """Return whether one more piece is taken, and count it."""
        if not self.rate:
            return True
        now = time.monotonic()
        self._room = min(self._room + (now - self._room_at) * self.rate, self.rate * _BURST_S)
        self._room_at = now
        if self._room < 1:
            self.left_out += 1
            return False
        self._room -= 1
        return True

    def take_left_out(self, *, at_end: bool = False) -> int:
        """Return how many were left out if a report is due: once a second at most, or at the end."""
        now = time.monotonic()
        if not self.left_out or not (at_end or now >= self._told_at + _SAY_AGAIN_S):
            return 0
        count, self.left_out, self._told_at = self.left_out, 0, now
        return count


class ProcessLog:
    """Logs the lines that a process writes as text, and the records that it sends as records.

    What exceeds the rate is dropped and counted, except the access log, which has a record for each request.
    """

    def __init__(self, output: logging.Logger) -> None:
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        """The last lines, including those of records, oldest first."""
        self.pid: int | None = None
        """The process."""
        self._output = output
        self._mark = {WORKER_FIELD: output.name.removeprefix(WORKER_LOGGER)}
        self._allowance = Allowance(_log_rate())

    def take_line(self, text: str) -> None:
        """Log a line that the process has written."""
        self.tail.append(text)
        if self._allowance.has_room():
            record = self._output.makeRecord(
                self._output.name, logging.INFO, "", 0, "%s", (text,), None, extra={**self._mark, "stream": "output"}
            )
            record.process = self.pid
            _hand_on(self._output, record)

    def take_record(self, fields: Mapping[str, Any]) -> None:
        """Log a record that the process has sent."""
        record = record_of(fields)
        vars(record).update({name: value for name, value in self._mark.items() if not hasattr(record, name)})
        self._allowance.left_out += int(fields.get("lost") or 0)
        if record.name == ACCESS_LOGGER:
            _hand_on(logging.getLogger(ACCESS_LOGGER), record)
            return
        self.tail.extend(_formatter.format(record).splitlines())
        if self._allowance.has_room():
            _hand_on(self._output, record)

    def tell_left_out(self, *, at_end: bool = False) -> None:
        """Say how much was left out, once a second at most, or at the end."""
        if count := self._allowance.take_left_out(at_end=at_end):
            self._output.warning(
                "%d lines and records of this process were left out: expected %d a second at most for long, see %s",
                count,
                self._allowance.rate,
                LOG_RATE_VARIABLE,
                extra=self._mark,
            )


def _hand_on(target: logging.Logger, record: logging.LogRecord) -> None:
    """Let a logger handle a record; a failing filter or handler must not end the process that logged it."""
    if target.isEnabledFor(record.levelno):
        call_safely(target.handle, record)


def _log_rate() -> int:
    text = os.environ.get(LOG_RATE_VARIABLE, "").strip()
    if not text:
        return _RATE
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    logger.warning("%s: expected a number, 0 or more, got %r: %d is used", LOG_RATE_VARIABLE, text, _RATE)
    return _RATE
