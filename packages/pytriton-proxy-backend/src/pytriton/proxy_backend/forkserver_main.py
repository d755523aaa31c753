"""`python -m pytriton.proxy_backend.forkserver_main CONTROL ROOM`: a process whose forks are hosts of Python models.

It has imported what each of them needs, which they share with it and with each other, and runs nothing of anybody's. It
has one thread, which forks whenever the process at the other end of CONTROL, a descriptor that it has inherited, asks,
see `process.forkserver`. ROOM is there to be written over: a process can say of itself what it is in the place that its
command line has.

A command that serves Python models forks such a process from itself with `early_forkserver`: the fork shares the memory
of Python, numpy and all other modules with the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import io
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from . import worker_main
from .process.forkserver import DESCRIPTORS, MAX_MESSAGE, Forkserver, Reply
from .system.parents import end_with_parent, give_back_memory, unblock_signals
from .wire.accelerator import accelerator

logger = logging.getLogger(__name__)

_NAME = "pytriton.proxy_backend.forkserver_main"
# The fields of `/proc/self/stat` with the addresses of command line and environment, counted after the name.
_PLACES = slice(45, 49)


def main(arguments: list[str]) -> int:
    """Fork to the end of the other side; returns the exit code, of this process as of every fork."""
    control = socket.socket(fileno=int(arguments[0]))
    end_with_parent(control)
    room = Room()
    _begin_forkserver(room)
    _prepare()
    control.send(bytes([Reply.READY]))
    return ForkLoop(control, room).run()


@contextlib.contextmanager
def early_forkserver() -> Iterator[None]:
    """Fork a forkserver from this process before the block, and end it after the block.

    It is for hosts of models without an environment of their own. The command should have imported little: hosts share
    what it has at this moment. If no forkserver can be made, hosts are started as programs.
    """
    # Imported late, because a forkserver that is started as a program does not need them.
    from .hosting.forkservers import OWN_LAUNCH, keep_early, let_go_early

    try:
        _check_can_be_forked()
        _prepare()
        forkserver = Forkserver(OWN_LAUNCH)
        forkserver.start_forked(functools.partial(_be_forked, os.getpid(), forkserver.variables))
    except OSError as error:
        logger.debug("Hosts are started as those of a program are: %s", error)
        yield
        return
    keep_early(OWN_LAUNCH, forkserver)
    try:
        yield
    finally:
        let_go_early(forkserver)
        forkserver.close()


def _check_can_be_forked() -> None:
    """Raise an error unless a fork of this process would be the same as a newly started one."""
    if threading.active_count() > 1:
        raise OSError("this process has several threads")
    for descriptor in range(3):
        # Otherwise a descriptor opened for the fork could take the place of a standard stream.
        os.fstat(descriptor)
    option = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    if option.startswith("-") and option != "-m":
        raise OSError(f"its interpreter has the option {option}, which those of hosts have not")


def _be_forked(parent: int, variables: Mapping[str, str], control: socket.socket, messages: IO[bytes]) -> int:
    """Do in a forked child of a command what `main` does in a new program."""
    os.setsid()
    end_with_parent(control, parent)
    _take_streams(messages)
    # This copies each variable, and frees the place of the original ones.
    os.environ.clear()
    os.environ.update(variables)
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    sys.excepthook = sys.__excepthook__
    # `python -m` does this as well.
    sys.modules["__main__"] = sys.modules[__name__]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    room = Room(with_environment=True)
    _begin_forkserver(room)
    control.send(bytes([Reply.READY]))
    return ForkLoop(control, room).run()


def _take_streams(messages: IO[bytes]) -> None:
    """Have standard streams of this process's own, not buffered, and nothing else that the command was given."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, source in enumerate((null, null, messages.fileno())):
        os.dup2(source, descriptor)
    os.close(null)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, f"__{name}__")
        stream = io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),
            encoding=before and before.encoding,
            errors=before and before.errors,
            write_through=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # The command's own descriptors are not inheritable, and somebody else closes them.
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the descriptor by which the list was read is closed
            if descriptor > 2 and os.get_inheritable(descriptor):
                os.close(descriptor)


def _begin_forkserver(room: Room) -> None:
    # A user who ends the service signals its parent, which ends this process after the hosts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    room.say(_NAME, "forkserver of hosts")


def _prepare() -> None:
    # A host imports this once it knows its task.
    from .python_models import host  # noqa: F401

    accelerator()
    # This fails if forks could not be watched.
    os.close(os.pidfd_open(os.getpid()))
    share_memory()


def share_memory() -> None:
    """Make the memory of this process ready to be shared with its forks."""
    gc.collect()
    give_back_memory()
    # The garbage collector writes into objects, which would copy their memory in each fork.
    gc.freeze()


class Room:
    """The memory that `ps` shows as the command line of this process; with the environment's if `with_environment`."""

    def __init__(self, *, with_environment: bool = False) -> None:
        self._begin = self._size = 0
        try:
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            begin, end, environment, last = map(int, fields[_PLACES])
        except (OSError, ValueError):
            # The system does not show the addresses, so the command line stays as it is.
            return
        if begin:
            self._begin, self._size = begin, (last if with_environment and environment == end else end) - begin

    def say(self, name: str, what: str) -> None:
        """Make `ps` show what this process is, as far as it fits."""
        if self._begin:
            text = f"{sys.executable} -m {name} ({what})".encode()
            ctypes.memmove(self._begin, text[: self._size - 1].ljust(self._size, b"\0"), self._size)


class _Fork:
    """A forked process; `pidfd` is readable when it has ended, and `life` is the connection that reports it."""

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.life = life
        self.has_ended = False

    def close(self) -> None:
        os.close(self.pidfd)
        self.life.close()


class ForkLoop:
    """Forks this process whenever the other side asks.

    Args:
        control: The connection to the other side; with its end this ends.
        room: Where forks say what they are.
        work: What a fork does, with the arguments of a worker's main function; returns its exit code.
    """

    def __init__(self, control: socket.socket, room: Room, work: Callable[[list[str]], int] = worker_main.main) -> None:
        self._control = control
        self._room = room
        self._work = work
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._forks: dict[int, _Fork] = {}

    def run(self) -> int:
        """Do so to the end; returns the exit code, here as in a fork."""
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor != self._control.fileno():
                    self._look_at(descriptor)
                    continue
                text, descriptors, _, _ = socket.recv_fds(
                    self._control, MAX_MESSAGE, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not text:
                    return 0
                if len(descriptors) != DESCRIPTORS:
                    # This process keeps only the first, by which it can report the failure.
                    for each in descriptors[1:]:
                        os.close(each)
                    for each in descriptors[:1]:
                        with socket.socket(fileno=each) as life:
                            _send(life, Reply.FAILED, errno.EMFILE)
                    continue
                job = self._fork(text.decode(), *descriptors)
                if job is not None:
                    return self._work(job)

    def _fork(self, label: str, life_fd: int, channel: int, job: int, output: int) -> list[str] | None:
        """Fork; in the child, return the arguments of a worker's main function."""
        life = socket.socket(fileno=life_fd)
        own = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send(life, Reply.FAILED, error.errno or 0)
            life.close()
            pid = -1
        if pid == 0:
            self._begin(own, label, output, life)
            return [str(channel), str(job)]
        for descriptor in (channel, job, output):
            os.close(descriptor)
        if pid > 0:
            self._watch(pid, life)
        return None

    def _begin(self, forkserver: int, label: str, output: int, life: socket.socket) -> None:
        """Make a forked process like a newly started one: group, signals, streams, random numbers."""
        os.setsid()
        end_with_parent(life, forkserver)
        unblock_signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Code of others may have put anything in the places of `sys.stdout` and `sys.stderr`.
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        self._control.close()
        for fork in {id(each): each for each in self._forks.values()}.values():
            fork.close()
        seed_numpy()
        self._room.say(worker_main.NAME, label)
        # This is sent only now, because the number is now also that of its process group, by which it may be killed.
        _send(life, Reply.BEGUN, os.getpid())
        life.close()

    def _watch(self, pid: int, life: socket.socket) -> None:
        try:
            fork = _Fork(pid, life)
        except OSError as error:
            # No descriptor is left, and a process that cannot be watched must not run.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _send(life, Reply.FAILED, error.errno or 0)
            life.close()
            return
        for descriptor in (fork.pidfd, life.fileno()):
            self._forks[descriptor] = fork
            self._poller.register(descriptor, select.POLLIN)

    def _look_at(self, descriptor: int) -> None:
        fork = self._forks.get(descriptor)
        if fork is None:
            # The process was forgotten in this same round.
            return
        if descriptor == fork.pidfd and not fork.has_ended:
            # Its process id is not reused until the other side is done with it.
            status = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None  # it has ended, so there is a status
            exited = status.si_code == os.CLD_EXITED
            fork.has_ended = True
            self._poller.unregister(fork.pidfd)
            _send(fork.life, Reply.ENDED, status.si_status if exited else -status.si_status)
        elif descriptor == fork.life.fileno():
            for each in (fork.pidfd, fork.life.fileno()):
                with contextlib.suppress(KeyError):
                    self._poller.unregister(each)
                del self._forks[each]
            fork.close()
            if not fork.has_ended:
                os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)


def seed_numpy() -> None:
    """Let a fork draw other random numbers with numpy than all others; Python does so for its own generator."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _send(life: socket.socket, kind: Reply, number: int) -> None:
    # If the other side is gone, the next look at the descriptors shows it.
    with contextlib.suppress(OSError):
        life.send(bytes([kind]) + str(number).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
