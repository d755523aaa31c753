"""`pytriton serve` on SIGHUP: another tritonserver takes the place of the running one."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from support.processes import at_terminal
from support.serving import ServeCommand, serve_command, short_home
from support.waiting import PATIENCE_S, eventually

APP = """
from pytriton.decorators import model


@model
class Count:
    def __init__(self):
        print("weights are loaded", flush=True)
        self.calls = 0

    def __call__(self, text: str) -> str:
        self.calls += 1
        return f"{text} {self.calls}"
"""
TAKEN = "Another server has taken the place"
GOES_ON = "The running server goes on, no other one took its place"


def hang_up(server: ServeCommand, told: str) -> None:
    """Send SIGHUP, and wait until something was told once more."""
    before = server.written.count(told)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.written.count(told) > before)


@pytest.mark.parametrize("workers", [0, 1])
def test_sighup_replaces_the_server_with_the_settings_of_now(tmp_path: Path, workers: int) -> None:
    (tmp_path / "app.py").write_text(APP)
    config = tmp_path / "serve.toml"
    config.write_text("[server]\nlog_verbose = 0\n")
    with serve_command(tmp_path, "app.py", "--config=serve.toml", f"--workers={workers}") as server:
        assert server.ask("Count", "a") == "a 1"
        answers: list[str] = []
        enough = threading.Event()

        def call() -> None:
            while not enough.is_set():
                answers.append(server.ask("Count", "x"))

        caller = threading.Thread(target=call)
        caller.start()
        try:
            config.write_text("[server]\nhttp_thread_count = 3\n")
            hang_up(server, TAKEN)
            # What it cannot do leaves the running one as it is, and tells why.
            config.write_text("[server]\nhttp_thread_count = \n")
            hang_up(server, GOES_ON)
            config.write_text("[server]\nallow_grpc = false\n")
            hang_up(server, GOES_ON)
            config.write_text("[server]\n")
            hang_up(server, TAKEN)
        finally:
            enough.set()
            caller.join(PATIENCE_S)
        # None was lost, and each counted on from the one before.
        assert answers == [f"x {number}" for number in range(2, len(answers) + 2)], server.written
        assert answers
    assert server.written.count("weights are loaded") == 1
    assert "serve.toml" in server.written
    assert "allow_grpc" in server.written


def test_what_sighup_cannot_change_is_told(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    config = tmp_path / "serve.toml"
    config.write_text("[server]\n")
    with serve_command(tmp_path, "app.py", "--config=serve.toml") as server:
        # What a start would refuse.
        config.write_text("[models.Cuont]\nworkers = 1\n")
        hang_up(server, "models.Cuont: expected one of the models Count; got 'Cuont'")
        # What a start would take.
        config.write_text("log_level = 'DEBUG'\n[models.Count]\nworkers = 1\n")
        hang_up(server, "serve.toml: log_level, models.Count changed, which counts from the next start on")
        assert server.ask("Count", "a") == "a 1"
    assert server.written.count(GOES_ON) == 1


def test_a_terminal_that_is_closed_ends_the_program(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    ports = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    command = [sys.executable, "-m", "pytriton", "serve", "app.py", *ports]
    with short_home(), at_terminal(command, tmp_path) as terminal:
        terminal.wait_found(r"HTTP +http://")
    # In order, with its server.
    assert terminal.process.returncode == 0
    assert "another server" not in terminal.shown.lower()
