"""The functions that every inference calls: those of the native library, and a few of Triton's, declared for speed.

Triton's callbacks are in the native library (`native/inprocess/calls.cc`), so that a response reaches the thread that
waits for it without any Python, and the interpreter's lock, in between. Pointers are plain addresses here, and a result
that is not `None` is an error, to be given to `check`: that halves the cost of a call.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntFlag
from typing import Any, Protocol

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.api import load_api
from pytriton.inprocess.capi.errors import UnsupportedError
from pytriton.proxy_backend import inprocess_library_path
from pytriton.server.tritonserver.version import describe_server_version

__all__ = ["Event", "NativeCalls", "Taken", "Told", "Wish", "load_native_calls"]

logger = logging.getLogger(__name__)


class Event(IntFlag):
    """What the native library tells of a request."""

    RELEASED = 1
    ARRIVED = 2
    ENDED = 4


class Wish(IntFlag):
    """What it is asked to tell, beyond the end of a request whose last response was taken before that."""

    RELEASED = 1
    ARRIVED = 2


Taken: Any = c_uint64 * 3
"""Where a response that is taken goes: its record, the address of the record's bytes and their number."""

_Tell = ctypes.CFUNCTYPE(None, c_uint64, c_uint32)


class Told(Protocol):
    """A request that the native library tells of."""

    gpu: int | None
    on_gpu: Any

    def told(self, events: int) -> None:
        """Take an `Event`, in threads of Triton's."""


class NativeCalls:
    """The functions, and the requests that they tell of. There is one for the process.

    Calls of `add_input`, `append_input_data`, `new_call` and `submit_call` may give an error.

    Attributes:
        pending: The requests that Triton has, by their numbers.
        numbers: Gives each request its number.

    Raises:
        LibraryNotFoundError: If this installation has no native library.
        UnsupportedError: If Triton's library lacks a function.
    """

    def __init__(self) -> None:
        api = load_api()
        self.pending: dict[int, Told] = {}
        self.numbers = itertools.count(1)
        self.check = api.check
        path = os.fspath(inprocess_library_path())
        library = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        # For what neither waits nor calls back: called with the GIL kept.
        short = ctypes.PyDLL(path, handle=library._handle)
        triton = ctypes.PyDLL(str(api.library.path), handle=api.library.handle._handle)
        self.add_input = _declared(
            triton["TRITONSERVER_InferenceRequestAddInput"], c_void_p, c_void_p, c_char_p, c_int, c_void_p, c_uint64
        )
        self.append_input_data = _declared(
            triton["TRITONSERVER_InferenceRequestAppendInputData"],
            c_void_p, c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int64,
        )  # fmt: skip
        named = "pytriton_inprocess_{}".format
        self.new_call = _declared(library[named("new_call")], c_void_p, c_void_p, c_char_p, c_int64, c_uint64, c_void_p)
        self.submit_call = _declared(
            library[named("submit_call")], c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_uint32
        )
        self.withdraw_call = _declared(library[named("withdraw_call")], None, c_void_p)
        self.take_record = _declared(library[named("take_record")], c_int, c_void_p, c_int64, c_void_p)
        self.cancel_call = _declared(library[named("cancel_call")], c_int, c_void_p)
        self.free_memory = _declared(library[named("free_memory")], None, c_void_p)
        self.free_record = _declared(short[named("free_record")], None, c_void_p)
        self.drop_call = _declared(short[named("drop_call")], None, c_void_p)
        # Kept for the life of the process, which is as long as the library may call it.
        self._tell = _Tell(self._told)
        open_calls = _declared(library[named("open_calls")], c_char_p, c_void_p, _Tell)
        missing = open_calls(api.library.handle._handle, self._tell)
        if missing:
            raise UnsupportedError(
                f"Expected a Triton of release 2.51 or later in {api.library.path}, which is "
                f"{describe_server_version(api.library.binary)}; it lacks {missing.decode()}, which every inference "
                "calls. Use the server that comes with pytriton-server.",
                expected=missing.decode(),
                received=None,
                where=str(api.library.path),
            )
        # Once the servers are stopped at the end of the process, no thread of Triton may enter the interpreter again.
        # What is registered last is called first.
        atexit.unregister(process._stop_all)
        atexit.register(_declared(short[named("close_calls")], None))
        atexit.register(process._stop_all)

    def _told(self, number: int, events: int) -> None:
        try:
            request = self.pending.get(number)
            if request is not None:
                request.told(events)
        except BaseException:
            logger.exception("what happened to a request could not be noted")


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    # By index: every time a function object of its own.
    function.restype = result
    function.argtypes = list(arguments)
    return function


def load_native_calls() -> NativeCalls:
    """Load the library and its functions, or give those that are loaded.

    Raises:
        LibraryNotFoundError: If this installation has no native library.
        UnsupportedError: If Triton's library lacks a function.
    """
    # The native library tells one only.
    return process.shared("native calls", NativeCalls)
