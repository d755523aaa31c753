"""Warm-up: batches through the callable before the worker attaches, whose results nobody gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pytriton.proxy.types import Request

from ..model import ModelSpec
from ..wire.batch import Batch
from ..wire.response import Answer
from .execution import Execution
from .service import Service

WarmupBatches = Sequence[Sequence[Request]]


def warm_up(service: Service, batches: WarmupBatches, run_async: Callable[[Awaitable[Any]], Any]) -> None:
    """Run batches through a synchronous callable.

    Raises:
        BaseException: What the callable raised or returned as an error, or what is wrong with its result.
    """
    for requests in batches:
        _WarmUp(service, requests).run(run_async)


async def warm_up_async(service: Service, batches: WarmupBatches) -> None:
    """Run batches through an asynchronous callable; raises as `warm_up`."""
    for requests in batches:
        await _WarmUp(service, requests).run_async()


class _WarmUpBatch(Batch):
    """Requests that came from no proxy backend: what an execution asks of a batch, for these."""

    __slots__ = ("_made", "_names", "_required")

    def __init__(self, requests: Sequence[Request], model: ModelSpec) -> None:
        # Nothing of a record is there: what is not overridden here is not to be asked for.
        self._made = list(requests)
        self._names = [spec.name for spec in model.outputs]
        self._required = {spec.name for spec in model.inputs if not spec.optional}
        self.number = 0
        self.rows = [1] * len(self._made)
        self.columns = {}
        self.uniform_outputs = None

    @property
    def is_uniform(self) -> bool:
        return False

    def requests(self) -> list[Request]:
        return self._made

    def is_cancelled(self, index: int) -> bool:
        return False

    def load_requested_outputs(self, index: int) -> list[str]:
        if not self._required.issubset(self._made[index]):
            # Of some of the inputs a callable makes some of the outputs, or others: nobody says which.
            return []
        requested = self._made[index].requested_output_names
        return self._names if requested is None else requested


class _WarmUp(Execution):
    """The way of a batch as far as the check of its results, which is all that can fail for the callable's sake."""

    __slots__ = ()

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        super().__init__(service, _WarmUpBatch(requests, service.model))

    def _answer_plain(self) -> bool:
        return False

    def _send(self, answers: list[Answer], *, done: bool) -> None:
        self._result = None

    def _end(self) -> None:
        self._drop()

    def _count_call(self) -> None:
        """Do not count."""

    def _refuse(self, index: int, error: BaseException) -> Answer:
        raise error

    def _fail(self, error: BaseException) -> None:
        self._drop()
        raise error
