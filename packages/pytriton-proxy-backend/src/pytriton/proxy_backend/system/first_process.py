"""What the first process of a container owes to the others there, for commands that are started without an init."""

from __future__ import annotations

import contextlib
import os
import signal

_SIGNALED = 128
"""A process that a signal ended has this exit code plus the number of the signal, as in a shell."""


def leave_first_process() -> None:
    """If this process is the first one of a container, go on in a child, and be its init.

    An orphan becomes a child of the first process, and stays a zombie until that takes its exit code. A program with
    children of its own cannot take all codes, because `subprocess` would then see 0. So the first process does only
    this, and passes signals on, which Linux would ignore for it.
    """
    if os.getpid() != 1:
        return
    signals = signal.valid_signals()
    # Signals that come before the child exists wait.
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
            # The kernel sends signals such as Ctrl+C to the child as well.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, came.si_signo)


def _take_exit_codes(child: int) -> None:
    """Take the exit codes of ended processes, and end with that of the child."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else _SIGNALED - code)
