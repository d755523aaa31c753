"""What all batches of a worker have in common: its callable, its model, and where the responses go."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

from ..model import ModelSpec
from ..wire.batch import Batch
from ..wire.layout import ErrorCode
from ..wire.record import Record
from ..wire.response import ResponseWriter
from .failures import FailureLog
from .results.golden import Golden
from .results.outputs import OutputChecker
from .results.steps import Pacing
from .statistics import Counters

InferenceCallable = Callable[..., Any]


def is_async(infer_func: InferenceCallable) -> bool:
    """Return whether a callable, or the `__call__` of an object, is a coroutine or async generator function."""
    while isinstance(infer_func, functools.partial):  # also one below a decorator
        infer_func = infer_func.func
    for candidate in (infer_func, getattr(infer_func, "__call__", None)):  # noqa: B004 - the method itself is wanted
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            return True
    return False


class ResponseSink(Protocol):
    """Where the responses to batches go."""

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        """Write a record and send it; when `done`, nothing more comes for the batch.

        Raises `ArenaFullError`, after which nothing was sent, and `ConnectionLostError` if nobody is there any more.
        """

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a batch with an error for every request of it that has no answer yet."""


class Together(Protocol):
    """Takes records of streams that are sent together with those of others."""

    def respond_soon(self, number: int, record: Record) -> None:
        """Keep a record of a batch that goes on until `flush`; nothing may refer to arrays in it.

        Raises `ArenaFullError` if an earlier record of that batch found no room, and `ConnectionLostError`.
        """

    def flush(self) -> None:
        """Send what is kept."""


class BatchSource(ResponseSink, Protocol):
    """Where batches come from, and their responses go; see `transport.connection.Connection`."""

    tick_s: float
    on_cancel: Callable[[int, int], None] | None
    on_unreadable: Callable[[], None] | None

    @property
    def pacing(self) -> Pacing | None:
        """What says which streams are to pause; `None` if nothing does."""

    def together(self, schedule: Callable[[], object]) -> Together | None:
        """Return what sends records of several batches together; `None` if nothing does.

        `schedule` is called when records wait, and has them sent soon.
        """

    def receive(self) -> Batch | None:
        """Wait for the next batch; `None` when there will be none."""

    def poll(self) -> list[Batch] | None:
        """Return the batches that are there; `None` when there will be none."""

    def tick(self) -> None:
        """Do what is due every `tick_s` seconds while nothing comes."""

    @property
    def is_settled(self) -> bool:
        """Whether `tick` has nothing to do before something comes."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` may find something."""


class CostRule:
    """Counts the elements that the free sizes of the costliest input take in a batch, as `cost.h` does."""

    def __init__(self, model: ModelSpec) -> None:
        """Prepare it for a model with a cost."""
        assert model.cost is not None
        self._is_packed = model.cost["layout"] == "packed"
        # The places of the free sizes in arrays, which have the rows in front.
        self._axes = {
            tensor.name: [axis for axis, size in enumerate(tensor.shape, 1) if size == -1]
            for tensor in model.inputs
            if -1 in tensor.shape
        }

    def of(self, batch: Batch) -> tuple[int, int]:
        """Return what a batch costs, and how much of that is padding."""
        most = (0, 0)
        for name, axes in self._axes.items():
            shapes = batch.shapes_of(name)
            # An empty size counts as 1.
            sizes = [[max(shape[axis], 1) for axis in axes] for shape in shapes]
            own = sum(shape[0] * math.prod(each) for shape, each in zip(shapes, sizes, strict=True))
            cost = own
            if not self._is_packed:
                cost = batch.metadata.starts[-1] * math.prod(map(max, zip(*sizes, strict=True))) if sizes else 0
            most = max(most, (cost, cost - own))
        return most


class Service:
    """What all batches of a worker have in common."""

    sink: ResponseSink  # where they go; there is none while the worker warms up

    def __init__(
        self,
        infer_func: InferenceCallable,
        model: ModelSpec,
        unrecoverable: tuple[type[BaseException], ...] = (),
        counters: Counters | None = None,
        *,
        join_below: int | None = None,
    ) -> None:
        self.infer_func = infer_func  # the callable
        self.model = model  # the model that it serves
        self.checker = OutputChecker(model)  # checks what it returns
        self.writer = ResponseWriter(join_below, batching=model.batching)  # lays the responses out
        self.unrecoverable = unrecoverable  # errors of the callable after which it must not be called again
        self.counters = Counters() if counters is None else counters  # where it is counted what happens
        self.failures = FailureLog()  # which failures are written to the log
        self.is_logged = False  # whether there is a record of every request
        self.golden: Golden | None = None  # takes the outputs of the warm-up; `None` if nobody compares them
        self.pacing: Pacing | None = None  # says which streams are to pause; `None` if nothing does
        self.together: Together | None = None  # sends records of several streams together; `None` if nothing does
        self._cost_rule = None if model.cost is None else CostRule(model)
        # A call for the whole batch, which a callable under `@batch` offers, and which makes no objects for each
        # request. It takes the inputs over the whole batch, the rows of each request, and a function that makes the
        # requests.
        self.columns_func: Callable[..., Any] | None = None
        # Asked of the type: a wrapper of somebody else's above `@batch` hands on all attributes, and has to be called.
        # Where requests differ in length, `@batch` pads or packs them, and cuts what comes back.
        is_plain = model.batching and not model.decoupled and model.cost is None
        if is_plain and hasattr(type(infer_func), "__pytriton_whole__"):
            self.columns_func = infer_func.__pytriton_whole__  # type: ignore[attr-defined]

    def count_cost(self, batch: Batch) -> None:
        """Count what a batch costs that the callable is about to get, if the model says what a batch may cost."""
        if self._cost_rule is not None:
            self.counters.add_cost(*self._cost_rule.of(batch))

    def wait_taken(self, batch: Batch | None, number: int) -> None:
        """Wait until the callers of a stream take what they were sent, or are gone.

        `None` if they have their last responses.
        """
        if self.pacing is not None and batch is not None:
            count = len(batch.rows)
            self.pacing.wait_taken(number, lambda: all(batch.is_cancelled(index) for index in range(count)))
