"""The options that commands have in common which run until a signal comes, and the log that they write."""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import re

from ..runtime.access import ACCESS_LOGGER
from ..runtime.records import OF_EVERY_RECORD, WORKER_FIELD, current_span
from ..system.escapes import escaped_lines, is_terminal
from ..system.log_gate import set_gate
from .app import seconds

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
"""Values of `--log-level`."""
FORMATS = ("text", "json")
"""Values of `--log-format`."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""How a record of the log is written as text."""

# A user at a terminal knows the day.
_TERMINAL_TIME = "%H:%M:%S"
_ESCAPE = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(?P<lone>ud[89a-f]..)|.)")
_TRACEBACK = "\nTraceback (most recent call last):\n"


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON.

    It has `time` (UTC), `level`, `logger`, `message`, `process`, `thread`, the traceback as `exception`, everything in
    `extra`, and `trace_id` and `span_id` inside a span.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        # Records of a callable's error have the traceback in their text, because frames would keep tensors alive.
        message, mark, traceback = record.getMessage().partition(_TRACEBACK)
        fields: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "process": record.process,
            "thread": record.threadName,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["exception"] = record.exc_text
        elif mark:
            fields["exception"] = (mark + traceback).strip()
        if record.stack_info:
            fields["stack"] = record.stack_info
        extra = {name: value for name, value in vars(record).items() if name not in OF_EVERY_RECORD}
        extra = {**current_span(), **extra}
        try:
            text = json.dumps({**extra, **fields}, default=repr, allow_nan=False)
        except (TypeError, ValueError):
            # JSON has no NaN, no tuples as keys, and no lists that contain themselves.
            text = json.dumps({**{name: repr(value) for name, value in extra.items()}, **fields})
        return _ESCAPE.sub(_without_lone, text) if "\\ud" in text else text


def _without_lone(found: re.Match[str]) -> str:
    """Return an escape for JSON; half of a surrogate pair becomes the replacement character, as readers refuse it."""
    return "\\ufffd" if found["lone"] else found[0]


class TextFormatter(logging.Formatter):
    """A log record as text: later lines are indented, and control characters are escaped.

    In a record of a worker process, the worker follows the name of its logger.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        return escaped_lines(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is that of logging
        """Return the text without tracebacks."""
        worker = getattr(record, WORKER_FIELD, None)
        if worker is None or record.name.endswith(str(worker)):
            return super().formatMessage(record)
        told = copy.copy(record)
        told.name = f"{record.name} [{worker}]"
        return super().formatMessage(told)


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs until a signal comes."""
    parser.add_argument(
        "--stop-timeout", type=seconds, default=30.0, metavar="S", help="how long requests in flight may take (30)"
    )
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=LEVELS,
        help="the least level of the whole log; without it INFO for pytriton and WARNING for all else",
    )
    parser.add_argument(
        "--log-format", default="text", choices=FORMATS, help="text, or json: an object for each record, a line each"
    )


def start_log(level: str | None, log_format: str = "text") -> None:
    """Write the log to standard error.

    `level` None means INFO for pytriton's loggers alone, because libraries read the root level as the wish of their
    user, and would show progress bars for each request.
    """
    for option, value, known in (("--log-level", level, LEVELS), ("--log-format", log_format, FORMATS)):
        if value is not None and value not in known:
            raise ValueError(f"{option} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")
    handler = logging.StreamHandler()
    text = TextFormatter(TEXT_FORMAT, _TERMINAL_TIME if is_terminal(handler.stream) else None)
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    set_gate(handler, for_all=True)
    logging.basicConfig(level=level or logging.WARNING, handlers=[handler])
    if level is None:
        logging.getLogger("pytriton").setLevel(logging.INFO)
    # With JSON, every line has to be JSON.
    logging.captureWarnings(log_format == "json")
    # Somebody asked for the access log, so its level does not follow the others.
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)
