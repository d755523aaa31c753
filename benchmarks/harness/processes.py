"""Server processes: start, wait for the first right answer, count, stop by pid. Linux only, as tritonserver is."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 40
_ORPHAN_TIMEOUT_S = 2
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_LOG_LINES = 15
# In the command lines of Triton's Python backend, and of ours.
_HOSTS = ("triton_python_backend_stub", "pytriton.proxy_backend.worker_main")
_FORKSERVER = "pytriton.proxy_backend.forkserver_main"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ports_given: set[int] = set()


class ServerError(Exception):
    """A server did not start, or died, or answered wrongly while it should be measured."""


@dataclass(frozen=True)
class Launch:
    """How to start a server process."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    """Added to the runner's own environment."""


@dataclass(frozen=True)
class StartUp:
    """What a start cost."""

    command_to_answer_s: float
    run_to_answer_s: float | None
    """From just before `Triton.run()`, for the servers that have it."""
    processes: int


class Server:
    """A running server process and everything it started."""

    _running: ClassVar[set[Server]] = set()

    def __init__(self, process: subprocess.Popen[bytes], log: Path, started_s: float) -> None:
        self._process = process
        self._log = log
        self._started_s = started_s
        self._running.add(self)

    def wait_for_answer(self, ask: Callable[[], None]) -> StartUp:
        """Call `ask` until it does not raise `OSError` any more.

        Raises:
            ServerError: the process ended, or gave no answer within `START_TIMEOUT_S` seconds.
        """
        deadline = self._started_s + START_TIMEOUT_S
        while True:
            try:
                ask()
                break
            except (OSError, ValueError) as error:
                self.check_alive()
                if time.monotonic() > deadline:
                    raise ServerError(f"waited {START_TIMEOUT_S} s for an answer: {error}\n{self.log_tail()}") from None
                time.sleep(_POLL_S)
        now = time.monotonic()
        run_s = self._run_moment()
        return StartUp(now - self._started_s, None if run_s is None else now - run_s, len(self.pids()))

    def check_alive(self) -> None:
        """Raise `ServerError` with the last lines of its log when the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"the server ended with exit code {code}:\n{self.log_tail()}")

    def pids(self) -> list[int]:
        """Return the ids of the process and all its descendants."""
        return descendants(self._process.pid)

    def cpu_s(self) -> float:
        """Return the processor time, in seconds, that the process and its living descendants used so far."""
        return sum(cpu_s(pid) for pid in self.pids())

    def worker_cpu_s(self) -> float:
        """Return the same without tritonserver itself: what the processes that run callables used."""
        return sum(cpu_s(pid) for pid in self.pids() if name_of(pid) != "tritonserver")

    def pss_mib(self) -> float:
        """Return the memory of all its processes, shared pages in parts, in MiB."""
        return sum(_pss_kib(pid) for pid in self.pids()) / 1024

    def instance_mib(self) -> float | None:
        """Return the memory that is there for a process that hosts an instance of a model and nothing else, the mean.

        That of the processes which they are forked from is theirs. What all these share with the rest of the server,
        which would have it without them, is not. None where there are no such processes.
        """
        pids = self.pids()
        commands = {pid: command_of(pid) for pid in pids}
        memory = {pid: _memory_kib(pid) for pid in pids}
        hosts = [pid for pid in pids if any(name in commands[pid] for name in _HOSTS)]
        own = [*hosts, *(pid for pid in pids if _FORKSERVER in commands[pid])]
        if not hosts:
            return None
        # A page of a process's own, shared with its forks or not, counts once in the first sum. In the rest of the
        # server, no process is a fork of another.
        kib = sum(each.get("Pss_Anon", 0) for each in memory.values())
        kib -= sum(memory[pid].get("Anonymous", 0) for pid in pids if pid not in own)
        kib += sum(memory[pid].get(kind, 0) for pid in own for kind in ("Pss_File", "Pss_Shmem"))
        return kib / len(hosts) / 1024

    def log_tail(self) -> str:
        """Return the last lines that the server printed."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])

    def stop(self) -> None:
        """Ask with SIGINT, which every peer takes for a clean stop; kill what is left after `STOP_TIMEOUT_S` s.

        Call `adopt_orphans` before the first start: then what a server left behind is found among our own descendants.
        """
        leavings = {path for pid in self.pids() for path in _leavings(pid)}
        try:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
            while self._leftovers() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:  # also on a second Ctrl-C
            while left := self._leftovers():  # again, since one may start another while it is killed
                for pid in left:
                    leavings |= _leavings(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_POLL_S)
            self._process.wait(STOP_TIMEOUT_S)
            self._running.discard(self)
            if not self._running:  # else it might be the process of another one, which waits for it itself
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            # What was named after it is its own even where the process that made it ended long before; nvidia-pytriton
            # misspells its own name.
            for name in (self._log.parent.name, f"pytrtion{self._process.pid}-"):
                leavings |= set(Path("/dev/shm").glob(f"{name}*"))
            for path in leavings:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _leftovers(self) -> list[int]:
        """Return our descendants that belong to no other running server: this one's, and what it left behind."""
        others = {pid for server in self._running if server is not self for pid in server.pids()}
        return [pid for pid in descendants(os.getpid())[1:] if pid not in others]

    def _run_moment(self) -> float | None:
        for line in self._log.read_text(errors="replace").splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == "run":
                return float(words[1])
        return None


@contextmanager
def serve(launch: Launch, scratch: Path) -> Iterator[Server]:
    """Run a server for the length of a `with` block, with its log in `scratch`."""
    log = scratch / "server.log"
    with log.open("wb") as output:
        started_s = time.monotonic()
        process = subprocess.Popen(
            launch.argv,
            env={**os.environ, **launch.environment},
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to the runner alone, which then stops the server
        )
    server = Server(process, log, started_s)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a short-named temporary folder (a unix socket's path has at most 107 bytes) that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="ptbench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Return TCP ports that are free on 127.0.0.1 now, each once per run; the peers cannot pick them by themselves.

    The system hands a port that was closed out again, while the server that is to have it still starts.
    """
    sockets: list[socket.socket] = []
    found: list[int] = []
    try:
        while len(found) < count:
            sockets.append(socket.create_server(("127.0.0.1", 0)))
            port = int(sockets[-1].getsockname()[1])
            if port not in _ports_given:
                _ports_given.add(port)
                found.append(port)
        return found
    finally:
        for each in sockets:
            each.close()


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, in place of the machine's init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(root: int) -> list[int]:
    """Return `root` and all its living descendants, parents first; empty when `root` has ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(int(entry))
    found = [root] if (stat := _stat(root)) is not None and stat[0] != "Z" else []
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def available_mib() -> float:
    """Return how much memory programs may still take, in MiB."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(found.group(1)) / 1024 if found else float("inf")


def machine_busy_s() -> float:
    """Return the processor time, in seconds, that all processes of the machine used since it was started."""
    user, nice, system, _idle, _iowait, irq, softirq = (
        int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third, the state, on; `None` when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _leavings(pid: int) -> set[Path]:
    """Return what a process uses that some peers leave behind: named shared memory, a model folder of tritonserver."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    folders = re.findall(r"/tmp/folder\w{6}\b", command_of(pid))
    return {Path(name) for name in re.findall(r"/dev/shm/\S+$", maps, re.M) + folders}


def command_of(pid: int) -> str:
    """Return the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """Return the name of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def thread_s(pids: Sequence[int]) -> dict[tuple[int, int], tuple[str, float]]:
    """Return the names of the threads of processes, and the processor time in seconds that each has used so far."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):  # it ended meanwhile
                seconds = int((path / "schedstat").read_text().split()[0]) / 1e9
                found[pid, int(path.name)] = (path / "comm").read_text().strip(), seconds
    return found


def _pss_kib(pid: int) -> int:
    return _memory_kib(pid).get("Pss", 0)


def _memory_kib(pid: int) -> dict[str, int]:
    """Return what the system says of the memory of a process; nothing when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


def cpu_s(pid: int) -> float:
    """Return the processor time, in seconds, that a process used so far; 0 when it is gone."""
    stat = _stat(pid)
    return 0.0 if stat is None else (int(stat[11]) + int(stat[12])) / _TICKS_PER_S
