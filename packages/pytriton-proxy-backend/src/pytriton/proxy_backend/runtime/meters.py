"""What a worker counts, as OpenTelemetry has it: for programs that set a meter provider up.

Nothing here imports OpenTelemetry: where nobody else has, there is no meter.
"""

from __future__ import annotations

import sys
from typing import Any

from ..model import ModelSpec

_METRICS = "opentelemetry.metrics"
# A quarter of a millisecond to two minutes, because OpenTelemetry's own buckets are for milliseconds.
_SECONDS = tuple(0.00025 * 2**exponent for exponent in range(20))
_ROWS = tuple(float(2**exponent) for exponent in range(13))


class Meters:
    """The instruments of one model. If the SDK keeps exemplars, what is recorded inside a span refers to that span."""

    def __init__(self, meter: Any, model: ModelSpec) -> None:
        # The spans use the same names.
        self._attributes = {"triton.model_name": model.name, "triton.model_version": model.version}
        self._requests = meter.create_counter("pytriton.requests", "{request}", "Requests handed to the callable")
        self._failed = meter.create_counter(
            "pytriton.failed_requests", "{request}", "Requests answered with an error, by its kind"
        )
        self._cancelled = meter.create_counter(
            "pytriton.cancelled_requests", "{request}", "Requests that their callers gave up while they were served"
        )
        self._rows = _histogram(meter, "pytriton.batch.rows", "{row}", "Rows of the batches", _ROWS)
        self._duration = _histogram(
            meter, "pytriton.callable.duration", "s", "Time in the callable, for each batch", _SECONDS
        )
        self._first = _histogram(
            meter, "pytriton.first_response.duration", "s", "Time to the first response of a stream", _SECONDS
        )
        self._queued = _histogram(
            meter, "pytriton.queue.duration", "s", "Time that a batch waited for the worker", _SECONDS
        )

    def add_call(self, requests: int, rows: int, queued_ns: int | None, callable_ns: int) -> None:
        """Record one call of the callable; `queued_ns` is `None` if the proxy backend left no time stamp."""
        self._requests.add(requests, self._attributes)
        self._rows.record(rows, self._attributes)
        self._duration.record(callable_ns * 1e-9, self._attributes)
        if queued_ns is not None:
            self._queued.record(queued_ns * 1e-9, self._attributes)

    def add_first_response(self, waited_ns: int) -> None:
        """Record the first response of a request to a decoupled model."""
        self._first.record(waited_ns * 1e-9, self._attributes)

    def add_failed(self, kind: str, requests: int) -> None:
        """Record requests that get an error, of a kind as in `statistics.ERROR_KINDS`."""
        self._failed.add(requests, {**self._attributes, "error.type": kind})

    def add_cancelled(self) -> None:
        """Record a request that its caller cancelled."""
        self._cancelled.add(1, self._attributes)


def find_meters(model: ModelSpec) -> Meters | None:
    """Return the instruments of a model; `None` while the program has no meter provider."""
    metrics = sys.modules.get(_METRICS)
    try:
        provider = None if metrics is None else metrics.get_meter_provider()
    except AttributeError:
        # Another thread is importing it at this moment.
        return None
    # Providers of the API alone do nothing; one of them stands in until the program sets another one.
    if provider is None or type(provider).__module__.startswith(_METRICS):
        return None
    return Meters(provider.get_meter("pytriton"), model)


def _histogram(meter: Any, name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Any:
    try:
        return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)
    except TypeError:  # before OpenTelemetry 1.30
        return meter.create_histogram(name, unit, description)
