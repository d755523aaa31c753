"""The records of what a callable raises: each names its requests, and a kind of failure that goes on fills no log."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ArenaFullError, OutputError, ProtocolError
from ..system.escapes import escaped
from ..wire.layout import ErrorCode
from .texts import error_text, shortened, told_error, told_trace

if TYPE_CHECKING:
    from ..model import ModelSpec
    from ..wire.batch import Batch

logger = logging.getLogger(__name__)

# Each kind of failure gets so many records at once, and then one in each period.
_AT_ONCE = 10
_PERIOD_S = 10.0
# The limit protects against a callable that makes an exception class for each failure.
_MOST_KINDS = 256
_MOST_NAMED = 8


def kind_of(error: BaseException) -> Hashable:
    """Return the kind of a failure.

    Failures of one type that come from one place in the code, or concern one output, are of one kind, because they
    mostly differ in a caller's text.
    """
    output = error.output_name if isinstance(error, OutputError) else None
    return type(error), output, *_place(error.__traceback__)


class FailureLog:
    """Decides which failures of one callable are logged. Threads may share it."""

    def __init__(self) -> None:
        # For each kind: the begin of its period, and how many records were written and left out in it.
        self._kinds: dict[Hashable, tuple[float, int, int]] = {}
        self._lock = threading.Lock()

    def admit(self, kind: Hashable) -> str | None:
        """Return what to add to the record of a failure; `None` if there were many of its kind just now."""
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
    """Return some ids of requests for a log, which a caller has chosen."""
    told = ", ".join(escaped(each) or "without id" for each in islice(ids, _MOST_NAMED))
    more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
    return f"request{'' if count == 1 else 's'} {told}{more}"


def _is_ours(error: BaseException) -> bool:
    """Return whether an error comes from this library, so that its text says what is wrong."""
    return isinstance(error, (OutputError, ArenaFullError, ProtocolError))


def is_of_caller(error: BaseException) -> bool:
    """Return whether an error is about what a caller has sent, and was raised before anything was computed of it."""
    return getattr(error, "__pytriton_of_caller__", False) is True


def is_cancellation(error: BaseException) -> bool:
    """Return whether a callable was cancelled."""
    # If asyncio was not imported, or another thread is importing it at this moment, there are no tasks.
    return isinstance(error, getattr(sys.modules.get("asyncio"), "CancelledError", ()))


def failed_as(error: BaseException) -> tuple[str, ErrorCode, str]:
    """Return how a failed call is counted, the code that its callers get, and what the log adds to the error's text."""
    if _is_ours(error):
        return "memory" if isinstance(error, ArenaFullError) else "output", ErrorCode.INTERNAL, ""
    if is_of_caller(error):
        return "callable", ErrorCode.INVALID_ARG, "the inference callable cannot take an input"
    if is_cancellation(error):
        return "cancelled", ErrorCode.CANCELLED, ""
    return "callable", ErrorCode.INTERNAL, "the inference callable failed"


def tell_failure(
    failures: FailureLog,
    model: ModelSpec,
    batch: Batch | None,
    failed: Sequence[int],
    error: BaseException,
    text: str,
    level: int,
) -> None:
    """Log that requests have failed, unless there were many such failures just now.

    `failed` are the places of the requests in the batch, which is `None` if it is over.
    """
    note = failures.admit(kind_of(error))
    if note is None:
        return
    trace = ""
    if _is_ours(error):
        told = told_error(error)
    elif is_of_caller(error):
        told = f"model {model.name}: {text}: {told_error(error)}"
    else:
        told = f"model {model.name}: {text}"
        # The traceback is text, because a handler that keeps records would keep the frames, and with them the inputs.
        trace = f"\n{told_trace(error)}"
    if batch is not None:
        told = f"{told}, {named((batch.load_fields(each)[0] for each in failed), len(failed))}"
    logger.log(level, "%s%s%s", told, note, trace)


def failure_text(model: ModelSpec, error: BaseException) -> str:
    """Return the text of an error for callers."""
    if _is_ours(error):
        return shortened(error_text(error))
    if is_cancellation(error):
        return cancelled_text(model)
    if is_of_caller(error):
        return shortened(f"model '{model.name}': {error_text(error)}")
    text = f"model '{model.name}': the inference callable raised {type(error).__name__}: {error_text(error)}"
    return shortened(f"{text}\n{told_trace(error)}" if model.send_tracebacks else text)


def cancelled_text(model: ModelSpec) -> str:
    """Return the text for callers of a cancelled request."""
    return f"model '{model.name}': the request was cancelled"
