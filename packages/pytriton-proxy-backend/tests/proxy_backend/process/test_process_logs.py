"""What a process logs and writes, on its way to the log of its parent."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import string
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytriton.proxy_backend import ProtocolError
from pytriton.proxy_backend.cli.logs import JsonFormatter, TextFormatter
from pytriton.proxy_backend.process import sender
from pytriton.proxy_backend.process.log import LOG_RATE_VARIABLE, ProcessLog
from pytriton.proxy_backend.process.messages import MAX_LINE_BYTES, LineReader, encode_message
from pytriton.proxy_backend.process.sender import MessageSender
from pytriton.proxy_backend.runtime.records import RecordHandler
from pytriton.proxy_backend.system.escapes import escaped, escaped_lines
from support.processes import in_child

HOSTILE = [
    "x\nINFO pytriton.access: {not json}",
    'x\nINFO pytriton.access: {"model": "m", "message": 1, "name": 2}',
    "x\nCRITICAL root: the building burns",
    "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f",
    "\u2028\u2029\u202e\x85\ud800",
    "%s %d {} \\n \0",
]


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    """A logger with nothing above it, as that of a worker process."""
    logger = logging.getLogger(f"pytriton.worker.{request.node.name}.0")
    logger.propagate, logger.level = False, logging.DEBUG
    yield logger
    logger.handlers.clear()
    logger.filters.clear()


@pytest.fixture
def kept(logger: logging.Logger) -> list[logging.LogRecord]:
    handler = Kept()
    logger.addHandler(handler)
    return handler.records


def over_the_channel(process_log: ProcessLog) -> Callable[..., object]:
    """What a process sends messages with, which come to a log as they come from a socket."""

    def send(kind: str, **fields: object) -> None:
        line = encode_message(kind, **fields)
        assert len(line) < MAX_LINE_BYTES
        for message in LineReader().feed(line):
            assert message["kind"] == "record"
            process_log.take_record(message)

    return send


# ---- records --------------------------------------------------------------------------------------------------------


def random_text(draw: random.Random) -> str:
    letters = string.printable + "äß字\x1b\x9b\u2028\ud800😀\0"
    return "".join(draw.choice(letters) for _ in range(draw.choice([0, 3, 30, 300])))


def random_value(draw: random.Random, depth: int = 0) -> object:
    kinds: list[Callable[[], object]] = [
        lambda: None,
        lambda: draw.random() < 0.5,
        lambda: draw.randrange(-(10**12), 10**12),
        draw.random,
        lambda: random_text(draw),
        lambda: [random_value(draw, depth + 1) for _ in range(draw.randrange(4))],
        lambda: {random_text(draw): random_value(draw, depth + 1) for _ in range(draw.randrange(4))},
    ]
    return draw.choice(kinds[:5] if depth > 2 else kinds)()


def test_records_come_as_they_were_made(logger: logging.Logger, kept: list[logging.LogRecord]) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    theirs = logging.getLogger("of the process")
    theirs.propagate, theirs.level = False, logging.DEBUG
    at_home = Kept()
    theirs.addHandler(at_home)
    theirs.addHandler(RecordHandler(over_the_channel(ProcessLog(logger))))
    try:
        for _ in range(300):
            extra = {f"field_{index}": random_value(draw) for index in range(draw.randrange(4))}
            level = draw.choice([10, 20, 25, 30, 40, 50])
            try:
                if draw.random() < 0.3:
                    raise ValueError(random_text(draw))
                theirs.log(level, "%s %r", random_text(draw), random_value(draw), extra=extra, stack_info=level == 25)
            except ValueError:
                theirs.log(level, "failed: %s", random_text(draw), exc_info=True, extra=extra)
    finally:
        theirs.handlers.clear()
    assert len(kept) == len(at_home.records) == 300
    for one, other in zip(at_home.records, kept, strict=True):
        same = (
            "name",
            "levelno",
            "levelname",
            "created",
            "pathname",
            "module",
            "lineno",
            "funcName",
            "process",
            "threadName",
        )
        for name in same:
            assert getattr(one, name) == getattr(other, name), (seed, name)
        lines = one.getMessage().split("\n")
        assert other.getMessage() == "\n".join(map(escaped, lines)), seed
        assert (one.exc_info is None) == (other.exc_text is None), seed
        assert (one.stack_info is None) == (other.stack_info is None), seed
        fields = {name: value for name, value in vars(one).items() if name.startswith("field_")}
        assert {name: value for name, value in vars(other).items() if name.startswith("field_")} == fields, seed
        assert vars(other)["worker"] == logger.name.removeprefix("pytriton.worker."), seed
        # Both forms of the log say it in the way in which they say what was logged here.
        told = json.loads(JsonFormatter().format(other))
        assert (told["logger"], told["level"]) == (one.name, one.levelname)
        assert ("exception" in told) == (one.exc_info is not None), seed


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_of_a_caller_makes_no_record_and_no_line(
    logger: logging.Logger, kept: list[logging.LogRecord], text: str
) -> None:
    access = Kept()
    logging.getLogger("pytriton.access").addHandler(access)
    process_log = ProcessLog(logger)
    try:
        RecordHandler(over_the_channel(process_log)).handle(
            logging.makeLogRecord({"name": "app", "levelno": 30, "levelname": "WARNING", "msg": text, "caller": text})
        )
        for line in text.encode("utf-8", "replace").split(b"\n"):
            process_log.take_line(line.decode("utf-8", "replace"))
    finally:
        logging.getLogger("pytriton.access").removeHandler(access)
    assert not access.records
    record, *lines = kept
    assert (record.name, record.levelno, vars(record)["caller"]) == ("app", 30, text)
    assert {(each.name, each.levelno, vars(each)["stream"]) for each in lines} == {(logger.name, 20, "output")}
    for each in kept:
        for formatter in (JsonFormatter(), TextFormatter("%(levelname)s %(name)s: %(message)s")):
            first, *more = formatter.format(each).split("\n")
            assert "".join([first, *more]).replace("\t", "").isprintable()
            assert all(line.startswith("    ") for line in more)


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_what_json_has_not_or_is_too_long_is_cut(logger: logging.Logger, kept: list[logging.LogRecord]) -> None:
    handler = RecordHandler(over_the_channel(ProcessLog(logger)))
    endless: list[Any] = []
    endless.append(endless)
    long = "😀" * 100_000
    fields = {
        "name": long, "levelno": 40, "levelname": long, "msg": long, "threadName": long, "exc_text": long,
        "stack_info": long, "pathname": long, "funcName": long, "endless": endless, "odd": Odd(), "long": long,
        "nothing": float("nan"), **{f"field_{index}": "y" * 8000 for index in range(100)},
    }  # fmt: skip
    handler.handle(logging.makeLogRecord(fields))
    handler.handle(logging.makeLogRecord({"levelno": 40, "msg": "%d apples", "args": ("no",)}))
    first, second = kept
    assert len(first.getMessage()) == 32768
    assert first.getMessage().startswith("😀")
    assert first.getMessage().endswith("😀")
    assert vars(first)["left_out"] is True
    assert vars(first)["nothing"] == "nan"
    assert "no repr" not in vars(first)["odd"]
    assert "'%d apples' ('no',) (TypeError: " in second.getMessage()


@pytest.mark.parametrize("field", ["name", "levelname", "message", "levelno", "created", "extra"])
@pytest.mark.parametrize("value", [None, [], object])
def test_what_is_no_record_is_refused(logger: logging.Logger, field: str, value: object) -> None:
    fields = {"name": "n", "levelname": "INFO", "message": "m", "levelno": 20, "created": 1.0, "extra": {}}
    ProcessLog(logger).take_record(fields)
    with pytest.raises(ProtocolError, match="expected a log record"):
        ProcessLog(logger).take_record({**fields, field: value})


def test_a_filter_that_fails_costs_one_record(
    logger: logging.Logger, kept: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    def filtered(record: logging.LogRecord) -> bool:
        if "bad" in record.getMessage():
            raise RuntimeError("a filter of the program")
        return True

    logger.addFilter(filtered)
    process_log = ProcessLog(logger)
    for text in ("bad", "good"):
        process_log.take_line(text)
        RecordHandler(over_the_channel(process_log)).handle(logging.makeLogRecord({"levelno": 40, "msg": text}))
    assert [record.getMessage() for record in kept] == ["good", "good"]
    assert capsys.readouterr().err.count("RuntimeError: a filter of the program") == 2


def test_a_forked_child_logs_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    sent: list[str] = []
    handler = RecordHandler(lambda kind, **_: sent.append(kind))

    def child() -> None:
        sys.stderr = os.fdopen(os.dup(2), "w")
        handler.handle(logging.makeLogRecord({"name": "n", "levelno": 40, "levelname": "ERROR", "msg": "forked"}))
        sys.stderr.flush()
        assert sent == []

    in_child(child)
    assert capfd.readouterr().err == "ERROR n: forked\n"


# ---- how much -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "kept_lines"), [("", 10_000), ("7", 70), ("0", 12_000), ("many", 10_000)])
def test_more_than_the_rate_is_left_out_and_said(
    logger: logging.Logger,
    kept: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rate: str,
    kept_lines: int,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pytriton.proxy_backend.process.log.time.monotonic", lambda: now[0])
    monkeypatch.setenv(LOG_RATE_VARIABLE, rate)
    process_log = ProcessLog(logger)
    assert ("expected a number" in caplog.text) == (rate == "many")
    for _ in range(12_000):
        process_log.take_line("x")
    assert len(kept) == kept_lines
    # A record of the access log is one of a request, and none of them is left out.
    access = {"name": "pytriton.access", "levelname": "INFO", "message": "{}", "levelno": 20, "created": 1.0}
    with caplog.at_level(logging.INFO, "pytriton.access"):
        process_log.take_record({**access, "extra": {"model": "m"}})
    assert [record.name for record in caplog.records][-1] == "pytriton.access"
    for _ in range(2):
        process_log.tell_left_out()
    told = [record.getMessage() for record in kept[kept_lines:]]
    if kept_lines == 12_000:
        assert not told
        return
    assert told[0].startswith(f"{12_000 - kept_lines} lines and records of this process were left out")
    assert LOG_RATE_VARIABLE in told[0]
    # There is room again for as much as the time that has passed.
    now[0] += 2.0
    for _ in range(12_000):
        process_log.take_line("x")
    assert len(kept) == kept_lines + 1 + kept_lines // 5
    process_log.tell_left_out(at_end=True)
    assert kept[-1].getMessage().startswith(f"{12_000 - kept_lines // 5} lines")


# ---- the way --------------------------------------------------------------------------------------------------------


class Pair:
    """Both ends of a channel."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.sender = MessageSender(ours)
        self._ours = ours
        self._reader = LineReader()

    def read(self) -> list[dict[str, Any]]:
        """Return what has come, and comes while it is read."""
        self.theirs.setblocking(False)
        found: list[dict[str, Any]] = []
        try:
            while data := self.theirs.recv(1 << 16):
                found += self._reader.feed(data)
        except BlockingIOError:
            return found
        raise AssertionError("the other end is closed")

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_parent_that_stands_still_costs_records_and_nothing_else(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(sender, "_TIMEOUT_S", 0.01)
    sent = [number for number in range(1000) if pair.sender.send("record", number=number)]
    assert len(sent) < 1000
    # What has to come waits for it.
    assert pair.sender.send("ready")
    assert not pair.sender.send("metrics", value=1)
    found: list[dict[str, Any]] = []
    while len(found) <= len(sent):
        found += pair.read()
        pair.sender.send("attached")
    pair.sender.send("record", number=-1)
    while not found or found[-1].get("number") != -1:
        found += pair.read()
        pair.sender.send("attached")
    kinds = [message["kind"] for message in found]
    assert kinds.index("ready") == len(sent)
    assert [message["number"] for message in found if message["kind"] == "record"] == [*sent, -1]
    assert next(message for message in found if message.get("number") == -1)["lost"] == 1000 - len(sent)


def test_messages_of_many_threads_are_whole(pair: Pair) -> None:
    found: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: [pair.sender.send("record", text="x" * size) for size in range(0, 20_000, 97)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found += pair.read()
    for thread in threads:
        thread.join()
    found += pair.read()
    assert sorted(len(message["text"]) for message in found) == sorted([*range(0, 20_000, 97)] * 4)


def test_a_message_may_interrupt_another(pair: Pair) -> None:
    """A signal handler, or what the collector finds, may log while its own thread is sending."""

    def interrupt(_number: int, _frame: object) -> None:
        pair.sender.send("record", text="of a signal handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
    found: list[dict[str, Any]] = []
    try:
        for number in range(2000):
            pair.sender.send("record", text="x" * 500, number=number)
            found += pair.read()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    pair.sender.send("ready")
    found += pair.read()
    assert [message["number"] for message in found if "number" in message] == list(range(2000))
    assert any(message.get("text") == "of a signal handler" for message in found)
    assert found[-1]["kind"] == "ready"


def test_a_parent_that_is_gone_is_said(pair: Pair) -> None:
    pair.theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        pair.sender.send("ready")


# ---- escapes --------------------------------------------------------------------------------------------------------


def test_escapes() -> None:
    assert escaped("a\tä 字 😀 \u200d") == "a\tä 字 😀 \u200d"
    assert escaped("\x1b[31m\r\n\0\x85") == r"\x1b[31m\r\n\x00\x85"
    assert escaped("\u2028\ud800\u202e") == r"\u2028\ud800\u202e"
    assert escaped_lines("a\r\nERROR b\n\x1b[0m") == "a\n    ERROR b\n    \\x1b[0m"
    for number in range(0x110000):
        text = escaped(chr(number))
        assert text.splitlines() in ([text], [])
