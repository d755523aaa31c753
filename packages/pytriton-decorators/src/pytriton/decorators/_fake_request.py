"""The type of requests in unit tests: a subclass of the server's where that is installed, else of a fake one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any


class FakeRequest(MutableMapping[str, Any]):
    """A request with the attributes of `pytriton.proxy.types.Request`, which is in another distribution."""

    # Tests do not set the fields of sequences and tracing.
    sequence_start = False
    sequence_end = False
    trace_context = ""

    def __init__(
        self,
        data: dict[str, Any],
        parameters: dict[str, Any] | None = None,
        span: Any = None,
        requested_output_names: list[str] | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_us: int = 0,
        correlation_id: int | str = 0,
    ) -> None:
        self.data = data
        self.parameters = {} if parameters is None else parameters
        self.span = span
        self.requested_output_names = requested_output_names
        self.request_id = request_id
        self.priority = priority
        self.timeout_us = timeout_us
        self.correlation_id = correlation_id

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    # Arrays have no truth value, so two mappings of arrays cannot be compared.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @contextmanager
    def traced_span(self, span_name: str) -> Iterator[None]:
        """Do nothing: unit tests have no tracer."""
        yield

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.data)})"


class _Cancellable:
    """Lets a test cancel a request, as its caller would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An event rather than a flag, because decorators copy requests, and a cancellation holds for all copies.
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make `is_cancelled()` say so from now on."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Return whether `cancel()` was called."""
        return self._cancelled.is_set()


@lru_cache(maxsize=1)
def request_type() -> Any:
    """Return the type of requests for tests: a subclass of the server's own, if that is installed."""
    try:
        from pytriton.proxy.types import Request
    except ModuleNotFoundError:
        return type("HarnessRequest", (_Cancellable, FakeRequest), {})
    return type("HarnessRequest", (_Cancellable, Request), {})
