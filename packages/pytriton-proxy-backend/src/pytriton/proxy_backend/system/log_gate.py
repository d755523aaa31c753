"""Keeps the log from standing in the way: where nobody reads a pipe or a terminal, records are dropped and counted.

A handler of `logging` waits until what it writes is taken, and with it the thread that logs: one that serves a request,
reads the output of a server, or stops it.
"""

from __future__ import annotations

import array
import fcntl
import logging
import math
import select
import termios
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_OURS = "pytriton"
# Seconds that a busy reader gets, once, before records are dropped.
_PATIENCE_S = 0.5
_PAUSE_S = 0.005
_PAGE_BYTES = 4096
# Reserved for what other threads and processes write between the check and the write.
_SPARE_PAGES = 4

_passing = threading.local()


def keep_log_from_blocking() -> None:
    """Never let a record of this package wait for the reader of the log, whatever handlers the program adds."""
    ours = logging.getLogger(_OURS)
    if not any(isinstance(handler, _Keeper) for handler in ours.handlers):
        # First of all handlers, because the others see a record after it.
        ours.handlers.insert(0, _Keeper())


def set_gate(handler: logging.Handler, *, for_all: bool) -> None:
    """Make a handler drop records that its stream cannot take; `for_all` includes records of other packages."""
    if isinstance(handler, logging.StreamHandler) and not any(isinstance(each, _Gate) for each in handler.filters):
        handler.addFilter(_Gate(handler, for_all=for_all))


def is_log_set_up(name: str) -> bool:
    """Return whether the program has configured a handler for a logger of this package."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if logger.level not in (logging.NOTSET, logging.getLogger().level):
            return True
        if any(not isinstance(handler, _Keeper) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return logging.root.manager.disable >= logging.INFO


class _Keeper(logging.Handler):
    """Sees every record of this package first, and to it that each handler behind it has a gate. It writes nothing."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Mark a record as ours, without a lock."""
        _passing.record = weakref.ref(record)
        found = False
        logger: logging.Logger | None = logging.getLogger(record.name if record.name.startswith(_OURS) else _OURS)
        while logger is not None:
            for handler in logger.handlers:
                if handler is not self:
                    found = True
                    set_gate(handler, for_all=False)
            logger = logger.parent if logger.propagate else None
        last = logging.lastResort
        if not found and last is not None and record.levelno >= last.level:
            # Logging does so if nothing is configured; this handler does not count as configuration.
            set_gate(last, for_all=False)
            last.handle(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Do nothing: `handle` is all."""


class _Gate(logging.Filter):
    """Passes a record if its handler's stream can take it."""

    def __init__(self, handler: logging.StreamHandler[Any], *, for_all: bool) -> None:
        super().__init__()
        self._handler = handler
        self._for_all = for_all
        self._lost = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        passing = getattr(_passing, "record", None)
        if not self._for_all and (passing is None or passing() is not record):
            return True
        # After a loss, no time is given any more, because a slow reader is as bad as none.
        if not self._has_room(record, _PATIENCE_S if not self._lost else 0.0):
            self._lost += 1
            return False
        lost, self._lost = self._lost, 0
        if lost:
            text = "%d records of the log were left out: nobody has read %s"
            name = getattr(self._handler.stream, "name", "it")
            note = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lost, name), None)
            _passing.record = weakref.ref(note)
            self._handler.handle(note)
        return True

    def _has_room(self, record: logging.LogRecord, patience_s: float) -> bool:
        try:
            descriptor = self._handler.stream.fileno()
        except (AttributeError, OSError, ValueError):
            # The stream is in memory, or closed, which the handler reports itself.
            return True
        lock = self._handler.lock
        # The lock's holder may be waiting for the reader with another record of the program.
        if lock is not None:
            if not lock.acquire(timeout=patience_s):
                return False
            lock.release()
        deadline = time.monotonic() + patience_s
        while not _takes(descriptor, lambda: len(self._handler.format(record).encode(errors="replace"))):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


def _takes(descriptor: int, count_bytes: Callable[[], int]) -> bool:
    """Return whether a write to a descriptor would not block now."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    if not poller.poll(0):
        return False
    try:
        pages = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES
        held = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, held)
    except OSError:
        # The stream is not a pipe.
        return True
    # Two adjacent pages of the pipe hold at least a page of text, because otherwise one text would have filled both.
    free = pages - 2 * held[0] // _PAGE_BYTES - 1
    return held[0] == 0 or math.ceil(count_bytes() / _PAGE_BYTES) + _SPARE_PAGES <= free
