"""What a process does that somebody else has started for his own ends: end with him, and take little memory."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket

__all__ = ["POLLRDHUP", "end_with_parent", "give_back_memory", "unblock_signals"]

POLLRDHUP = 0x2000
"""Of `poll`: the other side sends nothing more."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(channel: socket.socket, parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, whatever this process does from here on.

    Args:
        channel: A connection to whom it is for; where that has ended already, this process ends, too.
        parent: Its parent; where that is another one already, this process ends, too.
    """
    # As soon as it can be.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    poller = select.poll()
    poller.register(channel, POLLRDHUP)
    if poller.poll(0) or (parent is not None and os.getppid() != parent):
        # Gone before the signal was asked for: nobody will send it.
        os._exit(1)


def unblock_signals() -> None:
    """Hear all signals: a parent that waits for its own with `sigwait` blocks them, which is inherited."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def give_back_memory() -> None:
    """Give the system what has been freed: glibc keeps it for the next that ask, and each process would."""
    # Other C libraries have no such function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
