"""A Triton backend that hands inference to a worker process over shared memory.

The proxy backend listens on a unix socket per model version inside tritonserver; a `Worker` attaches to it and serves
the model with a Python callable. `docs/protocol.md` describes what passes between them.
"""

from pytriton.proxy._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from typing import TYPE_CHECKING as _TYPE_CHECKING

from .errors import (
    ArenaFullError,
    AttachError,
    ConnectionLostError,
    DescriptionError,
    DropInError,
    EndpointError,
    LibraryNotFoundError,
    OutputError,
    ProtocolError,
    ProxyBackendError,
    TargetError,
    VersionMismatchError,
    WorkerProcessError,
)
from .model import ModelSpec, TensorSpec, endpoint_path
from .runtime.statistics import Histogram, WorkerStatistics
from .wire.layout import MAJOR as _MAJOR
from .wire.layout import MINOR as _MINOR
from .worker.worker import Worker

if _TYPE_CHECKING:
    from .description import description_path, read_description, write_description
    from .settings import SIDE_FILE_NAME, ProxySettings
    from .system.native import (
        BACKEND_NAME,
        GUARD_LIBRARY_NAME,
        INPROCESS_BACKEND_NAME,
        INPROCESS_LIBRARY_NAME,
        LIBRARY_NAME,
        guard_library_path,
        inprocess_library_path,
        library_path,
    )

PROTOCOL_VERSION: tuple[int, int] = (_MAJOR, _MINOR)
"""Major and minor version of the protocol between the proxy backend and its workers."""

__all__ = [
    "BACKEND_NAME",
    "GUARD_LIBRARY_NAME",
    "INPROCESS_BACKEND_NAME",
    "INPROCESS_LIBRARY_NAME",
    "LIBRARY_NAME",
    "PROTOCOL_VERSION",
    "SIDE_FILE_NAME",
    "ArenaFullError",
    "AttachError",
    "ConnectionLostError",
    "DescriptionError",
    "DropInError",
    "EndpointError",
    "Histogram",
    "LibraryNotFoundError",
    "ModelSpec",
    "OutputError",
    "ProtocolError",
    "ProxyBackendError",
    "ProxySettings",
    "TargetError",
    "TensorSpec",
    "VersionMismatchError",
    "Worker",
    "WorkerProcessError",
    "WorkerStatistics",
    "description_path",
    "endpoint_path",
    "guard_library_path",
    "inprocess_library_path",
    "library_path",
    "read_description",
    "write_description",
]

# Names that a worker's process does not need; importing them would cost memory in each.
_LATER = {
    **dict.fromkeys(("description_path", "read_description", "write_description"), "description"),
    **dict.fromkeys(("SIDE_FILE_NAME", "ProxySettings"), "settings"),
    **dict.fromkeys(
        (
            "BACKEND_NAME",
            "GUARD_LIBRARY_NAME",
            "INPROCESS_BACKEND_NAME",
            "INPROCESS_LIBRARY_NAME",
            "LIBRARY_NAME",
            "guard_library_path",
            "inprocess_library_path",
            "library_path",
        ),
        "system.native",
    ),
}


def __getattr__(name: str) -> object:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f".{module}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
