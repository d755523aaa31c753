"""A log that nobody reads stops nobody."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import threading
from collections.abc import Iterator

import pytest

from pytriton.proxy_backend.cli.logs import JsonFormatter
from pytriton.proxy_backend.system.log_gate import keep_log_from_blocking, set_gate

logger = logging.getLogger("pytriton.some.module")
PATIENCE_S = 60.0


class Pipe:
    """A handler that writes into a pipe."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w", buffering=1)
        self.handler = logging.StreamHandler(self.stream)

    def read(self) -> str:
        os.set_blocking(self.reader, False)
        text = b""
        try:
            while part := os.read(self.reader, 1 << 20):
                text += part
        except BlockingIOError:
            pass
        return text.decode()

    def close(self) -> None:
        self.read()
        self.stream.close()
        os.close(self.reader)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    root, ours = logging.getLogger(), logging.getLogger("pytriton")
    before, before_ours = list(root.handlers), list(ours.handlers)
    made = Pipe()
    root.addHandler(made.handler)
    keep_log_from_blocking()
    logger.setLevel(logging.DEBUG)
    yield made
    root.handlers[:], ours.handlers[:] = before, before_ours
    for handler in [*before, *([logging.lastResort] if logging.lastResort is not None else [])]:
        for each in list(handler.filters):
            handler.removeFilter(each)
    logger.setLevel(logging.NOTSET)
    made.close()


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 100, 4096, 5000, 30_000])
def test_records_are_dropped_and_counted(pipe: Pipe, size: int) -> None:
    total = 200_000 // size // 8 if size < 100 else 3000 if size < 4096 else 60
    for number in range(total):
        logger.info("%d %s", number, "x" * size)
    told = pipe.read().splitlines()
    # The first are there, whole and in their order.
    assert told == [f"{number} {'x' * size}" for number in range(len(told))]
    assert 0 < len(told) < total
    logger.info("again")
    name = pipe.stream.name
    assert pipe.read().splitlines() == [
        f"{total - len(told)} records of the log were left out: nobody has read {name}", "again",
    ]  # fmt: skip


def test_a_pipe_that_is_read_gets_all(pipe: Pipe) -> None:
    read: list[bytes] = []
    total = 20_000

    def take() -> None:
        while sum(part.count(b"\n") for part in read) < total:
            read.append(os.read(pipe.reader, 1 << 16))

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(total):
        logger.info("%d", number)
    thread.join(PATIENCE_S)
    assert b"".join(read).split() == [str(number).encode() for number in range(total)]


def test_many_threads_do_not_get_into_it(pipe: Pipe) -> None:
    def write() -> None:
        for _ in range(200):
            logger.info("y" * 3000)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_one_of_the_programs_own_that_waits_is_not_waited_for(pipe: Pipe) -> None:
    mine = logging.getLogger("mine")
    mine.setLevel(logging.INFO)
    waiting = threading.Thread(target=lambda: mine.info("z" * 200_000), daemon=True)
    waiting.start()
    # It has begun to write, and has the lock of the handler.
    assert select.select([pipe.reader], [], [], PATIENCE_S)[0]
    logger.info("ours")
    read = ""
    while waiting.is_alive() or not read.endswith("\n"):
        read += pipe.read()
    waiting.join(PATIENCE_S)
    assert len(read) >= 200_001


def test_the_programs_own_records_are_as_before(pipe: Pipe) -> None:
    for number in range(2000):
        if number % 100 == 0:
            logging.getLogger("mine").warning("%s", number)
        else:
            logger.debug("%s", "x" * 100)
    assert [line for line in pipe.read().splitlines() if line.isdigit()] == [str(n) for n in range(0, 2000, 100)]


def test_a_handler_of_ours_drops_all(pipe: Pipe) -> None:
    set_gate(pipe.handler, for_all=True)
    for _ in range(3000):
        logging.getLogger("mine").error("%s", "x" * 100)
    assert "mine" not in pipe.read()


def test_without_handlers_warnings_go_to_standard_error(pipe: Pipe, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    kept, root.handlers[:] = list(root.handlers), []
    try:
        logger.info("not told")
        logger.warning("told")
    finally:
        root.handlers[:] = kept
    assert capsys.readouterr().err == "told\n"


def test_streams_in_memory_take_all(pipe: Pipe) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        for _ in range(3000):
            logger.info("%s", "x" * 100)
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().count("\n") == 3000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udcff", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        ("\\ud800", "\\ud800"),
        ("\\\ud800", "\\\ufffd"),
        ('"\ud800"\n', '"\ufffd"\n'),
    ],
)
def test_json_has_no_half_of_a_pair(text: str, told: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
    record.more = {text: text}
    line = JsonFormatter().format(record)
    read = json.loads(line)
    assert (read["message"], read["more"]) == (told, {told: told})
    assert line.isascii()
    line.encode()
    json.dumps(read, ensure_ascii=False).encode()
