"""The text of the metrics page: Triton's metrics, those of the callables, and the user's own.

The only module that imports `prometheus_client`. It is itself imported when the page is asked for first, because that
takes longer than the rest of the start of a server.
"""

import contextlib
import http.client
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pytriton.proxy_backend import Histogram
from pytriton.server.control.http import fetch
from pytriton.server.observe.metrics_totals import CallableTotals
from pytriton.server.tritonserver.ports import Endpoint

__all__ = ["TRITON_TIMEOUT_S", "ServedModel", "render_metrics"]

TRITON_TIMEOUT_S = 2.0
"""How long tritonserver may take for its part of the page, in seconds; the other parts come without it."""

_LABELS = ("model", "version", "worker")

logger = logging.getLogger(__name__)


class ServedModel(Protocol):
    """What is asked of a bound model."""

    name: str
    version: int

    def read_totals(self) -> Sequence[CallableTotals]:
        """Return what its callables have done."""
        ...


def render_metrics(triton: Endpoint, models: Callable[[], Iterable[ServedModel]]) -> bytes:
    """Make the text of the page. A part that cannot be had is left out, and `pytriton_metrics_up` says so.

    Args:
        triton: Where tritonserver serves its own metrics.
        models: Gives the models that are bound.
    """
    sources: dict[str, Callable[[], bytes]] = {
        "tritonserver": lambda: _fetch(triton),
        "callables": lambda: _rendered(_Callables(models)),
        "user": lambda: generate_latest(REGISTRY),
    }
    is_up = {}
    parts = []
    for source, collect in sources.items():
        try:
            parts.append(collect())
            is_up[source] = True
        except Exception as error:
            logger.warning("The metrics of source %r cannot be had: %s: %s", source, type(error).__name__, error)
            is_up[source] = False
    parts.append(_rendered(_Sources(is_up)))
    return b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in parts)


def _rendered(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _fetch(endpoint: Endpoint) -> bytes:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TRITON_TIMEOUT_S)
    with contextlib.closing(connection):
        status, page = fetch(connection, "GET", "/metrics", None, {"Connection": "close"}, timeout_s=TRITON_TIMEOUT_S)
    if status != http.HTTPStatus.OK:
        raise OSError(f"tritonserver answers with status {status}")
    return page


class _Sources(Collector):
    """Which parts of the page are there."""

    def __init__(self, is_up: dict[str, bool]) -> None:
        self._is_up = is_up

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "pytriton_metrics_up",
            "Whether this page has the metrics of a source: tritonserver, callables, user",
            labels=["source"],
        )
        for source, is_up in self._is_up.items():
            up.add_metric([source], float(is_up))
        yield up


class _Callables(Collector):
    """What the callables have done, read when it is asked for: counting costs nothing but the counts."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "pytriton_requests", "Requests that were handed to the inference callable", labels=_LABELS
        )
        failed = CounterMetricFamily(
            "pytriton_failed_requests",
            "Requests that were answered with an error by the worker, by its kind",
            labels=[*_LABELS, "kind"],
        )
        cancelled = CounterMetricFamily(
            "pytriton_cancelled_requests", "Requests that their callers gave up while they were served", labels=_LABELS
        )
        rows = HistogramMetricFamily(
            "pytriton_batch_rows", "Rows of the batches that the inference callable was called with", labels=_LABELS
        )
        seconds = HistogramMetricFamily(
            "pytriton_callable_seconds", "Time in the inference callable, for each batch", labels=_LABELS
        )
        queued = CounterMetricFamily(
            "pytriton_queue_seconds", "Time that batches waited for the worker after they were sent", labels=_LABELS
        )
        received = CounterMetricFamily("pytriton_input_bytes", "Bytes of the inputs", labels=_LABELS)
        sent = CounterMetricFamily("pytriton_output_bytes", "Bytes of the outputs", labels=_LABELS)
        attached = GaugeMetricFamily(
            "pytriton_worker_attached", "Whether the worker of the callable is attached to the server", labels=_LABELS
        )
        process = GaugeMetricFamily(
            "pytriton_worker_pid", "Process of the worker; left out while it has none", labels=_LABELS
        )
        ends = CounterMetricFamily(
            "pytriton_worker_ends", "Processes of the worker that ended by themselves", labels=_LABELS
        )
        for model in self._models():
            for totals in model.read_totals():
                labels = [model.name, str(model.version), str(totals.place)]
                statistics = totals.statistics
                requests.add_metric(labels, statistics.requests)
                for kind, count in statistics.failed_requests.items():
                    failed.add_metric([*labels, kind], count)
                cancelled.add_metric(labels, statistics.cancelled_requests)
                rows.add_metric(labels, _buckets(statistics.rows), statistics.rows.sum)
                seconds.add_metric(labels, _buckets(statistics.callable_seconds), statistics.callable_seconds.sum)
                queued.add_metric(labels, statistics.queued_seconds)
                received.add_metric(labels, statistics.input_bytes)
                sent.add_metric(labels, statistics.output_bytes)
                attached.add_metric(labels, float(totals.attached))
                if totals.pid is not None:
                    process.add_metric(labels, totals.pid)
                ends.add_metric(labels, totals.ends)
        yield from (requests, failed, cancelled, rows, seconds, queued, received, sent, attached, process, ends)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the upper bounds as text, each with the count of all values up to it."""
    bounds = [*(f"{bound:.9g}" for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, (float(count) for count in accumulate(histogram.counts)), strict=True))
