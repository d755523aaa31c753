"""Random batches of honest and hostile requests to the model `echo`, and what the reference says of their answers."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from support.isolation.echo import DTYPES, RAISE, REFUSE, SERVED, SHAPES, TEXTS, echo, echo_all
from support.isolation.raw_requests import NO_CODE, strings
from support.isolation.reference import DATA_TYPES, Answer, Model, RawRequest, RawTensor, Request, TensorSpec, serve

_NAMES = {dtype: name for name, dtype in DATA_TYPES.items()}
MODEL = Model(
    inputs={name: TensorSpec(_NAMES[dtype], SHAPES[name], optional=True) for name, dtype in DTYPES.items()},
    outputs={
        **{f"{name}_out": TensorSpec(_NAMES[dtype], SHAPES[name]) for name, dtype in DTYPES.items()},
        **{name: TensorSpec(_NAMES[dtype], (1,)) for name, dtype in SERVED.items()},
    },
    max_batch_size=64,
)
"""As the reference has it."""


# ---- requests -------------------------------------------------------------------------------------------------------


class Requests:
    """Makes batches.

    Args:
        seed: Of all that is random in them.
        hostile: The part of requests that have something wrong.
        reaching: Whether strings reach past the end of their requests. Triton's Python backend ends a batch for one.
        rowless: Whether there are requests of no rows. Triton's Python backend never answers them, and an ensemble
            makes a row of them.
    """

    def __init__(self, seed: int, hostile: float = 0.3, *, reaching: bool = True, rowless: bool = True) -> None:
        self._random = random.Random(seed)
        self._hostile = hostile
        self._reaching = reaching
        self._rowless = rowless
        self._count = 0
        self._is_only = False  # whether the request that is spoiled has one input

    def batch(self) -> list[RawRequest]:
        """Return requests that are sent together."""
        requests = [self._request() for _ in range(self._random.randint(2, 8))]
        for place, request in enumerate(requests):
            if self._random.random() < self._hostile:
                self._spoil(request, requests[(place + 1) % len(requests)])
        return requests

    def _request(self) -> RawRequest:
        draw = self._random
        self._count += 1
        rows = draw.choice([1, 1, 1, 2, 3])
        # Mostly of one form, so that they are joined.
        names = ["text"] if draw.random() < 0.5 else draw.sample(list(DTYPES), draw.randint(1, len(DTYPES)))
        inputs = {name: self._tensor(name, rows) for name in names}
        wanted = draw.sample(list(MODEL.outputs), draw.randint(1, 3)) if draw.random() < 0.3 else list(MODEL.outputs)
        return RawRequest(inputs, outputs=list(dict.fromkeys([*wanted, "ids"])), id=str(self._count))

    def _tensor(self, name: str, rows: int) -> RawTensor:
        draw = self._random
        shape = (rows, *(draw.choice([1, 1, 1, 2, 0, 3]) if size == -1 else size for size in SHAPES[name]))
        count = int(np.prod(shape))
        if name in TEXTS:
            return RawTensor("BYTES", shape, strings(*(self._string() for _ in range(count))))
        numbers = np.array([draw.randrange(1000) for _ in range(count)], DTYPES[name])
        return RawTensor(_NAMES[DTYPES[name]], shape, numbers.tobytes())

    def _string(self) -> bytes:
        draw = self._random
        chance = draw.random()
        if chance < 0.02:
            return RAISE if chance < 0.004 else REFUSE
        if chance < 0.1:
            # What looks like strings to whoever begins to read within it.
            return strings(draw.randbytes(draw.randrange(4)), b"looks like one")
        return draw.randbytes(draw.choice([0, 1, 3, 4, 11, 12, 100]))

    # ---- what is wrong with them ------------------------------------------------------------------------------------

    def _spoil(self, request: RawRequest, neighbour: RawRequest) -> None:
        """Put something wrong into a request; mostly such as reaches for the next one."""
        name = self._random.choice(list(request.inputs))
        self._is_only = len(request.inputs) == 1
        inputs = dict(request.inputs)
        ways: list[Callable[[RawTensor, RawRequest], RawTensor]] = [self._append, self._reshape, self._retype]
        if self._reaching or name not in TEXTS:
            ways += [self._reach, self._reach, self._reach, self._cut, self._flip]
        inputs[name] = self._random.choice(ways)(inputs[name], neighbour)
        if self._random.random() < 0.05:
            inputs["unknown"] = inputs[name]
        request.inputs = inputs

    def _reach(self, tensor: RawTensor, neighbour: RawRequest) -> RawTensor:
        """Have a length reach into what lies behind."""
        datatype, shape, payload = tensor
        if datatype != "BYTES" or not payload:
            return self._cut(tensor, neighbour)
        places = [0]
        while (end := places[-1] + 4 + struct.unpack_from("<I", payload, places[-1])[0]) < len(payload):
            places.append(end)
        at = places[-1] if self._random.random() < 0.7 else self._random.choice(places)
        behind = sum(len(other.payload) for other in neighbour.inputs.values())
        own = len(payload) - at - 4
        size = own + self._random.choice([1, 4, behind, behind + 4, self._random.randrange(200), 2**32 - 1 - own])
        return RawTensor(datatype, shape, payload[:at] + struct.pack("<I", size) + payload[at + 4 :])

    def _cut(self, tensor: RawTensor, _: RawRequest) -> RawTensor:
        return tensor._replace(payload=tensor.payload[: -self._random.randint(1, 8)])

    def _append(self, tensor: RawTensor, _: RawRequest) -> RawTensor:
        more = self._random.choice([b"\0", bytes(4), strings(b"one more"), self._random.randbytes(5)])
        return tensor._replace(payload=tensor.payload + more)

    def _reshape(self, tensor: RawTensor, _: RawRequest) -> RawTensor:
        shape = list(tensor.shape)
        axis = self._random.randrange(len(shape))
        shape[axis] = self._random.choice([0, 1, 2, 5, 63, 65, 1 << 20, 1 << 40])
        if axis == 0 and shape[0] % (1 << 32) == 0 and not (self._rowless and self._is_only):
            # What Triton makes of one such input beside others differs from run to run.
            shape[0] = 5
        return tensor._replace(shape=tuple(shape))

    def _retype(self, tensor: RawTensor, _: RawRequest) -> RawTensor:
        return tensor._replace(datatype=self._random.choice(list(DATA_TYPES)))

    def _flip(self, tensor: RawTensor, _: RawRequest) -> RawTensor:
        payload = bytearray(tensor.payload or b"\0")
        payload[self._random.randrange(len(payload))] ^= 1 << self._random.randrange(8)
        return tensor._replace(payload=bytes(payload))


# ---- answers --------------------------------------------------------------------------------------------------------


def plain(requests: Sequence[Request]) -> list[Any]:
    """The model for the reference."""
    return echo_all({request.id: request.inputs for request in requests})


def alone(requests: Sequence[Request]) -> list[Any]:
    """The model of rows for the reference, which knows of no requests."""
    return [echo(request.inputs, 0) for request in requests]


def differences(requests: Sequence[RawRequest], answers: Sequence[Answer], *, by_rows: bool = False) -> Iterator[str]:
    """Tell where answers are not those of the reference.

    Which requests were served as one batch, the answers say.

    Args:
        requests: What was sent.
        answers: What came.
        by_rows: Whether the callable has got rows, and cannot say which requests they are of.
    """
    found = dict(zip([request.id for request in requests], answers, strict=True))
    asked = {request.id: request for request in requests}
    for id, (outputs, code, error) in found.items():
        [expected] = serve(MODEL, [asked[id]], alone)
        if expected.error:
            # Told by whoever saw it first: Triton itself, or the proxy.
            own = re.match(r"input '\w+': ", error)
            if code not in (expected.code, NO_CODE) or (own and error != expected.error) or not error:
                yield f"request {id}, {asked[id]}: expected {expected}, got {found[id]}"
            continue
        if by_rows:
            compared = {name: value for name, value in outputs.items() if name not in SERVED}
            wanted = {name: value for name, value in expected.outputs.items() if name not in SERVED}
            if error or compared != wanted:
                yield f"request {id}, {asked[id]}: expected {expected}, got {found[id]}"
            continue
        batch = _batch_of(found[id]) or [id]
        if id not in batch or not set(batch) <= set(asked):
            yield f"request {id}: got the answer of the batch {batch}"
            continue
        whole = serve(MODEL, [asked[other] for other in batch], plain)
        meant = whole[batch.index(id)]
        if outputs != meant.outputs or code not in (meant.code, NO_CODE)[: 1 + bool(error)] or meant.error not in error:
            yield f"request {id}, {asked[id]}: expected {meant}, got {found[id]}"


def _batch_of(answer: Answer) -> list[str]:
    """Return the ids of the requests that were served with one; none where it was not."""
    if "raised with " in answer.error:
        return answer.error.partition("raised with ")[2].partition(";")[0].split(",")
    if "ids" in answer.outputs and answer.outputs["ids"].payload:
        size = struct.unpack_from("<I", answer.outputs["ids"].payload)[0]
        return answer.outputs["ids"].payload[4 : 4 + size].decode().split(",")
    return []
