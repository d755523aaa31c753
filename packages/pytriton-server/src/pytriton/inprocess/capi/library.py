"""Load libraries into the process: `libtritonserver` of the server that is found, and the native one of this package.

They are loaded with `RTLD_LOCAL`. With its symbols made global, modules that are imported later would bind to the
old OpenSSL and zlib that come with it. Triton's library cannot be unloaded: it
is loaded once per process, however many servers run.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytriton.inprocess.capi.errors import UnsupportedError
from pytriton.proxy_backend import inprocess_library_path
from pytriton.proxy_backend.wire.accelerator import OBJECT_BYTES
from pytriton.server.tritonserver.binary import TritonServerBinary, find_tritonserver
from pytriton.server.tritonserver.version import describe_server_version

_SUPPORTED_MAJOR: Final = 1

_lock = threading.Lock()
_loaded: Library | None = None


@dataclass(frozen=True)
class Library:
    """The server's library in this process."""

    handle: ctypes.CDLL  # the library, called without the GIL
    path: Path  # its file
    binary: TritonServerBinary  # the server that it belongs to
    api_version: tuple[int, int]  # major and minor version of its `TRITONSERVER_*` functions


def load_library() -> Library:
    """Load the library once, and return it."""
    global _loaded
    with _lock:
        if _loaded is None:
            binary = find_tritonserver()
            path = _find_file(binary)
            handle = _open(path)
            _loaded = Library(handle, path, binary, _api_version(handle, path))
        return _loaded


class NativeLibrary:
    """The native library of this package, whose functions begin with `pytriton_inprocess_`."""

    def __init__(self) -> None:
        path = os.fspath(inprocess_library_path())
        self._library = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._keeping_gil = ctypes.PyDLL(path, handle=self._library._handle)

    def function(self, name: str, result: Any, *arguments: Any, keep_gil: bool = False) -> Any:
        """Return a function of the library with its types; `keep_gil` keeps the GIL during its calls."""
        library = self._keeping_gil if keep_gil else self._library
        # Indexing makes a new function object each time.
        found = library[f"pytriton_inprocess_{name}"]
        found.restype = result
        found.argtypes = list(arguments)
        return found

    def open(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Call a function that keeps Python objects, and return the functions that it makes, by name.

        It needs an interpreter with the GIL.
        """
        if object.__basicsize__ != OBJECT_BYTES:
            raise UnsupportedError(
                "Expected an interpreter with a global lock, received one whose objects have another form, such as "
                "free-threaded Python. Use the ordinary build of Python.",
                expected=OBJECT_BYTES,
                received=object.__basicsize__,
            )
        objects = [ctypes.py_object] * len(arguments)
        functions: dict[str, Any] = self.function(name, ctypes.py_object, *objects, keep_gil=True)(*arguments)
        return functions

    def connect(self) -> None:
        """Have the library look up Triton's functions; raise an error if Triton lacks one."""
        triton = load_library()
        missing = self.function("connect", ctypes.c_char_p, ctypes.c_void_p)(triton.handle._handle)
        if missing:
            raise UnsupportedError(
                f"Expected a Triton of release 2.51 or later in {triton.path}, which is "
                f"{describe_server_version(triton.binary)}; it lacks {missing.decode()}, which pytriton.inprocess "
                "calls. Use the server that comes with pytriton-server.",
                expected=missing.decode(),
                received=None,
                where=str(triton.path),
            )


def _find_file(binary: TritonServerBinary) -> Path:
    for folder in binary.library_dirs:
        # A wheel may rename the library to libtritonserver-<hash>.so.
        for file in sorted(folder.glob("libtritonserver*.so*")):
            if file.is_file():
                return file
    places = ", ".join(str(folder) for folder in binary.library_dirs) or "a folder lib beside its bin, which is missing"
    raise UnsupportedError(
        f"Expected libtritonserver.so of {binary.origin} in {places}, found none. A server in process needs the "
        "library and not only the executable.",
        expected="libtritonserver*.so",
        received=None,
        where=places,
    )


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError:
        _preload_siblings(path)
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        raise UnsupportedError(
            f"Cannot load {path} into this process: {error}", expected="a library that loads", received=str(error)
        ) from error


def _preload_siblings(path: Path) -> None:
    """Load the libraries beside the server's, because it has no run path to find them.

    Those that fail are tried again after others, until nothing changes.
    """
    waiting = [
        file
        for file in sorted(path.parent.glob("*.so*"))
        # A second libpython would have a state of its own.
        if file.is_file() and file != path and not file.name.startswith("libpython")
    ]
    while waiting:
        failed = []
        for file in waiting:
            try:
                ctypes.CDLL(str(file), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            except OSError:
                # Loading the server's library later names what is really missing.
                failed.append(file)
        if len(failed) == len(waiting):
            return
        waiting = failed


def _api_version(handle: ctypes.CDLL, path: Path) -> tuple[int, int]:
    major, minor = ctypes.c_uint32(), ctypes.c_uint32()
    function = getattr(handle, "TRITONSERVER_ApiVersion", None)
    if function is None:
        raise UnsupportedError(
            f"Expected Triton's library in {path}, but it has no TRITONSERVER_ApiVersion.",
            expected="TRITONSERVER_ApiVersion",
            received=None,
            where=str(path),
        )
    function.restype = ctypes.c_void_p
    function(ctypes.byref(major), ctypes.byref(minor))
    if major.value != _SUPPORTED_MAJOR:
        raise UnsupportedError(
            f"Expected version {_SUPPORTED_MAJOR} of Triton's API in {path}, received {major.value}.{minor.value}. Use "
            "the server that comes with pytriton-server.",
            expected=_SUPPORTED_MAJOR,
            received=(major.value, minor.value),
            where=str(path),
        )
    return major.value, minor.value
