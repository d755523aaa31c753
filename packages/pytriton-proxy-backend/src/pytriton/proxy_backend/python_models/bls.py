"""Requests of a model to other models of the server, and their responses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import TritonError, TritonModelException
from .responses import InferenceResponse, received_response
from .server import SERVER, Phase
from .tensors import make_tensor

if TYPE_CHECKING:
    import asyncio

    from ..transport.calls import Call, CallResult

Ask = Callable[[bool, "Callable[[CallResult], object]"], "Call"]


class ResponseIterator:
    """The responses to a request to a decoupled model, as they come; from the first one again when all have come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._responses: list[InferenceResponse] = []
        self._given = 0
        self._is_complete = False
        self._call: Call | None = None

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._is_complete and self._given == len(self._responses):
            self._given = 0
        return self

    def __next__(self) -> InferenceResponse:
        with self._changed:
            self._changed.wait_for(lambda: self._given < len(self._responses) or self._is_complete)
            if self._given == len(self._responses):
                raise StopIteration
            self._given += 1
            return self._responses[self._given - 1]

    def cancel(self) -> None:
        """Cancel the rest of the responses."""
        if self._call is not None and not self._is_complete:
            self._call.cancel()


class _Responses:
    """Collects the responses to one request, and signals the first one."""

    def __init__(self, iterator: ResponseIterator, on_first: Callable[[], object]) -> None:
        self._iterator = iterator
        self._on_first = on_first

    def __call__(self, result: CallResult) -> None:
        iterator = self._iterator
        with iterator._changed:
            is_first = not iterator._responses
            iterator._responses.append(_response_of(result))
            iterator._is_complete = result.final
            iterator._changed.notify_all()
        if is_first:
            self._on_first()


def _response_of(result: CallResult) -> InferenceResponse:
    if result.error is not None:
        return InferenceResponse(error=TritonError(str(result.error), TritonError.of_number(result.error.code)))
    return received_response([make_tensor(name, array) for name, array in result.outputs.items()], result.parameters)


def _begin(iterator: ResponseIterator, ask: Ask, decoupled: bool, on_first: Callable[[], object]) -> None:
    """Begin a call; `on_first` is called when the first response is there."""
    if SERVER.phase is not Phase.SERVING:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    try:
        iterator._call = ask(decoupled, _Responses(iterator, on_first))
    except Exception as error:
        # An error of the request is its response.
        with iterator._changed:
            iterator._responses.append(InferenceResponse(error=TritonError(str(error))))
            iterator._is_complete = True
        on_first()


def execute(ask: Ask, decoupled: bool) -> Any:
    """Make a call, and return its first response; if `decoupled`, return an iterator of all responses."""
    came = threading.Event()
    iterator = ResponseIterator()
    _begin(iterator, ask, decoupled, came.set)
    came.wait()
    return iterator if decoupled else iterator._responses[0]


def execute_async(ask: Ask, decoupled: bool) -> asyncio.Future[Any]:
    """Make a call in the running event loop; returns a future of what `execute` returns."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    iterator = ResponseIterator()

    def give() -> None:
        if not future.done():
            future.set_result(iterator if decoupled else iterator._responses[0])

    def on_first() -> None:
        # If the loop is closed, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(give)

    _begin(iterator, ask, decoupled, on_first)
    return future
