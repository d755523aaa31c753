"""One worker process as its parent sees it: the start, what it says, what it writes, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol

from ..runtime.statistics import COUNTERS_BYTES, WorkerStatistics, read_statistics
from ..system.forks import call_in_child, close_in_child, replace_descriptors
from ..system.memory_files import make_memory_file
from ..system.processes import OutputLines, open_pidfd
from .log import ProcessLog
from .messages import Job, LineReader, PythonModelServing, encode_message

logger = logging.getLogger(__name__)

_READ_BYTES = 65536
# The limit of reads at a time, so that a process which writes without end does not keep its parent from its timers. The
# socket of a process that has ended holds less than this.
_MAX_READS = 32
# A host that waits reads the message at once. A host that is stopped by a signal never reads it.
_SERVE_TIMEOUT_S = 30.0
_MAIN = "pytriton.proxy_backend.worker_main"


class StartedProcess(Protocol):
    """The attributes of a process that `ChildProcess` needs; it leads its own process group.

    `pid` stays its own until `wait` was called, and `returncode` is negative for a signal.
    """

    pid: int
    stdout: IO[bytes] | None
    returncode: int | None

    def has_ended(self) -> bool:
        """Return whether it has ended."""

    def wait(self) -> int:
        """Wait until it has ended, and let its number go; return the exit code."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a worker process is started."""

    python: str | None = None  # the interpreter; `None` is that of this process
    # Variables that it gets beside those of this process; `None` takes one away.
    environment: Mapping[str, str | None] | None = None
    working_dir: str | None = None  # its working directory; `None` is that of this process

    def command(self, module: str = _MAIN) -> list[str]:
        """Return the interpreter and its arguments, as far as they are the same for all."""
        return [self.python or sys.executable, "-m", module]

    def variables(self) -> dict[str, str]:
        """Return all variables of its environment."""
        # Without a buffer, so that output appears when it is written.
        variables: dict[str, str | None] = {**os.environ, "PYTHONUNBUFFERED": "1", **(self.environment or {})}
        return {name: value for name, value in variables.items() if value is not None}


# This program runs on any Python since 2.7. It prints what a worker needs and what is installed, or nothing if
# everything is there.
_PROBE = """
from __future__ import print_function
import sys
if sys.version_info < (3, 10):
    sys.exit(print("Python 3.10 or later|Python %d.%d" % tuple(sys.version_info[:2])))
for package, module in (("numpy", "numpy"), ("pytriton-proxy-backend", "pytriton.proxy_backend")):
    try:
        __import__(module)
    except ImportError as error:
        sys.exit(print("%s in its environment|%s" % (package, error)))
"""
_PROBE_TIMEOUT_S = 60.0


def missing_in(launch: Launch) -> str:
    """Return what an interpreter lacks to run a worker, as a clause; empty if unknown."""
    python = launch.command()[0]
    try:
        told = _ask(launch, _PROBE)
    except subprocess.CalledProcessError as error:
        told = f"a Python interpreter|a program that ends with exit code {error.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        told = f"a Python interpreter|{error}"
    expected, _, received = told.strip().partition("|")
    return f"{python}: expected {expected}, received {received}" if expected else ""


_DISTRIBUTION = "pytriton-proxy-backend"
_VERSION = f"from importlib.metadata import version; print(version({_DISTRIBUTION!r}))"


def installed_version() -> str:
    """Return the version of this distribution; empty if it is not installed, but only found on the path."""
    # This import is not at the top of the module because only the report of a failure needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def installed_in(launch: Launch) -> str:
    """Return the version of this distribution that an interpreter has; empty if that cannot be found out."""
    try:
        told = _ask(launch, _VERSION)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.strip()


def _ask(launch: Launch, program: str) -> str:
    """Run a program with the interpreter of a worker process, and return what it prints."""
    done = subprocess.run(
        [launch.command()[0], "-c", program],
        env=launch.variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_PROBE_TIMEOUT_S,
        check=True,
    )
    return done.stdout.decode(errors="replace")


StartProcess = Callable[[Launch, int, int, str], StartedProcess]
"""Starts a worker process from its launch, the descriptors of its channel and its job, and its label for `ps`."""


def start_process(launch: Launch, channel: int, job: int, label: str) -> StartedProcess:
    """Start a worker process."""
    return start_program(launch, _MAIN, [channel, job], label)


def start_program(launch: Launch, module: str, descriptors: Sequence[int], *texts: str) -> StartedProcess:
    """Start a module in a process that leads a group of its own.

    Args:
        launch: How.
        module: Which.
        descriptors: What it inherits; their numbers are its first arguments.
        texts: Its other arguments.
    """
    return _Spawned(
        [*launch.command(module), *map(str, descriptors), *texts],
        env=launch.variables(),
        cwd=launch.working_dir,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        # Ctrl+C in a terminal signals the whole foreground group, but this program decides when a worker stops.
        # Processes that it starts end with its group.
        start_new_session=True,
    )


class _Spawned(subprocess.Popen[bytes]):
    def has_ended(self) -> bool:
        # The exit code is not taken, so that its process id is not reused.
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


class ChildProcess:
    """A running worker process.

    The thread that makes it must live as long as the process; other threads may only call `stop`.
    """

    def __init__(
        self, launch: Launch, job: Job, label: str, logger: logging.Logger, start: StartProcess = start_process
    ) -> None:
        self._log = ProcessLog(logger)
        self._output = OutputLines(self._log.take_line)
        self._reader = LineReader()
        self._channel, theirs = socket.socketpair()
        close_in_child(self._channel)
        self._job_fd = -1
        try:
            self._job_fd = make_memory_file("pytriton-job")
            os.pwrite(self._job_fd, bytes(COUNTERS_BYTES) + job.to_text().encode(), 0)
            os.lseek(self._job_fd, COUNTERS_BYTES, os.SEEK_SET)
            self._process = start(launch, theirs.fileno(), self._job_fd, label)
        except BaseException:
            self._channel.close()
            self._close_job()
            raise
        finally:
            theirs.close()
        self._channel.setblocking(False)
        self._stdout = self._process.stdout
        assert self._stdout is not None  # Popen was asked for a pipe
        os.set_blocking(self._stdout.fileno(), False)
        self._log.pid = self._process.pid
        self._pidfd = open_pidfd(self._process.pid)
        call_in_child(self, ChildProcess._let_go)
        self._poller = select.poll()
        for fd in (self._channel.fileno(), self._stdout.fileno(), self._pidfd):
            if fd is not None:
                self._poller.register(fd, select.POLLIN)
        self.exit_code: int | None = None
        """As `subprocess.Popen.returncode`; `None` while it runs."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def statistics(self) -> WorkerStatistics:
        """Its counts so far, or at its end; only until `close`, and in the thread that calls that."""
        return read_statistics(self._job_fd)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, with everything that it wrote."""
        return self.exit_code is not None

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines that it wrote or logged, oldest first."""
        return tuple(self._log.tail)

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for an event, log what the process wrote, and return its other messages."""
        assert self._stdout is not None
        ready = {fd for fd, _ in self._poller.poll(timeout_s * 1000)}
        if self._stdout.fileno() in ready and not self._output.read(self._stdout.fileno()):
            self._poller.unregister(self._stdout.fileno())
        messages = self._receive() if self._channel.fileno() in ready else []
        if self._pidfd in ready or (self._pidfd is None and self._process.has_ended()):
            messages += self._receive()
            self._reap()
        self._log.tell_left_out(at_end=self.has_ended)
        return messages

    def stop(self, timeout_s: float) -> None:
        """Ask it to finish the requests in flight and to end."""
        # A process that has ended cannot be asked to stop.
        with contextlib.suppress(OSError):
            self._channel.send(encode_message("stop", timeout_s=timeout_s))

    def serve(self, serving: PythonModelServing) -> None:
        """Have a host, which has completed a configuration, serve an instance."""
        rest = memoryview(encode_message("serve", **asdict(serving)))
        # The message may be larger than the socket's buffer. If the process is gone, its end shows that.
        with contextlib.suppress(OSError):
            while rest:
                try:
                    rest = rest[self._channel.send(rest) :]
                except BlockingIOError:
                    if not _wait_writable(self._channel, _SERVE_TIMEOUT_S):
                        logger.error("Process %d has not read what to serve within %g s", self.pid, _SERVE_TIMEOUT_S)
                        self.kill()
                        return

    def kill(self) -> None:
        """Kill it, and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it if it still runs; `close` has to follow."""
        if self.exit_code is None:
            self.kill()
            self._reap()

    def close(self) -> None:
        """Release everything; kill the process if it still runs."""
        self.end()
        self._channel.close()
        self._close_job()

    def _close_job(self) -> None:
        job_fd, self._job_fd = self._job_fd, -1
        if job_fd >= 0:
            os.close(job_fd)

    def _let_go(self) -> None:
        """In a forked child: the process is one of the parent's."""
        stdout = self._stdout
        output = None if stdout is None or stdout.closed else stdout.fileno()
        replace_descriptors([output, self._pidfd, self._job_fd])

    def _receive(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for _ in range(_MAX_READS):
            try:
                data = self._channel.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._poller.unregister(self._channel.fileno())
                break
            for message in self._reader.feed(data):
                if message["kind"] == "record":
                    self._log.take_record(message)
                else:
                    messages.append(message)
        return messages

    def _reap(self) -> None:
        assert self._stdout is not None
        # The group is killed before `wait` frees the process id, because the group holds the processes that this one
        # has started.
        self.kill()
        self._process.wait()
        self._output.finish(self._stdout.fileno())
        self._stdout.close()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        self.exit_code = self._process.returncode


def _wait_writable(channel: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(channel, select.POLLOUT)
    return bool(poller.poll(timeout_s * 1000))
