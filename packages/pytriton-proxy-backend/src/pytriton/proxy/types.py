"""Requests that an inference callable gets and responses that it may return."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "ParameterValue",
    "Request",
    "Requests",
    "Response",
    "Responses",
    "ResponsesNoneOrError",
    "ResponsesOrError",
    "Scope",
]

ParameterValue = str | int | bool | float
"""A parameter of a request or of a response."""


# Each input as one array over all requests, and the number of rows of each request.
WholeBatch = tuple[dict[str, "np.ndarray[Any, Any]"], list[int]]


class RequestDetails(Protocol):
    """The source of a request's details, which are read on demand; not for users."""

    def load_inputs(self, index: int) -> dict[str, np.ndarray[Any, Any]]: ...

    def load_parameters(self, index: int) -> dict[str, ParameterValue]: ...

    def load_fields(self, index: int) -> tuple[str, int, int, int | str, int, str]: ...

    def load_requested_outputs(self, index: int) -> list[str]: ...

    def is_cancelled(self, index: int) -> bool: ...

    def whole_batch(self) -> WholeBatch | None: ...


class RequestFields(NamedTuple):
    """The plain fields of a request."""

    request_id: str = ""
    priority: int = 0
    timeout_us: int = 0
    correlation_id: int | str = 0
    flags: int = 0
    trace_context: str = ""


class _Arrays(MutableMapping[str, "np.ndarray[Any, Any]"]):
    """The mapping methods of requests and responses, over their `data`."""

    data: dict[str, np.ndarray[Any, Any]]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.data[name]

    def __setitem__(self, name: str, value: np.ndarray[Any, Any]) -> None:
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    # Arrays have no truth value, so mappings of arrays are compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Request(_Arrays):
    """One inference request: a mapping from input names to arrays, and what came along with them.

    The arrays of a request that came from Triton are views on shared memory. They may be kept: the memory stays
    theirs until the last view of it is gone. Inputs that the caller left out (`Tensor(optional=True)`) are absent.

    Attributes:
        span: A place for a tracing span; nothing here reads it.
    """

    # The details of a request from the server, read on demand: making a request then costs two assignments.
    _details: RequestDetails | None = None
    _index = 0
    _data: dict[str, np.ndarray[Any, Any]] | None = None
    _issued: tuple[np.ndarray[Any, Any], ...] | None = None
    _parameters: dict[str, ParameterValue] | None = None
    _outputs: list[str] | None = None
    _fields: RequestFields | None = None
    span: Any = None

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        data = self._data
        return (self.data if data is None else data)[name]

    def __init__(
        self,
        data: dict[str, np.ndarray[Any, Any]],
        parameters: dict[str, ParameterValue] | None = None,
        span: Any = None,
        requested_output_names: list[str] | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_us: int = 0,
        correlation_id: int | str = 0,
    ) -> None:
        """Make a request by hand, as unit tests of a callable do.

        Args:
            data: The inputs, each of shape `(batch, *tensor.shape)` where the model batches, else `tensor.shape`.
            parameters: Request parameters, and HTTP or gRPC headers that the server was told to forward.
            span: See the attribute.
            requested_output_names: The outputs that the caller wants; `None` if it is not known.
            request_id: The caller's id of the request.
            priority: Its priority, 0 is the model's default.
            timeout_us: Its timeout in the queue in microseconds, 0 is none.
            correlation_id: The sequence it belongs to, 0 is none.
        """
        self._data = data
        self._parameters = {} if parameters is None else parameters
        self._outputs = requested_output_names
        self._fields = RequestFields(request_id, priority, timeout_us, correlation_id)
        self.span = span

    @property
    def data(self) -> dict[str, np.ndarray[Any, Any]]:
        """The inputs by name; a plain dictionary that may be changed."""
        data = self._data
        if data is None:
            assert self._details is not None
            data = self._data = self._details.load_inputs(self._index)
            self._issued = tuple(data.values())
        return data

    @data.setter
    def data(self, data: dict[str, np.ndarray[Any, Any]]) -> None:
        self._data = data
        self._issued = None

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """Request parameters and forwarded headers by name; a plain dictionary that may be changed."""
        if self._parameters is None:
            self._parameters = {} if self._details is None else self._details.load_parameters(self._index)
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: dict[str, ParameterValue] | None) -> None:
        self._parameters = {} if parameters is None else parameters

    @property
    def requested_output_names(self) -> list[str] | None:
        """The outputs that the caller wants; only these are sent back."""
        if self._outputs is None and self._details is not None:
            self._outputs = self._details.load_requested_outputs(self._index)
        return self._outputs

    @property
    def request_id(self) -> str:
        """The caller's id of the request, empty if there is none."""
        return self._load_fields().request_id

    @property
    def priority(self) -> int:
        """The priority that the caller gave, 0 if it gave none."""
        return self._load_fields().priority

    @property
    def timeout_us(self) -> int:
        """The timeout in Triton's queue in microseconds that the caller gave, 0 if it gave none."""
        return self._load_fields().timeout_us

    @property
    def correlation_id(self) -> int | str:
        """The sequence that the request belongs to, 0 if it belongs to none."""
        return self._load_fields().correlation_id

    @property
    def sequence_start(self) -> bool:
        """Whether this request begins its sequence."""
        return bool(self._load_fields().flags & 1)

    @property
    def sequence_end(self) -> bool:
        """Whether this request ends its sequence."""
        return bool(self._load_fields().flags & 2)

    @property
    def trace_context(self) -> str:
        """The W3C trace context that Triton's tracing carries, empty if it does not trace."""
        return self._load_fields().trace_context

    def is_cancelled(self) -> bool:
        """Return whether the caller has given the request up. Cheap enough to be asked inside a loop."""
        return self._details is not None and self._details.is_cancelled(self._index)

    def __pytriton_batch__(self, requests: Sequence[Any]) -> WholeBatch | None:
        """Return every input as one array over all requests, and the rows of each; `None` if the list is another one.

        The decorator `batch` asks the first request for it. The arrays are no copies. `None` means that the list is not
        the whole batch in its order, or that inputs were replaced or differ between requests.
        """
        details = self._details
        whole = None if details is None else details.whole_batch()
        if whole is None or len(requests) != len(whole[1]):
            return None
        columns, rows = whole
        for index, request in enumerate(requests):
            if type(request) is not Request or request._details is not details or request._index != index:
                return None
            data = request._data
            if data is not None:
                issued = request._issued
                if issued is None or len(data) != len(columns):
                    return None
                for name, expected in zip(columns, issued, strict=True):
                    if data.get(name) is not expected:
                        return None
        return dict(columns), list(rows)

    def _load_fields(self) -> RequestFields:
        fields = self._fields
        if fields is None:
            details = self._details
            fields = RequestFields() if details is None else RequestFields(*details.load_fields(self._index))
            self._fields = fields
        return fields

    def traced_span(self, span_name: str, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for a tracing span below this request's; it does nothing if nothing is traced.

        Args:
            span_name: The name of the span.
            **kwargs: Handed to the tracer, see `pytriton.proxy.telemetry.traced_span`.
        """
        from .telemetry import traced_span

        return traced_span(self, span_name, **kwargs)

    def __copy__(self) -> Request:
        return self._detached()

    def __deepcopy__(self, memo: dict[int, Any]) -> Request:
        return self._detached(copy.deepcopy(self.data, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # For another process: the span, and the link to the batch, stay here.
        made = self._detached()
        return _restored, (made._data, made._parameters, made._outputs, tuple(made._load_fields()))

    def _detached(self, data: dict[str, np.ndarray[Any, Any]] | None = None) -> Request:
        """Return a request of the same content that is not part of a batch any more, and is never cancelled."""
        names = self.requested_output_names
        made = Request(dict(self.data) if data is None else data, dict(self.parameters), self.span, names and [*names])
        made._fields = self._load_fields()
        return made

    def __repr__(self) -> str:
        return f"Request({', '.join(_described(self.data))})"


def _restored(
    data: dict[str, np.ndarray[Any, Any]],
    parameters: dict[str, ParameterValue],
    outputs: list[str] | None,
    fields: tuple[Any, ...],
) -> Request:
    request = Request(data, parameters, requested_output_names=outputs)
    request._fields = RequestFields(*fields)
    return request


_new_request = Request.__new__


def make_requests(details: RequestDetails, count: int, spans: Sequence[Any] | None = None) -> list[Request]:
    """Make the requests of a batch, in order; not for users."""
    made = []
    for index in range(count):
        request = _new_request(Request)
        request._details = details
        request._index = index
        made.append(request)
    if spans is not None:
        for request, span in zip(made, spans, strict=True):
            request.span = span
    return made


def _described(data: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {value.dtype}{list(value.shape)}"
        if isinstance(value, np.ndarray)
        else f"{name}: {type(value).__name__}"
        for name, value in data.items()
    ]


class Response(_Arrays):
    """The answer to one request: a mapping from output names to arrays, and response parameters.

    A generator that serves a decoupled model ends the stream of one request with `Response(data, final=True)`, or
    without a further response with `Response(final=True)`; the other requests of the batch go on.

    Attributes:
        data: The outputs by name.
        parameters: Response parameters: strings, integers of 64 bits, booleans and floats.
        final: Whether nothing more comes for the request; without meaning where the model is not decoupled, whose
            responses are all final.
    """

    def __init__(
        self,
        data: Mapping[str, np.ndarray[Any, Any]] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Make a response.

        Args:
            data: The outputs by name, each of shape `(batch, *tensor.shape)` where the model batches; none by default.
            parameters: Response parameters.
            final: See the attribute.
        """
        self.data: dict[str, np.ndarray[Any, Any]] = dict(data or {})
        self.parameters: dict[str, ParameterValue] = dict(parameters or {})
        self.final = final

    def __repr__(self) -> str:
        return f"Response({', '.join([*_described(self.data), *['final'] * self.final])})"


Requests = list[Request]
"""What a callable gets: the requests of a batch."""
Responses = list[Response]
"""What it answers: a response for each of them."""
ResponsesOrError = Responses | Exception
"""The answer to a batch, or why there is none."""
ResponsesNoneOrError = Responses | Exception | None
"""The same of a stream, where None is its end."""
Scope = dict[str, Any]
"""A type that code written for PyTriton may name; nothing here uses it."""
