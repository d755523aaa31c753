"""gRPC in a forked child, which it does not survive where other threads of the parent were waiting in it."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import FrameType

from ..exceptions import PyTritonClientValueError

# The last process that was forked while other threads were waiting in gRPC: neither it nor its children can use gRPC.
_parent: int | None = None


def is_usable() -> bool:
    """Return whether gRPC works in this process."""
    return _parent is None or _parent == os.getpid()


def check_fork(url: str) -> None:
    """Check that gRPC can be used here: after some forks it would end the process, or wait for ever."""
    if not is_usable():
        raise PyTritonClientValueError(
            "Expected an address for HTTP, because another thread was in a call over gRPC when this process was "
            f"forked, which leaves gRPC unusable in it; received {url}. Use an http:// address, fork before calls are "
            'made, or start processes with the method "spawn" or "forkserver".',
            input_name="url",
            received=url,
        )


@functools.cache
def watch_forks() -> None:
    """Record at each fork from now on whether gRPC survives it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_look)


def _look() -> None:
    global _parent
    if is_usable():
        own = threading.get_ident()
        others = [frame for thread, frame in sys._current_frames().items() if thread != own]
        _parent = os.getpid() if any(map(_waits_in_grpc, others)) else None


def _waits_in_grpc(frame: FrameType | None) -> bool:
    """Return whether a thread waits in gRPC; gRPC ends its own threads before a fork, so they do not count."""
    is_in_grpc, began_in = False, ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module != "threading":
            began_in = module
            is_in_grpc = is_in_grpc or module.startswith("grpc.")
        frame = frame.f_back
    return is_in_grpc and not began_in.startswith("grpc.")
