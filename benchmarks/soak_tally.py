"""The books of a soak: each request is entered once when it is sent, and once when its outcome is known."""

from __future__ import annotations

import threading
from collections import Counter

_KEPT = 20


class Tally:
    """Counts requests and outcomes, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.problems: list[str] = []
        self._problems = 0

    def begin(self, kind: str) -> None:
        """Enters a request that is about to be sent."""
        with self._lock:
            self.sent[kind] += 1

    def end(self, kind: str, outcome: str, problem: str | None = None) -> None:
        """Enters what became of it; a `problem` is what should never happen."""
        with self._lock:
            self.outcomes.setdefault(kind, Counter())[outcome if problem is None else "VIOLATION"] += 1
            if problem is not None:
                self._note(f"{kind}: {problem}")

    def note(self, problem: str) -> None:
        """Enters something that should not happen, and is no request: it comes before those of requests."""
        with self._lock:
            self.problems.insert(0, problem)

    def _note(self, problem: str) -> None:
        self._problems += 1
        if len(self.problems) < _KEPT:
            self.problems.append(problem)
        elif len(self.problems) == _KEPT:
            self.problems.append("... and more")

    @property
    def lost(self) -> int:
        """How many requests have no outcome."""
        with self._lock:
            return sum(self.sent.values()) - sum(sum(counts.values()) for counts in self.outcomes.values())

    @property
    def totals(self) -> Counter[str]:
        """The outcomes of all kinds together."""
        with self._lock:
            total: Counter[str] = Counter()
            for counts in self.outcomes.values():
                total.update(counts)
            return total
