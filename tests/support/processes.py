"""Processes in tests: one of its own for what cannot be undone, and others that stand still for a while."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import eventually

_VARIABLE = "PYTRITON_TEST_ALONE"


def is_run_alone(node: pytest.Item, timeout_s: float) -> bool:
    """Run a test once more in a fresh process, and fail as it does there.

    Args:
        node: The test; `request.node` in it.
        timeout_s: How long it may take, in seconds.

    Returns:
        Whether that was done, so that nothing is left to do. False in the fresh process.
    """
    if os.environ.get(_VARIABLE) == node.nodeid:
        return False
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", node.nodeid],
        cwd=node.config.rootpath,
        env={**os.environ, _VARIABLE: node.nodeid},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process stand still, with all its threads: the signal alone returns before the last of them does."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Let a process stand still, with all its threads, until it gets SIGCONT or is killed."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    # "pid (name) state ...", and a name may hold anything.
    eventually(lambda: all(_stat(thread).rpartition(")")[2].split()[0] == "T" for thread in threads.iterdir()))


def is_running(pid: int) -> bool:
    """Return whether there is a process, one that only waits to be reaped left out."""
    try:
        # "pid (name) state ...", and a name may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(thread: Path) -> str:
    try:
        return (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended meanwhile.
        return ") T"
