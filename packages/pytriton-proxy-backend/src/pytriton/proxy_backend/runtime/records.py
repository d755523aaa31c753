"""Log records on their way from a worker process to its parent: as records, never as text that would be read again."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ProtocolError
from ..system.escapes import escaped
from .texts import error_text, shown

TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"
"""The format of a record as text."""

OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""The attributes of every record; all others are its `extra`."""

WORKER_FIELD = "worker"
"""The field with the worker, `<model>.<number>`, in whose process a record was made."""

# In characters. A character takes up to twelve bytes in a message, which has to hold the whole text.
_MAX_MESSAGE = 32768
_MAX_TRACE = 16384
_MAX_NAME = 256
# The limit of each value of `extra`, as JSON.
_MAX_VALUE = 8192
_MAX_EXTRA = 65536
_NUMBERS = ("levelno", "lineno", "process", "thread")
_NAMES = ("name", "levelname", "pathname", "funcName", "processName", "threadName", "taskName")
_TEXTS = ("message", "exception", "stack")
_LEFT_OUT = " [...] "
_formatter = logging.Formatter(TEXT_FORMAT)


class RecordHandler(logging.Handler):
    """Sends the records of this process to its parent with level, logger, `extra` and traceback.

    A forked child has no such parent, so it writes text to standard error.
    """

    def __init__(self, send: Callable[..., object]) -> None:
        super().__init__()
        self._send_message = send
        self._pid = os.getpid()

    def take_over(self, send: Callable[..., object]) -> None:
        """In a forked child that has a parent of its own to tell: send its records there."""
        self._send_message = send
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            if os.getpid() == self._pid:
                self._send_message("record", **_fields(record))
            else:
                sys.stderr.write(f"{_formatter.format(record)}\n")
        except Exception:
            # As in every logging handler, an error here must not reach the code that logs.
            self.handleError(record)


def record_of(fields: Mapping[str, Any]) -> logging.LogRecord:
    """Make the record again that a worker process has sent."""
    extra, created, level = fields.get("extra"), fields.get("created"), fields.get("levelno")
    texts = {name: _text(fields.get(name)) for name in (*_NAMES, *_TEXTS)}
    if (
        not isinstance(extra, dict)
        or not isinstance(created, (int, float))
        or not isinstance(level, int)
        or any(texts[name] is None for name in ("name", "levelname", "message"))
    ):
        raise ProtocolError(f"expected a log record, got {shown(dict(fields))}")
    message, trace, stack = (texts.pop(name) for name in _TEXTS)
    path = texts.pop("pathname") or ""
    file = os.path.basename(path)
    return logging.makeLogRecord(
        {
            **{str(name): value for name, value in extra.items() if name not in OF_EVERY_RECORD},
            **texts,
            **{name: fields.get(name) for name in _NUMBERS},
            "created": created,
            "msg": message,
            "pathname": path,
            "filename": file,
            "module": os.path.splitext(file)[0],
            "msecs": int(created % 1 * 1000) + 0.0,
            "exc_text": trace,
            "stack_info": stack,
        }
    )


def current_span() -> dict[str, str]:
    """Return the ids of this thread's span; none if OpenTelemetry was not imported."""
    trace = sys.modules.get("opentelemetry.trace")
    try:
        found = None if trace is None else trace.get_current_span().get_span_context()
    except AttributeError:
        # Another thread is importing it at this moment.
        return {}
    if found is None or not found.is_valid:
        return {}
    return {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    # A record that a program made by hand may contain anything.
    fields: dict[str, object] = {"created": float(_number(record, "created"))}
    for name in _NUMBERS:
        fields[name] = int(_number(record, name))
    for name in _NAMES:
        fields[name] = _cut(str(getattr(record, name, "")), _MAX_NAME)
    exception = record.exc_text
    if record.exc_info and not exception:
        exception = _formatter.formatException(record.exc_info)
    fields["message"] = _cut(_message(record), _MAX_MESSAGE)
    fields["exception"] = exception and _cut(exception, _MAX_TRACE)
    fields["stack"] = record.stack_info and _cut(str(record.stack_info), _MAX_TRACE)
    fields["extra"] = _extra(record)
    return fields


def _number(record: logging.LogRecord, name: str) -> int | float:
    value = getattr(record, name, None)
    return value if isinstance(value, (int, float)) and -(2**63) <= value < 2**63 else 0


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:
        # The text does not fit its arguments; both are logged, because that is better than nothing.
        return f"{shown(record.msg)} {shown(record.args)} ({type(error).__name__}: {error_text(error)})"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    extra: dict[str, object] = {}
    size = 0
    for name, value in {**current_span(), **vars(record)}.items():
        if name in OF_EVERY_RECORD:
            continue
        told, length = _json(value)
        size += len(name) + length
        if len(name) > _MAX_NAME or size > _MAX_EXTRA:
            extra["left_out"] = True
            break
        extra[name] = told
    return extra


def _json(value: object) -> tuple[object, int]:
    """Return the part of a value that JSON can carry, and its length."""
    try:
        length = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        # The value becomes text, as in a JSON log.
        length = _MAX_VALUE + 1
    if length <= _MAX_VALUE:
        return value, length
    text = shown(value)
    return text, 12 * len(text)


def _cut(text: str, limit: int) -> str:
    """Return a text of some length at most: of a longer one the begin and the end."""
    if len(text) <= limit:
        return text
    begin = limit // 4
    return text[:begin] + _LEFT_OUT + text[len(text) - limit + begin + len(_LEFT_OUT) :]


def _text(value: object) -> str | None:
    """Return a text with escapes, except for line breaks, which the formatter of a record treats."""
    if not isinstance(value, str):
        return None
    return "\n".join(escaped(line) for line in value.split("\n"))
