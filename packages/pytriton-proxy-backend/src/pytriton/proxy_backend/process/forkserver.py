"""Processes that are forked from one which has imported what they need, as the process sees it that asks for them.

The forkserver is asked over a socket of packets: a packet holds a label and, as descriptors, one end of a pair of
sockets, the *life* of the process, then the channel and the job of a worker, and where its output goes. Over its life
come packets of one byte, a `Reply`, and a number in decimal: `BEGUN` with the process id, or `FAILED` with the number
of an error; then `ENDED` with the exit code, negative for a signal. The process stays a zombie until the other end of
its life is closed.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO

from ..system.forks import close_in_child
from ..system.memory_files import make_memory_file
from ..system.processes import describe_exit, quote_lines
from ..system.threads import call_safely
from .child import Launch

__all__ = [
    "DESCRIPTORS",
    "MAX_MESSAGE",
    "ROOM",
    "ForkRequests",
    "ForkedProcess",
    "Forkserver",
    "ForkserverLostError",
    "Reply",
]

MAX_MESSAGE = 4096
"""How long a packet may be."""

DESCRIPTORS = 4
"""The number of descriptors in a request for a process."""

ROOM = "-" * 160
"""Memory for the command line that the process shows of itself."""

logger = logging.getLogger(__name__)

_MAIN = "pytriton.proxy_backend.forkserver_main"
_MAX_LABEL = 1000
# Equal to the default start timeout of a worker process (`RestartLimits`).
_START_TIMEOUT_S = 300.0
_FORK_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_LAST_BREATH_S = 5.0


class Reply(enum.IntEnum):
    """The kinds of replies of a forkserver."""

    READY = 1
    BEGUN = 2
    FAILED = 3
    ENDED = 4


class ForkserverLostError(OSError):
    """A forkserver does not answer; it seems to have ended."""


class ForkRequests:
    """This end of the connection by which one forkserver is asked for processes.

    Attributes:
        theirs: The other end, to be closed here when the forkserver has it.
    """

    def __init__(self) -> None:
        self._control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_child(self._control)
        # Only one request is sent at a time. The next one waits until that is answered.
        self._lock = threading.Lock()

    def await_ready(self) -> None:
        """Wait until the forkserver answers.

        Raises:
            OSError: It does not, or has ended.
        """
        self._control.settimeout(_START_TIMEOUT_S)
        try:
            said = self._control.recv(MAX_MESSAGE)
        except TimeoutError:
            raise OSError(f"the forkserver of hosts was not ready within {_START_TIMEOUT_S:g} s") from None
        if not said:
            raise OSError("the forkserver of hosts has ended before it was ready")

    def fork(self, channel: int, job: int, label: str) -> ForkedProcess:
        """Make it fork a process.

        Args:
            channel: The descriptor of the process's end of its channel.
            job: That of its job.
            label: What `ps` shows of it.

        Raises:
            ForkserverLostError: It does not answer; it seems to have ended.
            OSError: It cannot fork.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(life.close)
            theirs.callback(their_life.close)
            output, their_output = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, their_output)
            forked = ForkedProcess(life, ours.enter_context(open(output, "rb", buffering=0)))
            text = label[:_MAX_LABEL].encode(errors="replace")
            try:
                with self._lock:
                    socket.send_fds(self._control, [text], [their_life.fileno(), channel, job, their_output])
            except OSError as error:
                # EBADF: another thread saw the end first, and closed the socket.
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    raise
                raise ForkserverLostError("the forkserver has ended") from None
            ours.pop_all()
        forked.begin()
        return forked

    def close(self) -> None:
        """Ask for nothing more; a forkserver that has no forks ends by itself then."""
        self._control.close()


class Forkserver:
    """A process that hosts are forked from, one of its own for each way to start them."""

    def __init__(self, launch: Launch) -> None:
        self._command = launch.command(_MAIN)
        self._working_dir = launch.working_dir
        self.variables = launch.variables()
        """The environment variables of it and all of its forks."""
        self._requests = ForkRequests()
        self._theirs = self._requests.theirs
        self._process: subprocess.Popen[bytes] | _Forked | None = None
        self._error: OSError | None = None
        self._has_begun = threading.Event()
        self._is_closing = False
        # Linux ends the process with the thread that started it, so that thread is one of our own.
        self._thread = threading.Thread(target=self._run, name="pytriton-forkserver", daemon=True)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._thread.start()
        self._has_begun.wait()
        if self._error is not None:
            self._requests.close()
            raise self._error
        self._await_ready()

    def start_forked(self, main: Callable[[socket.socket, IO[bytes]], int]) -> None:
        """Fork it from this process, whose only thread is the main one, and wait until it answers.

        In the child this ends with `SystemExit`; `main` gets its end of the connection and the file for its messages.
        """
        with contextlib.ExitStack() as opened:
            opened.callback(self._theirs.close)
            messages = opened.enter_context(_open_messages())
            pid = os.fork()
            if pid == 0:
                try:
                    self._requests.close()
                    code = main(self._theirs, messages)
                except Exception:
                    # The exception must not leave this frame, because the code further up the stack would go on as if
                    # it were the parent.
                    traceback.print_exc()
                    code = 1
                sys.exit(code)
            self._process = _Forked(pid)
            self._thread = threading.Thread(
                target=self._watch, args=(self._process, messages), name="pytriton-forkserver", daemon=True
            )
            self._thread.start()
            opened.pop_all()
        self._theirs.close()
        self._await_ready()

    def _await_ready(self) -> None:
        try:
            self._requests.await_ready()
        except OSError:
            self.close()
            raise

    def fork(self, channel: int, job: int, label: str) -> ForkedProcess:
        """Make it fork a process; `ForkserverLostError` means that it does not answer."""
        return self._requests.fork(channel, job, label)

    def close(self) -> None:
        """End a forkserver that has no forks any more."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()
        self._requests.close()
        if self._thread.ident is not None:
            self._thread.join(_END_TIMEOUT_S)

    def has_ended(self) -> bool:
        """Return whether it has ended; wait for one that is about to."""
        self._thread.join(_LAST_BREATH_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with _open_messages() as messages:
                process = self._process = subprocess.Popen(
                    [*self._command, str(self._theirs.fileno()), ROOM],
                    env=self.variables,
                    cwd=self._working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=messages,
                    pass_fds=(self._theirs.fileno(),),
                    start_new_session=True,
                )
                self._theirs.close()
                self._has_begun.set()
                self._watch(process, messages)
        except Exception as error:
            if self._has_begun.is_set():
                # The forkserver is killed, its forks end with it, and the next user starts another one.
                call_safely(logger.exception, "The forkserver of the hosts of Python models cannot be looked after")
                if self._process is not None:
                    self._process.kill()
                return
            self._theirs.close()
            self._error = error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
            self._has_begun.set()

    def _watch(self, process: subprocess.Popen[bytes] | _Forked, messages: IO[bytes]) -> None:
        """Wait for its end, and say how it came."""
        with messages:
            code = process.wait()
            messages.seek(0)
            said = messages.read().decode(errors="replace").splitlines()
        if not self._is_closing:
            logger.warning(
                "The forkserver of the hosts of Python models (pid %d) %s, and its forks with it.%s",
                process.pid,
                describe_exit(code),
                quote_lines(said),
            )


class _Forked:
    """A child of this process that it has forked. Used as a `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # After it was waited for, another process may have its process id.
        self._lock = threading.Lock()
        self._was_waited_for = False

    def kill(self) -> None:
        with self._lock:
            if not self._was_waited_for:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._was_waited_for = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _open_messages() -> IO[bytes]:
    return open(make_memory_file("pytriton-forkserver"), "r+b")


class ForkedProcess:
    """A process that a forkserver has forked, used like a `subprocess.Popen`."""

    def __init__(self, life: socket.socket, stdout: IO[bytes]) -> None:
        close_in_child(life)
        self._life = life
        self.stdout: IO[bytes] | None = stdout
        self.pid = 0
        self.returncode: int | None = None

    def begin(self) -> None:
        """Wait until the process exists.

        `ForkserverLostError` means that no forkserver is left that could say why not.
        """
        self._life.settimeout(_FORK_TIMEOUT_S)
        try:
            kind, number = self._receive()
        except TimeoutError:
            self.close()
            raise OSError(f"the forkserver has not forked within {_FORK_TIMEOUT_S:g} s") from None
        if kind != Reply.BEGUN:
            self.close()
            if kind == Reply.FAILED:
                raise OSError(number, os.strerror(number))
            if kind == Reply.ENDED:
                raise OSError(f"the process that the forkserver has forked {describe_exit(number)} at once")
            raise ForkserverLostError("the forkserver has not forked")
        self.pid = number

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        poller = select.poll()
        poller.register(self._life, select.POLLIN)
        return bool(poller.poll(0))

    def wait(self) -> int:
        """Wait until it has ended, and let its number go; return the exit code."""
        if self.returncode is None:
            self._life.settimeout(_END_TIMEOUT_S)
            try:
                kind, number = self._receive()
            except TimeoutError:
                kind, number = 0, 0
            # Without a forkserver nobody reports the end; the processes that end with it end by SIGKILL.
            self.returncode = number if kind == Reply.ENDED else -signal.SIGKILL
            self._life.close()
        return self.returncode

    def close(self) -> None:
        """Release everything, whatever fails."""
        self._life.close()
        if self.stdout is not None:
            self.stdout.close()

    def _receive(self) -> tuple[int, int]:
        try:
            data = self._life.recv(MAX_MESSAGE)
        except ConnectionError:
            data = b""
        return (data[0], int(data[1:])) if data else (0, 0)
