"""What servers show: on a terminal, in a pipe, and as JSON for what collects logs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.processes import CTRL_C, at_terminal
from support.serving import serve_command, short_home
from support.waiting import PATIENCE_S

PORTS = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
STOP = "Serving. Press Ctrl+C or send SIGTERM to stop."
APP = """
from pytriton.decorators import model
from pytriton.triton import Triton, TritonConfig


@model(max_batch_size=8)
def shout(text: str) -> str:
    if text == "fail":
        raise ValueError("told to fail")
    return text.upper()


if __name__ == "__main__":
    local = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "http_port": 0, "grpc_port": 0}
    with Triton(config=TritonConfig(allow_metrics=False, **local)) as triton:
        triton.bind(shout)
        triton.serve()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def serve(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytriton", "serve", "app.py", *PORTS, *arguments]


def call(shown: str) -> Any:
    """Make the call that is shown."""
    told = re.search(r"Try: (.*)", shown)
    assert told, shown
    program, silent, url, option, body = shlex.split(told[1])
    assert (program, silent, option) == ("curl", "-s", "-d")
    with urllib.request.urlopen(url, body.encode(), timeout=PATIENCE_S) as answer:
        return json.load(answer)


def read_until_served(process: subprocess.Popen[str], records: list[dict[str, Any]]) -> str:
    """Read records until the server serves; returns its address."""
    assert process.stdout is not None
    while not records or records[-1]["message"] != STOP:
        records.append(json.loads(process.stdout.readline()))
    [url] = [record["message"].split()[1] for record in records if record["message"].startswith("HTTP  ")]
    return str(url)


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_terminal_shows_what_is_served_and_nothing_else(folder: Path, level: str) -> None:
    with short_home(), at_terminal(serve(f"--log-level={level}"), folder) as terminal:
        lines = terminal.wait_for(STOP).splitlines()
        patterns = (
            r"The access token is in \S+, where this user's pytriton finds it: pytriton models http://127\.0\.0\.1:\d+",
            r"shout\(text: str as BYTES\[1\]\) -> output: str as BYTES\[1\]; ready, max_batch_size=8, 1 thread",
            r"HTTP    http://127\.0\.0\.1:\d+",
            r"gRPC    grpc://127\.0\.0\.1:\d+",
            r"metrics http://127\.0\.0\.1:\d+/metrics",
            r"Ready after \d+\.\d s\.",
            r"Try: curl -s http://\S+/generate -d '\{\"text\": \"hello\"\}'",
            re.escape(STOP),
        )
        assert len(lines) == len(patterns), lines
        for line, pattern in zip(lines, patterns, strict=True):
            assert re.fullmatch(pattern, line), line
        assert call(terminal.shown)["output"] == "HELLO"
        terminal.press(CTRL_C)
        assert terminal.wait_ended() == 0
        assert "Traceback" not in terminal.shown


def test_a_script_at_a_terminal_shows_the_same(folder: Path) -> None:
    with short_home(), at_terminal([sys.executable, "app.py"], folder) as terminal:
        lines = terminal.wait_for(STOP).splitlines()
        assert lines[0].startswith("shout(text: str as BYTES[1]) -> output: str as BYTES[1]; ready, ")
        assert call(terminal.shown)["output"] == "HELLO"
        terminal.press(CTRL_C)
        assert terminal.wait_ended() == 0


SCRIPT = """
import os, signal, threading, time
from app import Triton, TritonConfig, shout

triton = Triton(config=TritonConfig(http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False))
triton.bind(shout)


def end():
    while not triton.is_alive():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=end).start()
triton.serve()
"""


def test_a_script_in_a_pipe_prints_one_line_to_standard_error(folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("threading.Thread(target=end).start()", "")]
    with (
        short_home(),
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        rest = process.communicate(timeout=PATIENCE_S)
    assert re.fullmatch(r"pytriton: shout served at http://127\.0\.0\.1:\d+; Ctrl\+C or SIGTERM stops it\.\n", line)
    assert (process.returncode, *rest) == (0, "", "")


def test_a_script_with_logging_of_its_own_prints_nothing_else(folder: Path) -> None:
    script = f"import logging; logging.basicConfig(level=logging.ERROR)\n{SCRIPT}"
    with short_home():
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_for_what_collects_logs(folder: Path) -> None:
    with (
        short_home(),
        subprocess.Popen(
            serve("--log-format=json", "--log-level=DEBUG"),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        records: list[dict[str, Any]] = []
        url = read_until_served(process, records)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/v2/models/shout/generate", b'{"text": "fail"}', timeout=PATIENCE_S)
        caught.value.close()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        records += [json.loads(line) for line in rest.splitlines()]
    for record in records:
        assert {"time", "level", "logger", "message", "process", "thread"} <= record.keys()
        # Triton's own prefix has what the record has by itself.
        assert not re.match(r"[IWEV]\d{4} ", record["message"])
    of_triton = [record for record in records if record["logger"] == "pytriton.tritonserver"]
    assert any(record["level"] == "INFO" and "Started HTTPService" in record["message"] for record in of_triton)
    # Of a model there is one line at INFO.
    assert {record["level"] for record in of_triton if "loading: shout:1" in record["message"]} == {"DEBUG"}
    told = [record["message"] for record in records if record["level"] == "INFO"]
    told = told[: told.index("Serving. Press Ctrl+C or send SIGTERM to stop.")]
    assert [text.partition("(")[0] for text in told if "shout" in text and not text.startswith("Try: ")] == ["shout"]
    # Its table of options is wider than a screen.
    assert {record["level"] for record in of_triton if record["message"].startswith(("|", "+-"))} == {"DEBUG"}
    [failed] = [record for record in records if "exception" in record]
    assert failed["level"] == "ERROR"
    assert failed["message"] == "model shout: the inference callable failed, request without id"
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["exception"].endswith("\nValueError: told to fail")


def test_what_cannot_be_served_is_told_as_json_as_well(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytriton", "serve", "app.py:shot", "--log-format=json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    told = json.loads(done.stderr)
    assert told["level"] == "ERROR"
    assert "there is no 'shot'" in told["message"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_access_log_has_every_request(folder: Path, workers: int) -> None:
    command = serve("--log-format=json", "--access-log", f"--workers={workers}")
    with (
        short_home(),
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        url = f"{read_until_served(process, [])}/v2/models/shout/generate"
        for number, text in enumerate(["a", "fail", "b"]):
            body = json.dumps({"text": text, "id": f"request {number}"}).encode()
            try:
                urllib.request.urlopen(url, body, timeout=PATIENCE_S).close()
            except urllib.error.HTTPError as error:
                error.close()
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    records = [json.loads(line) for line in told.splitlines()]
    records = [record for record in records if record["logger"] == "pytriton.access"]
    assert [(record["request_id"], record["outcome"]) for record in records] == [
        ("request 0", "ok"),
        ("request 1", "callable"),
        ("request 2", "ok"),
    ]
    for record in records:
        assert (record["model"], record["version"], record["rows"], record["batch"]) == ("shout", 1, 1, 1)
        assert record["duration_ms"] > 0


@pytest.mark.parametrize("options", [[], ["--workers=1"]])
def test_an_error_shows_the_users_frames_and_a_stop_loses_nothing(folder: Path, options: list[str]) -> None:
    with serve_command(folder, "app.py", *options) as server:
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask("shout", "fail")
        caught.value.close()
    assert "attaching again" not in server.written
    places = [line for line in server.written.splitlines() if line.lstrip().startswith("File ")]
    assert len(places) == 1, server.written
    assert "app.py" in places[0]


@pytest.mark.parametrize("options", [[], ["--workers=1"]])
def test_a_class_that_fails_shows_its_own_frames(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "app.py").write_text(
        "from pytriton.decorators import model\n\n\n@model\nclass Shout:\n    def __init__(self) -> None:\n"
        "        self.load()\n\n    def load(self) -> None:\n        raise ValueError('no weights')\n\n"
        "    def __call__(self, text: str) -> str:\n        return text\n"
    )
    with short_home():
        done = subprocess.run(
            serve(*options), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 1
    places = [line for line in done.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert [("app.py" in place, place.rpartition(" ")[2]) for place in places] == [(True, "__init__"), (True, "load")]
    assert "ValueError: no weights" in done.stderr
