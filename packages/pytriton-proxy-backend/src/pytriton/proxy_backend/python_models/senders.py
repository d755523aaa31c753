"""`InferenceResponseSender`, and the batch behind it: which of its requests have their last response."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import Any, Protocol

from ..errors import ArenaFullError, ConnectionLostError
from ..runtime.failures import FailureLog, named
from ..runtime.statistics import Counters, FirstResponses
from ..runtime.texts import shortened
from ..wire.batch import Batch
from ..wire.errors import ProtocolError
from ..wire.layout import ErrorCode
from ..wire.record import Record
from ..wire.response import ResponseData, ResponseWriter
from .errors import ModelFailure, TritonModelException
from .responses import InferenceResponse, output_names, response_data

COMPLETE_FINAL = 1
"""`TRITONSERVER_RESPONSE_COMPLETE_FINAL`."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the responses to batches go. What it does is done under the lock of its `SenderContext`."""

    can_reschedule: bool  # whether a request may go back to Triton's scheduler
    can_continue: bool  # whether more may come after an error

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """Write a record and send it, see `ResponseSink`; `executing` says that `executed` follows."""

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a batch, see `ResponseSink`."""

    def executed(self, number: int) -> None:
        """Report that `execute` has finished a batch that is still open, or was reported as executing."""

    def note_dropped(self, batch: OpenBatch, index: int) -> None:
        """Answer a request whose senders are all gone; any thread may call this at any time."""


class SenderContext:
    """What all batches of a model have in common."""

    __slots__ = ("_has_told", "counters", "declared", "decoupled", "failures", "has_sent", "lock", "name", "writer")

    def __init__(
        self,
        name: str,
        decoupled: bool,
        writer: ResponseWriter,
        counters: Counters,
        failures: FailureLog,
        declared: Iterable[str],
    ) -> None:
        self.name = name  # what errors call the model: the name of its instance
        self.declared = frozenset(declared)  # the outputs that its configuration has
        self._has_told = False
        self.has_sent = False  # whether the model has sent a response by a sender
        self.decoupled = decoupled  # whether a request may get any number of responses
        self.writer = writer  # lays the responses out
        self.counters = counters  # where it is counted what happens
        self.failures = failures  # which failures are written to the log
        self.lock = threading.Lock()  # held by whoever sends, or changes the state of a batch

    def note_outputs(self, names: Iterable[str]) -> None:
        """Warn once of outputs that the configuration lacks; like Triton's Python backend, nobody gets them."""
        if self._has_told or self.declared.issuperset(names):
            return
        self._has_told = True
        logger.warning(
            "model %s: the model returned outputs that its configuration has not (%s), which are dropped: expected %s. "
            "This is said once.",
            self.name,
            shortened(", ".join(sorted(set(names) - self.declared))),
            ", ".join(sorted(self.declared)) or "none",
        )


class OpenBatch:
    """A batch of the model.

    While `execute` runs in the accelerator, which owns the connection, responses wait until `take`; afterwards they are
    sent at once. `note_return` and `note_executed` surround the answers that `execute` returns.
    """

    __slots__ = (
        "_batch",
        "_began_ns",
        "_count",
        "_early",
        "_executing",
        "_failed",
        "_firsts",
        "_is_at",
        "_load",
        "_number",
        "_open",
        "_sink",
        "state",
    )

    def __init__(self, state: SenderContext, load: Callable[[], Batch]) -> None:
        """Begin."""
        self.state = state
        self._began_ns = monotonic_ns()
        self._firsts: FirstResponses | None = None
        self._failed: frozenset[int] = frozenset()
        self._load: Callable[[], Batch] | None = load
        self._batch: Batch | None = None
        self._early: list[ResponseData] | None = None
        self._open: list[bool] | None = None
        self._sink: Sink | None = None

    @property
    def batch(self) -> Batch:
        """The batch, while a request of it may be open."""
        batch = self._loaded()
        assert batch is not None  # nobody asks once all is answered
        return batch

    def _loaded(self) -> Batch | None:
        # In this order, because another thread may be replacing `_load` by `_batch`.
        load, batch = self._load, self._batch
        if batch is None and load is not None:
            batch = self._batch = load()
            self._load = None
        return batch

    def is_cancelled(self, index: int) -> bool:
        """Return whether the caller of a request is gone; False after its last response."""
        batch = self._loaded()
        return batch is not None and batch.is_cancelled(index)

    def wanted(self, index: int) -> Sequence[str]:
        """Return the outputs that a request wants."""
        batch = self.batch
        outputs = batch.uniform_outputs
        return batch.load_requested_outputs(index) if outputs is None else outputs

    # ---- answers ----------------------------------------------------------------------------------------------------

    def take(self, sink: Sink, *, executing: bool) -> None:
        """Send the responses that wait, and from now on each one at once."""
        batch = self.batch
        self._executing = executing
        self._is_at = True  # as the proxy backend sees it
        with self.state.lock:
            self._number = batch.number
            self._count = len(batch.rows)
            self._open = [True] * self._count
            if self.state.decoupled:
                self._firsts = FirstResponses(self.state.counters, self._count)
            self._sink = sink
            early, self._early = self._early or [], None
            for data in early:
                # A response that cannot be sent becomes an error of its own request.
                try:
                    self._send([data])
                except TritonModelException as error:
                    logger.warning("model %s: %s", self.state.name, error)

    def note_return(self) -> None:
        """Note that `execute` has returned."""
        with self.state.lock:
            self._executing = False

    def note_executed(self) -> None:
        """Let the next batch come, although this one may have open requests."""
        with self.state.lock:
            if self._is_at and self._sink is not None:
                self._is_at = False
                with contextlib.suppress(ConnectionLostError):
                    self._sink.executed(self._number)

    def close(self) -> None:
        """Forget the batch, which is answered completely."""
        self._batch = self._load = None

    @property
    def is_taken(self) -> bool:
        """Whether everything goes at once."""
        return self._sink is not None

    @property
    def open_requests(self) -> list[int]:
        """The requests that have not had their last response."""
        return [index for index, is_open in enumerate(self._open or ()) if is_open]

    def named_open(self) -> str:
        """Return the ids of the requests that are open, for a log."""
        # Another thread may be answering the last request.
        with self.state.lock:
            batch, left = self._loaded(), self.open_requests
            if batch is None or not left:
                return "after the last response"
            return named((batch.load_fields(index)[0] for index in left), len(left))

    def answer(self, index: int, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response to a request."""
        self.state.has_sent = True
        if response is not None:
            self.state.note_outputs(output_names(response))
        data = response_data(index, response, () if response is None else self.wanted(index), final=final)
        with self.state.lock:
            if self._open is None:
                if self._early is None:
                    self._early = []
                self._early.append(data)
            elif self._open[index]:
                self._send([data])
            else:
                # An error ended the stream, on a server on which it has to.
                logger.warning("model %s: a response after the last one of its request is dropped", self.state.name)

    def answer_all(self, responses: list[ResponseData]) -> None:
        """Send the last responses to several open requests at once; empties the list."""
        with self.state.lock:
            still_open = self._open
            assert still_open is not None
            responses[:] = [data for data in responses if still_open[data.request]]
            self._send(responses)

    def fail(self, text: str, code: ErrorCode = ErrorCode.INTERNAL, kind: str = "callable") -> None:
        """Answer every request that is open with an error."""
        with self.state.lock:
            left = self.open_requests
            self._send([ResponseData(index, error=shortened(text), code=code) for index in left], kind)

    def _send(self, responses: list[ResponseData], kind: str = "returned") -> None:
        """Send responses to open requests, and close those that are complete; the lock is held."""
        assert self._open is not None
        assert self._sink is not None
        if not responses:
            return
        if not self._sink.can_continue:
            _end_with_errors(responses)
        ended = [data.request for data in responses if data.final]
        for index in ended:
            self._open[index] = False
        done = not any(self._open)
        counters = self.state.counters
        # A stream may have several errors.
        if failed := {data.request for data in responses if data.error is not None} - self._failed:
            self._failed |= failed
            counters.add_failed(kind, len(failed))
        if self._firsts is not None:
            self._firsts.note(responses, self._began_ns)
        # No reference to the inputs may be left here when their last responses are sent.
        if done:
            self.close()
            self._is_at = self._executing
        try:
            record = self.state.writer.lay_out(responses)
            responses.clear()
            self._sink.respond(self._number, record, done=done, executing=self._executing)
            counters.add_output(record.layout.payload_bytes)
        except ConnectionLostError as error:
            raise TritonModelException(f"the response cannot be sent: {error}") from error
        except (ArenaFullError, ProtocolError, TypeError, ValueError) as error:
            # The caller gets the error, and so does the code that sent it.
            counters.add_failed("memory" if isinstance(error, ArenaFullError) else "output", len(ended) or 1)
            if done:
                self._is_at = False
                self._sink.fail(self._number, shortened(str(error)))
            elif ended:
                lost = [ResponseData(index, error=shortened(str(error))) for index in ended]
                self._sink.respond(self._number, self.state.writer.lay_out(lost), done=False)
            raise TritonModelException(f"the response cannot be sent: {error}") from error

    def drop(self, index: int) -> None:
        """Answer a request whose senders are all gone."""
        if self._sink is not None:
            self._sink.note_dropped(self, index)

    def answer_dropped(self, index: int) -> None:
        """Answer the request."""
        if self._open is None or not self._open[index]:
            return
        text = (
            f"model '{self.state.name}': request {index} of a batch of {self._count} got no last response: expected "
            "one in the list that execute returns, or a response that is sent with "
            "TRITONSERVER_RESPONSE_COMPLETE_FINAL; the request and its response sender are gone without it"
        )
        if (note := self.state.failures.admit("no last response")) is not None:
            logger.error("%s, %s%s", text, named([self.batch.load_fields(index)[0]], 1), note)
        with self.state.lock, contextlib.suppress(TritonModelException):
            self._send([ResponseData(index, error=shortened(text))], "callable")


def _end_with_errors(responses: list[ResponseData]) -> None:
    for data in responses:
        data.final |= data.continues
        data.continues = False


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    __slots__ = ("_batch", "_closed", "_index", "_sent")

    def __init__(self, batch: OpenBatch | None = None, index: int = 0) -> None:
        """Begin; without a batch, for a request that the model has made itself, which nobody answers by this."""
        self._batch = batch
        self._index = index
        self._closed = False
        self._sent = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send(response): expected an InferenceResponse, got a {type(response).__name__}")
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        batch = self._batch
        if batch is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the model."
            )
        try:
            self._note(batch.state, response is not None, flags)
        except ModelFailure as failure:
            raise TritonModelException(str(failure)) from None
        if response is not None or batch.state.decoupled:
            # A model that is not decoupled has one response, which is the last one whatever its flag says.
            final = flags == COMPLETE_FINAL or not batch.state.decoupled
            batch.answer(self._index, response, final=final)

    def note_returned(self) -> None:
        """Note a response that `execute` returns for the request; a second one is an error."""
        if self._batch is not None:
            self._note(self._batch.state, True, COMPLETE_FINAL)

    def _note(self, state: SenderContext, has_response: bool, flags: int) -> None:
        with state.lock:
            if not state.decoupled:
                if has_response and self._sent:
                    raise ModelFailure(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if not has_response and not self._sent:
                    raise ModelFailure(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self._closed:
                raise ModelFailure("Unable to send response. Response sender has been closed.")
            self._closed = flags == COMPLETE_FINAL
            self._sent += 1

    def close(self) -> None:
        """Let nothing more be sent."""
        self._closed = True

    def is_cancelled(self) -> bool:
        """Return whether the caller of the request is gone."""
        return self._batch is not None and self._batch.is_cancelled(self._index)

    def __del__(self) -> None:
        # This may run in any thread, at any time.
        batch: Any = getattr(self, "_batch", None)
        if batch is not None and not self._closed:
            batch.drop(self._index)
