"""The functions that every inference calls: those of the native library, and a few of Triton's, declared for speed.

Triton's callbacks are in the native library (`native/inprocess/calls.cc`), so that a response reaches the thread that
waits for it without any Python, and the interpreter's lock, in between. Pointers are addresses here, and a result
that is not `None` is an error, to be given to `check`: that halves the cost of a call.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntFlag
from typing import Any, Protocol

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.api import load_api
from pytriton.inprocess.capi.library import NativeLibrary, declared

__all__ = ["Event", "NativeCalls", "RecordSlot", "SubmittedRequest", "load_native_calls"]

logger = logging.getLogger(__name__)


class Event(IntFlag):
    """What happened to a request. `submit_call` takes those that are to be reported as they happen.

    The end is reported anyway if the last response was taken before it.
    """

    RELEASED = 1
    ARRIVED = 2
    ENDED = 4


RecordSlot: Any = c_uint64 * 3
"""Where a response that is taken goes: its record, the address of the record's bytes and their number."""

_EventCallback = ctypes.CFUNCTYPE(None, c_uint64, c_uint32)


class SubmittedRequest(Protocol):
    """A request whose events the native library reports."""

    gpu: int | None
    gpu_buffers: dict[int, Any]

    def on_events(self, events: int) -> None:
        """Take an `Event`, in threads of Triton's."""


class NativeCalls:
    """The functions, and the requests whose events they report. There is one for the process.

    Calls of `add_input`, `append_input_data`, `new_call` and `submit_call` may give an error.

    Attributes:
        pending: The requests that Triton has, by their numbers.
        numbers: Gives each request its number.
        input_owners: What keeps all input buffers of a request alive, by the address of the request of the C API. Set
            before Triton gets the request, and removed when it releases it.

    Raises:
        LibraryNotFoundError: If this installation has no native library.
        UnsupportedError: If Triton's library lacks a function.
    """

    def __init__(self) -> None:
        api = load_api()
        self.pending: dict[int, SubmittedRequest] = {}
        self.numbers = itertools.count(1)
        self.input_owners: dict[int, object] = {}
        self.check = api.check
        triton = ctypes.PyDLL(str(api.library.path), handle=api.library.handle._handle)
        self.add_input = declared(
            triton["TRITONSERVER_InferenceRequestAddInput"], c_void_p, c_void_p, c_char_p, c_int, c_void_p, c_uint64
        )
        self.append_input_data = declared(
            triton["TRITONSERVER_InferenceRequestAppendInputData"],
            c_void_p, c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int64,
        )  # fmt: skip
        library = NativeLibrary()
        function = library.function
        self.new_call = function("new_call", c_void_p, c_void_p, c_char_p, c_int64, c_uint64, c_void_p)
        self.submit_call = function("submit_call", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_uint32)
        self.withdraw_call = function("withdraw_call", None, c_void_p)
        self.take_record = function("take_record", c_int, c_void_p, c_int64, c_void_p)
        self.cancel_call = function("cancel_call", c_int, c_void_p)
        self.free_memory = function("free_memory", None, c_void_p)
        self.free_record = function("free_record", None, c_void_p, keep_gil=True)
        self.drop_call = function("drop_call", None, c_void_p, keep_gil=True)
        # Kept for the life of the process, which is as long as the library may call it.
        self._callback = _EventCallback(self._on_events)
        library.connect("open_calls", self._callback)
        # Then no thread of Triton may enter the interpreter any more.
        process.call_at_exit(function("close_calls", None, keep_gil=True))

    def _on_events(self, number: int, events: int) -> None:
        try:
            request = self.pending.get(number)
            if request is not None:
                request.on_events(events)
        except BaseException:
            logger.exception("what happened to a request could not be noted")


@functools.cache
def load_native_calls() -> NativeCalls:
    """Load the library and its functions, or give those that are loaded.

    Raises:
        LibraryNotFoundError: If this installation has no native library.
        UnsupportedError: If Triton's library lacks a function.
    """
    # The native library reports to one only.
    return process.shared("native calls", NativeCalls)
