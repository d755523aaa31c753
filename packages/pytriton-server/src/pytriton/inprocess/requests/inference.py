"""Inference: a request goes in, an iterator over its responses comes out."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from pytriton.inprocess.capi.errors import TimedOutError, TritonError, wrong_argument
from pytriton.inprocess.requests.model_spec import describe
from pytriton.inprocess.requests.pending import Pending, submit
from pytriton.inprocess.requests.request import InferenceRequest
from pytriton.inprocess.requests.response import InferenceResponse

_Deliver = Callable[[InferenceResponse], None]


class _Responses:
    """The common base of both iterators over responses."""

    __slots__ = ("__weakref__", "_finished", "_pending", "_raises", "_request", "_timeout_s")

    _finished: bool
    _pending: Pending
    _raises: bool
    _request: InferenceRequest
    _timeout_s: float | None

    def cancel(self) -> None:
        """Cancel the request: the work for it is interrupted where the model looks for that, and no more is waited for.

        The responses that are there already can still be read; then comes a `CancelledError`. Does nothing if the last
        response is there. Can be called in any thread.
        """
        self._pending.cancel()

    def close(self) -> None:
        """End the iteration; cancel the request if it is not over."""
        if not self._finished:
            self._finished = True
            self._pending.cancel()

    def __del__(self) -> None:
        # It is missing if Triton refused the request, or a signal ended the call.
        pending = getattr(self, "_pending", None)
        # With a queue of the caller, responses are read from the queue.
        if pending is not None and not self._finished and self._request.response_queue is None:
            pending.cancel()

    def _checked(self, response: InferenceResponse) -> InferenceResponse:
        if response.final:
            self._finished = True
        error = response.error
        if error is not None and self._raises:
            raise _with_response(error, response)
        return response

    def _timed_out(self) -> TimedOutError:
        place = describe(self._request.model)
        timeout_s = self._timeout_s
        return TimedOutError(
            f"Waited {timeout_s:g} s (response_timeout_s) for the next response of {place}, in vain. The request runs "
            "on: iterate on to wait again, or cancel() it.",
            expected=f"a response within {timeout_s:g} s",
            where=place,
        )


class ResponseIterator(_Responses, Iterator[InferenceResponse]):
    """The responses to a request, in order.

    An iterator that is dropped or closed before the last response cancels the request, unless the request has a
    `response_queue`. Without `response_timeout_s`, waiting for a response has no limit.

    Args:
        request: The request, which is sent.
        raise_on_error: Whether to raise the error of a response, or to yield the response with it.

    Raises:
        InvalidArgumentError: If the request does not fit the model, or has a value that cannot be sent.
        NotFoundError: If there is no such model.
        UnavailableError: If the model or the server is not ready.
        TritonError: What else Triton says if it does not accept the request.
    """

    __slots__ = ("_queue",)

    def __init__(self, request: InferenceRequest, raise_on_error: bool) -> None:
        self._finished = False
        self._raises = raise_on_error
        self._request = request
        self._timeout_s = None if request.response_timeout_s is None else _checked_timeout(request)
        self._queue: queue.SimpleQueue[InferenceResponse] | None = None
        deliver: _Deliver | None = None
        if request.response_queue is not None:
            self._queue = queue.SimpleQueue()
            deliver = _deliver_to_both(self._queue.put, _sync_put(request))
        self._pending = submit(request, deliver)

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        """Wait for the next response.

        Raises:
            StopIteration: After the last one.
            TimedOutError: If it does not come within `response_timeout_s`.
            TritonError: The error of the response, with the response among its `args`, if `raise_on_error`.
        """
        if self._finished:
            raise StopIteration
        timeout_s = self._timeout_s
        response = self._pending.take(timeout_s) if self._queue is None else _get(self._queue, timeout_s)
        if response is None:
            raise self._timed_out()
        if response.error is None:
            self._finished = response.final
            return response
        return self._checked(response)

    def __enter__(self) -> ResponseIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncResponseIterator(_Responses, AsyncIterator[InferenceResponse]):
    """The responses to a request, in order, for `async for`.

    An iterator that is dropped or closed before the last response cancels the request, unless the request has a
    `response_queue`; so does a task that is cancelled while it waits for a response. Without `response_timeout_s`,
    waiting for a response has no limit. It may be made outside of an event loop, and used in any.

    Args:
        request: The request, which is sent.
        raise_on_error: Whether to raise the error of a response, or to yield the response with it.

    Raises:
        InvalidArgumentError: If the request does not fit the model, or has a value that cannot be sent.
        NotFoundError: If there is no such model.
        UnavailableError: If the model or the server is not ready.
        TritonError: What else Triton says if it does not accept the request.
    """

    __slots__ = ("_arrived", "_waiters")

    def __init__(self, request: InferenceRequest, raise_on_error: bool) -> None:
        self._finished = False
        self._raises = raise_on_error
        self._request = request
        self._timeout_s = None if request.response_timeout_s is None else _checked_timeout(request)
        self._arrived: deque[InferenceResponse] = deque()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        # The request must not refer to the iterator, whose deletion cancels the request.
        deliver = _wake_waiters(self._arrived, self._waiters)
        if request.response_queue is not None:
            deliver = _deliver_to_both(deliver, _async_put(request))
        self._pending = submit(request, deliver)

    def __aiter__(self) -> AsyncResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        """Wait for the next response.

        Raises:
            StopAsyncIteration: After the last one.
            TimedOutError: If it does not come within `response_timeout_s`.
            TritonError: The error of the response, with the response among its `args`, if `raise_on_error`.
        """
        if self._finished:
            raise StopAsyncIteration
        timeout_s = self._timeout_s
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while not self._arrived:
            await self._wait(deadline)
        return self._checked(self._arrived.popleft())

    async def aclose(self) -> None:
        """End the iteration; cancel the request if it is not over."""
        self.close()

    async def __aenter__(self) -> AsyncResponseIterator:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _wait(self, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiters.append((loop, future))
        if self._arrived:
            # The response came before the waiter was added.
            return
        timer = None if deadline is None else loop.call_at(deadline, _wake, future)
        try:
            await future
        except asyncio.CancelledError:
            self._pending.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not self._arrived and deadline is not None and loop.time() >= deadline:
            raise self._timed_out()


def _wake_waiters(
    arrived: deque[InferenceResponse], waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]
) -> _Deliver:
    def deliver(response: InferenceResponse) -> None:
        arrived.append(response)
        while waiters:
            try:
                loop, future = waiters.popleft()
            except IndexError:
                return
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                # The loop is closed, so nobody waits in it.
                continue

    return deliver


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _get(source: queue.SimpleQueue[InferenceResponse], timeout_s: float | None) -> InferenceResponse | None:
    try:
        return source.get() if timeout_s is None else source.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _checked_timeout(request: InferenceRequest) -> float:
    timeout_s = request.response_timeout_s
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise wrong_argument(
            "response_timeout_s", "None or a number of seconds from 0 on", timeout_s, where=describe(request.model)
        )
    # Python cannot wait longer than this, which is centuries.
    return min(timeout_s, threading.TIMEOUT_MAX)


def _deliver_to_both(first: _Deliver, second: _Deliver) -> _Deliver:
    def deliver(response: InferenceResponse) -> None:
        first(response)
        second(response)

    return deliver


def _sync_put(request: InferenceRequest) -> _Deliver:
    target = request.response_queue
    put = getattr(target, "put_nowait", None)
    bounded = getattr(target, "maxsize", 0) > 0
    if isinstance(target, asyncio.Queue) or put is None or bounded:
        # A full queue would block a thread of Triton.
        raise wrong_argument(
            "response_queue", "a queue.SimpleQueue, or a queue.Queue without a limit", target,
            where=describe(request.model),
        )  # fmt: skip
    deliver: _Deliver = put
    return deliver


def _async_put(request: InferenceRequest) -> _Deliver:
    target = request.response_queue
    if not isinstance(target, asyncio.Queue):
        return _sync_put(request)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise wrong_argument(
            "response_queue", "None outside of a running event loop", target, where=describe(request.model)
        ) from None
    tasks: set[asyncio.Task[None]] = set()

    def put(response: InferenceResponse) -> None:
        if target.maxsize <= 0:
            target.put_nowait(response)
            return
        # The task waits for room; a queue serves waiting tasks in order.
        task = loop.create_task(target.put(response))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def deliver(response: InferenceResponse) -> None:
        try:
            loop.call_soon_threadsafe(put, response)
        except RuntimeError:
            # The loop is closed, so nobody reads the queue.
            return

    return deliver


def _with_response(error: TritonError, response: InferenceResponse) -> TritonError:
    error.args = (*error.args, response)
    return error
