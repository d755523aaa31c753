"""`Answers`: the requests of a batch that are answered one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pytriton.proxy.types import Response

from ..errors import OutputError
from ..wire.batch import Batch
from ..wire.layout import ErrorCode
from ..wire.response import ResponseData
from .access import Access
from .failures import cancelled_text, failure_text, is_of_caller, tell_failure
from .service import Service


class Answers:
    """What each request of a batch gets, where a request may end before the others."""

    __slots__ = ("_access", "_note_refused", "_service", "given_up", "open")

    def __init__(
        self,
        service: Service,
        count: int,
        access: Access | None,
        note_refused: Callable[[int, BaseException], object] | None = None,
    ) -> None:
        """Begin with all requests open."""
        self.open = [True] * count  # by request: whether its last response is not sent yet
        self.given_up = False  # whether the caller of a stream is gone
        self._service = service
        self._access = access
        self._note_refused = note_refused

    def make(
        self, batch: Batch | None, wanted: Sequence[str] | None, index: int, result: Any, *, final: bool
    ) -> ResponseData | None:
        """Return the response to a request; `None` if nothing has to be sent.

        `wanted` are the outputs that all requests want, `None` if they differ.
        """
        service = self._service
        decoupled = service.model.decoupled
        if not final and batch is not None and batch.is_cancelled(index):
            # The caller of this stream has left, so it ends here; other streams go on.
            service.counters.add_failed("cancelled")
            self.given_up = True
            if self._access is not None:
                self._access.fail(index, "cancelled")
            return ResponseData(index, error=cancelled_text(service.model), code=ErrorCode.CANCELLED)
        if isinstance(result, BaseException):
            return self._refuse(batch, index, result)
        if result is None and decoupled:
            return ResponseData(index, empty=True) if final else None
        if isinstance(result, Response) and result.final and decoupled:
            final = True
            if not result.data and not result.parameters:
                return ResponseData(index, empty=True)
        if wanted is None and batch is not None:
            wanted = tuple(batch.load_requested_outputs(index))
        try:
            outputs, parameters = service.checker.one(result, index, wanted)
        except OutputError as error:
            # The other requests of the batch can still be answered. The traceback is dropped, because its frames refer
            # to the inputs.
            return self._refuse(batch, index, error.with_traceback(None))
        return ResponseData(index, outputs, parameters, final=final)

    def _refuse(self, batch: Batch | None, index: int, error: BaseException) -> ResponseData:
        """Return the response to a request whose result is an error, or cannot be sent."""
        if self._note_refused is not None:
            self._note_refused(index, error)
        service = self._service
        is_unsendable = isinstance(error, OutputError)
        # A callable may return errors for mistakes of its callers.
        text = "" if is_unsendable else "the callable returned an error"
        level = logging.ERROR if is_unsendable else logging.WARNING
        kind = "output" if is_unsendable else "returned"
        tell_failure(service.failures, service.model, batch, [index], error, text, level)
        service.counters.add_failed(kind)
        if self._access is not None:
            self._access.fail(index, kind)
        told = failure_text(service.model, error)
        # The frames of the traceback refer to the inputs, whose memory goes back with this answer.
        error.__traceback__ = None
        code = ErrorCode.INVALID_ARG if is_of_caller(error) else ErrorCode.INTERNAL
        return ResponseData(index, error=told, code=code)
