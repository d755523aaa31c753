"""One batch through an inference callable: call it, check what it returns, send the answers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Any

from pytriton.proxy.types import make_requests

from ..errors import ArenaFullError, ConnectionLostError, OutputError, ProtocolError
from ..wire.batch import Batch
from ..wire.layout import ErrorCode
from ..wire.record import Record
from ..wire.response import ResponseData, lay_out_columns
from .access import Access
from .answers import Answers
from .apart import Refused, call_apart, call_apart_async, refused_by
from .failures import failed_as, failure_text, is_cancellation, tell_failure
from .results.alike import AlikeResponses
from .results.steps import NOTHING, StepTime, Turns, close, close_async, next_of, stepped
from .service import Service
from .statistics import FirstResponses
from .texts import told_error

logger = logging.getLogger(__name__)

# In the place of the time when the callable began, or went on.
_PAUSED = 0
_COUNTED = -1


class Call:
    """A call of a callable that was made elsewhere."""

    __slots__ = ("began_ns", "error", "result")

    def __init__(self, began_ns: int, result: Any, error: BaseException | None) -> None:
        self.began_ns = began_ns  # when, on the clock of `time.monotonic_ns`
        self.result = result  # what it returned
        self.error = error  # what it raised


class Execution:
    """What happens to one batch, from the call to the last answer.

    It holds the only references to the requests that this library keeps. They are dropped before the last responses are
    written, and the sink lets go of the outputs before it sends them, so that the proxy backend gets the memory of the
    inputs back with them.
    """

    __slots__ = (
        "_access",
        "_alike",
        "_answers",
        "_batch",
        "_began_ns",
        "_called",
        "_count",
        "_firsts",
        "_number",
        "_request_spans",
        "_result",
        "_service",
        "_spent_ns",
        "_step_time",
        "_uniform",
        "failure",
        "first_ns",
    )

    def __init__(self, service: Service, batch: Batch, called: Call | None = None) -> None:
        """Take a batch, whose callable is not called yet, or was in `called`."""
        self.failure: BaseException | None = None  # what the callable raised, if it is of an `unrecoverable` type
        self._service = service
        self._number = batch.number
        self._count = len(batch.rows)
        self._uniform = batch.uniform_outputs
        self._batch: Batch | None = batch
        self._called = called
        self._request_spans: list[Any] | None = None
        self._result: Any = None
        self._answers: Answers | None = None  # made when the first request may end before the others
        self._firsts = FirstResponses(service.counters, self._count) if service.model.decoupled else None
        self._alike: AlikeResponses | None = None  # of a stream, which go together as soon as the generator waits
        self._spent_ns = 0  # inside the callable, up to the last step of a generator
        self._step_time = StepTime()
        self._access = Access(service.model, batch) if service.is_logged else None

    # ---- how callables are called -----------------------------------------------------------------------------------

    def run(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Serve the batch with a synchronous callable; `run_async` drives what unexpectedly is a coroutine."""
        try:
            try:
                self._serve(run_async)
            except Exception as error:
                self._result = call_apart(self._service.infer_func, self._apart(error), run_async)
                self._respond()
        except ConnectionLostError:
            if self._access is not None:
                self._access.end("lost")
            raise
        except BaseException as error:
            self._fail(error)

    def _serve(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        if self._called is not None:
            self._go_on(self._called, run_async)
            return
        batch = self._batch
        columns_func = self._service.columns_func
        self.first_ns = self._began_ns = monotonic_ns()
        if columns_func is not None and batch is not None and batch.is_uniform:
            requests = partial(make_requests, batch, self._count, self._request_spans)
            self._result = columns_func(batch.columns, batch.rows, requests)
            # No reference to the inputs may be left here when the responses are sent.
            batch = requests = None  # type: ignore[assignment]
            if self._result.__class__ is dict:
                self._respond_columns()
                return
        else:
            batch = None
            self._result = self._call()
        self._finish(run_async)

    def _apart(self, error: Exception) -> Refused:
        batch = self._batch if self._answers is None and not self._service.model.decoupled else None
        return refused_by(error, () if batch is None else make_requests(batch, self._count, self._request_spans))

    def _go_on(self, called: Call, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Go on with a call over the whole batch that was made."""
        self._called = None
        self.first_ns = self._began_ns = called.began_ns
        self._result = called.result
        called.result = None
        if called.error is not None:
            raise called.error
        if self._result.__class__ is dict and self._service.columns_func is not None:
            self._respond_columns()
        else:
            self._finish(run_async)

    def _finish(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Go on with what the callable returned."""
        if self._result.__class__ not in (list, tuple):
            result, self._result = self._result, None
            if inspect.isgenerator(result):
                self._stream(result)
                return
            if inspect.isawaitable(result) or inspect.isasyncgen(result):
                run_async(self._finish_async(result, is_alone=True))
                return
            self._result, result = result, None
        self._respond()

    async def run_async(self) -> None:
        """Serve the batch with a callable that returns an awaitable or an async generator."""
        try:
            self.first_ns = self._began_ns = monotonic_ns()
            try:
                await self._finish_async(self._call())
            except Exception as error:
                self._result = await call_apart_async(self._service.infer_func, self._apart(error))
                self._respond()
        except ConnectionLostError:
            if self._access is not None:
                self._access.end("lost")
            raise
        except BaseException as error:
            self._fail(error)

    def _call(self) -> Any:
        assert self._batch is not None
        self._service.count_cost(self._batch)
        return self._service.infer_func(make_requests(self._batch, self._count, self._request_spans))

    async def _finish_async(self, result: Any, *, is_alone: bool = False) -> None:
        """Go on with what the callable returned, on a loop that serves other batches, or none: `is_alone`."""
        if inspect.isasyncgen(result):
            await self._stream_async(result, is_alone)
            return
        if inspect.isawaitable(result):
            result = await result
        if inspect.isgenerator(result):
            if is_alone or not self._service.model.decoupled:
                self._stream(result)
            else:
                await self._stream_async(stepped(result, self._service.model.name), is_alone=False)
            return
        self._result = result
        result = None
        self._respond()

    def _stream(self, results: Generator[Any, Any, Any]) -> None:
        try:
            if self._service.model.decoupled:
                for self._result in results:
                    # The next step may take any time, so nothing is held back for it.
                    is_wanted = self._give()
                    self._send_kept()
                    if not is_wanted:
                        if self._answers is not None and self._answers.given_up:
                            # The generator gets one more step, in which it may ask `is_cancelled` and clean up in its
                            # own way.
                            next(results, None)
                        return
                    self._service.wait_taken(self._batch, self._number)
                    self._began_ns = monotonic_ns()
                self._end()
                return
            self._result = _only(self._service, next(results, NOTHING), next(results, NOTHING))
        finally:
            close(results, self._service.model.name)
        self._respond()

    async def _stream_async(self, results: AsyncGenerator[Any, Any], is_alone: bool) -> None:
        import asyncio

        try:
            if self._service.model.decoupled:
                pacing = None if is_alone else self._service.pacing
                turns = Turns(asyncio.get_running_loop(), pacing, self._number)
                while (result := await next_of(results, self._send_kept, self._step_time)) is not NOTHING:
                    self._result = result
                    # No reference to the inputs may be left here when the responses are sent.
                    result = None
                    if not self._give():
                        return
                    if is_alone:
                        # No other thread reads the connection.
                        self._send_kept()
                        self._service.wait_taken(self._batch, self._number)
                    # A generator that never waits leaves no room for the others, nor for what its callers say.
                    if turns.is_due():
                        self._send_kept()
                        await turns.give_way()
                    self._began_ns = monotonic_ns()
                self._end()
                return
            self._result = _only(self._service, await anext(results, NOTHING), await anext(results, NOTHING))
        finally:
            await close_async(results, self._service.model.name)
        self._respond()

    def _count_call(self) -> None:
        """Count the call, once: the callable has nothing more to do for this batch."""
        batch = self._batch
        if batch is None or self._began_ns == _COUNTED:
            return
        spent_ns = self._spent_ns + (0 if self._began_ns == _PAUSED else monotonic_ns() - self._began_ns)
        self._began_ns = _COUNTED
        self._service.counters.add_call(batch.metadata.size, batch.sent_ns, self.first_ns, spent_ns)

    # ---- responses --------------------------------------------------------------------------------------------------

    def _respond(self) -> None:
        """Send what `_result` holds, one element per request: the last responses."""
        self._count_call()
        record = _lay_out_results(self._service, self._result, self._count, self._uniform)
        if record is None:
            self._respond_each(final=True)
        else:
            self._send(record, done=True)

    def _respond_columns(self) -> None:
        """Send what `_result` holds, a dictionary of arrays over the whole batch: the last responses."""
        self._count_call()
        checker = self._service.checker
        batch = self._batch
        if batch is None:
            return
        record = None
        if self._uniform is not None:
            names = checker.wanted(self._uniform)
            record = lay_out_columns(batch.metadata, self._result, names, checker.fits_columns)
        if record is None:
            self._result = batch.split(self._result)
            batch = None
            self._respond_each(final=True)
        else:
            batch = None
            self._send(record, done=True)

    def _respond_each(self, *, final: bool) -> None:
        """Send what `_result` holds, one element per request, each checked by itself: the last ones, or not."""
        answers = self._answers
        if answers is None:
            answers = self._answers = self._make_answers()
        still_open = answers.open
        batch = self._batch
        responses: list[ResponseData] = []
        results = self._service.checker.results(self._result, self._count)
        for index, result in enumerate(results):
            if not still_open[index]:
                continue
            response = answers.make(batch, self._uniform, index, result, final=final)
            if response is not None:
                responses.append(response)
        batch = result = results = response = None  # type: ignore[assignment] # nothing may refer to the inputs
        if responses:
            ended = [given.request for given in responses if given.final]
            if self._firsts is not None:
                self._firsts.note(responses, self.first_ns)
            if not final and self._count == 1:
                self._alike = AlikeResponses.of(self._result, responses[0])
            self._send(self._lay_out(responses), done=len(ended) == sum(still_open))
            # Requests are ended only now that their responses are sent: one whose result cannot be sent is still open,
            # and gets an error.
            for index in ended:
                still_open[index] = False
            if self._access is not None:
                self._access.end(ended=ended)

    def _give(self) -> bool:
        """Send what a generator has given, or keep it until `_send_kept`; says whether anybody is left to take more."""
        self._spent_ns += monotonic_ns() - self._began_ns
        self._began_ns = _PAUSED
        if self._keep():
            if self._step_time.is_long():
                # The next one may take as long, and need not wait for anything.
                self._send_kept(soon=False)
            return True
        self._respond_each(final=False)
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._answers is not None and not any(self._answers.open)

    def _open(self) -> list[bool]:
        """Return whether the last response is not sent yet, by request."""
        return [True] * self._count if self._answers is None else self._answers.open

    def _make_answers(self) -> Answers:
        return Answers(self._service, self._count, self._access)

    def _end(self) -> None:
        """End the stream of every request that is still open."""
        self._send_kept()
        if not self._is_over():
            self._count_call()
            ends = [ResponseData(index, empty=True) for index, is_open in enumerate(self._open()) if is_open]
            self._send(self._lay_out(ends), done=True)

    def _keep(self) -> bool:
        """Keep what a generator has given for a moment, where it looks like what it gave before; says whether."""
        alike = self._alike
        if alike is None or (not alike and self._batch is not None and self._batch.is_cancelled(0)):
            return False
        if not alike.add(self._result):
            self._send_kept()
            return False
        self._result = None
        if alike.is_full:
            self._send_kept()
        return True

    def _send_kept(self, *, soon: bool = True) -> None:
        """Send the responses that were kept. Not by `_send`: what the generator gave last is not among them."""
        if self._alike:
            self._alike.send(self._service.writer, partial(self._put, done=False, soon=soon))

    def _lay_out(self, responses: list[ResponseData]) -> Record:
        record = self._service.writer.lay_out(responses)
        # The record has the outputs, and lets go of them.
        responses.clear()
        return record

    def _send(self, record: Record, *, done: bool) -> None:
        if done:
            if self._began_ns != _COUNTED:
                self._count_call()
            self._batch = None
        self._result = None
        self._put(record, done=done)
        if done and self._access is not None:
            self._access.end()

    def _put(self, record: Record, *, done: bool, soon: bool = False) -> None:
        """Send a record; `soon` allows it to wait for those of other streams."""
        service = self._service
        together = service.together if soon else None
        # Before it is sent: who has the responses finds them counted.
        service.counters.add_output(record.layout.payload_bytes)
        try:
            if together is None:
                service.sink.respond(self._number, record, done=done)
            else:
                together.respond_soon(self._number, record)
        except ArenaFullError:
            service.counters.add_output(-record.layout.payload_bytes)
            raise

    def _drop(self) -> None:
        self._batch = self._result = None

    def _fail(self, error: BaseException) -> None:
        if self._is_over():
            self._fail_late(error)
            return
        self._count_call()
        kind, code, added = failed_as(error)
        if isinstance(error, self._service.unrecoverable):
            kind, code, self.failure = "callable", ErrorCode.INTERNAL, error
            logger.error("model %s: the callable cannot go on: %s", self._service.model.name, told_error(error))
        elif kind != "cancelled":
            # As text: a handler that keeps records would keep the frames of the error, and with them the inputs.
            self._tell(error, added)
        self._service.counters.add_failed(kind, sum(self._open()))
        text = failure_text(self._service.model, error)
        # The frames of the traceback refer to the inputs, which go back with this answer.
        error.__traceback__ = None
        self._drop()
        try:
            # Callers are told of the failure if there is no room for what came before it.
            with suppress(ArenaFullError, ProtocolError):
                self._send_kept()
            self._service.sink.fail(self._number, text, code)
        finally:
            if self._access is not None:
                self._access.end(kind)

    def _fail_late(self, error: BaseException) -> None:
        """Note an error that comes when every request has its last answer: there is nobody to tell it to."""
        if isinstance(error, self._service.unrecoverable):
            self.failure = error
        if not is_cancellation(error):
            self._tell(error, "the callable failed after its last response")
        error.__traceback__ = None
        self._drop()

    def _tell(self, error: BaseException, text: str = "") -> None:
        """Write to the log what failed, of all requests that are open."""
        service = self._service
        failed = [index for index, is_open in enumerate(self._open()) if is_open]
        tell_failure(service.failures, service.model, self._batch, failed, error, text, logging.ERROR)


def _only(service: Service, first: Any, second: Any) -> Any:
    """Return the one result of a generator, given the first two that it has yielded, or `NOTHING`."""
    if first is NOTHING or second is not NOTHING:
        received = "none" if first is NOTHING else "more than one"
        raise OutputError(
            f"model '{service.model.name}': a generator that serves a model which is not decoupled must yield exactly "
            f"one result, it yielded {received}. Bind the model with ModelConfig(decoupled=True) to send any number of "
            f"responses",
            model_name=service.model.name,
            expected="1 result",
            received=received,
        )
    return first


def _lay_out_results(service: Service, result: Any, count: int, wanted: tuple[str, ...] | None) -> Record | None:
    """Lay a result out in one go, where it is as regular as it mostly is."""
    if wanted is None or result.__class__ is not list or len(result) != count:
        return None
    return service.writer.lay_out_results(result, service.checker.wanted(wanted), service.checker.fits_results)
