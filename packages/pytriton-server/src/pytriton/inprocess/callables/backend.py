"""The backend inside this process: a small native library whose entry points, called by Triton, call functions here.

The library is loaded twice, by Triton from its folder of backends and here, and is the same both times. It is told how
to find Triton's functions and which functions of Python to call. There is one for the process, however many servers
run; what belongs to a model is found by a number, which is in the only file of the model that Triton gets:

    Bindings --add_model--> number in the model's file --Triton loads the model--> _load_model
        --> _load_instance, once for each callable --> _execute, once for each batch --> runner

Functions that Triton calls run in its threads. None lets an exception out; what could be told to nobody else is logged.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pytriton.inprocess.callables.batches import BatchHandle
from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.library import NativeLibrary

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

    def execute(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
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
        library = NativeLibrary()
        function = library.function
        # Triton calls back into Python while it sends, partly with its own locks held: never with the GIL kept.
        self.respond = function("respond", ctypes.c_int, _U64, _ADDRESS, _U64, _ADDRESS)
        self.fail = function("fail", None, _U64, ctypes.c_int, ctypes.c_char_p)
        self.is_cancelled = function("is_cancelled", ctypes.c_int, _U64, _U32, keep_gil=True)
        self.delete = function("delete", ctypes.c_int, _U64, keep_gil=True)
        self._refuse = function("refuse", None, ctypes.c_char_p, keep_gil=True)
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
        python = ctypes.pythonapi
        names = "PyGILState_Ensure", "PyGILState_Release", "PyEval_SaveThread"
        states = _ThreadStates(*[ctypes.cast(getattr(python, name), _ADDRESS).value for name in names])
        library.connect("connect", ctypes.addressof(self._hooks), ctypes.addressof(states))
        # Then no thread of Triton may enter the interpreter any more.
        process.call_at_exit(function("close", None, keep_gil=True))

    # ---- for bindings -----------------------------------------------------------------------------------------------

    def add_model(self, model: ServedModel) -> int:
        """Give a model a number, under which Triton can load it."""
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
        handle = BatchHandle(self, batch)
        try:
            inputs = []
            if count:
                inputs = [(item.tensor, item.address) for item in (_InPlace * count).from_address(in_place)]
            self._runners[token].execute(handle, request, inputs)
        except BaseException as error:
            logger.exception("pytriton.inprocess: a batch failed outside of its callable")
            handle.fail(f"the batch could not be served: {type(error).__name__}: {error}", 1)
        return 1


def load_backend() -> Backend:
    """Load the native library, or give it if it is there.

    Raises:
        LibraryNotFoundError: If this installation has none.
        TritonServerNotFoundError: If there is no tritonserver.
        UnsupportedError: If its library cannot be used.
    """
    # The native library calls the functions of one only.
    return process.shared("backend", Backend)
