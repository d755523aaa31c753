"""The books of a soak: each request is entered once when it is sent, and once when its outcome is known."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 20
SERVER_LOST = "server lost"
# How long before it was noticed the server may have died, and how long after that it may be missed.
_NOTICED_S = 2.0
_MISSED_S = 30.0


class _Fault(NamedTuple):
    """What should never happen, unless the server died about then."""

    moment: float
    kind: str | None  # None is no request
    problem: str


class Tally:
    """Counts requests and outcomes, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.problems: list[str] = []
        self._problems = 0
        self._faults: list[_Fault] = []

    def begin(self, kind: str) -> None:
        """Enter a request that is about to be sent."""
        with self._lock:
            self.sent[kind] += 1

    def end(self, kind: str, outcome: str, problem: str | None = None, *, by_error: bool = False) -> None:
        """Enter what became of it; a `problem` is what should never happen, except `by_error` when the server dies."""
        with self._lock:
            if problem is not None and by_error:
                self._faults.append(_Fault(time.monotonic(), kind, problem))
                return
            self._count(kind, outcome, problem)

    def trouble(self, problem: str) -> None:
        """Enter something that should not happen unless the server dies, and is no request."""
        with self._lock:
            self._faults.append(_Fault(time.monotonic(), None, problem))

    def note(self, problem: str) -> None:
        """Enter something that should not happen, and is no request: it comes before those of requests."""
        with self._lock:
            self.problems.insert(0, problem)

    def close(self, deaths: Sequence[float]) -> None:
        """Enter what was left open: whether errors are explained by deaths of the server, noticed at these moments."""
        with self._lock:
            for moment, kind, problem in self._faults:
                explained = any(death - _NOTICED_S <= moment <= death + _MISSED_S for death in deaths)
                if kind is not None:
                    self._count(kind, SERVER_LOST, None if explained else problem)
                elif not explained:
                    self.problems.insert(0, problem)
            self._faults.clear()

    def _count(self, kind: str, outcome: str, problem: str | None) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome if problem is None else "VIOLATION"] += 1
        if problem is None:
            return
        self._problems += 1
        if len(self.problems) < _KEPT:
            self.problems.append(f"{kind}: {problem}")
        elif len(self.problems) == _KEPT:
            self.problems.append("... and more")

    @property
    def lost(self) -> int:
        """How many requests have no outcome, once the books are closed."""
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
