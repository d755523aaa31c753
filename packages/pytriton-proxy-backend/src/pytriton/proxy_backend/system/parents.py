"""What a process does that somebody else has started for his own ends: end with him, and take little memory."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket

POLLRDHUP = 0x2000
"""An event of `poll`: the other side sends nothing more."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(channel: socket.socket, parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends.

    If `parent` or the peer of `channel` has already ended, this process ends now.
    """
    # As early as possible.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    poller = select.poll()
    poller.register(channel, POLLRDHUP)
    if poller.poll(0) or (parent is not None and os.getppid() != parent):
        # The parent ended before the signal was requested, so nobody would send it.
        os._exit(1)


def unblock_signals() -> None:
    """Unblock all signals: a parent that waits with `sigwait` blocks them, and children inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc would keep in each process."""
    # Other C libraries lack this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
