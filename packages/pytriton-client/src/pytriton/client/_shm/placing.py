"""Where the tensors of a request lie in shared memory, and how large its outputs are going to be."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core.dtypes import dtype_of
from .._core.forks import Lock
from .._core.requests import InferRequest, InferResponse, SharedTensors, Slice
from .._core.spec import ModelSpec
from .._core.tensors import decode_tensor, encode_tensor
from .pool import RegionPool
from .regions import Region

_ALIGNMENT = 64
# How many shapes of inputs are remembered with the sizes of their outputs.
_MOST_SHAPES = 64
# After this many outputs of one size for inputs of one shape, the next one is expected to have that size, too.
_SURE_AFTER = 2
_SEQUENCE_OPTIONS = ("sequence_id", "sequence_start", "sequence_end")


def layout_of_inputs(request: InferRequest, least_bytes: int) -> dict[str, int]:
    """Return the sizes of those inputs that go through shared memory."""
    sizes = {}
    for tensor, array in request.inputs:
        size = array.nbytes
        if tensor.datatype == "BYTES":
            size = 4 * array.size + sum(map(len, array.ravel().tolist()))
        if size >= least_bytes:
            sizes[tensor.name] = size
    return sizes


class Expectations:
    """How large the outputs of a model will be: by its specification, or as they were for inputs of the same shapes."""

    def __init__(self, max_response_bytes: int) -> None:
        self._max_response_bytes = max_response_bytes
        self._lock = Lock()
        self._seen: OrderedDict[object, dict[str, tuple[int, int]]] = OrderedDict()
        # The outputs whose sizes cannot be predicted.
        self._changing: set[str] = set()

    def sizes(self, spec: ModelSpec, request: InferRequest, least_bytes: int) -> dict[str, int]:
        """Return the sizes of those outputs that go through shared memory."""
        sizes = {}
        batch = request.inputs[0][1].shape[0] if spec.batching and request.inputs else None
        with self._lock:
            seen = self._seen.get(_shapes(request), {}) if self._seen and may_repeat(request) else {}
            for tensor in spec.outputs:
                if tensor.dtype is np.bytes_ or tensor.name in self._changing:
                    continue
                size, count = seen.get(tensor.name, (0, 0))
                if -1 not in tensor.shape and (batch is not None or not spec.batching):
                    size, count = math.prod((batch or 1, *tensor.shape)) * np.dtype(tensor.dtype).itemsize, _SURE_AFTER
                if count >= _SURE_AFTER and size >= least_bytes:
                    sizes[tensor.name] = size
        return sizes if sum(sizes.values()) <= self._max_response_bytes else {}

    def learn(self, spec: ModelSpec, request: InferRequest, response: InferResponse, least_bytes: int) -> None:
        """Remember how large the outputs were that can go through shared memory."""
        large = {name for name, array in response.outputs.items() if array.nbytes >= least_bytes}
        names = [
            tensor.name
            for tensor in spec.outputs
            if tensor.name in large and tensor.dtype is not np.bytes_ and -1 in tensor.shape
        ]
        if not names:
            return
        shapes = _shapes(request)
        with self._lock:
            seen = self._seen.setdefault(shapes, {})
            self._seen.move_to_end(shapes)
            if len(self._seen) > _MOST_SHAPES:
                self._seen.popitem(last=False)
            for name in names:
                size = response.outputs[name].nbytes
                before, count = seen.get(name, (size, 0))
                if before != size:
                    self._changing.add(name)
                seen[name] = (size, count + 1)

    def give_up(self, placed: Placed, text: str) -> bool:
        """Stop expecting a size for the output that the server's text names; return whether it names one."""
        too_small = {name for name in placed.output_names if f"'{name}'" in text}
        with self._lock:
            self._changing |= too_small
        return bool(too_small)


class OutputRoom:
    """A region that a server writes outputs into; with ``may_lend``, arrays of the caller may lie in it."""

    def __init__(self, region: Region, sizes: Mapping[str, int], *, may_lend: bool) -> None:
        self.region = region
        self.slices = _slices(region, sizes)
        self.may_lend = may_lend
        self.owner = region.memory[:]

    def read(self, name: str, datatype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Return the array of an output that the server has written."""
        where = self.slices[name]
        if datatype == "BYTES":
            raise ValueError(f"expected numbers as the output {name!r}, received strings")
        size = math.prod(shape) * np.dtype(dtype_of(datatype)).itemsize
        if size > where.size:
            raise ValueError(f"expected at most {where.size} bytes of the output {name!r}, received {size}")
        # A small output must not keep the whole region in use.
        may_share = self.may_lend and 2 * size >= sum(other.size for other in self.slices.values())
        data = self.owner.data[where.offset : where.offset + size]
        return decode_tensor(data, datatype, shape, may_share=may_share)


class Placed:
    """A request, and the regions that its tensors lie in."""

    def __init__(self, pool: RegionPool, request: InferRequest) -> None:
        self._pool = pool
        self.request = request  # what is to be sent
        self._regions: list[Region] = []
        self._room: OutputRoom | None = None

    @staticmethod
    def room_for(sizes: Mapping[str, int]) -> int:
        """Return the bytes that tensors take together."""
        return sum(_aligned(size) for size in sizes.values())

    def place_inputs(self, region: Region, sizes: Mapping[str, int]) -> None:
        """Copy inputs into a region."""
        self._regions.append(region)
        slices = _slices(region, sizes)
        for tensor, array in self.request.inputs:
            where = slices.get(tensor.name)
            if where is None:
                continue
            place = region.memory[where.offset : where.offset + where.size]
            if tensor.datatype == "BYTES":
                place[:] = np.frombuffer(encode_tensor(array, tensor.datatype), np.uint8)
            else:
                np.copyto(place.view(array.dtype).reshape(array.shape), array, casting="no")
        self.request = dataclasses.replace(self.request, shared=SharedTensors(slices, {}, _nothing))

    def place_outputs(self, region: Region, sizes: Mapping[str, int], spec: ModelSpec) -> None:
        """Have outputs written into a region."""
        self._regions.append(region)
        room = self._room = OutputRoom(region, sizes, may_lend=self._pool.may_lend(region))
        inputs = {} if self.request.shared is None else self.request.shared.inputs
        outputs = {tensor.name: room.slices.get(tensor.name) for tensor in spec.outputs}
        self.request = dataclasses.replace(self.request, shared=SharedTensors(inputs, outputs, room.read))

    @property
    def output_names(self) -> list[str]:
        """The outputs that the server writes into a region."""
        return [] if self._room is None else list(self._room.slices)

    @property
    def may_repeat(self) -> bool:
        """Whether the model may carry out the request a second time."""
        return may_repeat(self.request)

    @property
    def region_names(self) -> list[str]:
        """The regions."""
        return [region.name for region in self._regions]

    @property
    def has_regions(self) -> bool:
        """Whether a tensor of the request goes through shared memory."""
        return bool(self._regions)

    def finish(self, response: InferResponse) -> InferResponse:
        """Return the response of the server, which has done with the regions."""
        room, self._room = self._room, None
        if room is not None and room.may_lend:
            self._regions.remove(room.region)
            self._pool.lend(room.region, room.owner)
        self.give_back()
        return response

    def give_back(self) -> None:
        """Free the regions."""
        self._end(self._pool.give_back)

    def leave(self) -> None:
        """Leave the regions to the server, which may still use them."""
        self._end(self._pool.leave)

    def forget(self) -> None:
        """Leave the regions, which the server does not know any more."""
        self._end(self._pool.forget)

    def _end(self, end: Any) -> None:
        for region in self._regions:
            end(region)
        self._regions.clear()


def _nothing(name: str, datatype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    raise ValueError(f"expected the output {name!r} in the response, received {datatype} of {list(shape)} elsewhere")


def may_repeat(request: InferRequest) -> bool:
    """Return whether a model may carry out a request twice: a request of a sequence has changed its state."""
    return not any(option in request.call.options for option in _SEQUENCE_OPTIONS)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slices(region: Region, sizes: Mapping[str, int]) -> dict[str, Slice]:
    slices = {}
    offset = 0
    for name, size in sizes.items():
        slices[name] = Slice(region.name, offset, size)
        offset += _aligned(size)
    return slices


def _shapes(request: InferRequest) -> object:
    return tuple((tensor.name, array.shape) for tensor, array in request.inputs)
