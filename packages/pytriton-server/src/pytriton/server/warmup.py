"""The warm-up of a bound model, as the batches that its workers run before they attach."""

from collections.abc import Iterable, Sequence
from typing import overload

from pytriton.model_config._warmup import warmup_request
from pytriton.model_config.common import ModelWarmup
from pytriton.proxy.types import Request

__all__ = ["WarmupBatches"]


class WarmupBatches(Sequence[Sequence[Request]]):
    """Batches of one request each, made anew whenever one is asked for: callables may keep and change their inputs.

    Args:
        warmups: What to make.
        batching: Whether the model has a batch axis.

    Raises:
        PyTritonBadParameterError: A file cannot be read, or what it holds does not fit.
    """

    def __init__(self, warmups: Iterable[ModelWarmup], *, batching: bool) -> None:
        self._batching = batching
        self._calls = [(warmup, index) for warmup in warmups for index in range(warmup.count)]
        for warmup, index in self._calls:
            if index == 0 and any(given.input_data_file for given in warmup.inputs.values()):
                # A wrong file is told where it is named, not in the thread of a worker.
                self._make(warmup, index)

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, place: int) -> Sequence[Request]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[Request]]: ...
    def __getitem__(self, place: int | slice) -> "Sequence[Request] | Sequence[Sequence[Request]]":
        if isinstance(place, slice):
            return [self._make(*call) for call in self._calls[place]]
        return self._make(*self._calls[place])

    def _make(self, warmup: ModelWarmup, index: int) -> Sequence[Request]:
        data = warmup_request(warmup, index, batching=self._batching)
        return [Request(data, request_id=f"warmup-{warmup.name}-{index}")]
