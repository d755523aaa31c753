"""The command `pytriton serve`, with real servers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.python_models import parent_processes, worker_processes
from support.serving import FREE_PORTS, ServeCommand, ServedFile, serve_command, short_home
from support.waiting import PATIENCE_S, eventually

APP = """
import os

from pytriton.decorators import model
from pytriton.triton import Triton, TritonConfig


@model
def shout(text: str) -> str:
    return text.upper()


@model(name="greeter")
class Greeter:
    def __init__(self) -> None:
        self.process = os.getpid()

    def __call__(self, name: str) -> str:
        return f"Hello, {name}, from {self.process}"


def make() -> Triton:
    local = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "http_port": 0, "grpc_port": 0}
    triton = Triton(config=TritonConfig(allow_metrics=False, **local))
    triton.bind("loud", shout)
    return triton
"""

UNGUARDED = """
with Triton() as triton:
    triton.bind(shout)
    triton.serve()
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytriton", "serve", *arguments]


@contextmanager
def serving(folder: Path, *arguments: str, ports: Sequence[str] = FREE_PORTS) -> Iterator[ServeCommand]:
    """The command while it serves `app.py` of the folder."""
    (folder / "app.py").write_text(APP)
    with serve_command(folder, *arguments, ports=ports) as server:
        yield server


def fails(folder: Path, code: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code of the command and what it says, where it is to end by itself."""
    (folder / "app.py").write_text(code)
    with short_home():
        done = subprocess.run(
            command(*arguments),
            cwd=folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.stdout == ""
    return done.returncode, done.stderr


def post(url: str, body: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, body.encode(), timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def ask(url: str, model: str, **inputs: str) -> str:
    return str(post(f"{url}/v2/models/{model}/generate", json.dumps(inputs))["output"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_models_of_a_file_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, "app.py") as server:
        written = server.written
        assert ask(server.url, "shout", text="hi") == "HI"
        assert ask(server.url, "greeter", name="you") == f"Hello, you, from {server.process.pid}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(server.url, "loud", text="hi")
        caught.value.close()
        assert re.search(r"Ready after \d+\.\d s\.", written)
        # The models with their signatures, in the order of the file.
        shown = r"shout\(text: str as BYTES\[1\]\) -> output: str as BYTES\[1\]; .*1 thread$"
        assert re.search(shown, written, re.MULTILINE)
        assert written.index(" shout(text") < written.index(" greeter(name")
        assert server.end(number) == 0, server.written
        assert "Traceback" not in server.written


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_file_is_imported(tmp_path: Path, number: signal.Signals) -> None:
    # In short sleeps: Python misses a signal that comes in the moment before one.
    sleep = "for _ in range(6000):\n    time.sleep(0.1)\n"
    (tmp_path / "app.py").write_text(f"import time\n\nprint('importing', flush=True)\n{sleep}")
    with subprocess.Popen(
        command("app.py", *FREE_PORTS), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (128 + number, "")


def test_a_signal_as_soon_as_somebody_could_ask(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with short_home() as home, ServedFile(tmp_path / "app.py", home).running() as process:
        # It has been ready for no longer than it takes to be told so.
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_call_that_it_tells_works(tmp_path: Path) -> None:
    with serving(tmp_path, "app.py") as server:
        told = re.search(r"Try: (.*)", server.written)
        assert told, server.written
        program, silent, url, option, body = shlex.split(told[1])
        assert (program, silent, option) == ("curl", "-s", "-d")
        assert post(url, body)["output"] == "HELLO"


def test_one_model_in_processes(tmp_path: Path) -> None:
    with serving(tmp_path, "app.py:Greeter", "--workers=1") as server:
        assert re.search(r" greeter\(name.*1 process$", server.written, re.MULTILINE)
        assert " shout(" not in server.written
        said = re.fullmatch(r"Hello, you, from (\d+)", ask(server.url, "greeter", name="you"))
        assert said
        assert int(said[1]) != server.process.pid
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(server.url, "shout", text="hi")
        caught.value.close()


@pytest.mark.parametrize("sleep", ["process", "parent"])
def test_a_model_of_processes_sleeps(tmp_path: Path, sleep: str) -> None:
    with serving(tmp_path, "app.py:Greeter", "--workers=1", "--idle=0.2s", f"--sleep={sleep}") as server:
        eventually(lambda: not worker_processes(server.process.pid))
        assert len(parent_processes(server.process.pid)) == (2 if sleep == "parent" else 0)

        def answers() -> bool:
            try:
                return ask(server.url, "greeter", name="you").startswith("Hello, you, from ")
            except urllib.error.HTTPError as error:
                # A busy machine may take longer to start a process than requests wait for one.
                error.close()
                return False

        eventually(answers)


def test_a_server_that_a_function_makes(tmp_path: Path) -> None:
    with serving(tmp_path, "app.py:make", ports=()) as server:
        assert ask(server.url, "loud", text="hi") == "HI"
    code, said = fails(tmp_path, APP, "app.py:make", "--http-port=0", "--workers=1")
    assert code == 2
    assert "app.py:make is a Triton with settings of its own: leave out --workers, --http-port" in said


def test_a_file_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    code, said = fails(tmp_path, "def load():\n    raise ValueError('no weights')\n\n\nload()\n", "app.py", *FREE_PORTS)
    assert code == 1
    frames = re.findall(r'File "(.+)", line (\d+)', said)
    assert frames == [(str(tmp_path / "app.py"), "5"), (str(tmp_path / "app.py"), "2")]
    assert said.startswith("Error: app.py fails when it is imported:\nTraceback (most recent call last):\n")
    assert said.endswith("ValueError: no weights\n")


def test_a_file_that_serves_when_it_is_imported(tmp_path: Path) -> None:
    code, said = fails(tmp_path, APP + UNGUARDED, "app.py", *FREE_PORTS)
    assert code == 1
    assert 'under `if __name__ == "__main__":`' in said
    # Where that is in the file, and nothing else.
    assert re.findall(r'File "(.+)", line', said) == [str(tmp_path / "app.py")]


@pytest.mark.parametrize(
    ("code", "target", "problem"),
    [
        (APP, "other.py", "there is no file"),
        (APP, "no_such_module", "there is no module 'no_such_module'"),
        ("number = 1\n", "app.py", "'app.py' defines no model: decorate a function with @model"),
        (APP, "app.py:shot", "there is no 'shot'. What can be served: shout, Greeter."),
        (APP, "app.py:os", "expected a function or class under @model"),
        ("from math import sin\nfrom other import shout\n", "app.py", "Name what it imports or makes: app.py:shout."),
    ],
)
def test_nothing_to_serve(tmp_path: Path, code: str, target: str, problem: str) -> None:
    if "other import" in code:
        (tmp_path / "other.py").write_text(APP)
    result, said = fails(tmp_path, code, target, *FREE_PORTS)
    assert result == 1
    assert problem in said
    assert said.startswith("Error: ")
    assert "Traceback" not in said
