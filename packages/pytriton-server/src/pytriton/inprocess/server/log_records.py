"""The records of Triton's log for `Options.log_callback`.

Older servers know no callback, so all of them write their log into a pipe of this process, which a thread reads. The
log belongs to the process, and so does the pipe, which stays open to the end: Triton writes there until the next start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.enums import LogLevel

logger = logging.getLogger(__name__)

LogCallback = Callable[[LogLevel, str, int, int, str], object]

_LEVELS = {b"I": LogLevel.INFO, b"W": LogLevel.WARN, b"E": LogLevel.ERROR, b"F": LogLevel.ERROR}
# I1128 14:23:15.471205 30526 server.cc:604] "message"
_HEAD = re.compile(rb'([IWEF])\d{4} [\d:.]+ \d+ ([^\]"]*):(-?\d+)\] ?(.*)', re.DOTALL)
_MARK = b"\0end of records\n"
_CHUNK = 1 << 16
_DELIVERY_S = 10.0


class _LogPipe:
    """The pipe, the thread that reads it, and who gets the records."""

    def __init__(self) -> None:
        self._reading_end, self._own_end = os.pipe()
        os.set_blocking(self._own_end, False)  # Triton opens the pipe anew, and its own end blocks
        self.path = os.fsencode(f"/proc/self/fd/{self._own_end}")
        self.callback: LogCallback | None = None
        self._place = (LogLevel.INFO, "", 0)
        self._table: list[bytes] | None = None
        self._marks: list[threading.Event] = []
        # A daemon, which exit does not wait for: if a server was stopped, `deliver` has waited already.
        self._thread = threading.Thread(target=self._read, name="triton-log-records", daemon=True)
        self._thread.start()

    def deliver(self) -> None:
        """Wait until the callback has got all that Triton has written so far, unless it calls this itself."""
        if threading.current_thread() is self._thread:
            return
        mark, deadline = threading.Event(), time.monotonic() + _DELIVERY_S
        self._marks.append(mark)
        if select.select([], [self._own_end], [], _DELIVERY_S)[1]:
            os.write(self._own_end, _MARK)
            if mark.wait(max(0.0, deadline - time.monotonic())):
                return
        logger.warning("Options.log_callback has not taken the records of Triton's log within %g s.", _DELIVERY_S)

    def _read(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._reading_end, _CHUNK)).split(b"\n")
            for line in lines:
                if line + b"\n" == _MARK:
                    self._marks.pop(0).set()
                else:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        if (head := _HEAD.fullmatch(line)) is not None:
            self._end_table()
            level, file, number, text = head.groups()
            self._place = (_LEVELS[level], file.decode(errors="replace"), int(number))
            if text:
                self._call(_unquoted(text.decode(errors="replace")))
            else:
                self._table = []  # its lines follow, up to an empty one
        elif self._table is None:
            self._call(line.decode(errors="replace"))
        elif line:
            self._table.append(line)
        else:
            self._end_table()

    def _end_table(self) -> None:
        if self._table:
            self._call("\n" + b"\n".join(self._table).decode(errors="replace"))
        self._table = None

    def _call(self, message: str) -> None:
        if self.callback is None:
            return
        try:
            self.callback(*self._place, time.time_ns() // 1000, message)
        except Exception:
            logger.exception("Options.log_callback failed for a record of Triton's log: %s", message)


def _unquoted(text: str) -> str:
    """Return a message as it was written; newer servers log it as JSON does a string."""
    try:
        message = json.loads(text)
    except ValueError:
        return text
    return message if isinstance(message, str) else text


def log_pipe_for(callback: LogCallback) -> bytes:
    """Have a callback get the records of the process, and return the path of the file for them."""
    pipe = process.shared("log pipe", _LogPipe)
    pipe.callback = callback
    return pipe.path


def deliver_log() -> None:
    """Wait until the callback, if there is one, has got what Triton has written so far."""
    if (pipe := process.shared_if_made("log pipe", _LogPipe)) is not None:
        pipe.deliver()
