"""gRPC in programs whose standard library gevent or eventlet has patched, so that their threads are green ones.

gRPC waits in C, where no green thread gives way to another one. It has a mode for gevent, and none for eventlet.
"""

from __future__ import annotations

import functools
import sys
import warnings

import grpc.experimental.gevent

from ..exceptions import PyTritonClientValueError
from ..warnings import PyTritonWarning

_ADVICE = "Use an http:// address, whose calls give way to other green threads."


def adapt_to_patches() -> None:
    """Have calls give way to other green threads, or warn that they do not; to be called before a channel is made."""
    if _is_patched("gevent.monkey", "is_module_patched", "threading"):
        _adapt_to_gevent()
    elif _is_patched_by_eventlet():
        warnings.warn(
            f"eventlet has patched this program, and gRPC knows nothing of it: each call stops all green threads. "
            f"{_ADVICE}",
            PyTritonWarning,
            stacklevel=7,  # the line of the user that makes the client
        )


def check_stream(url: str) -> None:
    """Raise an error if reading a stream here would wait for ever."""
    if _is_patched_by_eventlet():
        raise PyTritonClientValueError(
            f"Expected an address for HTTP, because a stream over gRPC would wait for ever in a program that eventlet "
            f"has patched; received {url}. {_ADVICE}",
            input_name="url",
            received=url,
        )


@functools.cache
def _adapt_to_gevent() -> None:
    grpc.experimental.gevent.init_gevent()


def _is_patched_by_eventlet() -> bool:
    return _is_patched("eventlet.patcher", "is_monkey_patched", "thread")


def _is_patched(patcher: str, question: str, module: str) -> bool:
    # One that another thread is importing at this moment may lack the function, and has patched nothing yet.
    is_patched = getattr(sys.modules.get(patcher), question, None)
    return is_patched is not None and bool(is_patched(module))
