"""What the first process of a container owes to the others there, for commands that are started without an init."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["leave_first_process"]

_SIGNALED = 128
"""With the number of a signal, the exit code by which a shell tells that it has ended a process."""


def leave_first_process() -> None:
    """Where this process is the first one of a container, go on in a child, for which it is what an init is.

    A process whose parent has ended becomes a child of the first one, and stays as a zombie until that takes its exit
    code. A program that has children itself cannot take them all: some are waited for, as by `subprocess`, which would
    be told 0. So one process does nothing else. It hands signals on, which the system would spare a first process.
    """
    if os.getpid() != 1:
        return
    signals = signal.valid_signals()
    # Those that come before there is a child wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        came = signal.sigwaitinfo(signals)
        if came.si_signo == signal.SIGCHLD:
            _take_exit_codes(child)
        elif came.si_code <= 0:
            # What the kernel sends, as for Ctrl+C, it sends to the child as well.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, came.si_signo)


def _take_exit_codes(child: int) -> None:
    """Let those go that have ended, and end with the child, as it has."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else _SIGNALED - code)
