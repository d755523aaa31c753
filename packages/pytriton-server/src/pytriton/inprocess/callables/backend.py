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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pytriton.inprocess.callables.batches import BatchHandle
from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.library import NativeLibrary

MODEL_FILE = "bound"
"""The file in the folder of a model version that has its number in this process."""

logger = logging.getLogger(__name__)


class Instance(ctypes.Structure):
    """One model instance, as the native library sees it.

    Attributes:
        slab: Address of the memory where the next batch is written.
        capacity: Its bytes.
        in_place_from: Inputs of so many bytes stay where they are if they can.
        token: The number of the instance here.
        batching: Whether tensors have a batch axis.
        decoupled: Whether a request may get any number of responses.
        owner: What keeps the slab, as long as it is the instance's.
        lane: That of plain batches; `None` where Python serves every batch.
        cache_bytes: What the answers of all models may take that are given again; 0 where those of this one are not.
        cost_limit: What a batch may cost; 0 if that is not counted.
        cost_overhead: What a batch costs by itself; 0 if that is to be found.
        cost_alike: A bit for each input that is as long as the others which have one.
        cost_packed: Whether inputs lie behind each other, and nothing is padded.
        cost_alone: Whether a request that costs more is served by itself.
        is_timed: Whether the callable has a batch for itself, so that the time that it takes is known.
    """

    _fields_ = (
        ("slab", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("in_place_from", ctypes.c_uint64),
        ("token", ctypes.c_uint64),
        ("batching", ctypes.c_uint32),
        ("decoupled", ctypes.c_uint32),
        ("owner", ctypes.py_object),
        ("lane", ctypes.c_void_p),
        ("cache_bytes", ctypes.c_uint64),
        ("cost_limit", ctypes.c_uint64),
        ("cost_overhead", ctypes.c_uint64),
        ("cost_alike", ctypes.c_uint64),
        ("cost_packed", ctypes.c_uint32),
        ("cost_alone", ctypes.c_uint32),
        ("is_timed", ctypes.c_uint32),
    )


class InstanceRunner(Protocol):
    """Serves the batches of one model instance."""

    def execute(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
        """Serve a batch, or arrange that it is served. It is in the instance's slab; `request` is its first request."""

    def make_room(self, length: int) -> None:
        """Replace the instance's slab by one of `length` bytes or more."""

    def unload(self) -> None:
        """End, once: no batch comes any more."""


class LoadableModel(Protocol):
    """A model that Triton can load."""

    def make_runner(self, place: int, instance: Instance) -> InstanceRunner:
        """Make the runner of an instance, the one at `place` of the loaded model, and set the instance's fields."""


class _Load:
    """One loading of a model by Triton; while Triton loads it again, there are two."""

    def __init__(self, model: LoadableModel) -> None:
        self.model = model
        self.places = itertools.count()


class Backend:
    """The native library, and what it calls."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._models: dict[int, LoadableModel] = {}
        self._loads: dict[int, _Load] = {}
        self._runners: dict[int, InstanceRunner] = {}
        library = NativeLibrary()
        library.connect()
        # In the order of the library's arguments; the library keeps them as long as the process lives.
        hooks = (
            self._guarded(self._load_model),
            self._guarded(self._load_instance),
            self._guarded(self._unload_model),
            self._guarded(self._unload_instance),
            self._guarded(self._make_room),
            self._execute,
        )
        functions = library.open("open", hooks)
        # Sends the answers of a record.
        self.respond: Callable[[int, int, int, list[int] | None], None] = functions["respond"]
        # Answers every open request of a batch with an error.
        self.fail: Callable[[int, int, bytes], None] = functions["fail"]
        # Whether a request, or all of a batch, was given up.
        self.is_cancelled: Callable[[int, int], bool] = functions["is_cancelled"]
        self.delete: Callable[[int], bool] = functions["delete"]  # deletes a batch that has its answers
        self.new_lane: Callable[..., Any] = functions["new_lane"]  # makes the lane of an instance, see `Lane`
        # Gives the thread that a lane serves a batch in; 0 if none does.
        self.lane_thread: Callable[[Any], int] = functions["lane_thread"]
        self.close_lane: Callable[[Any], None] = functions["close_lane"]  # lets a lane go of everything
        self._refuse: Callable[[bytes], None] = functions["refuse"]
        # After that, no thread of Triton may enter the interpreter.
        process.call_at_exit(library.function("close", None, keep_gil=True))

    # ---- for bindings -----------------------------------------------------------------------------------------------

    def add_model(self, model: LoadableModel) -> int:
        """Give a model a number, under which Triton can load it."""
        number = next(self._numbers)
        self._models[number] = model
        return number

    def remove_model(self, number: int) -> None:
        """Forget a model; its loaded instances stay until Triton unloads them."""
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

    def _load_model(self, folder: str, version: int) -> int:
        text = (Path(folder) / str(version) / MODEL_FILE).read_text(encoding="ascii")
        model = self._models.get(int(text))
        if model is None:
            raise LookupError(f"the model was bound in another process, or is unbound: there is no binding {text} here")
        number = next(self._numbers)
        self._loads[number] = _Load(model)
        return number

    def _unload_model(self, number: int) -> None:
        self._loads.pop(number, None)

    def _load_instance(self, number: int, address: int) -> int:
        load = self._loads[number]
        token = next(self._numbers)
        self._runners[token] = load.model.make_runner(next(load.places), Instance.from_address(address))
        return token

    def _unload_instance(self, token: int) -> None:
        self._runners.pop(token).unload()

    def _make_room(self, token: int, length: int) -> None:
        self._runners[token].make_room(length)

    def _execute(self, token: int, batch: int, request: int, in_place: list[tuple[int, int]]) -> int:
        # From here on, the handle answers the batch at the latest when it is deleted.
        handle = BatchHandle(self, batch)
        handle.serve(self._runners[token].execute, request, in_place)
        return 1


def load_backend() -> Backend:
    """Load the native library once, and return it."""
    # The native library calls the functions of a single object.
    return process.shared("backend", Backend)
