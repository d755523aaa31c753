"""What a worker process says to its parent: whole messages, in order, from any thread, whatever interrupts whom."""

from __future__ import annotations

import collections
import select
import socket
import threading

from .messages import encode_message

__all__ = ["MessageSender"]

# A parent reads at once; one that stands still may never do so.
_TIMEOUT_S = 30.0
_PATIENCE_S = 5.0
# Kinds that may be lost: others follow, or say as much.
_MAY_BE_LOST = frozenset({"record", "metrics", "alive"})


class MessageSender:
    """Sends messages over a channel.

    A parent that stands still is waited for, though not by everything: a record of the log is left out then, and how
    many were is said with the next one. A message that interrupts another one of its own thread, as that of a signal
    handler or of an object that the collector finds, is sent after that.

    Args:
        channel: The channel, which does not block.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        channel.setblocking(False)
        self._poller = select.poll()
        self._poller.register(channel, select.POLLOUT)
        self._lock = threading.RLock()
        # All that follows is guarded by the lock.
        self._waiting: collections.deque[bytes] = collections.deque()
        self._rest = memoryview(b"")
        self._is_sending = False
        self._is_stuck = False
        self._lost_records = 0

    def send(self, kind: str, **fields: object) -> bool:
        """Send a message; return whether it is on its way, which one that may be lost need not be.

        Raises:
            OSError: Nobody is there.
        """
        with self._lock:
            may_be_lost = kind in _MAY_BE_LOST
            if may_be_lost and self._is_stuck and not self._flush(0.0):
                self._lost_records += kind == "record"
                return False
            if kind == "record" and self._lost_records:
                fields["lost"], self._lost_records = self._lost_records, 0
            self._waiting.append(encode_message(kind, **fields))
            self._is_stuck = not self._flush(_PATIENCE_S if may_be_lost else _TIMEOUT_S)
            return True

    def _flush(self, timeout_s: float) -> bool:
        """Send what waits; return whether all of it has gone, or goes with what is being sent."""
        if self._is_sending:
            return True
        self._is_sending = True
        try:
            while self._rest or self._waiting:
                if not self._rest:
                    self._rest = memoryview(self._waiting.popleft())
                try:
                    self._rest = self._rest[self._channel.send(self._rest) :]
                except BlockingIOError:
                    if not self._poller.poll(timeout_s * 1000):
                        return False
            return True
        finally:
            self._is_sending = False
