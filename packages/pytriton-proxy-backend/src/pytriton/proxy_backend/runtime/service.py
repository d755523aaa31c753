"""What all batches of a worker have in common: its callable, its model, its connection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..model import ModelSpec
from ..transport.connection import Connection
from ..wire import layout
from ..wire.batch import Batch
from ..wire.response import Answer, Array, Written
from .outputs import OutputChecker
from .statistics import Counters

InferenceCallable = Callable[..., Any]


def is_async(infer_func: InferenceCallable) -> bool:
    """Return whether a callable, or the `__call__` of an object, is a coroutine or async generator function."""
    while hasattr(infer_func, "func") and hasattr(infer_func, "keywords"):  # functools.partial
        infer_func = infer_func.func
    for candidate in (infer_func, getattr(infer_func, "__call__", None)):  # noqa: B004 - the method itself is wanted
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            return True
    return False


class AnswerWay(Protocol):
    """Where the answers to a batch go; the methods are those of `Connection`."""

    def respond(self, number: int, answers: Sequence[Answer], *, done: bool, drop: Callable[[], None]) -> None: ...

    def write_whole(
        self,
        batch: Batch,
        outputs: dict[str, Array],
        names: tuple[str, ...],
        fits: Callable[[dict[str, Array], tuple[str, ...]], bool],
    ) -> Written | None: ...

    def write_plain(
        self,
        number: int,
        results: Sequence[dict[str, Array]],
        names: tuple[str, ...],
        fits: Callable[[Sequence[dict[str, Array]], tuple[str, ...]], bool],
    ) -> Written | None: ...

    def send(self, number: int, written: Written, *, done: bool) -> None: ...

    def fail(self, number: int, text: str, code: layout.ErrorCode = ...) -> None: ...


class Service:
    """What all batches of a worker have in common.

    Attributes:
        connection: Where the batches come from; there is none while the worker warms up, nor in process.
        answers: Where the answers go, mostly the same; there is none while the worker warms up.
        infer_func: The callable.
        model: The model that it serves.
        checker: Checks what it returns.
        unrecoverable: Errors of the callable after which it must not be called again.
        counters: Where it is counted what happens.
        joins: Whether answers may go out as arrays over the whole batch.
    """

    connection: Connection
    answers: AnswerWay

    def __init__(
        self,
        infer_func: InferenceCallable,
        model: ModelSpec,
        unrecoverable: tuple[type[BaseException], ...] = (),
        counters: Counters | None = None,
    ) -> None:
        self.infer_func = infer_func
        self.model = model
        self.checker = OutputChecker(model)
        self.unrecoverable = unrecoverable
        self.counters = Counters() if counters is None else counters
        self.joins = model.batching
        # What a callable under `@batch` offers: a call for the whole batch that makes nothing for each request.
        self.whole: Callable[..., Any] | None = None
        # Asked of the type: a wrapper of somebody else's above `@batch` hands on all attributes, and has to be called.
        if model.batching and not model.decoupled and hasattr(type(infer_func), "__pytriton_whole__"):
            self.whole = infer_func.__pytriton_whole__  # type: ignore[attr-defined]
        self._wanted: dict[tuple[str, ...] | None, tuple[str, ...]] = {}

    def wanted_names(self, requested: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the outputs that the model has of those that are asked for.

        In its  order; `None` where it is not known.
        """
        names = self._wanted.get(requested)
        if names is None and requested is not None:
            names = self._wanted[requested] = self.checker.wanted(requested)
        return names
