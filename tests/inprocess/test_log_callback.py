"""`Options.log_callback`: Triton's log as records, in place of a file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pytriton.inprocess import InternalError, LogLevel, Server

Record = tuple[LogLevel, str, int, int, str]


class Records(list[Record]):
    def __call__(self, *record: Any) -> None:
        self.append(record)


def test_records_have_all_their_parts_and_are_there_when_the_server_has_stopped() -> None:
    records = Records()
    server = Server(log_callback=records, log_info=True)
    server.start()
    server.stop()

    levels = {record[0] for record in records}
    assert LogLevel.INFO in levels
    assert all(file.endswith(".cc") and line > 0 and time_us > 1e15 for _, file, line, time_us, _ in records)
    messages = [message for *_, message in records]
    assert any(message.startswith("Timeout 1: Found 0 live models") for message in messages)
    table = next(message for message in messages if "server_version" in message)
    assert table.startswith("\n+-")
    assert table.endswith("-+")
    assert not any(message.startswith('"') for message in messages)


def test_only_enabled_levels_come_and_the_file_is_left_alone(tmp_path: Path) -> None:
    records, file = Records(), tmp_path / "log"
    with Server(log_callback=records, log_error=True, log_file=file):
        pass

    assert {record[0] for record in records} <= {LogLevel.ERROR}
    assert not file.exists()


def test_a_start_that_fails_has_told_why(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text("no configuration")
    records = Records()

    with pytest.raises(InternalError):
        Server(log_callback=records, log_error=True, model_repository=tmp_path).start()

    assert any(level is LogLevel.ERROR and "config.pbtxt" in message for level, *_, message in records)


def test_the_last_start_decides_who_gets_the_log(tmp_path: Path) -> None:
    first, second, file = Records(), Records(), tmp_path / "log"
    with Server(log_callback=first, log_info=True), Server(log_callback=second, log_info=True):
        pass
    before = len(first), len(second)
    with Server(log_file=file, log_info=True):
        pass

    assert (len(first), len(second)) == before
    assert all(before)
    assert "Found 0 live models" in file.read_text()


def test_a_callback_that_fails_is_reported_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fail(*record: Any) -> None:
        calls.append(threading.current_thread().name)
        raise ValueError("no room")

    with Server(log_callback=fail, log_info=True):
        pass

    assert len(calls) > 1
    assert set(calls) == {"triton-log-records"}
    failed = [record for record in caplog.records if "Options.log_callback failed" in record.getMessage()]
    assert len(failed) == len(calls)
    assert failed[0].exc_info is not None
    assert isinstance(failed[0].exc_info[1], ValueError)
