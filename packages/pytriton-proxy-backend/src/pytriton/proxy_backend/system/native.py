"""Where the native libraries of this installation are."""

from __future__ import annotations

from pathlib import Path

from ..errors import LibraryNotFoundError

LIBRARY_NAME = "libtriton_pytriton.so"
"""Name of the file with the native proxy backend, as Triton looks for it."""
BACKEND_NAME = "pytriton"
"""Name of the backend in the configuration of a model."""
PYTHON_LIBRARY_NAME = "libtriton_python.so"
"""The name of the same library as the backend of models written for Triton's Python backend."""
INPROCESS_LIBRARY_NAME = "libtriton_pytriton_inprocess.so"
"""Name of the file with the backend for callables of the process that runs Triton."""
INPROCESS_BACKEND_NAME = "pytriton_inprocess"
"""Name of that backend in the configuration of a model."""
GUARD_LIBRARY_NAME = "libpytriton_guard.so"
"""Name of the file with the guard, which is loaded into tritonserver before its own libraries."""


def library_path() -> Path:
    """Return the native library that tritonserver loads as the backend `pytriton`.

    Raises:
        LibraryNotFoundError: If this installation has none, as on a platform without a wheel.
    """
    return _path(LIBRARY_NAME, "the native proxy backend")


def inprocess_library_path() -> Path:
    """Return the native library that Triton loads as the backend `pytriton_inprocess`, inside a Python process.

    Raises:
        LibraryNotFoundError: If this installation has none, as on a platform without a wheel.
    """
    return _path(INPROCESS_LIBRARY_NAME, "the backend for callables in process")


def guard_library_path() -> Path:
    """Return the library that keeps hostile requests from ending a tritonserver.

    It is for the variable `LD_PRELOAD` of a tritonserver that starts; `docs/security.md` describes it.

    Raises:
        LibraryNotFoundError: If this installation has none, as on a platform without a wheel.
    """
    return _path(GUARD_LIBRARY_NAME, "the guard")


def _path(name: str, what: str) -> Path:
    path = Path(__file__).parent.parent / "_lib" / name
    if not path.is_file():
        raise LibraryNotFoundError(
            f"expected {what} at {path}, there is none. Install a wheel of pytriton-proxy-backend "
            f"for this platform, or install from source with a C++ compiler (or the package ziglang) at hand"
        )
    return path
