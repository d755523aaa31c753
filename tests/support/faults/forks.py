"""Callables that fork, for tests that kill their process while the child goes on."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from support.waiting import eventually

DOUBLE = 3.0
FORK = 1.0
MULTIPROCESSING = 2.0
RAW_FORK = 4.0
BUSY = -1.0
FORK_AND_RETURN = -2.0
DIES_BY_SIGTERM = -3.0
"""What a request says with its first number: the way to fork, or what else to do."""


def sleep() -> None:
    """Do nothing until somebody kills this process, whatever becomes of those that it is a child of."""
    os.setsid()
    while True:
        time.sleep(3600)


def announce(url: str | None) -> None:
    """Print the address as soon as SIGTERM is taken care of, which `serve` does after this."""

    def wait() -> None:
        eventually(lambda: signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, 60.0)
        print("serving", url, flush=True)

    threading.Thread(target=wait, daemon=True).start()


def fork(kind: float = FORK) -> int:
    """Fork a child that sleeps.

    Returns:
        Its process id.
    """
    # From Python 3.12 on, a fork of a process with threads is warned of.
    warnings.simplefilter("ignore", DeprecationWarning)
    if kind == MULTIPROCESSING:
        process = multiprocessing.get_context("fork").Process(target=sleep)
        process.start()
        assert process.pid is not None
        return apart(process.pid)
    if kind == RAW_FORK:
        return fork_as_c_does()
    pid = os.fork()
    if pid == 0:
        sleep()
    return apart(pid)


def fork_as_c_does() -> int:
    """Fork as a C library does: Python's fork hooks do not run."""
    while True:
        # Keep the GIL, or the child could never take it.
        pid = int(ctypes.PyDLL(None).fork())
        if pid == 0:
            sleep()
        with contextlib.suppress(AssertionError):
            eventually(lambda pid=pid: os.getsid(pid) == pid, 30.0)  # type: ignore[misc]
            return pid
        # A thread had asked for the GIL, and the child waits for ever until that one has taken it: there is none.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def apart(pid: int) -> int:
    """Wait until a child has left the group of this process, with which it might be killed."""
    eventually(lambda: os.getsid(pid) == pid)
    return pid


def say(*words: object) -> None:
    """Print a line, and write it to the file that the test has named, with the number of this process."""
    print(*words, flush=True)
    report = os.environ.get("PYTRITON_TEST_REPORT")
    if report is not None:
        with open(report, "a") as file:
            print(*words, os.getpid(), file=file)


def infer(requests: Any) -> Any:
    """Double the input, and do what the request asks for."""
    x = requests[0]["x"]
    number = float(x.flat[0])
    if number in (FORK, MULTIPROCESSING, RAW_FORK):
        say("child", fork(number))
    elif number == BUSY:
        say("busy")
        time.sleep(3600)
    elif number == FORK_AND_RETURN:
        say("child", os.fork() or os.getpid())
    elif number == DIES_BY_SIGTERM:
        pid = fork()
        os.kill(pid, signal.SIGTERM)
        return [{"y": np.full_like(x, os.waitpid(pid, 0)[1])}]
    return [{"y": request["x"] * np.float32(2)} for request in requests]


def make() -> Callable[[Any], Any]:
    """Make the callable of a worker process."""
    return infer


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def killed_in_the_end(pid: int) -> Iterator[int]:
    """Check that a child is there until the end of the block, and kill it then."""
    try:
        yield pid
        assert is_there(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_there(pid))


def read_word(process: subprocess.Popen[str], word: str) -> str:
    """Read lines up to one that begins with a word; gives what follows it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        first, _, rest = line.rstrip("\n").partition(" ")
        if first == word:
            return rest
    raise AssertionError(f"expected a line {word!r}, got: {''.join(lines)}")
