"""One batch through an inference callable: call it, check what it returns, send the answers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from time import monotonic_ns
from typing import Any

from pytriton.proxy.types import Response

from ..errors import ArenaFullError, ConnectionLostError, OutputError, ProtocolError
from ..wire import layout
from ..wire.batch import Batch
from ..wire.response import Answer
from .service import Service
from .texts import error_text, shortened

logger = logging.getLogger(__name__)

# In the place of the time when the callable began, or went on.
_PAUSED = 0
_COUNTED = -1


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
        "_given_up",
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
        """Take a batch; its callable is not called yet."""
        self.failure: BaseException | None = None
        self._service = service
        self._number = batch.number
        self._count = len(batch.rows)
        self._uniform = batch.uniform_outputs
        self._batch: Batch | None = batch
        self._requests: list[Any] | None = None  # made where they are asked for
        self._result: Any = None
        self._open: list[bool] | None = None  # by request; made when the first of them may end before the others
        self._given_up = False  # by the caller of a stream at least
        self._spent_ns = 0  # inside the callable, up to the last step of a generator

    # ---- how callables are called -----------------------------------------------------------------------------------

    def run(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Serve the batch with a synchronous callable; `run_async` drives what unexpectedly is a coroutine."""
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
        """Serve the batch with a callable that returns an awaitable or an async generator."""
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

    def _stream(self, results: Generator[Any, Any, Any]) -> None:
        try:
            if self._service.model.decoupled:
                for self._result in results:
                    if not self._give():
                        if self._given_up:
                            # One step more, in which it may ask `is_cancelled` and see to its end in its own way.
                            next(results, None)
                        break
                    self._began_ns = monotonic_ns()
                self._end()
                return
            self._result = self._only(next(results, _NOTHING), next(results, _NOTHING))
        finally:
            self._close(results)
        self._count_call()
        self._answer(final=True)

    async def _stream_async(self, results: AsyncGenerator[Any, Any]) -> None:
        try:
            if self._service.model.decoupled:
                async for self._result in results:
                    if not self._give():
                        break
                    # A generator that never waits leaves no room for the others, nor for cancellations.
                    await asyncio.sleep(0)
                    self._began_ns = monotonic_ns()
                self._end()
                return
            self._result = self._only(await anext(results, _NOTHING), await anext(results, _NOTHING))
        finally:
            await self._close_async(results)
        self._count_call()
        self._answer(final=True)

    def _close(self, results: Generator[Any, Any, Any]) -> None:
        """End a generator, so that its `finally` blocks have run; of one that came to its end this costs nothing."""
        try:
            results.close()
        except Exception as error:
            self._log_close(error)

    async def _close_async(self, results: AsyncGenerator[Any, Any]) -> None:
        try:
            await results.aclose()
        except Exception as error:
            self._log_close(error)

    def _log_close(self, error: Exception) -> None:
        # Its callers have their answers, or get the error that it is closed for.
        logger.warning("model %s: closing the generator failed\n%s", self._service.model.name, _trace(error))
        error.__traceback__ = None

    def _count_call(self) -> None:
        """Count the call: the callable has nothing more to do for this batch."""
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
        """Send what `_result` holds: one element per request."""
        if not (final and self._answer_plain()):
            self._answer_each(final=final)

    def _answer_each(self, *, final: bool) -> None:
        still_open = self._open
        if still_open is None:
            still_open = self._open = [True] * self._count
        answers: list[Answer] = []
        results = self._service.checker.results(self._result, self._count)
        for index, result in enumerate(results):
            if still_open[index] and (answer := self._checked(index, result, final)) is not None:
                answers.append(answer)
        result = results = answer = None  # type: ignore[assignment] # nothing may refer to the inputs when they are sent
        if answers:
            ended = [given.request for given in answers if given.final]
            self._send(answers, done=len(ended) == sum(still_open))
            # Not before: what cannot be sent is answered with an error.
            for index in ended:
                still_open[index] = False

    def _checked(self, index: int, result: Any, final: bool) -> Answer | None:
        """Return what one element of the result is for its request; `None` where that is nothing."""
        if not final and self._batch is not None and self._batch.is_cancelled(index):
            # Nobody reads this stream any more: it ends here, whatever becomes of the others.
            self._service.counters.failed["cancelled"] += 1
            self._given_up = True
            return Answer(index, error=self._text(asyncio.CancelledError()), code=layout.ErrorCode.CANCELLED)
        if isinstance(result, BaseException):
            return self._refuse(index, result)
        if result is None and self._service.model.decoupled:
            return Answer(index, empty=True) if final else None
        if isinstance(result, Response) and result.final and self._service.model.decoupled:
            final = True
            if not result.data and not result.parameters:
                return Answer(index, empty=True)
        wanted: Sequence[str] | None = self._uniform
        if wanted is None and self._batch is not None:
            wanted = self._batch.load_requested_outputs(index)
        try:
            outputs, parameters = self._service.checker.one(result, index, wanted)
        except OutputError as error:
            # The other requests of the batch can have what is theirs. The frames of the traceback refer to the inputs.
            return self._refuse(index, error.with_traceback(None))
        return Answer(index, outputs, parameters, final=final)

    def _give(self) -> bool:
        """Send what a generator has given; says whether anybody is left to give something to."""
        self._spent_ns += monotonic_ns() - self._began_ns
        self._began_ns = _PAUSED
        self._answer_each(final=False)
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._open is not None and not any(self._open)

    def _refuse(self, index: int, error: BaseException) -> Answer:
        """Return the answer to a request for which the callable returned an error, or something that cannot be sent."""
        if isinstance(error, OutputError):
            kind = "output"
            logger.warning("%s", error_text(error))
        else:
            kind = "returned"
            name = self._service.model.name
            logger.warning(
                "model %s: the callable returned an error for request %d: %s", name, index, error_text(error)
            )
        self._service.counters.failed[kind] += 1
        return Answer(index, error=self._text(error))

    def _answer_whole(self) -> None:
        """Send what `_result` holds: a dictionary of arrays over the whole batch."""
        service = self._service
        batch = self._batch
        names = service.wanted_names(self._uniform)
        if batch is not None and names is not None:
            written = service.answers.write_whole(batch, self._result, names, service.checker.fits_whole)
            if written is not None:
                # Nothing may refer to the inputs any more when the answer is sent.
                self._result = batch = self._batch = None
                service.answers.send(self._number, written, done=True)
                return
        if batch is not None:
            self._result = batch.split(self._result)
            batch = None
        self._answer_each(final=True)

    def _answer_plain(self) -> bool:
        """Send what `_result` holds in one go, where it is as plain as it mostly is."""
        service = self._service
        result = self._result
        if not service.joins or result.__class__ is not list or len(result) != self._count:
            return False
        names = service.wanted_names(self._uniform)
        if names is None:
            return False
        if service.model.strict and not service.checker.has_exactly(result, names):
            return False
        written = service.answers.write_plain(self._number, result, names, service.checker.fit_each)
        if written is None:
            return False
        # Nothing may refer to the inputs any more when the answer is sent.
        self._result = result = self._batch = self._requests = None
        service.answers.send(self._number, written, done=True)
        return True

    def _drop(self) -> None:
        self._batch = self._requests = self._result = None

    def _end(self) -> None:
        """End the stream of every request that is still open."""
        if self._is_over():
            return
        self._count_call()
        still_open = self._open or [True] * self._count
        self._send([Answer(index, empty=True) for index, is_open in enumerate(still_open) if is_open], done=True)

    def _send(self, answers: list[Answer], *, done: bool) -> None:
        if done and self._began_ns != _COUNTED:
            self._count_call()

        def drop() -> None:
            answers.clear()
            if done:
                self._drop()
            else:
                self._result = None

        self._service.answers.respond(self._number, answers, done=done, drop=drop)

    def _fail(self, error: BaseException) -> None:
        if self._is_over():
            self._fail_late(error)
            return
        if self._began_ns != _COUNTED:
            self._count_call()
        code = layout.ErrorCode.INTERNAL
        kind = "callable"
        if isinstance(error, self._service.unrecoverable):
            self.failure = error
            logger.error("model %s: the callable cannot go on: %s", self._service.model.name, error_text(error))
        elif isinstance(error, _OURS):
            kind = "memory" if isinstance(error, ArenaFullError) else "output"
            logger.warning("%s", error_text(error))
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
        self._service.answers.fail(self._number, text, code)

    def _fail_late(self, error: BaseException) -> None:
        """Note an error that comes when every request has its last answer: there is nobody to tell it to."""
        if isinstance(error, self._service.unrecoverable):
            self.failure = error
        if not isinstance(error, asyncio.CancelledError):
            name = self._service.model.name
            logger.warning("model %s: the callable failed after its last response\n%s", name, _trace(error))
        error.__traceback__ = None
        self._drop()

    def _text(self, error: BaseException) -> str:
        model = self._service.model
        if isinstance(error, _OURS):
            return shortened(error_text(error))
        if isinstance(error, asyncio.CancelledError):
            return f"model '{model.name}': the request was cancelled"
        text = f"model '{model.name}': the inference callable raised {type(error).__name__}: {error_text(error)}"
        return shortened(f"{text}\n{_trace(error)}" if model.send_tracebacks else text)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# Errors that are ours, not the callable's: their text says it all.
_OURS = (OutputError, ArenaFullError, ProtocolError)


class _Nothing:
    """Marks the end of a generator."""


_NOTHING = _Nothing()
