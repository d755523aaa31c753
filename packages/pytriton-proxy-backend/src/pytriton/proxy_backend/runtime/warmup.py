"""Warm-up: batches through the callable before the worker attaches, whose results nobody gets."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pytriton.proxy.types import Request

from ..model import ModelSpec
from ..wire.batch import Batch
from ..wire.record import Record
from ..wire.response import ResponseData
from .answers import Answers
from .execution import Execution
from .service import Service
from .statistics import Counters

WarmupBatches = Sequence[Sequence[Request]]


def warm_up(service: Service, batches: WarmupBatches, run_async: Callable[[Awaitable[Any]], Any]) -> None:
    """Run batches through a synchronous callable."""
    service = _unobserved(service)
    for requests in batches:
        _WarmUp(service, requests).run(run_async)
    if service.golden is not None:
        service.golden.finish()


async def warm_up_async(service: Service, batches: WarmupBatches) -> None:
    """Run batches through an asynchronous callable; raises as `warm_up`."""
    service = _unobserved(service)
    for requests in batches:
        await _WarmUp(service, requests).run_async()
    if service.golden is not None:
        service.golden.finish()


def _unobserved(service: Service) -> Service:
    """Return the service without logs and counts, because nobody sent these requests."""
    made = copy.copy(service)
    made.is_logged = False
    made.counters = Counters()
    return made


class _WarmUpBatch(Batch):
    """Requests that came from no proxy backend, with the methods of a batch that an execution uses."""

    __slots__ = ("_names", "_required", "requests")

    def __init__(self, requests: Sequence[Request], model: ModelSpec) -> None:
        # There is no record, so everything that would read one is overridden here.
        self.requests = list(requests)
        self._names = [spec.name for spec in model.outputs]
        self._required = {spec.name for spec in model.inputs if not spec.optional}
        self.number = 0
        self.rows = [1] * len(self.requests)
        self.uniform_outputs = None

    @property
    def is_uniform(self) -> bool:
        return False

    def is_cancelled(self, index: int) -> bool:
        return False

    def load_requested_outputs(self, index: int) -> list[str]:
        if not self._required.issubset(self.requests[index]):
            # From a part of the inputs a callable may make any part of the outputs, so nothing is expected.
            return []
        requested = self.requests[index].requested_output_names
        return self._names if requested is None else requested


class _WarmUp(Execution):
    """The way of a batch as far as the check of its results, which is all that can fail for the callable's sake."""

    __slots__ = ("_requests",)

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        batch = _WarmUpBatch(requests, service.model)
        super().__init__(service, batch)
        self._requests = batch.requests

    def _call(self) -> Any:
        return self._service.infer_func(self._requests)

    def _keep(self) -> bool:
        # Each response is laid out by itself, and so seen below.
        return False

    def _lay_out(self, responses: list[ResponseData]) -> Record:
        if (golden := self._service.golden) is not None:
            for response in responses:
                golden.take(response.outputs)
        return super()._lay_out(responses)

    def _put(self, record: Record, *, done: bool, soon: bool = False) -> None:
        """Do not send."""

    def _end(self) -> None:
        self._drop()

    def _count_call(self) -> None:
        """Do not count."""

    def _make_answers(self) -> Answers:
        return Answers(self._service, self._count, None, _raise)

    def _fail(self, error: BaseException) -> None:
        self._drop()
        raise error


def _raise(_index: int, error: BaseException) -> None:
    raise error
