"""The backend inside this process: a small native library whose entry points, called by Triton, call functions here.

The library is loaded twice, by Triton from its folder of backends and here, and is the same both times. It is told how
to find Triton's functions and which functions of Python to call. There is one for the process, however many servers
run; what belongs to a model is found by a number, which is in the only file of the model that Triton gets:

    Bindings --add_model--> number in the model's file --Triton loads the model--> _load_model
        --> _load_instance, once for each callable --> _execute, once for each batch --> runner

Functions that Triton calls run in its threads. None lets an exception out; what could be told to nobody else is logged.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pytriton.inprocess.callables.batches import Handle
from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.errors import UnsupportedError
from pytriton.inprocess.capi.library import load_library
from pytriton.proxy_backend import inprocess_library_path
from pytriton.server.tritonserver.version import describe_server_version

__all__ = ["MODEL_FILE", "Backend", "Instance", "InstanceRunner", "ServedModel", "load_backend"]

MODEL_FILE = "bound"
"""Name of the file in the folder of a model version that says which one it is here."""

logger = logging.getLogger(__name__)

_ADDRESS = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class Instance(ctypes.Structure):
    """One model instance, as the native library sees it.

    Attributes:
        slab: Address of the memory where the next batch is written.
        capacity: Its bytes.
        in_place_from: Inputs of so many bytes stay where they are if they can.
        token: The number of the instance here.
        batching: Whether tensors have a batch axis.
        decoupled: Whether a request may get any number of responses.
    """

    _fields_ = (
        ("slab", _ADDRESS),
        ("capacity", _U64),
        ("in_place_from", _U64),
        ("token", _U64),
        ("batching", _U32),
        ("decoupled", _U32),
    )


class _InPlace(ctypes.Structure):
    _fields_ = (("tensor", _U64), ("address", _U64))


_LoadModel = ctypes.CFUNCTYPE(_U64, ctypes.c_char_p, _U64)
_UnloadModel = ctypes.CFUNCTYPE(None, _U64)
_LoadInstance = ctypes.CFUNCTYPE(_U64, _U64, ctypes.POINTER(Instance))
_UnloadInstance = ctypes.CFUNCTYPE(None, _U64)
_MakeRoom = ctypes.CFUNCTYPE(None, _U64, _U64)
_Execute = ctypes.CFUNCTYPE(_U32, _U64, _U64, _U64, _U64, _U32)


class _Hooks(ctypes.Structure):
    _fields_ = (
        ("load_model", _LoadModel),
        ("unload_model", _UnloadModel),
        ("load_instance", _LoadInstance),
        ("unload_instance", _UnloadInstance),
        ("make_room", _MakeRoom),
        ("execute", _Execute),
    )


class _ThreadStates(ctypes.Structure):
    _fields_ = (("ensure", _ADDRESS), ("release", _ADDRESS), ("save", _ADDRESS))


class InstanceRunner(Protocol):
    """What serves the batches of one model instance."""

    def execute(self, handle: Handle, request: int, in_place: list[tuple[int, int]]) -> None:
        """Serve a batch, or see to it that it is served. It is in the instance's slab; `request` is its first one."""

    def make_room(self, length: int) -> None:
        """Put a slab of `length` bytes or more in the place of the instance's."""

    def unload(self) -> None:
        """End, once: no batch comes any more."""


class ServedModel(Protocol):
    """What Triton can load."""

    def make_runner(self, place: int, instance: Instance) -> InstanceRunner:
        """Make what serves an instance, which is the one at `place` of the loaded model; sets its fields."""


class _Load:
    """One loading of a model by Triton. While it loads a model anew, there are two."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.places = itertools.count()


class Backend:
    """The native library, and what it calls.

    Attributes:
        respond: Sends the answers of a record.
        fail: Answers every open request of a batch with an error.
        is_cancelled: Whether a request, or all of a batch, was given up.
        delete: Deletes a batch that has its answers.

    Raises:
        LibraryNotFoundError: If this installation has no native library.
        UnsupportedError: If Triton's library lacks a function.
    """

    def __init__(self) -> None:
        path = os.fspath(inprocess_library_path())
        self._library = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        # For what neither waits nor calls back: the same library, called with the GIL kept.
        keeping_gil = ctypes.PyDLL(path, handle=self._library._handle)
        # Triton calls back into Python while it sends, partly with its own locks held: never with the GIL kept.
        self.respond = _declared(self._library, "respond", ctypes.c_int, _U64, _ADDRESS, _U64, _ADDRESS)
        self.fail = _declared(self._library, "fail", None, _U64, ctypes.c_int, ctypes.c_char_p)
        self.is_cancelled = _declared(keeping_gil, "is_cancelled", ctypes.c_int, _U64, _U32)
        self.delete = _declared(keeping_gil, "delete", ctypes.c_int, _U64)
        self._refuse = _declared(keeping_gil, "refuse", None, ctypes.c_char_p)
        self._numbers = itertools.count(1)
        self._models: dict[int, ServedModel] = {}
        self._loads: dict[int, _Load] = {}
        self._runners: dict[int, InstanceRunner] = {}
        # Kept for the life of the process, which is as long as the library may call them.
        self._hooks = _Hooks(
            _LoadModel(self._guarded(self._load_model)),
            _UnloadModel(self._guarded(self._unload_model)),
            _LoadInstance(self._guarded(self._load_instance)),
            _UnloadInstance(self._guarded(self._unload_instance)),
            _MakeRoom(self._guarded(self._make_room)),
            _Execute(self._guarded(self._execute)),
        )
        self._connect(keeping_gil)

    def _connect(self, keeping_gil: ctypes.PyDLL) -> None:
        triton = load_library()
        python = ctypes.pythonapi
        states = _ThreadStates(
            *[ctypes.cast(getattr(python, f"Py{name}"), _ADDRESS).value for name in (
                "GILState_Ensure", "GILState_Release", "Eval_SaveThread",
            )]
        )  # fmt: skip
        connect = _declared(self._library, "connect", ctypes.c_char_p, _ADDRESS, _ADDRESS, _ADDRESS)
        missing = connect(triton.handle._handle, ctypes.addressof(self._hooks), ctypes.addressof(states))
        if missing:
            raise UnsupportedError(
                f"Expected a Triton of release 2.51 or later in {triton.path}, which is "
                f"{describe_server_version(triton.binary)}; it lacks {missing.decode()}, which bound models need. Use "
                "the server that comes with pytriton-server.",
                expected=missing.decode(),
                received=None,
                where=str(triton.path),
            )
        # Once the servers are stopped at the end of the process, no thread of Triton may enter the interpreter again.
        # What is registered last is called first.
        atexit.unregister(process._stop_all)
        atexit.register(_declared(keeping_gil, "close", None))
        atexit.register(process._stop_all)

    # ---- for bindings -----------------------------------------------------------------------------------------------

    def add_model(self, model: ServedModel) -> int:
        """Return a model a number, under which Triton can load it."""
        number = next(self._numbers)
        self._models[number] = model
        return number

    def remove_model(self, number: int) -> None:
        """Forget a model; what Triton has loaded of it stays until it is unloaded."""
        self._models.pop(number, None)

    # ---- called by Triton -------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                logger.exception("pytriton.inprocess: %s failed", function.__name__)
                self._refuse(f"{type(error).__name__}: {error}".encode("utf-8", "replace").replace(b"\0", b""))
                return 0

        return call

    def _load_model(self, folder: bytes, version: int) -> int:
        text = (Path(os.fsdecode(folder)) / str(version) / MODEL_FILE).read_text(encoding="ascii")
        model = self._models.get(int(text))
        if model is None:
            raise LookupError(f"the model was bound in another process, or is unbound: there is no binding {text} here")
        number = next(self._numbers)
        self._loads[number] = _Load(model)
        return number

    def _unload_model(self, number: int) -> None:
        self._loads.pop(number, None)

    def _load_instance(self, number: int, instance: Any) -> int:
        load = self._loads[number]
        token = next(self._numbers)
        self._runners[token] = load.model.make_runner(next(load.places), instance.contents)
        return token

    def _unload_instance(self, token: int) -> None:
        self._runners.pop(token).unload()

    def _make_room(self, token: int, length: int) -> None:
        self._runners[token].make_room(length)

    def _execute(self, token: int, batch: int, request: int, in_place: int, count: int) -> int:
        # From here on the batch is answered by its handle at the latest.
        handle = Handle(self, batch)
        try:
            inputs = []
            if count:
                inputs = [(item.tensor, item.address) for item in (_InPlace * count).from_address(in_place)]
            self._runners[token].execute(handle, request, inputs)
        except BaseException as error:
            logger.exception("pytriton.inprocess: a batch failed outside of its callable")
            handle.fail(f"the batch could not be served: {type(error).__name__}: {error}", 1)
        return 1


def _declared(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = library[f"pytriton_inprocess_{name}"]
    function.restype = result
    function.argtypes = list(arguments)
    return function


def load_backend() -> Backend:
    """Load the native library, or give it if it is there.

    Raises:
        LibraryNotFoundError: If this installation has none.
        TritonServerNotFoundError: If there is no tritonserver.
        UnsupportedError: If its library cannot be used.
    """
    # The native library calls the functions of one only.
    return process.shared("backend", Backend)
