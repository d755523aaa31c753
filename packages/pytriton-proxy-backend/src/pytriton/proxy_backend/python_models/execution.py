"""A batch through `execute`: the requests that it gets, the check of what it returns, the answers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..model import ModelSpec
from ..runtime.execution import Call
from ..runtime.failures import kind_of
from ..runtime.service import Service
from ..runtime.statistics import Counters
from ..system.escapes import escaped_lines
from ..system.forks import close_in_child
from ..wire.batch import Batch
from ..wire.layout import ErrorCode
from ..wire.record import Array
from ..wire.response import ResponseData
from .errors import ModelFailure, TritonModelException, calls_model, told
from .requests import InferenceRequest, are_untouched, is_to_be_rescheduled, make_request
from .responses import InferenceResponse, output_names, plain_outputs, response_data
from .senders import OpenBatch, SenderContext, Sink

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

Execute = Callable[[list[InferenceRequest]], Any]


class Outcome:
    """The result of a call of `execute` that the short way could not handle."""

    __slots__ = ("batch", "failure", "kind", "requests", "returned")

    def __init__(
        self,
        batch: OpenBatch,
        requests: list[InferenceRequest],
        returned: Any,
        failure: str | None = None,
        kind: Hashable = None,
    ) -> None:
        self.batch = batch
        self.requests = requests
        self.returned = returned
        self.failure = failure
        self.kind = kind


class OutputTaker:
    """Takes outputs unchecked, as Triton's Python backend does; it replaces an `OutputChecker`."""

    def wanted(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """Return the outputs that are sent."""
        return requested

    def fits_results(self, results: Sequence[dict[str, Array]], names: tuple[str, ...]) -> bool:
        """Return whether all of them are numbers, which are sent as they are."""
        return all(result[name].dtype.kind not in "OST" for name in names for result in results)

    def fits_columns(self, outputs: dict[str, Array], names: tuple[str, ...]) -> bool:
        """Return false: a model answers each request by itself."""
        return False

    def shapes(self, results: Sequence[dict[str, Array]], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that outputs may have, -1 for any dimension."""
        return tuple((-1,) * results[0][name].ndim for name in names)


class CoroutineLoop:
    """The event loop in which the coroutines of a model run, in a thread of its own, as long as the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[Future[Any]] = set()
        self._awaited: set[Future[Any]] = set()
        self._is_stopped = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it to its end, or to `stop`, where it is cancelled."""
        future = self._begin(coroutine)
        self._awaited.add(future)
        try:
            if self._is_stopped:
                # Nothing else would end it any more.
                future.cancel()
            return future.result()
        finally:
            self._awaited.discard(future)

    def run_in_background(
        self, coroutine: Coroutine[Any, Any, Any], on_error: Callable[[BaseException], object]
    ) -> None:
        """Start a coroutine; `on_error` is called with its error."""
        future = self._begin(coroutine)
        self._running.add(future)
        future.add_done_callback(partial(self._note_end, on_error))

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        # Imported late, because most models have no coroutines.
        import asyncio

        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.new_event_loop()
            # `execute` finds this loop, as in Triton's stub.
            asyncio.set_event_loop(loop)
            self._thread = threading.Thread(
                target=self._keep_running, args=(loop,), name="pytriton-coroutines", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def _keep_running(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._is_stopped:
            try:
                loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                # asyncio stops the loop if a task raises SystemExit or KeyboardInterrupt; whoever awaits the task gets
                # it once the loop goes on.
                continue

    def _note_end(self, on_error: Callable[[BaseException], object], future: Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            on_error(error)

    def stop(self) -> None:
        """Let nothing more run on it."""
        self._is_stopped = True
        for future in tuple(self._awaited):
            future.cancel()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        """Stop the loop and free its resources, in a process that goes on without the model."""
        self.stop()
        if self._loop is None or self._thread is None:
            return
        import asyncio

        self._thread.join()
        self._loop.close()
        asyncio.set_event_loop(None)


class Bell:
    """Wakes the thread that waits for batches; from any thread, at any time, as long as the process."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        close_in_child(self)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._fd

    def ring(self) -> None:
        """Wake it."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Note that a batch has come."""
        os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


class ModelService(Service):
    """What all batches of a Python model have in common."""

    sink: Sink

    def __init__(
        self,
        execute: Execute | None,
        file: str,
        name: str,
        model: ModelSpec,
        counters: Counters,
        outputs: Iterable[str],
    ) -> None:
        """Begin."""
        super().__init__(self._call_lane, model, (), counters)
        self.checker = OutputTaker()  # type: ignore[assignment]
        self.columns_func = self._call_lane
        # What the senders of responses need to know.
        self.state = SenderContext(name, model.decoupled, self.writer, self.counters, self.failures, outputs)
        self.bell = Bell()  # wakes the thread that waits for batches
        # Whether a request was open when `execute` had returned: others answer it, from other threads.
        self.has_late = False
        self.loop = CoroutineLoop()
        self._execute = execute
        self._file = file

    def _call_lane(
        self, columns: dict[str, Array], rows: list[int], load: Callable[[], Batch]
    ) -> list[dict[str, Array]] | Outcome:
        """Call `execute` for the accelerator, with the inputs over the whole batch and the rows of each request.

        `load` gives the batch. Returns the outputs of each request, or an `Outcome` if Python has to do the rest.
        """
        batch = OpenBatch(self.state, load)
        if len(rows) == 1:
            requests = [make_request(batch, load, 0, columns)]
        else:
            requests = []
            begin = 0
            for index, count in enumerate(rows):
                end = begin + count
                inputs = {name: column[begin:end] for name, column in columns.items()}
                requests.append(make_request(batch, load, index, inputs))
                begin = end
        outcome = self.call(batch, requests)
        returned = outcome.returned
        if returned.__class__ is not list or len(returned) != len(requests) or outcome.failure is not None:
            return outcome
        plain = plain_outputs(returned) if are_untouched(requests) else None
        if plain is None:
            return outcome
        for outputs in plain:
            self.state.note_outputs(outputs)
        return plain

    @calls_model
    def call(self, batch: OpenBatch, requests: list[InferenceRequest]) -> Outcome:
        """Call `execute`, and wait for its coroutine, unless the model is decoupled."""
        try:
            if self._execute is None:
                return Outcome(batch, requests, None, f"Python model {self._file} does not implement `execute` method.")
            # A list of its own: the model may take requests out of it, whose senders answer them later.
            returned = self._execute(requests.copy())
            if returned.__class__ is not list and isinstance(returned, Coroutine):
                if self.state.decoupled:
                    self.loop.run_in_background(returned, partial(self._tell_late, batch))
                    returned = None
                else:
                    returned = self.loop.run(returned)
        except BaseException as error:
            # SystemExit and KeyboardInterrupt in `execute` fail the batch; they do not end the host.
            return Outcome(batch, requests, None, told(error), kind_of(error))
        return Outcome(batch, requests, returned)

    def tell(self, batch: OpenBatch, kind: Hashable, text: str, failure: str) -> None:
        """Log a failure in a batch, unless there were many of its kind just now."""
        if (note := self.failures.admit(kind)) is not None:
            told = f"model {self.state.name}: {text}, {batch.named_open()}{note}: {failure}"
            logger.error("%s", escaped_lines(told))

    def _tell_late(self, batch: OpenBatch, error: BaseException) -> None:
        self.tell(batch, kind_of(error), "execute failed after it had given control back", told(error))


class Execution:
    """What happens to one batch, from the call to the last answer that the call gives."""

    failure: BaseException | None = None  # what the worker cannot go on after: nothing

    __slots__ = ("_batch", "_called", "_service")

    def __init__(self, service: ModelService, batch: Batch, called: Call | None = None) -> None:
        """Take a batch, for which `execute` is not called yet, or was by the accelerator."""
        self._service = service
        self._batch: Batch | None = batch
        self._called = called

    def run(self, _run_async: object) -> None:
        """Serve the batch."""
        batch = self._batch
        assert batch is not None
        self._batch = None
        service = self._service
        called = self._called
        if called is None:
            began_ns = monotonic_ns()
            result: Any = self._call(batch)
        else:
            began_ns = called.began_ns
            result, called.result = called.result, None
            if called.error is not None:
                raise called.error
        service.counters.add_call(batch.metadata.size, batch.sent_ns, began_ns, monotonic_ns() - began_ns)
        try:
            # The called code must hold the only references to the inputs.
            if result.__class__ is list:
                opened, batch = OpenBatch(service.state, _giver(batch)), None
                self._answer_plain(opened, result)
            else:
                outcome, batch, result = result, None, None
                self._answer(outcome)
        except TritonModelException as error:
            # Its callers have their error, or are gone.
            logger.warning("model %s: %s", service.state.name, error)

    def _call(self, batch: Batch) -> Outcome:
        load = _giver(batch)
        opened = OpenBatch(self._service.state, load)
        opened.take(self._service.sink, executing=True)
        requests = [make_request(opened, load, index, batch.load_inputs(index)) for index in range(len(batch.rows))]
        return self._service.call(opened, requests)

    def _answer_plain(self, opened: OpenBatch, results: list[dict[str, Array]]) -> None:
        """Answer with outputs that the accelerator did not send: strings, others than are wanted, or a full arena."""
        opened.take(self._service.sink, executing=False)
        responses = []
        while results:
            index = len(results) - 1
            wanted = opened.wanted(index)
            outputs = {name: array for name, array in results.pop().items() if name in wanted}
            responses.append(ResponseData(index, outputs))
            del outputs
        responses.reverse()
        opened.answer_all(responses)

    def _answer(self, outcome: Outcome) -> None:
        service = self._service
        batch, requests, returned = outcome.batch, outcome.requests, outcome.returned
        failure, kind = outcome.failure, outcome.kind
        responses: list[ResponseData] = []
        if failure is None:
            try:
                responses = self._check(batch, requests, returned)
            except ModelFailure as error:
                failure, kind = str(error), kind_of(error)
            except Exception as error:
                failure, kind = told(error), kind_of(error)
        if failure is not None:
            for request in requests:
                request.get_response_sender().close()
        answered = {response.request for response in responses}
        left = {index: request for index, request in enumerate(requests) if index not in answered}
        if failure is None:
            for index, request in left.items():
                if is_to_be_rescheduled(request):
                    request.get_response_sender().close()
                    responses.append(self._reschedule(index))
        # No reference to the inputs may be left here when the last responses are sent.
        outcome.requests = outcome.returned = requests = returned = request = None  # type: ignore[assignment]
        if failure is not None:
            left.clear()
        if batch.is_taken:
            batch.note_return()
        else:
            batch.take(service.sink, executing=False)
        try:
            if failure is not None:
                text = f"Failed to process the request(s) for model '{service.state.name}', message: {failure}"
                service.tell(batch, kind, "execute failed", failure)
                batch.fail(text)
            else:
                batch.answer_all(responses)
                for index in batch.open_requests:
                    # As long as a sender exists, somebody may answer.
                    left[index].get_response_sender()
                    service.has_late = True
        finally:
            batch.note_executed()

    def _reschedule(self, index: int) -> ResponseData:
        """Return what gives a request back to Triton's scheduler."""
        service = self._service
        if service.sink.can_reschedule:
            return ResponseData(index, reschedule=True)
        text = f"model '{service.state.name}': this server cannot reschedule requests"
        return ResponseData(index, error=text, code=ErrorCode.UNSUPPORTED)

    @calls_model
    def _check(self, batch: OpenBatch, requests: list[InferenceRequest], returned: Any) -> list[ResponseData]:
        """Return the responses that `execute` has returned."""
        state = self._service.state
        if returned is None:
            return []
        if state.decoupled:
            raise ModelFailure(
                f"Python model '{state.name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise ModelFailure(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise ModelFailure(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        responses = []
        for index, (request, response) in enumerate(zip(requests, returned, strict=True)):
            if response is None:
                continue
            if is_to_be_rescheduled(request):
                # Triton spells it like this.
                raise ModelFailure(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'."
                )
            if not isinstance(response, InferenceResponse):
                raise ModelFailure(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
            request.get_response_sender().note_returned()
            state.note_outputs(output_names(response))
            responses.append(response_data(index, response, batch.wanted(index), final=True))
        return responses


def _giver(batch: Batch) -> Callable[[], Batch]:
    return lambda: batch
