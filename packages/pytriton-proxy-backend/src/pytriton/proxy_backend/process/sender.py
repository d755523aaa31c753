"""What a worker process says to its parent: whole messages, in order, from any thread, whatever interrupts whom."""

from __future__ import annotations

import collections
import select
import socket
import threading

from .messages import encode_message

__all__ = ["MessageSender"]

# A running parent reads at once. A parent that is stopped by a signal may never read.
_TIMEOUT_S = 30.0
_PATIENCE_S = 5.0
# Messages of these kinds may be dropped, because later messages say the same or more.
_MAY_BE_LOST = frozenset({"record", "metrics", "alive"})


class MessageSender:
    """Sends messages over a non-blocking channel.

    If the parent does not read, most messages wait, but log records are dropped, and the next one says how many. A
    message that interrupts another one of its thread, such as one of a signal handler, is sent after it.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        channel.setblocking(False)
        self._poller = select.poll()
        self._poller.register(channel, select.POLLOUT)
        self._lock = threading.RLock()
        # The lock guards all that follows.
        self._waiting: collections.deque[bytes] = collections.deque()
        self._rest = memoryview(b"")
        self._is_sending = False
        self._is_stuck = False
        self._lost_records = 0

    def send(self, kind: str, **fields: object) -> bool:
        """Send a message; return whether it was sent, since some kinds may be dropped."""
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
        """Send the waiting messages; return whether all are sent, or follow the one that is being sent."""
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
