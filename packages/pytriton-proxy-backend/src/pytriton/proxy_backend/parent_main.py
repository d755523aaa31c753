"""`python -m pytriton.proxy_backend.parent_main CHANNEL JOB CONTROL LABEL ROOM`: workers are forked from it.

It imports what the factory of a model needs, and forks a child that calls the factory. If what the factory has made
can be forked once more, see `process.fork_safety`, workers are forked from that child, which have its weights at once.
Otherwise the child ends, and workers are forked from this process, and call the factory themselves. Neither ever serves
anybody.

CHANNEL and JOB are those of a worker, see `process.messages`; over CONTROL forks are asked for, see
`process.forkserver`; LABEL is for those who list processes, and ROOM makes room for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

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

# How long the child may take to end that cannot be forked from.
_END_S = 5.0
_READ_BYTES = 65536


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
        # Another thread of control may not share the state of the one before.
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
            _end_fork(code)
        return code

    def _serve(self, arguments: list[str]) -> int:
        """In a fork: be a worker."""
        for each in (self._channel, self._verdict, self._its_verdict):
            each.close()
        reopen_files(self._files)
        return worker_main.main(arguments, self._prepared)

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
    while others := [pid for pid in _members(group) if pid != own]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _members(group: int) -> Iterator[int]:
    """Yield the processes of a group that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        # It may end meanwhile.
        with contextlib.suppress(OSError, ValueError):
            state, _, found = path.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                yield int(path.parent.name)


def _end_fork(code: int) -> NoReturn:
    """End a fork without what the factory has asked for at the end of its process, which others still need.

    It may have registered the removal of a folder that it has made, for example.
    """
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
