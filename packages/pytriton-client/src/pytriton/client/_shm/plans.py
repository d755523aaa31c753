"""Requests whose tensors go through shared memory, as plans without I/O that both kinds of clients run.

A plan gets regions, has the server register those that are new, puts the inputs there, says where the outputs are to
go, and sends what is left of the request. What cannot go this way travels as always where ``"auto"`` was asked for.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import warnings
from collections.abc import Generator
from operator import methodcaller
from typing import Any

from .._core.deadline import Deadline
from .._core.forks import Lock
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.startup import Ask, Exchange, Pause, PlanStep, Question, Target
from .._core.url import TritonUrl
from ..exceptions import PyTritonClientError, PyTritonClientInferenceServerError, PyTritonClientSharedMemoryError
from ..warnings import SharedMemoryWarning
from .placing import Expectations, Placed, layout_of_inputs
from .pool import RegionPool, stale_regions_of
from .regions import FOLDER, Region, is_left_behind, remove_left_files

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 18
"""The size from which "auto" puts a tensor into shared memory; docs/clients.md says why."""

_UNKNOWN_TEXT = "Unable to find shared memory region"
# Our guard says this. It checks shapes before the server looks for regions, and expects the bytes in the request until
# a region is registered.
_UNSENT_TEXT = "and no request in flight has so many"
_TOO_SMALL_TEXT = "shared memory size specified with the request for output"
_NO_OUTPUT_TEXT = "unexpected inference output"
# The server itself answers with these; errors of a callable have another status.
_REFUSED_STATUSES = ("400", "INVALID_ARGUMENT")
_IN_USE_TEXT = "in use"
_BUSY_STATUSES = ("503", "UNAVAILABLE")
# These errors may be gone at the next try.
_SHORTAGES = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# Seconds that a call, or a close, spends on tidying up, and seconds until the next try.
_TIDY_TIMEOUT_S = 2.0
_TIDY_PAUSE_S = 1.0
# Seconds that a close waits for the server to release regions of requests that it has answered.
_PATIENCE_S = 0.2
_CLOSE_PAUSE_S = 0.01


def is_usable(url: TritonUrl) -> bool:
    """Ask whether an address is one of this host for sure, and this host has shared memory."""
    return url.is_loopback and not url.is_balanced and os.path.isdir(FOLDER)


class SharedMemory:
    """The shared memory of a client and its views.

    If it is required, a tensor that cannot use it is an error; otherwise large tensors use it if they can.
    """

    def __init__(self, target: Target, *, is_required: bool, max_response_bytes: int) -> None:
        self._target = target
        self._is_required = is_required
        self._least_bytes = 1 if is_required else LEAST_BYTES
        self._pool = RegionPool(target.url)
        self._stale = stale_regions_of(target.url)
        self._expectations = Expectations(max_response_bytes)
        self._lock = Lock()
        self._has_swept = self._has_warned = self._is_off = False

    def infer(
        self, spec: ModelSpec, request: InferRequest, timeout_s: float
    ) -> Generator[PlanStep, Any, InferResponse]:
        """Carry a request as a ``Transport`` does."""
        deadline = Deadline(timeout_s)
        was_unknown = False
        while True:
            placed = yield from self.place(spec, request, deadline)
            if not placed.has_regions:
                response: InferResponse = yield Exchange(methodcaller("infer", request, deadline.remaining_s()))
                self._expectations.learn(spec, request, response, self._least_bytes)
                return response
            try:
                response = yield Exchange(methodcaller("infer", placed.request, deadline.remaining_s()))
            except PyTritonClientInferenceServerError as error:
                if not self.may_place_anew(placed, error, was_unknown=was_unknown):
                    raise
                was_unknown = was_unknown or is_unknown(placed, error)
            except BaseException:
                placed.leave()
                raise
            else:
                response = placed.finish(response)
                self._expectations.learn(spec, request, response, self._least_bytes)
                return response

    def place(
        self, spec: ModelSpec, request: InferRequest, deadline: Deadline, *, is_stream: bool = False
    ) -> Generator[PlanStep, Any, Placed]:
        """Put the inputs of a request into shared memory, and get room for its outputs unless it is a stream."""
        placed = Placed(self._pool, request)
        if self._is_off:
            return placed
        inputs = layout_of_inputs(request, self._least_bytes)
        outputs = {} if is_stream else self._expectations.sizes(spec, request, self._least_bytes)
        if not inputs and not outputs:
            return placed
        try:
            if self._stale.names and time.monotonic() >= self._stale.not_before:
                yield from self._unregister_left()
            if inputs:
                placed.place_inputs((yield from self._get(placed.room_for(inputs), deadline)), inputs)
            if outputs:
                placed.place_outputs((yield from self._get(placed.room_for(outputs), deadline)), outputs, spec)
        except _UnavailableError as error:
            placed.give_back()
            self._refuse(error)
            return Placed(self._pool, request)
        except BaseException:
            placed.give_back()
            raise
        return placed

    def may_place_anew(self, placed: Placed, error: PyTritonClientInferenceServerError, *, was_unknown: bool) -> bool:
        """Leave the regions of a request that the server refused, and return whether it may be sent again."""
        if is_unknown(placed, error):
            # The server says this before it asks the model: most likely it was restarted.
            placed.forget()
            if was_unknown:
                text = f"the server forgets what it registers: {error.server_message}"
                self._refuse(_UnavailableError(0, text, error))
            return True
        placed.leave()
        text = error.server_message or ""
        if _NO_OUTPUT_TEXT in text and error.status in _REFUSED_STATUSES:
            # The server says this before it asks the model: it was loaded again with other outputs.
            return self._expectations.give_up(placed, text)
        return _TOO_SMALL_TEXT in text and placed.may_repeat and self._expectations.give_up(placed, text)

    def close(self) -> Generator[PlanStep, Any, None]:
        """Have the server forget all regions that no request uses. Raises nothing of the server's."""
        self._pool.close()
        patience = Deadline(_PATIENCE_S)
        yield from self._unregister_left()
        while self._stale.names and self._stale.was_early and not patience.is_over:
            yield Pause(_CLOSE_PAUSE_S)
            yield from self._unregister_left()

    def _get(self, size: int, deadline: Deadline) -> Generator[PlanStep, Any, Region]:
        """Return a region that the server has registered."""
        region = self._pool.take(size)
        if region is not None:
            return region
        try:
            yield from self._sweep()
            yield from self._unregister_left()
            region = self._pool.make(size)
        except OSError as error:
            raise _UnavailableError(size, str(error), error, is_shortage=error.errno in _SHORTAGES) from error
        try:
            remaining_s = deadline.remaining_s()
            yield Ask(Question.REGISTER_REGION, remaining_s, region=region.name, size=region.size)
        except BaseException as error:
            self._pool.leave(region)
            if isinstance(error, PyTritonClientInferenceServerError):
                is_shortage = error.status in _BUSY_STATUSES
                raise _UnavailableError(size, error.message, error, is_shortage=is_shortage) from error
            raise
        finally:
            region.unlink()
        return region

    def _sweep(self) -> Generator[PlanStep, Any, None]:
        """Have the server forget the regions of killed clients; a client does so once."""
        with self._lock:
            if self._has_swept:
                return
            self._has_swept = True
        remove_left_files()
        try:
            names = yield Ask(Question.LIST_REGIONS, _TIDY_TIMEOUT_S)
        except PyTritonClientError as error:
            logger.debug("Regions of clients that are gone stay registered: %s", error)
            return
        for name in filter(is_left_behind, names):
            self._stale.add(name)

    def _unregister_left(self) -> Generator[PlanStep, Any, None]:
        deadline = Deadline(_TIDY_TIMEOUT_S)
        for _ in range(len(self._stale.names)):
            try:
                name = self._stale.names.popleft()
            except IndexError:
                return  # another thread took the last name
            try:
                yield Ask(Question.UNREGISTER_REGION, deadline.remaining_s(), region=name)
            except PyTritonClientInferenceServerError as error:
                if _IN_USE_TEXT in error.message or error.status in _BUSY_STATUSES:
                    self._stale.put_back(name, _TIDY_PAUSE_S)
                else:
                    logger.debug("The server keeps the region %s: %s", name, error)
            except BaseException as error:
                self._stale.put_back(name, _TIDY_PAUSE_S)
                if not isinstance(error, PyTritonClientError):
                    raise
                logger.debug("The server was not told to forget the region %s: %s", name, error)
                return

    def _refuse(self, error: _UnavailableError) -> None:
        """Raise what is wrong, or warn once."""
        message = (
            f"Shared memory for the model {self._target.model} at {self._target.url} cannot be had: "
            f"{str(error).rstrip('.')}. "
            f"Expected room in {FOLDER} and a tritonserver on this host that sees the same files there, runs under the "
            "same user or as root, and lets this client register shared memory."
        )
        if self._is_required:
            raise PyTritonClientSharedMemoryError(message, **self._target.fields, size=error.size) from error.reason
        self._is_off = self._is_off or not error.is_shortage
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            warnings.warn(f"{message} Tensors travel in requests and responses.", SharedMemoryWarning, stacklevel=2)


class _UnavailableError(Exception):
    """No region of that size can be had."""

    def __init__(self, size: int, text: str, reason: Exception, *, is_shortage: bool = False) -> None:
        super().__init__(text)
        self.size = size
        self.reason = reason
        self.is_shortage = is_shortage


def is_unknown(placed: Placed, error: PyTritonClientInferenceServerError) -> bool:
    """Ask whether the server refused a request because it does not know a region."""
    text = error.server_message or ""
    if _UNKNOWN_TEXT in text:
        # A callable may use the same words for other regions; it never knows the names of these.
        return any(name in text for name in placed.region_names)
    return _UNSENT_TEXT in text and placed.has_regions and error.status in _REFUSED_STATUSES
