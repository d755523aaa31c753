"""Log records on their way from a worker process to its parent."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import ProtocolError
from pytriton.proxy_backend.runtime import records
from pytriton.proxy_backend.runtime.records import RecordHandler, current_span, record_of

MESSAGE, TRACE, NAME, VALUE, EXTRA = 32768, 16384, 256, 8192, 65536


def sent(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that a handler sends, as they are after JSON."""
    messages: list[tuple[str, dict[str, Any]]] = []
    RecordHandler(lambda kind, **fields: messages.append((kind, fields))).emit(record)
    [(kind, fields)] = messages
    assert kind == "record"
    return json.loads(json.dumps(fields, allow_nan=False))  # type: ignore[no-any-return]


def made(message: Any = "text", *args: Any, **more: Any) -> logging.LogRecord:
    values = {
        "name": "net", "levelname": "INFO", "levelno": 20, "pathname": "/folder/file.py", "lineno": 7,
        "funcName": "call", "created": 12.75, "process": 5, "thread": 6, "processName": "p", "threadName": "t",
        "msg": message, "args": args,
    }  # fmt: skip
    return logging.makeLogRecord({**values, **more})


def failed() -> Any:
    try:
        raise ValueError("so")
    except ValueError:
        return sys.exc_info()


def test_a_record_arrives_as_it_was_made() -> None:
    record = record_of(sent(made("%s and %d", "a", 2, exc_info=failed(), stack_info="stack", tenant="x", depth=[1])))
    assert (record.getMessage(), record.levelno, record.levelname, record.name) == ("a and 2", 20, "INFO", "net")
    assert (record.pathname, record.filename, record.module, record.lineno) == ("/folder/file.py", "file.py", "file", 7)
    assert (record.funcName, record.process, record.thread) == ("call", 5, 6)
    assert (record.processName, record.threadName) == ("p", "t")
    assert (record.created, record.msecs) == (12.75, 750.0)
    assert record.exc_text is not None
    assert record.exc_text.endswith("ValueError: so")
    assert (record.exc_info, record.stack_info) == (None, "stack")
    assert (vars(record)["tenant"], vars(record)["depth"]) == ("x", [1])


def test_what_was_formatted_before_is_taken() -> None:
    assert sent(made(exc_info=failed(), exc_text="as it was"))["exception"] == "as it was"
    assert sent(made())["exception"] is None
    assert sent(made())["stack"] is None


@pytest.mark.parametrize(("length", "is_cut"), [(0, False), (1, True), (1000, True)])
def test_long_texts_keep_their_begin_and_their_end(length: int, is_cut: bool) -> None:
    for field, limit, record in (
        ("message", MESSAGE, made("b" + "x" * (MESSAGE - 2 + length) + "e")),
        ("exception", TRACE, made(exc_text="b" + "x" * (TRACE - 2 + length) + "e")),
        ("stack", TRACE, made(stack_info="b" + "x" * (TRACE - 2 + length) + "e")),
        ("name", NAME, made(name="b" + "x" * (NAME - 2 + length) + "e")),
    ):
        text = sent(record)[field]
        assert len(text) == limit
        assert (text[0], text[-1]) == ("b", "e")
        assert (" [...] " in text) is is_cut
        if is_cut:
            assert text.index(" [...] ") == limit // 4


def test_numbers_that_are_none() -> None:
    fields = sent(made(created="now", lineno=None, thread=2**63, process=-(2**63), levelno=2**63 - 1))
    assert [fields[name] for name in ("created", "lineno", "thread", "process", "levelno")] == [
        0, 0, 0, -(2**63), 2**63 - 1
    ]  # fmt: skip
    assert sent(made(thread=-(2**63) - 1))["thread"] == 0


def test_what_a_record_lacks_is_empty() -> None:
    record = made()
    for name in ("threadName", "process"):
        delattr(record, name)
    fields = sent(record)
    assert (fields["threadName"], fields["process"]) == ("", 0)


def test_a_message_that_does_not_fit_its_arguments() -> None:
    message = sent(made("%d", "text"))["message"]
    # What Python says of it differs between its versions.
    assert re.fullmatch(r"'%d' \('text',\) \(TypeError: .*%d.*\)", message), message


def test_values_that_json_cannot_carry_are_texts() -> None:
    loop: list[Any] = []
    loop.append(loop)
    extra = sent(made(whole=float("nan"), thing={1, 2}, loop=loop, good={"a": [1, None, True]}))["extra"]
    assert (extra["whole"], extra["thing"], extra["good"]) == ("nan", "{1, 2}", {"a": [1, None, True]})
    assert isinstance(extra["loop"], str)
    # With the quotes of JSON.
    fits, long = "x" * (VALUE - 2), "x" * (VALUE - 1)
    assert sent(made(value=fits))["extra"]["value"] == fits
    assert sent(made(value=long))["extra"]["value"] != long


def test_how_much_extra_goes_along() -> None:
    values = {f"v{number:02}": "x" * (VALUE - 2) for number in range(9)}
    extra = sent(made(**values))["extra"]
    # Names and values count: seven of these fit.
    assert list(extra) == [*list(values)[:7], "left_out"]
    assert extra["left_out"] is True
    assert "left_out" not in sent(made(**dict(list(values.items())[:7])))["extra"]
    # The limit itself is within it.
    filled = {**dict(list(values.items())[:7]), "rest": "x" * (EXTRA - 7 * (3 + VALUE) - 4 - 2)}
    assert "left_out" not in sent(made(**filled))["extra"]
    assert "left_out" in sent(made(**{**filled, "rest": filled["rest"] + "x"}))["extra"]
    assert list(sent(made(**{"n" * NAME: 1}))["extra"]) == ["n" * NAME]
    assert list(sent(made(**{"n" * (NAME + 1): 1}))["extra"]) == ["left_out"]


def test_texts_of_values_count_with_all_that_json_may_make_of_them() -> None:
    class Shown:
        def __repr__(self) -> str:
            return "x" * 300

    extra = sent(made(**{f"v{number:02}": Shown() for number in range(40)}))["extra"]
    # Of 200 characters and three dots, each up to twelve bytes.
    assert list(extra) == [*(f"v{number:02}" for number in range(EXTRA // (3 + 12 * 203))), "left_out"]


def test_a_forked_child_writes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[Any] = []
    handler = RecordHandler(lambda kind, **fields: messages.append(kind))
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    handler.emit(made("hello"))
    assert (capsys.readouterr().err, messages) == ("INFO net: hello\n", [])
    handler.take_over(lambda kind, **fields: messages.append(("taken over", kind)))
    handler.emit(made("hello"))
    assert (capsys.readouterr().err, messages) == ("", [("taken over", "record")])


def test_an_error_of_the_way_does_not_reach_who_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def send(kind: str, **fields: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(logging, "raiseExceptions", True)
    RecordHandler(send).emit(made("hello"))
    told = capsys.readouterr().err
    assert "OSError: gone" in told
    assert "Message: 'hello'" in told


GOOD = {"extra": {}, "created": 1.5, "levelno": 20, "name": "n", "levelname": "INFO", "message": "m"}


@pytest.mark.parametrize(
    "change",
    [
        {"extra": None}, {"extra": []}, {"created": "x"}, {"created": None}, {"levelno": 1.5}, {"levelno": None},
        {"name": None}, {"levelname": 3}, {"message": None},
    ],
)  # fmt: skip
def test_what_is_no_record(change: dict[str, Any]) -> None:
    assert record_of(GOOD).getMessage() == "m"
    with pytest.raises(ProtocolError, match="expected a log record, got "):
        record_of({**GOOD, **change})


def test_what_comes_cannot_pretend_to_be_something_else() -> None:
    fields = {**GOOD, "extra": {"levelno": 50, "msg": "other", "tenant": "x", "7": 8}, "message": "a\x1b[31m\nb"}
    record = record_of(fields)
    assert (record.levelno, vars(record)["tenant"], vars(record)["7"]) == (20, "x", 8)
    assert record.getMessage() == "a\\x1b[31m\nb"
    assert (record.pathname, record.filename, record.module, record.msecs) == ("", "", "", 500.0)


@given(st.text(max_size=40))
def test_messages_are_not_formatted_again(text: str) -> None:
    arrived = record_of({**GOOD, "message": text}).getMessage()
    assert arrived.count("\n") == text.count("\n")
    assert ("%s" in arrived) == ("%s" in text)


def test_the_span_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    assert current_span() == {}
    context = trace.SpanContext(trace_id=10, span_id=11, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert current_span() == {"trace_id": f"{10:032x}", "span_id": f"{11:016x}"}
        assert sent(made(span_id="own"))["extra"] == {"trace_id": f"{10:032x}", "span_id": "own"}
    for module in (None, records):
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
        assert current_span() == {}
