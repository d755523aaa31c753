"""Processes in tests: of their own for what cannot be undone, that stand still for a while, and at a terminal."""

import contextlib
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.waiting import PATIENCE_S, eventually

CTRL_C = b"\x03"
"""What that key sends."""

_VARIABLE = "PYTRITON_TEST_ALONE"
# How many ports a process of pytest has for programs, and which of them it has given to one.
_PORTS = 1500
_given: set[int] = set()


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


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def is_running(pid: int) -> bool:
    """Return whether there is a process, one that only waits to be reaped left out."""
    try:
        # "pid (name) state ...", and a name may hold anything. Its first thread may end before the others.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


class Terminal:
    """The terminal of a running program."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int) -> None:
        self.process = process
        self.shown = ""
        self._fd = fd

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._fd, keys)

    def wait_for(self, text: str) -> str:
        """Wait until the program has shown a text; returns all that it has shown."""
        return self.wait_until(lambda shown: text in shown, repr(text))

    def wait_until(self, condition: Callable[[str], object], what: str = "it") -> str:
        """Wait until what the program has shown fulfils a condition; returns all of that."""
        while not condition(self.shown):
            assert self._read(), f"the program ended without {what}:\n{self.shown}"
        return self.shown

    def wait_found(self, pattern: str) -> "re.Match[str]":
        """Wait until the program has shown what matches a pattern; returns the match."""
        self.wait_until(lambda shown: re.search(pattern, shown), repr(pattern))
        found = re.search(pattern, self.shown)
        assert found is not None
        return found

    def wait_ended(self) -> int:
        """Wait for the end of the program; returns its exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        assert select.select([self._fd], [], [], PATIENCE_S)[0], f"nothing more was shown:\n{self.shown}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            # Nobody has the other side open any more.
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextlib.contextmanager
def at_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a program at a terminal, where Ctrl+C is a signal to it, and end it with the block."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", **(environment or {})},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        os.close(ours)
        if process.poll() is None:
            process.send_signal(signal.SIGHUP)
        process.wait(PATIENCE_S)


def _stat(thread: Path) -> str:
    try:
        return (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended meanwhile.
        return ") T"


def require(program: str, package: str | None = None) -> str:
    """Return the path of a program of Debian's; the test says why it is skipped where it is not installed."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed (apt install {package or program})")
    return found


@contextlib.contextmanager
def while_running(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as long as the block, and end it by SIGTERM."""
    with subprocess.Popen([str(part) for part in command], **options) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(PATIENCE_S)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody has, for programs that cannot take any free one by themselves.

    None of those that the system gives to whoever asks for any, and each only once: another test could get it before
    the program has it. Each process of pytest has ports of its own.
    """
    first = 20_000 + _PORTS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12_000
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(first, first + _PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            if port not in _given:
                one.bind(("127.0.0.1", port))
                ports.append(port)
                _given.add(port)
    return ports


@contextlib.contextmanager
def haproxy(
    configuration: Path, folder: Path, serves: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run HAProxy as long as the block, which begins when it serves; its log lies in the folder."""
    command = [require("haproxy"), "-db", "-f", configuration]
    with (
        (folder / "haproxy.log").open("wb") as log,
        while_running(command, env=environment, stdout=log, stderr=log),
    ):
        eventually(serves)
        yield


def envoy(folder: Path, addresses: Mapping[int, str]) -> list[str]:
    """Return the command that runs Envoy by the file of deploy/.

    Args:
        folder: Where its configuration is written to.
        addresses: By each port in the file, the address that stands in place of it.
    """

    def address(found: re.Match[str]) -> str:
        host, _, port = addresses[int(found[1])].rpartition(":")
        return f"address: {host}, port_value: {port}"

    text = (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text()
    text = re.sub(r"address: [\d.]+, port_value: (\d+)", address, text)
    text = re.sub(r"(?<=\{port_value: )\d+", lambda found: addresses[int(found[0])].rpartition(":")[2], text)
    configuration = folder / "envoy.yaml"
    configuration.write_text(text)
    # For hot restarts it would take shared memory, which has one name for all on a machine.
    return [str(Path(sys.executable).with_name("envoy")), "--disable-hot-restart", "-c", str(configuration)]


@contextlib.contextmanager
def forked(function: Callable[[], object]) -> Iterator[None]:
    """Call a function in a forked child as long as the block, and see it return then."""
    with warnings.catch_warnings():
        # From Python 3.12 on, a fork of a process with threads is warned of.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        threading.Timer(PATIENCE_S, os._exit, (2,)).start()
        status = 1
        try:
            function()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    try:
        yield
    finally:
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == 0


def in_child(function: Callable[[], object]) -> None:
    """Call a function in a forked child, and see it return."""
    with forked(function):
        pass
