"""How requests for inference have ended, which the guard of a server counts in memory that is shared with it."""

import os
import struct
import threading
from collections import Counter
from collections.abc import Mapping

from pytriton.proxy_backend.system.forks import call_in_child, replace_descriptors
from pytriton.proxy_backend.system.memory_files import make_memory_file

OUTCOMES_VARIABLE = "PYTRITON_GUARD_OUTCOMES"
"""Environment variable for the guard: the descriptor of the memory."""

# The guard counts by the same names, in the same order (`native/guard/shared.h` is written from these).
PROTOCOLS = ("http", "grpc")
MEANINGS = {
    "ok": "It was answered.",
    "invalid": "The caller made a mistake.",
    "queue_full": "The queue of the model was full.",
    "queue_timeout": "It waited too long for its turn.",
    "time_limit": "The callable took longer than the model's execution timeout.",
    "cancelled": "The caller disconnected or cancelled it, or its deadline passed.",
    "failed": "The callable raised, or what it returned is wrong.",
    "worker_lost": "The worker ended while it was at it.",
    "unavailable": "Nothing serves the model.",
}
"""How a request may end, and what that means."""
OUTCOMES = tuple(MEANINGS)
"""How a request may end."""

COUNTED_MODELS = 1024
"""Models that have counts of their own; the first entry is that of requests without a model."""
COUNTED_NAME = 248
"""Bytes of the name of such a model."""
COUNTED_OUTCOMES = 16
"""Places for outcomes in an entry, more than there are."""
ENTRY_READY = 2
"""The state of an entry whose name is written."""
_HEAD = struct.Struct(f"II{COUNTED_NAME}s")
_COUNTS = struct.Struct(f"{len(PROTOCOLS) * COUNTED_OUTCOMES}Q")
_ENTRY_SIZE = _HEAD.size + _COUNTS.size


class OutcomeCounts:
    """The memory in which guards count, for one server after the other: the counts of the one before are carried on."""

    def __init__(self, before: "OutcomeCounts | None" = None) -> None:
        self._before: Mapping[tuple[str, str, str], int] = {} if before is None else before.read()
        self.descriptor = make_memory_file("pytriton-outcomes")
        """What the server inherits; -1 once it is closed."""
        try:
            os.ftruncate(self.descriptor, COUNTED_MODELS * _ENTRY_SIZE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._left_out: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()  # of the descriptor, whose number is another file's once it is closed
        call_in_child(self, OutcomeCounts._leave)

    def read(self) -> Mapping[tuple[str, str, str], int]:
        """Return how many requests for a model came over a protocol and ended so; what is not there is 0.

        A request has the model "" where its name is that of no model, or could not be read.
        """
        # Read, not mapped: a mapping of Python's keeps a descriptor of its own, which forked children would have.
        with self._lock:
            counts = Counter(self._before)
            memory = b"" if self.descriptor < 0 else os.pread(self.descriptor, COUNTED_MODELS * _ENTRY_SIZE, 0)
        for place in range(0, len(memory), _ENTRY_SIZE):
            state, size, name = _HEAD.unpack_from(memory, place)
            if state != ENTRY_READY and place > 0:
                continue
            model = name[:size].decode(errors="replace")
            values = _COUNTS.unpack_from(memory, place + _HEAD.size)
            for number, protocol in enumerate(PROTOCOLS):
                for outcome, value in zip(OUTCOMES, values[number * COUNTED_OUTCOMES :], strict=False):
                    if value:
                        counts[model, protocol, outcome] += value
        return counts - self._left_out

    def leave_out(self, model: str, protocol: str) -> None:
        """Take one request back that was no caller's: that of a try, which was refused."""
        self._left_out[model, protocol, "invalid"] += 1

    def close(self) -> None:
        """Let go of the memory. What was counted can be read all the same."""
        before = self.read()
        with self._lock:
            if self.descriptor < 0:
                return
            self._before, self._left_out = before, Counter()
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _leave(self) -> None:
        self._lock = threading.Lock()
        replace_descriptors([self.descriptor])
