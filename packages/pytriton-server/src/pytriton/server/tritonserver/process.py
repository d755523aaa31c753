"""tritonserver as a child process: start, log, end.

One thread belongs to each process. It starts the child, reads its output, waits for its end and reports it. It has to
be one thread, because the kernel sends the child its death signal when the thread that started it is gone.
"""

import collections
import contextlib
import errno
import logging
import os
import re
import resource
import secrets as random_texts
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pytriton.proxy_backend.process.log import Allowance
from pytriton.proxy_backend.system.control_groups import MemoryKills
from pytriton.proxy_backend.system.forks import call_in_child, close_in_child, replace_descriptors
from pytriton.proxy_backend.system.processes import OutputLines, describe_exit, open_pidfd
from pytriton.proxy_backend.system.shortage import advise_threads, explain
from pytriton.proxy_backend.system.threads import call_safely
from pytriton.server.errors import TritonServerStartError
from pytriton.server.tritonserver import exec_shim
from pytriton.server.tritonserver.argument_memory import wipe_arguments
from pytriton.server.tritonserver.guard import GUARD_VARIABLE, Guard
from pytriton.server.tritonserver.handover import HANDOVER_VARIABLE, Handover
from pytriton.server.tritonserver.outcomes import OUTCOMES_VARIABLE, OutcomeCounts

LOG_TAIL_LINES = 200
"""How many of the last log lines are kept."""
KILL_DEADLINE_S = 10.0
"""How long the end of a killed process is waited for, in seconds."""
DEATH_SIGNAL = signal.SIGTERM
"""What tritonserver gets when this process dies. It shuts down on it, which also removes its sockets; SIGKILL would
not."""

# The guard's last words of a crash take no longer.
_ABORT_DEADLINE_S = 5.0
_SPAWN_DEADLINE_S = 30.0
_LOG_FILE_BYTES = 65536
# Descriptors that a server may have closed since it failed to open one: those of a connection and an event loop.
_SPARE_DESCRIPTORS = 4
_POLL_WITHOUT_PIDFD_MS = 200
# A line that repeats itself is written so many times in a row; further ones are only counted.
_MOST_REPETITIONS = 10
# How long its last lines may take to arrive after the end of the process.
_REPORT_DEADLINE_S = 1.5
_SEVERITY = re.compile(r"([VIWEF])\d{4} ")
# The prefix of the server's own lines: time and process, which log records have anyway, and the place in its sources.
_PREFIX = re.compile(r"[VIWEF]\d{4} [\d:.]+ \d+ ([^\]]+)\](?: |$)")
# The lines of the tables that it prints of its options and of what it has loaded, which are wider than a screen. A
# record without a text stands before each table.
_TABLE = re.compile(r"\||\+--|I\d{4} [^\]]*\]\s*$")
# The prefixes of libevent's lines, which differ from all others.
_FOREIGN = {"[warn]": logging.WARNING, "[err]": logging.ERROR}
# What the server logs of each model while it starts, besides errors. Whoever started it reports which models are
# served.
_OF_A_START = re.compile(
    r"I\d{4} [^\]]*(model_lifecycle\.cc:\d+\] \"?(loading: |successfully loaded )|"
    r"connection\.cc:\d+\] \"?model '.*' version \d+: worker .* attached, protocol )"
)
# What the server logs of workers that were told to leave, or whose place is held; whoever told them reports it.
_OF_A_SLEEP = re.compile(
    r"[IE]\d{4} [^\]]*connection\.cc:\d+\] \"?model '.*' version \d+: worker "
    r"('placeholder of workers that sleep' |.* detached: it detached\b)"
)
# What it says where it ends before all of its models have been freed.
_OF_A_LATE_END = "Exit timeout expired. Exiting immediately."
_GUARD_IS_ACTIVE = "pytriton guard] active"
_LEVELS = {
    "V": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}

logger = logging.getLogger(__name__)
output_logger = logging.getLogger("pytriton.tritonserver")


def shim_command(death_signal: signal.Signals) -> list[str]:
    """Return what a command begins with whose program gets a signal when the thread that started it ends.

    An interrupt of the main thread may come when the child is there and `Popen` has not returned yet, so that nobody
    knows of it. It is empty if there is no Python interpreter to run it.
    """
    interpreter = sys.executable or shutil.which("python3")
    if not interpreter:
        return []
    return [interpreter, "-I", "-S", str(Path(exec_shim.__file__)), str(os.getpid()), str(int(death_signal))]


class ExitReport:
    """How a server process ended.

    Args:
        exit_code: As in `subprocess.Popen.returncode`: negative for a signal.
        ending: The same in words, with who may have sent the signal.
        log_lines: The last lines that it wrote, oldest first.
        expected: Whether `ServerProcess.stop` ended it.
    """

    def __init__(self, exit_code: int, ending: str, log_lines: Sequence[str], expected: bool) -> None:
        self.exit_code = exit_code
        self.ending = ending
        self.log_lines = tuple(log_lines)
        self.expected = expected


class ServerProcess:
    """One tritonserver process."""

    def __init__(
        self,
        command: Sequence[str],  # program and arguments
        environment: Mapping[str, str],  # its whole environment
        *,
        # Called once when the process has ended, in the thread that watches it. It must not wait for this object.
        on_exit: Callable[[ExitReport], None] | None = None,
        # The file that the process logs into in place of its output. The end of the file counts as the last output.
        log_file: Path | None = None,
        # Lines that contain one of these go to the log at DEBUG, whatever their own severity.
        quiet: Sequence[str] = (),
        # Whether what it says of each model while it starts goes to the log at INFO; else at DEBUG.
        tells_start: bool = True,
        # Parts of the command that must not be seen. The guard puts them in where nobody sees them; without it they are
        # wiped out of what the system shows of the command, once the process has read them.
        secrets: Sequence[str] = (),
        guard: Guard | None = None,  # what is loaded into the process
        handover: Handover | None = None,  # what its guard shares with this process, which is closed with the process
        outcomes: OutcomeCounts | None = None,  # where its guard counts how requests end; None: nowhere
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._on_exit = on_exit
        self._log_file = log_file
        self._quiet = tuple(quiet)
        self._tells_start = tells_start
        self._secrets = tuple(secrets)
        self._guard = Guard() if guard is None else guard
        self._outcomes = outcomes
        self.handover = handover
        """Its sockets, for the server that is to follow; None without the guard."""
        self.is_idle = False
        """Whether it is to end, and has nothing to do: then it is of no interest how much of it has ended by itself."""
        self._is_guarded = False
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._level = logging.INFO
        self._allowance = Allowance()
        self._repeated = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._spawn_error: OSError | None = None
        self._spawned = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        # Whether it got SIGKILL from here; else, whether the system kills for want of memory tells who sent one.
        self._is_killed = False
        self._memory_kills = MemoryKills()
        self._thread = threading.Thread(target=self._watch, name="pytriton-tritonserver", daemon=True)
        self._pidfd: int | None = None
        call_in_child(self, lambda process: replace_descriptors([process._pidfd]))

    def start(self) -> None:
        """Start the process, which has not opened a port yet when this returns."""
        program = self._command[0]
        if shutil.which(program) is None:
            what = "is no program that this user may run" if os.path.exists(program) else "does not exist"
            raise TritonServerStartError(
                f"tritonserver cannot be started: {program} {what}. Set PYTRITON_TRITONSERVER_DIR to a folder with a "
                "bin/tritonserver that can be run, or install pytriton-server again."
            )
        self._thread.start()
        if not self._spawned.wait(_SPAWN_DEADLINE_S):
            raise TritonServerStartError(
                f"tritonserver was not started within {_SPAWN_DEADLINE_S:g} s: this machine is out of processes, "
                "memory or time."
            )
        if self._spawn_error is not None:
            error = self._spawn_error
            advice = advise_threads() if error.errno == errno.EAGAIN else ""
            raise TritonServerStartError(
                f"tritonserver ({program}) cannot be started: {explain(error, advice)}"
            ) from error

    @property
    def command(self) -> Sequence[str]:
        """Program and arguments, with the access token among them."""
        return self._command

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._popen is None else self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """As in `subprocess.Popen.returncode`; None before the end."""
        return self._popen.returncode if self._popen is not None and self._ended.is_set() else None

    @property
    def ending(self) -> str:
        """How it has ended, such as `was killed by signal 9 (SIGKILL)`, with who may have sent the signal."""
        return describe_exit(self.exit_code, None if self._is_killed else self._memory_kills)

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._popen is not None and not self._ended.is_set()

    @property
    def is_guarded(self) -> bool:
        """Whether the guard has said that it is there, which it does before the code of the server itself runs."""
        return self._is_guarded

    @property
    def guard(self) -> Guard:
        """What is loaded into the process."""
        return self._guard

    def maps_guard(self) -> bool:
        """Tell whether the guard's library is in the memory of the process, if its line has not been read yet."""
        library, pid = self._guard.library, self.pid
        if library is None or pid is None:
            return False
        try:
            return str(library.resolve()) in Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            return False

    @property
    def log_tail(self) -> list[str]:
        """The last lines that the process wrote, oldest first."""
        return [*_last_lines(self._log_file), *self._tail][-LOG_TAIL_LINES:]

    @property
    def last_line(self) -> str:
        """The last line that the process wrote; cheap."""
        return self._tail[-1] if self._tail else ""

    @property
    def open_files(self) -> tuple[int, int] | None:
        """How many files it has open, and how many it may have; None where that cannot be seen."""
        pid = self.pid
        if pid is None or not self.is_running:
            return None
        try:
            return len(os.listdir(f"/proc/{pid}/fd")), resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        except OSError:
            return None

    @property
    def shortage(self) -> str:
        """Says so where it has nearly as many files open as it may, as far as that can be seen; else empty."""
        count, limit = self.open_files or (0, resource.RLIM_INFINITY)
        is_short = limit != resource.RLIM_INFINITY and count + _SPARE_DESCRIPTORS >= limit
        return f"It has {count} files open and may have {limit}: {os.strerror(errno.EMFILE)}." if is_short else ""

    def wipe_secrets(self) -> None:
        """Wipe the secrets out of the command line that the system shows; the process must have read it."""
        secrets, self._secrets = self._secrets, ()
        if self._guard.library is not None:
            return
        pid = self.pid
        if secrets and pid is not None and self.is_running and not wipe_arguments(pid, secrets):
            logger.debug("The system does not let the access token be wiped out of the command line of %d.", pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False if it has not ended after `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def stop(self, patience_s: float, *, hurried: Callable[[], bool] = lambda: False) -> int | None:
        """End the process: SIGINT, then after `patience_s`, or once `hurried` returns true, a warning and SIGKILL.

        Returns the exit code; None if it never ran, or if not even SIGKILL ended it in `KILL_DEADLINE_S`.
        """
        self._stopping = True
        if self.handover is not None:
            # From its own end of listening on, nobody is to wait there.
            self.handover.close()
        popen = self._popen
        if popen is None:
            return None
        if not self._ended.is_set():
            popen.send_signal(signal.SIGINT)
            deadline = time.monotonic() + patience_s
            try:
                while not self._ended.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
                    # A process that is stopped (SIGSTOP, a debugger) or hangs acts on no signal but SIGKILL.
                    if hurried() or time.monotonic() >= deadline:
                        self._kill(popen)
                        break
            except BaseException:
                # A second Ctrl+C. Whoever gets it cannot be relied on to come back for the process.
                self._kill(popen)
                raise
        if self._thread is not threading.current_thread():
            self._thread.join(_REPORT_DEADLINE_S)
        return self.exit_code

    def abort(self, reason: str) -> None:
        """End a process that does not answer any more: SIGABRT, at which it says where it is, and then SIGKILL.

        Its end is reported as one that nobody ordered. The reason goes to the log, and is among the last lines of the
        report.
        """
        popen = self._popen
        if popen is None or self._ended.is_set():
            return
        logger.error("%s", reason)
        self._tail.append(reason)
        popen.send_signal(signal.SIGABRT)
        if not self._ended.wait(_ABORT_DEADLINE_S):
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)

    def _kill(self, popen: "subprocess.Popen[bytes]") -> None:
        logger.warning("tritonserver (pid %d) has not ended on SIGINT in time: it gets SIGKILL now.", popen.pid)
        self._is_killed = True
        # It leads a process group of its own, with the stubs of Triton's Python backend in it; gone if it just ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        if not self._ended.wait(KILL_DEADLINE_S):
            logger.error("tritonserver (pid %d) is still there %.0f s after SIGKILL.", popen.pid, KILL_DEADLINE_S)

    def _watch(self) -> None:
        try:
            command, environment = self._shimmed()
            self._popen = popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl+C in a terminal goes to the whole group in front: the server's stop is ours to order.
                start_new_session=True,
                pass_fds=self._given,
            )
        except Exception as error:
            self._spawn_error = error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
            self._spawned.set()
            if self.handover is not None:
                self.handover.close()
            return
        if self.handover is not None:
            self.handover.close_given()
        self._spawned.set()
        try:
            assert popen.stdout is not None  # Popen was asked for a pipe
            close_in_child(popen.stdout)
            with popen.stdout as output:
                self._read_until_end(popen, output)
        except Exception as error:
            # A server whose output nobody reads stands still once the pipe is full. It is ended, and reported as usual.
            self._tail.append(f"its output cannot be read: {type(error).__name__}: {error}")
            call_safely(logger.exception, "The output of tritonserver cannot be read: it is ended")
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
        finally:
            popen.wait()
            if self.handover is not None:
                self.handover.close()
            self._ended.set()
        ending = self.ending
        logger.debug("tritonserver (pid %d) %s.", popen.pid, ending)
        if self._on_exit is not None:
            call_safely(self._on_exit, ExitReport(popen.returncode, ending, self.log_tail, self._stopping))

    @property
    def _given(self) -> Sequence[int]:
        """The descriptors that the process inherits."""
        if self._guard.library is None:
            return ()
        handover = () if self.handover is None else self.handover.given
        return handover if self._outcomes is None else (*handover, self._outcomes.descriptor)

    def _shimmed(self) -> tuple[list[str], dict[str, str]]:
        """Return command and environment that start the process through `exec_shim`."""
        shim = shim_command(DEATH_SIGNAL)
        if not shim:
            logger.warning(
                "No Python interpreter was found to start tritonserver with: it may outlive a killed parent."
            )
            self._guard = Guard(obstacle="no Python interpreter was found to start tritonserver with")
            return self._command, self._environment
        command, environment = self._command, dict(self._environment)
        if self._guard.library is not None:
            environment[exec_shim.PRELOAD_VARIABLE] = str(self._guard.library)
            environment[GUARD_VARIABLE] = self._guard.settings
            if self.handover is not None:
                environment[HANDOVER_VARIABLE] = ",".join(map(str, self.handover.given))
            if self._outcomes is not None:
                environment[OUTCOMES_VARIABLE] = str(self._outcomes.descriptor)
        if self._secrets:
            lines = []
            for secret in dict.fromkeys(self._secrets):
                # This must not be guessed, because a server without the guard would accept it as its token.
                mark = f"{{secret-{random_texts.token_urlsafe(32)}}}"
                command = [
                    part.removesuffix(secret) + mark if part.endswith(f"={secret}") else part for part in command
                ]
                lines += [mark, secret]
            environment[exec_shim.SECRETS_VARIABLE] = "\n".join(lines)
        return [*shim, *command], environment

    def _read_until_end(self, popen: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
        os.set_blocking(output.fileno(), False)
        poller = select.poll()
        poller.register(output.fileno(), select.POLLIN)
        self._pidfd = pidfd = open_pidfd(popen.pid)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        lines = OutputLines(self._take_line)
        try:
            while True:
                ready = {fd for fd, _ in poller.poll(None if pidfd is not None else _POLL_WITHOUT_PIDFD_MS)}
                ended = pidfd in ready if pidfd is not None else popen.poll() is not None
                if output.fileno() in ready and not lines.read(output.fileno()):
                    poller.unregister(output.fileno())
                    if pidfd is None:
                        popen.wait()
                        ended = True
                if ended:
                    lines.finish(output.fileno())
                    return
        finally:
            self._pidfd = None
            if pidfd is not None:
                os.close(pidfd)

    def _take_line(self, text: str) -> None:
        if _GUARD_IS_ACTIVE in text:
            self._is_guarded = True
            call_safely(output_logger.debug, "%s", _without_prefix(text), stacklevel=2)
            return
        if self._is_repetition(text):
            return
        self._tail.append(text)
        found = _SEVERITY.match(text)
        if found:
            self._level = _LEVELS[found[1]]
            # It logs only after it has read its arguments.
            self.wipe_secrets()
        elif text.startswith("error:") or "re2.cc:" in text:
            self._level = logging.ERROR
        is_known = _TABLE.match(text) or _OF_A_SLEEP.match(text) or (self.is_idle and _OF_A_LATE_END in text)
        is_quiet = is_known or any(part in text for part in self._quiet) or self._is_of_start(text)
        # A filter of the program that fails does not end the server whose words it was given.
        level = logging.DEBUG if is_quiet else _FOREIGN.get(text.partition(" ")[0], self._level)
        if not self._allowance.has_room():
            return
        if count := self._allowance.take_left_out():
            rate = self._allowance.rate
            call_safely(output_logger.warning, "%d lines were left out: %d a second are taken for long.", count, rate)
        call_safely(output_logger.log, level, "%s", _without_prefix(text), stacklevel=2)

    def _is_of_start(self, text: str) -> bool:
        is_starting = not self._tells_start and self.handover is not None and not self.handover.is_complete
        return is_starting and _OF_A_START.match(text) is not None

    def _is_repetition(self, text: str) -> bool:
        """Leave out a line that has come many times in a row, and say how often it came when another one comes."""
        if text == self.last_line:
            self._repeated += 1
            return self._repeated > _MOST_REPETITIONS
        count, self._repeated = self._repeated - _MOST_REPETITIONS, 0
        if count > 0:
            call_safely(output_logger.log, self._level, "(the line before came %d times more)", count)
        return False


def is_complete(process: ServerProcess | None) -> bool:
    """Return whether all models of a server are there, as far as `mark_complete` has told it."""
    return process is not None and process.handover is not None and process.handover.is_complete


def mark_complete(process: ServerProcess | None) -> None:
    """Have a server say to those who ask for a model that it has not that no other is about to come."""
    if process is not None and process.handover is not None:
        process.handover.mark_complete()


def _without_prefix(text: str) -> str:
    found = _PREFIX.match(text)
    if found is None:
        return text
    told = text[found.end() :]
    # A text with a backslash stays quoted: callers choose parts of it, and must not write line breaks here.
    if len(told) > 2 and told[0] == told[-1] == '"' and "\\" not in told:
        told = told[1:-1]
    return f"{told} ({found[1]})".lstrip()


def _last_lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_FILE_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"({path} cannot be read: {error.strerror})"]
