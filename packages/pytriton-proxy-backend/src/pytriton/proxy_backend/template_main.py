"""`python -m pytriton.proxy_backend.template_main CONTROL ROOM`: a process whose forks are hosts of Python models.

It has imported what each of them needs, which they share with it and with each other, and runs nothing of anybody's. It
has one thread, which forks whenever the process at the other end of CONTROL, a descriptor that it has inherited, asks,
see `process.template`. ROOM is there to be written over: a process can say of itself what it is in the place that its
command line has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path

from . import worker_main
from .process.template import DESCRIPTORS, MAX_MESSAGE, Reply
from .system.parents import end_with_parent, give_back_memory
from .wire.accelerator import accelerator

_NAME = "pytriton.proxy_backend.template_main"
# Where `/proc/self/stat` has the place of the command line, counted from behind the name.
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46


def main(arguments: list[str]) -> int:
    """Fork to the end of the other side; returns the exit code, of this process as of every fork."""
    control = socket.socket(fileno=int(arguments[0]))
    end_with_parent(control)
    # Who wants all processes of a service to end tells its parent, which ends it when the hosts are gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _say(_NAME, "template of hosts")
    _prepare()
    control.send(bytes([Reply.READY]))
    return _Template(control).run()


def _prepare() -> None:
    # What a host imports once it knows that it is one.
    from .python_models import host  # noqa: F401

    accelerator()
    # Fails where forks could not be watched.
    os.close(os.pidfd_open(os.getpid()))
    gc.collect()
    give_back_memory()
    # The collector writes into what it looks at, and each fork would have its own copy of that.
    gc.freeze()


class _Fork:
    """A forked process.

    Attributes:
        pid: Its process id.
        pidfd: Readable when it has ended.
        life: Where the other side is told of its end, and says that it may be forgotten.
        has_ended: Whether that was told.
    """

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.life = life
        self.has_ended = False

    def close(self) -> None:
        os.close(self.pidfd)
        self.life.close()


class _Template:
    """This process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._forks: dict[int, _Fork] = {}

    def run(self) -> int:
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
                    # This process may have no more of them. The first is the one by which that can be said.
                    for each in descriptors[1:]:
                        os.close(each)
                    for each in descriptors[:1]:
                        with socket.socket(fileno=each) as life:
                            _send(life, Reply.FAILED, errno.EMFILE)
                    continue
                job = self._fork(text.decode(), *descriptors)
                if job is not None:
                    return worker_main.main(job)

    def _fork(self, label: str, life_fd: int, channel: int, job: int, output: int) -> list[str] | None:
        """Fork; return in the child what the main function of a worker is given."""
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

    def _begin(self, template: int, label: str, output: int, life: socket.socket) -> None:
        """Be a process as any other that was started anew."""
        os.setsid()
        end_with_parent(life, template)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output, stream.fileno())
        os.close(output)
        self._control.close()
        for fork in {id(each): each for each in self._forks.values()}.values():
            fork.close()
        # Else all instances of a model would draw the same numbers; Python's own generator looks after itself.
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()
        _say(worker_main.NAME, label)
        # Not before: by this number, too, which is that of its group now, it may be killed.
        _send(life, Reply.BEGUN, os.getpid())
        life.close()

    def _watch(self, pid: int, life: socket.socket) -> None:
        try:
            fork = _Fork(pid, life)
        except OSError:
            # No descriptor is left: what cannot be watched must not run.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            life.close()
            return
        for descriptor in (fork.pidfd, life.fileno()):
            self._forks[descriptor] = fork
            self._poller.register(descriptor, select.POLLIN)

    def _look_at(self, descriptor: int) -> None:
        fork = self._forks.get(descriptor)
        if fork is None:
            # Of one that was forgotten in this very round.
            return
        if descriptor == fork.pidfd and not fork.has_ended:
            # Its number stays its own until the other side has done with it.
            status = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None  # it has ended, so there is one
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


def _send(life: socket.socket, kind: Reply, number: int) -> None:
    # Where nobody is there any more, the next look at the descriptor says so.
    with contextlib.suppress(OSError):
        life.send(bytes([kind]) + str(number).encode())


def _say(name: str, what: str) -> None:
    """Have `ps` show what this process is, as far as there is room."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    except (OSError, ValueError, IndexError):
        # A system that does not tell: the command line stays as it is.
        return
    text = f"{sys.executable} -m {name} ({what})".encode()
    if begin:
        size = end - begin
        ctypes.memmove(begin, text[: size - 1].ljust(size, b"\0"), size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
