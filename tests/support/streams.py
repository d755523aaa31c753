"""A gRPC stream for tests: requests in, every response, final flag and error as it comes."""

from __future__ import annotations

import queue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc

from pytriton.triton import Triton
from support.waiting import PATIENCE_S


class Event(NamedTuple):
    """One thing that came."""

    request_id: str  # whom it is for; empty where Triton does not say
    value: Any = None  # the first element of the output `y`, `None` if there is none
    # The response parameters, but for the final flag.
    parameters: dict[str, Any] = {}  # noqa: RUF012 - never written
    final: bool = False  # whether nothing more comes for the request
    error: str | None = None  # the text of an error


class Stream:
    """One gRPC stream; requests have one input `x` of one float."""

    def __init__(self, triton: Triton) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(str(triton.grpc_url).removeprefix("grpc://"))
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._closed = False

    def send(self, model: str, value: float, request_id: str = "1") -> None:
        """Send one request."""
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
        self._client.async_stream_infer(model, [tensor], request_id=request_id, enable_empty_final_response=True)

    def next(self) -> Event:
        """Wait for what comes next."""
        result, error = self._answers.get(timeout=PATIENCE_S)
        if error is not None:
            return Event("", final=True, error=str(error))
        response = result.get_response()
        parameters = {
            key: getattr(value, str(value.WhichOneof("parameter_choice"))) for key, value in response.parameters.items()
        }
        final = bool(parameters.pop("triton_final_response"))
        array = result.as_numpy("y")
        return Event(response.id, None if array is None else array.ravel()[0], parameters, final)

    def ask(self, model: str, value: float) -> tuple[list[Any], str | None]:
        """Send one request and read to its end: the values, and the error that ended it."""
        self.send(model, value)
        values = []
        while True:
            event = self.next()
            if event.value is not None:
                values.append(event.value)
            if event.final:
                return values, event.error

    def close(self, *, cancel: bool = False) -> None:
        """End the stream: in order, or by going away."""
        if not self._closed:
            self._closed = True
            self._client.stop_stream(cancel_requests=cancel)
            self._client.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)
