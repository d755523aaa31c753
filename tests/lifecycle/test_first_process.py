"""A program that is the first process of a container, which the system spares signals that nobody handles."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults.forks import is_there, read_word
from support.processes import CTRL_C, at_terminal
from support.serving import FREE_PORTS, ServeCommand
from support.waiting import PATIENCE_S, eventually

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

PROGRAM = """
import os, sys, time
from pytriton.triton import Triton, TritonConfig
addresses = dict(http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False)
triton = Triton(config=TritonConfig(**addresses))
if sys.argv[1] == "forked":
    if os.fork() == 0:
        print("made", os.getpid(), flush=True)
        time.sleep(3600)
    print("child", os.wait()[1], flush=True)
    os._exit(0)
if sys.argv[1] == "run":
    triton.run()
print("made", os.getpid(), flush=True)
if sys.argv[1] == "serve":
    triton.serve()
    sys.exit()
while True:
    time.sleep(0.1)  # a signal that comes right before a sleep ends it only afterwards, in any program of Python
"""


@functools.cache
def may_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def first_process(how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs the program in a container; gives the process that waits for it, and its own number out here."""
    if not may_unshare():
        pytest.skip("this user or machine does not allow a PID namespace of its own")
    command = [*UNSHARE, sys.executable, "-c", PROGRAM, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outside:
        try:
            inside = int(eventually(Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text))
            yield outside, inside
        finally:
            outside.kill()


@pytest.mark.parametrize("how", ["wait", "run"])
def test_sigterm_before_serve_ends_it(how: str, home: Path) -> None:
    with first_process(how) as (outside, inside):
        assert read_word(outside, "made") == "1"
        os.kill(inside, signal.SIGTERM)
        # As a shell tells it of a process that SIGTERM has ended.
        assert outside.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert not is_there(inside)
        assert os.listdir(home) == []


def test_sigterm_is_answered_by_serve(home: Path) -> None:
    with first_process("serve") as (outside, inside):
        assert read_word(outside, "made") == "1"
        os.kill(inside, signal.SIGTERM)
        # 0, or where it came before serve() was reached, as above.
        assert outside.wait(PATIENCE_S) in (0, 128 + signal.SIGTERM)
        assert os.listdir(home) == []


@pytest.mark.usefixtures("home")
def test_a_forked_child_ends_as_ever() -> None:
    with first_process("forked") as (outside, inside):
        assert read_word(outside, "made") != "1"
        child = int(Path(f"/proc/{inside}/task/{inside}/children").read_text())
        os.kill(child, signal.SIGTERM)
        assert read_word(outside, "child") == str(int(signal.SIGTERM))


APP = """
import os, subprocess, sys
from pytriton.decorators import model

@model
def make(text: str) -> str:
    if text == "orphan":
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
            os._exit(0)
        return str(os.wait()[1])
    if text == "child":
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return str(child.wait())
    return str(os.getpid())
"""


def serve_in_container(folder: Path) -> list[str]:
    """Return the command that serves these models as the first process of a container."""
    if not may_unshare():
        pytest.skip("this user or machine does not allow a PID namespace of its own")
    (folder / "app.py").write_text(APP)
    return [*UNSHARE, sys.executable, "-m", "pytriton", "serve", "app.py", *FREE_PORTS]


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def first_command(folder: Path) -> Iterator[tuple[ServeCommand, int]]:
    """Serve so; gives the command, and the number of the first process out here."""
    command = serve_in_container(folder)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as outside:
        try:
            yield ServeCommand(outside), children_of(outside.pid)[0]
        finally:
            outside.kill()


@pytest.mark.usefixtures("home")
def test_a_command_lets_orphans_go(tmp_path: Path) -> None:
    with first_command(tmp_path) as (served, first):
        [server] = children_of(first)
        for _ in range(3):
            assert served.ask("make", "orphan") == "0"
        eventually(lambda: children_of(first) == [server])
        # The exit codes of its own children are its own.
        assert served.ask("make", "child") == "7"
        assert served.ask("make", "") != "1"
        os.kill(first, signal.SIGTERM)
        assert served.process.wait(PATIENCE_S) == 0


@pytest.mark.usefixtures("home")
def test_a_command_ends_as_what_serves(tmp_path: Path) -> None:
    with first_command(tmp_path) as (served, first):
        os.kill(children_of(first)[0], signal.SIGKILL)
        assert served.process.wait(PATIENCE_S) == 128 + signal.SIGKILL
        assert not is_there(first)


@pytest.mark.usefixtures("home")
def test_ctrl_c_reaches_a_command_once(tmp_path: Path) -> None:
    with at_terminal(serve_in_container(tmp_path), tmp_path) as terminal:
        terminal.wait_for("Press Ctrl+C")
        terminal.press(CTRL_C)
        assert terminal.wait_ended() == 0
        assert terminal.shown.count("Got SIGINT") <= 1
