"""Converted models in a tritonserver that somebody else starts, and the command that starts their processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.proxy_backend.cli.app import run as run_command
from support.processes import is_running
from support.python_models import hosts as started
from support.waiting import PATIENCE_S, eventually


class Hosts:
    """The command that starts the processes, and what it has written."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def pids(self) -> set[int]:
        """Return the processes of models that it has started and that run."""
        return {pid for pid in started(self.process.pid) if is_running(pid)}


@contextlib.contextmanager
def hosts_at(folder: Path, log: Path, *options: str) -> Iterator[Hosts]:
    """Run the command while a block runs; it has to end well where the block has not ended it."""
    command = [sys.executable, "-m", "pytriton.proxy_backend", "hosts", "--endpoint", str(folder), *options]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        hosts = Hosts(process, log)
        try:
            eventually(lambda: hosts.said("can be had at") or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield hosts
        finally:
            pids = hosts.pids()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0, log.read_text()
            eventually(lambda: not any(map(is_running, pids)))


def convert(*arguments: object) -> None:
    """Run the command that converts a model."""
    with pytest.raises(SystemExit) as ended:
        run_command(["convert", *map(str, arguments)])
    assert not ended.value.code
