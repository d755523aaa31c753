"""One batch through an inference callable: call it, check what it returns, send the answers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from time import monotonic_ns
from typing import Any

from . import _layout as layout
from ._connection import Connection
from ._outputs import OutputChecker
from ._records import Batch
from ._responses import Answer
from ._statistics import Counters
from .errors import ArenaFullError, ConnectionLostError, OutputError, ProtocolError
from .model import ModelSpec

logger = logging.getLogger(__name__)

# In the place of the time when the callable began, or went on.
_PAUSED = 0
_COUNTED = -1

InferenceCallable = Callable[..., Any]


def is_async(infer_func: InferenceCallable) -> bool:
    """Whether a callable is a coroutine function or an async generator function, or an object whose `__call__` is."""
    while hasattr(infer_func, "func") and hasattr(infer_func, "keywords"):  # functools.partial
        infer_func = infer_func.func
    for candidate in (infer_func, getattr(infer_func, "__call__", None)):  # noqa: B004 - the method itself is wanted
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            return True
    return False


class Service:
    """What all batches of a worker have in common.

    Attributes:
        connection: Where the batches come from; there is none while the worker warms up.
        infer_func: The callable.
        model: The model that it serves.
        checker: Checks what it returns.
        unrecoverable: Errors of the callable after which it must not be called again.
        counters: Where it is counted what happens.
        joins: Whether answers may go out as arrays over the whole batch.
    """

    connection: Connection

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
        self.whole: Callable[..., Any] | None = getattr(infer_func, "__pytriton_whole__", None)
        if not model.batching or model.decoupled:
            self.whole = None
        self._wanted: dict[tuple[str, ...] | None, tuple[str, ...]] = {}

    def wanted_names(self, requested: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """The outputs that the model has of those that are asked for, in its order; `None` where it is not known."""
        names = self._wanted.get(requested)
        if names is None and requested is not None:
            names = self._wanted[requested] = self.checker.wanted(requested)
        return names


class Execution:
    """What happens to one batch, from the call to the last answer.

    It holds the only references to the requests that this library keeps; they are dropped when the outputs are
    written, before the answer is sent, so that the proxy backend gets the memory of the inputs back with it.

    Attributes:
        failure: What the callable raised, where it is of one of the `unrecoverable` types.
        first_ns: When the callable was called, on the clock of `time.monotonic_ns`.
    """

    __slots__ = (
        "_batch",
        "_began_ns",
        "_count",
        "_number",
        "_open",
        "_requests",
        "_result",
        "_service",
        "_spent_ns",
        "_uniform",
        "failure",
        "first_ns",
    )

    def __init__(self, service: Service, batch: Batch) -> None:
        """Takes a batch; its callable is not called yet."""
        self.failure: BaseException | None = None
        self._service = service
        self._number = batch.number
        self._count = len(batch.rows)
        self._uniform = batch.uniform_outputs
        self._batch: Batch | None = batch
        self._requests: list[Any] | None = None  # made where they are asked for
        self._result: Any = None
        self._open: list[bool] | None = None  # by request; made when the first of them may end before the others
        self._spent_ns = 0  # inside the callable, up to the last step of a generator

    # ---- how callables are called -----------------------------------------------------------------------------------

    def run(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Serves the batch with a synchronous callable; `run_async` drives what unexpectedly is a coroutine."""
        try:
            service = self._service
            batch = self._batch
            self.first_ns = self._began_ns = monotonic_ns()
            if service.whole is not None and batch is not None and batch.is_uniform:
                result = service.whole(batch.columns, batch.rows, batch.requests)
                if result.__class__ is dict:
                    self._count_call()
                    self._result = result
                    result = batch = None
                    self._answer_whole()
                    return
            else:
                result = self._call()
            batch = None
            if result.__class__ is list:
                self._count_call()
                self._result = result
                result = None
                if not self._answer_plain():
                    self._answer_each(final=True)
                return
            if not isinstance(result, tuple):
                if inspect.isgenerator(result):
                    self._stream(result)
                    return
                if inspect.isawaitable(result) or inspect.isasyncgen(result):
                    run_async(self._finish(result))
                    return
            self._count_call()
            self._result = result
            result = None
            self._answer(final=True)
        except ConnectionLostError:
            raise
        except BaseException as error:
            self._fail(error)

    async def run_async(self) -> None:
        """Serves the batch with a callable that returns an awaitable or an async generator."""
        try:
            self.first_ns = self._began_ns = monotonic_ns()
            await self._finish(self._call())
        except ConnectionLostError:
            raise
        except BaseException as error:
            self._fail(error)

    def _call(self) -> Any:
        if self._batch is not None:
            self._requests = self._batch.requests()
        return self._service.infer_func(self._requests)

    async def _finish(self, result: Any) -> None:
        if inspect.isasyncgen(result):
            await self._stream_async(result)
            return
        if inspect.isawaitable(result):
            result = await result
        if inspect.isgenerator(result):
            self._stream(result)
            return
        self._count_call()
        self._result = result
        result = None
        self._answer(final=True)

    def _stream(self, results: Iterator[Any]) -> None:
        if self._service.model.decoupled:
            for self._result in results:
                self._pause()
                self._answer(final=False)
                self._began_ns = monotonic_ns()
            self._count_call()
            self._end()
            return
        try:
            self._result = self._only(next(results, _NOTHING), next(results, _NOTHING))
        finally:
            results.close()  # type: ignore[attr-defined] # a generator: inspect said so
        self._count_call()
        self._answer(final=True)

    async def _stream_async(self, results: AsyncIterator[Any]) -> None:
        if self._service.model.decoupled:
            async for self._result in results:
                self._pause()
                self._answer(final=False)
                self._began_ns = monotonic_ns()
            self._count_call()
            self._end()
            return
        try:
            self._result = self._only(await anext(results, _NOTHING), await anext(results, _NOTHING))
        finally:
            await results.aclose()  # type: ignore[attr-defined] # an async generator: inspect said so
        self._count_call()
        self._answer(final=True)

    def _pause(self) -> None:
        """Notes that a generator gives something: what follows until it goes on is not its time."""
        self._spent_ns += monotonic_ns() - self._began_ns
        self._began_ns = _PAUSED

    def _count_call(self) -> None:
        """Counts the call: the callable has nothing more to do for this batch."""
        batch = self._batch
        if batch is None:
            return
        spent_ns = self._spent_ns
        if self._began_ns != _PAUSED:
            spent_ns += monotonic_ns() - self._began_ns
        self._began_ns = _COUNTED
        self._service.counters.add_call(batch.size, batch.sent_ns, self.first_ns, spent_ns)

    def _only(self, first: Any, second: Any) -> Any:
        if first is _NOTHING or second is not _NOTHING:
            received = "none" if first is _NOTHING else "more than one"
            raise OutputError(
                f"model '{self._service.model.name}': a generator that serves a model which is not decoupled must "
                f"yield exactly one result, it yielded {received}. Bind the model with ModelConfig(decoupled=True) to "
                f"send any number of responses",
                model_name=self._service.model.name,
                expected="1 result",
                received=received,
            )
        return first

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, *, final: bool) -> None:
        """Sends what `_result` holds: one element per request."""
        if not (final and self._answer_plain()):
            self._answer_each(final=final)

    def _answer_each(self, *, final: bool) -> None:
        if self._open is None:
            self._open = [True] * self._count
        answers: list[Answer] = []
        results = self._service.checker.results(self._result, self._count)
        for index, result in enumerate(results):
            if not self._open[index]:
                continue
            if isinstance(result, BaseException):
                answers.append(self._refuse(index, result))
                self._open[index] = False
                continue
            if result is None and not final:
                continue
            wanted: Sequence[str] | None = self._uniform
            if wanted is None and self._batch is not None:
                wanted = self._batch.load_requested_outputs(index)
            outputs, parameters = self._service.checker.one(result, index, wanted)
            answers.append(Answer(index, outputs, parameters, final=final))
        result = results = outputs = None  # type: ignore[assignment] # nothing may refer to the inputs when they are sent
        if answers:
            self._send(answers, done=final)

    def _refuse(self, index: int, error: BaseException) -> Answer:
        """The answer to a request for which the callable returned an error."""
        logger.warning(
            "model %s: the callable returned an error for request %d: %s", self._service.model.name, index, str(error)
        )
        self._service.counters.failed["returned"] += 1
        return Answer(index, error=self._text(error))

    def _answer_whole(self) -> None:
        """Sends what `_result` holds: a dictionary of arrays over the whole batch."""
        service = self._service
        batch = self._batch
        names = service.wanted_names(self._uniform)
        if batch is not None and names is not None:
            written = service.connection.write_whole(batch, self._result, names, service.checker.fits_whole)
            if written is not None:
                # Nothing may refer to the inputs any more when the answer is sent.
                self._result = batch = self._batch = None
                service.connection.send(self._number, written, done=True)
                return
        if batch is not None:
            self._result = batch.split(self._result)
            batch = None
        self._answer_each(final=True)

    def _answer_plain(self) -> bool:
        """Sends what `_result` holds in one go, where it is as plain as it mostly is."""
        service = self._service
        result = self._result
        if not service.joins or result.__class__ is not list or len(result) != self._count:
            return False
        names = service.wanted_names(self._uniform)
        if names is None:
            return False
        if service.model.strict and not service.checker.has_exactly(result, names):
            return False
        connection = service.connection
        written = connection.write_plain(self._number, result, names, service.checker.fits)
        if written is None:
            return False
        # Nothing may refer to the inputs any more when the answer is sent.
        self._result = result = self._batch = self._requests = None
        connection.send(self._number, written, done=True)
        return True

    def _drop(self) -> None:
        self._batch = self._requests = self._result = None

    def _end(self) -> None:
        """Ends the stream of every request that is still open."""
        answers = [
            Answer(index, final=True, empty=True)
            for index, is_open in enumerate(self._open or [True] * self._count)
            if is_open
        ]
        if answers:
            self._send(answers, done=True)
        else:
            self._service.connection.fail(self._number, "")

    def _send(self, answers: list[Answer], *, done: bool) -> None:
        def drop() -> None:
            answers.clear()
            if done:
                self._drop()
            else:
                self._result = None

        self._service.connection.respond(self._number, answers, done=done, drop=drop)

    def _fail(self, error: BaseException) -> None:
        if self._began_ns != _COUNTED:
            self._count_call()
        code = layout.ErrorCode.INTERNAL
        kind = "callable"
        if isinstance(error, self._service.unrecoverable):
            self.failure = error
            logger.error("model %s: the callable cannot go on: %s", self._service.model.name, str(error))
        elif isinstance(error, _OURS):
            kind = "memory" if isinstance(error, ArenaFullError) else "output"
            logger.warning("%s", str(error))
        elif isinstance(error, asyncio.CancelledError):
            kind = "cancelled"
            code = layout.ErrorCode.CANCELLED
        else:
            # As text: a handler that keeps its records would keep the frames, and with them the inputs.
            logger.warning("model %s: the inference callable failed\n%s", self._service.model.name, _trace(error))
        self._service.counters.failed[kind] += self._count if self._open is None else sum(self._open)
        text = self._text(error)
        # The frames of the traceback refer to the inputs, which go back with this answer.
        error.__traceback__ = None
        self._drop()
        self._service.connection.fail(self._number, text, code)

    def _text(self, error: BaseException) -> str:
        model = self._service.model
        if isinstance(error, _OURS):
            return str(error)
        if isinstance(error, asyncio.CancelledError):
            return f"model '{model.name}': the request was cancelled"
        text = f"model '{model.name}': the inference callable raised {type(error).__name__}: {error}"
        return f"{text}\n{_trace(error)}" if model.send_tracebacks else text


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# Errors that are ours, not the callable's: their text says it all.
_OURS = (OutputError, ArenaFullError, ProtocolError)


class _Nothing:
    """Marks the end of a generator."""


_NOTHING = _Nothing()
