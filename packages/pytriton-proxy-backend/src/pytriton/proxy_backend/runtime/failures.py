"""The records of what a callable raises: each names its requests, and a kind of failure that goes on fills no log."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from time import monotonic
from types import TracebackType

from ..errors import OutputError
from ..system.escapes import escaped

__all__ = ["FailureLog", "kind_of", "named"]

# Of each kind of failure so many records are written at once, and then one in so many seconds.
_AT_ONCE = 10
_PERIOD_S = 10.0
# A callable that makes an exception class for each failure must not make this grow.
_MOST_KINDS = 256
_MOST_NAMED = 8


def kind_of(error: BaseException) -> Hashable:
    """Return of which kind a failure is.

    Failures of one type that were raised at one place in the code, or concern one output, are of one kind: what differs
    is mostly the text of a caller.

    Args:
        error: What was raised or returned, with its traceback.
    """
    output = error.output_name if isinstance(error, OutputError) else None
    return type(error), output, *_place(error.__traceback__)


class FailureLog:
    """Says which failures of one callable are written to the log. From any thread."""

    def __init__(self) -> None:
        # When a period began, how many records were written in it, and how many were left out.
        self._kinds: dict[Hashable, tuple[float, int, int]] = {}
        self._lock = threading.Lock()

    def admit(self, kind: Hashable) -> str | None:
        """Return what to add to the record of a failure; `None` if there were many of its kind a moment ago.

        Args:
            kind: Of which kind it is, as `kind_of` has it.
        """
        with self._lock:
            return self._admit(kind)

    def _admit(self, kind: Hashable) -> str | None:
        now = monotonic()
        since, written, left_out = self._kinds.pop(kind, (now, 0, 0))
        if now - since >= _PERIOD_S:
            since, written = now, _AT_ONCE - 1 if written >= _AT_ONCE else 0
        if written >= _AT_ONCE:
            self._kinds[kind] = since, written, left_out + 1
            return None
        self._kinds[kind] = since, written + 1, 0
        for oldest in list(islice(self._kinds, max(0, len(self._kinds) - _MOST_KINDS))):
            del self._kinds[oldest]
        return f" ({left_out} of this kind were left out)" if left_out else ""


def _place(trace: TracebackType | None) -> tuple[str, int]:
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def named(ids: Iterator[str] | Sequence[str], count: int) -> str:
    """Return some ids of requests for a log, which a caller has chosen.

    Args:
        ids: The ids; those of requests without one are empty.
        count: How many requests there are.
    """
    told = ", ".join(escaped(each) or "without id" for each in islice(ids, _MOST_NAMED))
    more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
    return f"request{'' if count == 1 else 's'} {told}{more}"
