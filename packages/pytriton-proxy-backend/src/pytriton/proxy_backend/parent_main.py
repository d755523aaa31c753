"""`python -m pytriton.proxy_backend.parent_main CHANNEL JOB CONTROL LABEL ROOM`: workers are forked from it.

It imports what the factory of a model needs, and forks a child that calls the factory. If what the factory has made
can be forked once more, see `process.fork_safety`, workers are forked from that child, which have its weights at once.
Otherwise the child ends, and workers are forked from this process, and call the factory themselves. Neither ever serves
anybody.

CHANNEL and JOB are those of a worker, see `process.messages`; over CONTROL forks are asked for, see
`process.forkserver`; LABEL is for those who list processes, and ROOM makes room for that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import platform
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from . import worker_main
from .description import parse_description
from .errors import ProxyBackendError
from .forkserver_main import ForkLoop, Room, seed_numpy, share_memory
from .process.fork_safety import Belongings, reopen_files, why_not_forked
from .process.messages import FORMAT, JobRefusedError, WorkerJob
from .process.sender import MessageSender
from .runtime.statistics import COUNTERS_BYTES
from .runtime.texts import shortened, told_trace
from .system.parents import end_with_parent, unblock_signals
from .wire.accelerator import accelerator
from .worker.context import check_callable, import_all

NAME = "pytriton.proxy_backend.parent_main"
"""Name of this module, which is not its own where it is run."""

# How long the child may take to end that cannot be forked from, and what it has started after it was killed.
_END_S = 5.0
_PAUSE_S = 0.01
_READ_BYTES = 65536
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def main(arguments: list[str]) -> int:
    """Fork workers to the end of the other side; returns the exit code."""
    channel = socket.socket(fileno=int(arguments[0]))
    end_with_parent(channel)
    unblock_signals()
    _ignore_signals()
    job = int(arguments[1])
    text = os.pread(job, os.fstat(job).st_size, COUNTERS_BYTES).decode()
    os.close(job)
    control = socket.socket(fileno=int(arguments[2]))
    room = Room()
    room.say(NAME, arguments[3])
    return _Parent(channel, control, room).run(text)


class _Parent:
    """This process, and the child that calls the factory."""

    def __init__(self, channel: socket.socket, control: socket.socket, room: Room) -> None:
        self._channel = channel
        self._control = control
        self._room = room
        self._sender = MessageSender(channel)
        # By this the child says whether it can be forked.
        self._verdict, self._its_verdict = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._before = Belongings()
        self._files: list[int] = []
        self._prepared: worker_main.Preparation | None = None
        # In a fork: its exit code, and the finalizers of the factory, which are for others.
        self._exit_code = 1
        self._finalizers: dict[Any, Any] | None = None

    def run(self, job_text: str) -> int:
        """Prepare, and fork to the end; returns the exit code."""
        self._send("hello", format=FORMAT, pid=os.getpid(), python=platform.python_version())
        try:
            prepared = self._prepare(job_text)
            reason = why_not_forked(self._before)
        except BaseException as error:
            self._fail("refused" if isinstance(error, JobRefusedError) else "load", _told(error), told_trace(error))
            return 1
        if reason:
            self._fail("refused", f"what its factory imports: {reason}")
            return 1
        _flush_writers()
        share_memory()
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            return self._be_child(own, prepared)
        return self._follow(pid)

    def _prepare(self, job_text: str) -> worker_main.Preparation:
        job = WorkerJob.from_text(job_text)
        self._prepared = prepared = worker_main.Preparation(job, self._send)
        import_all(parse_description(job.model))
        accelerator()
        prepared.load()
        return prepared

    def _follow(self, pid: int) -> int:
        """Wait for the verdict of the child, and for its end; fork from this process if it is not fit for that."""
        self._its_verdict.close()
        pidfd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(self._verdict, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        # Whoever started this process limits the time.
        poller.poll()
        self._verdict.setblocking(False)
        try:
            said = self._verdict.recv(_READ_BYTES)
        except OSError:
            said = b""
        reason = json.loads(said) if said else None
        if reason == "":
            # The other side has to see the end of the child, not of this process.
            self._control.close()
            self._channel.close()
            return _end_as(os.waitpid(pid, 0)[1])
        poller.unregister(self._verdict)
        if not poller.poll(_END_S * 1000):
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(pidfd)
        _kill_group()
        if reason is None:
            reason = f"its factory ended the process ({_told_status(status)})"
        return self._fork("imports", reason)

    def _be_child(self, parent: int, prepared: worker_main.Preparation) -> int:
        """Call the factory, say whether this process can be forked then, and fork it."""
        self._verdict.close()
        end_with_parent(self._its_verdict, parent)
        seed_numpy()
        # The next thread of control must not share the state of the one before.
        self._sender = MessageSender(self._channel)
        prepared.take_over(self._send)
        try:
            infer_func, signature = prepared.make()
            job = prepared.job
            check_callable(infer_func, signature, parse_description(job.model), job.target)
            reason = why_not_forked(self._before)
        except BaseException as error:
            # The fork that calls it again says so of itself, with its traceback.
            reason = f"its factory failed: {_told(error)}"
        else:
            reason = reason and f"its factory: {reason}"
        if not reason:
            _flush_writers()
            share_memory()
        self._its_verdict.send(json.dumps(shortened(reason)).encode())
        return 0 if reason else self._fork("weights", "")

    def _fork(self, keeps: str, reason: str) -> int:
        self._files = self._before.files()
        # The factory may have set others.
        _ignore_signals()
        self._send("parent", keeps=keeps, reason=reason)
        self._send("ready")
        own = os.getpid()
        try:
            code = ForkLoop(self._control, self._room, self._serve).run()
        except BaseException:
            if os.getpid() == own:
                raise
            traceback.print_exc()
            code = 1
        if os.getpid() != own:
            if self._finalizers is None:
                # It has not begun.
                os._exit(code)
            self._exit_code = code
        return code

    def _serve(self, arguments: list[str]) -> int:
        """In a fork: be a worker."""
        # Functions are called in the reverse order of their registration. So Python ends a fork like any process, pools
        # of threads included, except for the functions that the factory has registered for the end of its process, such
        # as the removal of a folder. No object of the factory is freed before, because that could have the same effect.
        atexit.register(self._end_fork)
        self._finalizers = _Finalizers.take()
        for each in (self._channel, self._verdict, self._its_verdict):
            each.close()
        reopen_files(self._files)
        return worker_main.main(arguments, self._prepared)

    def _end_fork(self) -> NoReturn:
        try:
            # If the factory had one, their function is registered before this one.
            _Finalizers.call()
            for stream in (sys.stdout, sys.stderr):
                # Code of others may have put anything in their place, also nothing.
                with contextlib.suppress(Exception):
                    stream.flush()
        finally:
            os._exit(self._exit_code)

    def _send(self, kind: str, **fields: object) -> None:
        # Without the other side, the system ends this process.
        with contextlib.suppress(OSError):
            self._sender.send(kind, **fields)

    def _fail(self, stage: str, text: str, trace: str = "") -> None:
        self._send("failed", stage=stage, error="", text=shortened(text), traceback=trace[-20000:])


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ProxyBackendError) else f"{type(error).__name__}: {error}"


def _ignore_signals() -> None:
    # A user who ends the service signals its process, which ends this one after the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _told_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _end_as(status: int) -> int:
    """End this process as another one ended; returns the exit code if it has one."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    return abs(code)


def _kill_group() -> None:
    """Kill what the factory has started, which is in the group of this process."""
    own, group = os.getpid(), os.getpgrp()
    deadline = time.monotonic() + _END_S
    while (others := [pid for pid in _members(group) if pid != own]) and time.monotonic() < deadline:
        for pid in others:
            # A process may have ended meanwhile, or belong to another user.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _members(group: int) -> Iterator[int]:
    """Yield the processes of a group that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        # It may end meanwhile.
        with contextlib.suppress(OSError, ValueError):
            state, _, found = path.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                yield int(path.parent.name)


def _flush_writers() -> None:
    """Write what files hold back, which each fork would write again."""
    # `isinstance` would ask proxy objects, and may make them import what they stand for.
    writers = [each for each in gc.get_objects() if issubclass(type(each), _WRITERS)]
    # Code of others may have put anything in the place of the first two.
    for each in (sys.stdout, sys.stderr, *writers):
        # It may be closed, or nothing at all.
        with contextlib.suppress(Exception):
            each.flush()


class _Finalizers(weakref.finalize):  # type: ignore[type-arg]
    """All finalizers of this process, which have one function in `atexit` together."""

    @classmethod
    def take(cls) -> dict[Any, Any]:
        """Forget and return those that there are."""
        taken = dict(cls._registry)  # type: ignore[attr-defined]
        cls._registry.clear()  # type: ignore[attr-defined]
        return taken

    @classmethod
    def call(cls) -> None:
        """Do at once what is for the end of the process."""
        cls._exitfunc()  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
