"""Calls of Triton's C API.

`load_api()` gives one object with the functions of the API that are called here, under their C names. A function that
returns an error raises it, so that no call site can forget to look. The declarations are in `functions.py`, the types
in `c_types.py`.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from pytriton.inprocess.capi import functions
from pytriton.inprocess.capi.c_types import MessageHandle
from pytriton.inprocess.capi.errors import TritonError, UnsupportedError, code_of, error_class
from pytriton.inprocess.capi.library import Library, load_library
from pytriton.server.tritonserver.version import describe_server_version

_lock = threading.Lock()
_api: Api | None = None


class Api:
    """The functions of the C API, as attributes with their C names.

    Those that return a `TRITONSERVER_Error*` of which the caller becomes the owner raise it as a `TritonError` and
    return `None`; only `TRITONSERVER_ErrorNew` returns the pointer.

    A function that the library lacks raises an `UnsupportedError` where it is called: most programs do without.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        # The same library, for functions that are called with the GIL held.
        keeping_gil = ctypes.PyDLL(str(library.path), handle=library.handle._handle)
        self._declare(library.handle, functions.CALLS)
        self._declare(keeping_gil, functions.SHORT_CALLS)
        for name, (restype, *argtypes) in functions.VALUES.items():
            function = _function(keeping_gil, name, argtypes)
            if function is not None:
                function.restype = restype
            setattr(self, name, function or self._missing(name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Python calls this for unknown names only: the functions are in the dictionary of the object.
        raise AttributeError(f"{name!r} is not declared in pytriton.inprocess.capi.functions", name=name, obj=self)

    def error_from(self, error: Any, *, owned: bool = False) -> TritonError:
        """Make the exception for a `TRITONSERVER_Error*`."""
        code: int = self.TRITONSERVER_ErrorCode(error)
        text: bytes = self.TRITONSERVER_ErrorMessage(error) or b""
        if owned:
            self.TRITONSERVER_ErrorDelete(error)
        return error_class(code)(text.decode(errors="replace"))

    def has(self, function: str) -> bool:
        """Return whether the library has a function."""
        return hasattr(self.library.handle, function)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function that gives a message as its last argument, and return what the JSON of the message says."""
        message = MessageHandle()
        getattr(self, function)(*arguments, ctypes.byref(message))
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        try:
            self.TRITONSERVER_MessageSerializeToJson(message, ctypes.byref(text), ctypes.byref(size))
            return json.loads(ctypes.string_at(text, size.value))
        finally:
            self.TRITONSERVER_MessageDelete(message)

    def check(self, error: Any) -> None:
        """Raise the error that a function gave and delete it; a null pointer is no error.

        Only needed for an error that came in some other way than as a result of a function of this object.
        """
        if error:
            raise self.error_from(error, owned=True)

    def new_error(self, error: BaseException) -> int:
        """Make a `TRITONSERVER_Error*` for an exception, to be returned to Triton, which becomes its owner."""
        text = str(error) if isinstance(error, TritonError) else f"{type(error).__name__}: {error}"
        # C ends the text at a zero byte.
        encoded = text.replace("\0", "\\0").encode(errors="replace")
        pointer = self.TRITONSERVER_ErrorNew(int(code_of(error)), encoded)
        return int(pointer.value or 0)

    def _declare(self, library: ctypes.CDLL, table: dict[str, tuple[Any, ...]]) -> None:
        for name, argtypes in table.items():
            function = _function(library, name, argtypes)
            if function is not None:
                function.restype = ctypes.c_void_p
                function.errcheck = self._raise
            setattr(self, name, function or self._missing(name))

    def _missing(self, name: str) -> Callable[..., NoReturn]:
        def missing(*_arguments: Any) -> NoReturn:
            library = self.library
            raise UnsupportedError(
                f"Expected the function {name} in {library.path}, which has none: its tritonserver is "
                f"{describe_server_version(library.binary)}, with API {library.api_version[0]}."
                f"{library.api_version[1]}. Do without what calls it, or use the server that comes with "
                "pytriton-server.",
                expected=name,
                received=library.api_version,
                where=str(library.path),
            )

        return missing

    def _raise(self, result: int | None, function: Any, arguments: tuple[Any, ...]) -> None:
        if result is not None:
            raise self.error_from(result, owned=True)


def _function(library: ctypes.CDLL, name: str, argtypes: Any) -> Any:
    try:
        # An attribute would be shared by everybody who declares functions of this library.
        function = library[name]
    except AttributeError:
        return None
    function.argtypes = list(argtypes)
    return function


def load_api() -> Api:
    """Load the library and its functions once, and return them."""
    global _api
    # Once it exists it is read without the lock, because every call into Triton reads it.
    if _api is None:
        library = load_library()
        with _lock:
            if _api is None:
                _api = Api(library)
    return _api
