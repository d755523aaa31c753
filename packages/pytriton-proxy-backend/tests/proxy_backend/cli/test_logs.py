"""Log records as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pytriton.proxy_backend.cli.logs import JsonFormatter, start_log


def formatted(message: str, *args: object, **more: Any) -> dict[str, Any]:
    record = logging.getLogger("some.logger").makeRecord(
        "some.logger", logging.WARNING, "file.py", 1, message, args, more.pop("exc_info", None), extra=more
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_record_is_one_line_with_its_own_fields() -> None:
    told = formatted("%s\nand %d", "text", 3, model="net", rows=2)
    assert (told["level"], told["logger"], told["message"]) == ("WARNING", "some.logger", "text\nand 3")
    assert (told["model"], told["rows"]) == ("net", 2)
    assert told["time"].endswith("+00:00")


def test_tracebacks_have_a_field() -> None:
    try:
        raise ValueError("no weights")
    except ValueError:
        told = formatted("failed", exc_info=sys.exc_info())
    assert told["message"] == "failed"
    assert told["exception"].endswith("ValueError: no weights")
    told = formatted("failed\nTraceback (most recent call last):\n  somewhere\nValueError: no weights\n")
    assert told["message"] == "failed"
    assert told["exception"] == "Traceback (most recent call last):\n  somewhere\nValueError: no weights"


@pytest.mark.parametrize("value", [float("nan"), {("a", "b"): 1}, object(), b"\xff", "\ufffd"])
def test_what_json_has_not_is_told_all_the_same(value: object) -> None:
    told = formatted("text", value=value)
    assert told["message"] == "text"
    assert told["value"] in (repr(value), value)


def test_what_somebody_calls_a_field_hides_none_of_ours() -> None:
    assert formatted("text", time="never", level="none")["level"] == "WARNING"


@pytest.mark.parametrize(("level", "log_format"), [("LOUD", "text"), ("INFO", "xml")])
def test_no_such_level_or_format(level: str, log_format: str) -> None:
    with pytest.raises(ValueError, match=r"must be .* or .*, got"):
        start_log(level, log_format)


def test_a_record_in_a_span_says_which() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0x12, is_remote=False))
    with trace.use_span(span):
        told = formatted("text")
        # A record that knows better is believed.
        own = formatted("text", trace_id="its own")
    assert (told["trace_id"], told["span_id"]) == ("abc".zfill(32), "12".zfill(16))
    assert own["trace_id"] == "its own"
    assert "trace_id" not in formatted("text")
