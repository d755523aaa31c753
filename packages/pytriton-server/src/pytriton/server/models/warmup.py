"""The warm-up of a bound model, as the batches that one of its workers runs before it attaches."""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import overload

from pytriton.model_config.common import ModelWarmup
from pytriton.model_config.warmup import warmup_request
from pytriton.proxy.types import Request


class WarmupBatches(Sequence[Sequence[Request]]):
    """Batches of one request each. They are made when they are asked for, because callables may change their inputs."""

    def __init__(self, warmups: Iterable[ModelWarmup], *, batching: bool, output_names: Iterable[str]) -> None:
        self._batching = batching
        self._output_names = list(output_names)
        self._warmups = list(warmups)
        # The number of the last request of each warm-up, counted over all.
        self._ends = list(itertools.accumulate(int(warmup.count) for warmup in self._warmups))
        self._made = 0
        self._is_cut = False
        for warmup in self._warmups:
            if warmup.count and any(given.input_data_file for given in warmup.inputs.values()):
                # A wrong file is an error of bind(), and not of a worker's thread.
                self._make(warmup, 0)

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        if not self._made:
            return f"none of its {len(self)} requests was begun"
        return f"request {self._made} of {len(self)}, of ModelWarmup {self._find(self._made - 1)[0].name!r}"

    def cut(self) -> None:
        """End it, so that whoever iterates gets no more batches."""
        self._is_cut = True

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> Sequence[Request]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[Request]]: ...
    def __getitem__(self, place: int | slice) -> "Sequence[Request] | Sequence[Sequence[Request]]":
        found = range(len(self))[place]
        if isinstance(found, range):
            return [self._make(*self._find(index)) for index in found]
        if self._is_cut:
            raise IndexError(place)
        self._made = found + 1
        return self._make(*self._find(found))

    def _find(self, place: int) -> tuple[ModelWarmup, int]:
        which = bisect.bisect_right(self._ends, place)
        return self._warmups[which], place - (self._ends[which - 1] if which else 0)

    def _make(self, warmup: ModelWarmup, index: int) -> Sequence[Request]:
        data = warmup_request(warmup, index, batching=self._batching)
        return [
            Request(
                data,
                requested_output_names=list(self._output_names),
                request_id=f"warmup-{warmup.name}-{index}",
            )
        ]
