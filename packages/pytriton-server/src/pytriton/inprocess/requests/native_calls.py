"""The functions that every inference calls: those of the native library, which are functions of Python's.

Triton's callbacks are in the native library (`native/inprocess/requests.cc`), so that a response reaches the thread
that waits for it without any Python, and the interpreter's lock, in between. The interpreter calls the library as it
calls any extension module (`native/inprocess/python_requests.cc`): ctypes would cost more than all the rest of a call.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from enum import IntFlag
from typing import Any, Protocol

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.api import load_api
from pytriton.inprocess.capi.library import NativeLibrary
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES

logger = logging.getLogger(__name__)

ResponseContent = tuple[int, str, int, Any, Any, Any, Any, Any]
"""A response: `ResponseFlag`s; name and version of the model; parameters, or `None`; code and text of the error, or
`None` twice; the outputs, each its name, the number of its data type, its shape, and an array or the address of
elements that are not in host memory; its label, or `None`."""


class Event(IntFlag):
    """What happens to a request. `submit` takes those that are to be reported as they happen.

    The end is reported anyway if the last response was taken before it.
    """

    RELEASED = 1
    """Triton has no more need of the inputs; the request is still there."""
    RESPONDED = 2
    """There is a response in the queue."""
    COMPLETED = 4
    """Triton has done with the request, and it is deleted."""


class ResponseFlag(IntFlag):
    """What is known of a response."""

    FINAL = 1
    """It is the last one."""
    CANCELLED = 2
    """The request was cancelled."""
    COMPLETE = 4
    """The request has ended, and nothing more will be reported of it."""


class SubmittedRequest(Protocol):
    """A request whose events the native library reports."""

    gpu: int | None
    gpu_buffers: dict[int, Any]

    def on_events(self, events: int) -> None:
        """Take an `Event`, in threads of Triton's."""


class NativeCalls:
    """The functions, and the requests whose events they report. There is one for the process."""

    def __init__(self) -> None:
        api = load_api()
        self.pending: dict[int, SubmittedRequest] = {}  # the requests that Triton has, by their numbers
        self.numbers = itertools.count(1)  # gives each request its number
        # The owner of all input buffers of a request, by the address of the request of the C API. It is set before
        # Triton gets the request, and removed when Triton releases it.
        self.input_owners: dict[int, object] = {}
        library = NativeLibrary()
        library.connect()
        dtypes = {int(number): dtype for number, dtype in NUMPY_TYPES.items()}
        # The library keeps its arguments as long as the process lives, because it may use them until then.
        functions = library.open("open_requests", dtypes, api.check, self._on_events)
        # Makes the native side of a request, given its number. It lives as long as the object, and until Triton has
        # done with the request.
        self.new: Callable[[int], Any] = functions["new_request"]
        # Makes the request of the C API: given the native side, the server, the name and the version of the model, a
        # dictionary of inputs, and a list that gets those that must live until it is released. Gives its address, or
        # `None` if an input is neither a plain array nor a tuple of data type, shape, address, size, kind of memory
        # and device.
        self.create: Callable[..., int | None] = functions["create_request"]
        # Gives a request to Triton: native side, server, address of a trace, address of an allocator, events.
        self.submit: Callable[..., None] = functions["submit_request"]
        # Deletes a request that Triton has not got; whether it was so.
        self.withdraw: Callable[[Any], bool] = functions["withdraw_request"]
        # Waits for the next `ResponseContent` so many nanoseconds; `None` if it did not come, `False` where none
        # will come.
        self.take: Callable[[Any, int], Any] = functions["take_response"]
        # Ends the wait and asks Triton to stop the work; whether the request has ended.
        self.cancel: Callable[[Any], bool] = functions["cancel_request"]
        # After that, no thread of Triton may enter the interpreter.
        process.call_at_exit(library.function("close_requests", None, keep_gil=True))

    def _on_events(self, number: int, events: int) -> None:
        try:
            request = self.pending.get(number)
            if request is not None:
                request.on_events(events)
        except BaseException:
            logger.exception("what happened to a request could not be noted")


@functools.cache
def load_native_calls() -> NativeCalls:
    """Load the library and its functions once, and return them."""
    # The native library reports to a single object.
    return process.shared("native calls", NativeCalls)
