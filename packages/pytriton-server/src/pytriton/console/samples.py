"""What the numbers of a server say: samples of its counters, and what happened between two of them.

Nothing here waits or opens a connection.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pytriton.catalog.listing import ModelUse

_QUANTILES = {"0.5": "p50", "0.99": "p99"}
_SUMMARY = "nv_inference_request_summary_us"
_COUNTERS = {
    "nv_inference_request_success": "succeeded",
    "nv_inference_count": "rows",
    "nv_inference_exec_count": "batches",
    "nv_inference_request_duration_us": "request_us",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_compute_input_duration_us": "compute_us",
    "nv_inference_compute_infer_duration_us": "compute_us",
    "nv_inference_compute_output_duration_us": "compute_us",
}
_SUMS = ("succeeded", "failed", "rows", "batches", "request_us", "queue_us", "compute_us", "cost", "padding")
# Triton gives this reason for errors of the backend; our own metrics know more of them.
_OF_BACKEND = "backend"
_OK = "ok"
_COSTS = {"pytriton_batch_cost_sum": "cost", "pytriton_batch_padding": "padding"}
_WORKER_FIELDS: Mapping[str, tuple[str, type]] = {
    "pytriton_worker_attached": ("attached", bool),
    "pytriton_worker_asleep": ("asleep", bool),
    "pytriton_worker_pid": ("pid", int),
    "pytriton_worker_ends": ("ends", int),
    "pytriton_requests": ("requests", float),
    "pytriton_callable_seconds_sum": ("busy_s", float),
}


@dataclass
class ModelCounts:
    """Counters of one model, over all of its versions."""

    succeeded: float = 0.0
    failed: float = 0.0
    rows: float = 0.0
    batches: float = 0.0
    request_us: float = 0.0
    queue_us: float = 0.0
    compute_us: float = 0.0
    cost: float = 0.0
    """What batches took of the limit of a `Cost`, with their padding."""
    padding: float = 0.0
    pending: float | None = None
    """Requests that wait in the queue now."""
    outcomes: dict[str, float] = field(default_factory=dict)
    """Requests by how they ended, if the guard counts them; this includes requests that no worker saw."""
    kinds: dict[str, float] = field(default_factory=dict)
    """Requests that failed by the kind of the error, as far as that is known."""
    callable_kinds: dict[str, float] = field(default_factory=dict)
    """The same for requests that our workers answered."""
    quantiles_ms: dict[str, float] = field(default_factory=dict)
    """Latency as the server summarises it: `p50`, `p99`."""
    callable_buckets: dict[float, float] = field(default_factory=dict)
    """Batches by the upper bound of their time in the callable, in seconds, cumulative."""

    def add(self, other: "ModelCounts") -> None:
        """Add the counters of another model; of quantiles, the largest is kept."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.pending is not None:
            self.pending = (self.pending or 0.0) + other.pending
        for mine, others in (
            (self.outcomes, other.outcomes),
            (self.kinds, other.kinds),
            (self.callable_kinds, other.callable_kinds),
            (self.callable_buckets, other.callable_buckets),
        ):
            _add(mine, others)
        for name, value in other.quantiles_ms.items():
            self.quantiles_ms[name] = max(self.quantiles_ms.get(name, 0.0), value)

    @property
    def failures(self) -> dict[str, float]:
        """Requests that failed, by the best kind that is known."""
        if self.outcomes:
            return {name: count for name, count in self.outcomes.items() if name != _OK}
        if not self.kinds and not self.callable_kinds:
            return {"failed": self.failed}
        kinds = {name: count for name, count in self.kinds.items() if name != _OF_BACKEND or not self.callable_kinds}
        return {**kinds, **self.callable_kinds}


@dataclass
class WorkerCounts:
    """The counts of one of our workers."""

    model: str
    version: str
    place: int
    attached: bool = False
    asleep: bool = False
    """Whether it has ended until a request comes."""
    pid: int | None = None
    ends: int = 0
    """How many of its processes ended by themselves."""
    requests: float = 0.0
    failed: float = 0.0
    busy_s: float = 0.0
    """Time in the callable."""
    busy: float | None = None
    """The share of the time since the last sample that it spent in the callable."""
    ended_lately: bool = False
    """Whether one of its processes was seen to end by itself a moment ago."""


@dataclass
class Sample:
    """The counters of a server at some time."""

    time_s: float
    """On a clock that never goes back."""
    models: dict[str, ModelCounts] = field(default_factory=dict)
    workers: dict[tuple[str, str, int], WorkerCounts] = field(default_factory=dict)
    uses: dict[str, ModelUse] = field(default_factory=dict)
    """How the worker processes of models that may sleep are used."""
    has_metrics: bool = False
    """Whether it is from a page of metrics, not from Triton's statistics alone."""


@dataclass(frozen=True)
class Point:
    """The difference of two samples; None if they show nothing."""

    requests_s: float
    failures_s: Mapping[str, float]
    latency_ms: float | None
    queue_ms: float | None
    compute_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    of_callable: bool
    """Whether the quantiles are about the callable instead of requests."""
    batch_rows: float | None
    pending: float | None
    padding: float | None
    """The share of padding in the cost of batches; None of a model without a `Cost`."""

    @property
    def all_failures_s(self) -> float:
        """All requests that failed, a second."""
        return sum(self.failures_s.values())


def read_metrics(page: str, time_s: float) -> Sample:
    """Return the sample that a page of metrics holds."""
    sample = Sample(time_s, has_metrics=True)
    for family in text_string_to_metric_families(page):
        if not family.name.startswith(("nv_inference_", "pytriton_")):
            continue
        for name, labels, value, *_ in family.samples:
            if "model" in labels and math.isfinite(value):
                _take(sample, name.removesuffix("_total"), labels, value)
    return sample


def read_statistics(statistics: Iterable[Mapping[str, Any]], time_s: float) -> Sample:
    """Return the sample that Triton's statistics of all models hold."""
    sample = Sample(time_s)
    for item in statistics:
        counts = sample.models.setdefault(str(item["name"]), ModelCounts())
        kinds = item.get("inference_stats", {})
        of = {name: (int(each.get("count", 0)), int(each.get("ns", 0)) / 1e3) for name, each in kinds.items()}
        none = (0, 0.0)
        counts.succeeded += of.get("success", none)[0]
        counts.failed += of.get("fail", none)[0]
        counts.rows += int(item.get("inference_count", 0))
        counts.batches += int(item.get("execution_count", 0))
        counts.request_us += of.get("success", none)[1]
        counts.queue_us += of.get("queue", none)[1]
        counts.compute_us += sum(of.get(f"compute_{part}", none)[1] for part in ("input", "infer", "output"))
    return sample


def total(sample: Sample) -> ModelCounts:
    """Return the counters of all models together."""
    counts = ModelCounts()
    for each in sample.models.values():
        counts.add(each)
    return counts


def since(before: ModelCounts, now: ModelCounts, seconds: float) -> Point | None:
    """Return the difference of two samples of a model; None if its counters were reset."""
    succeeded, failed = now.succeeded - before.succeeded, now.failed - before.failed
    # If Triton's own front end serves gRPC, the guard counts HTTP only.
    answered = max(sum(now.outcomes.values()) - sum(before.outcomes.values()), succeeded + failed)
    rows, batches = now.rows - before.rows, now.batches - before.batches
    cost, padding = now.cost - before.cost, now.padding - before.padding
    if min(succeeded, failed, rows, batches, cost, padding) < 0:
        return None
    failures = {kind: count - before.failures.get(kind, 0.0) for kind, count in now.failures.items()}
    quantiles = now.quantiles_ms if succeeded else {}
    of_callable = not now.quantiles_ms and bool(now.callable_buckets)
    if of_callable:
        found = _quantiles(before.callable_buckets, now.callable_buckets)
        quantiles = {name: seconds * 1e3 for name, seconds in found.items()}
    return Point(
        requests_s=answered / seconds,
        failures_s={kind: max(0.0, count) / seconds for kind, count in failures.items()},
        latency_ms=(now.request_us - before.request_us) / succeeded / 1e3 if succeeded else None,
        queue_ms=(now.queue_us - before.queue_us) / succeeded / 1e3 if succeeded else None,
        compute_ms=(now.compute_us - before.compute_us) / succeeded / 1e3 if succeeded else None,
        p50_ms=quantiles.get("p50"),
        p99_ms=quantiles.get("p99"),
        of_callable=of_callable,
        batch_rows=rows / batches if batches else None,
        pending=now.pending,
        padding=padding / cost if cost else None,
    )


def _take(sample: Sample, name: str, labels: Mapping[str, str], value: float) -> None:
    if name.startswith("nv_"):
        counts = sample.models.setdefault(labels["model"], ModelCounts())
        if name in _COUNTERS:
            setattr(counts, _COUNTERS[name], getattr(counts, _COUNTERS[name]) + value)
        elif name == "nv_inference_request_failure":
            counts.failed += value
            _add(counts.kinds, {labels.get("reason", "failed").lower(): value})
        elif name == "nv_inference_pending_request_count":
            counts.pending = (counts.pending or 0.0) + value
        elif name == _SUMMARY and labels.get("quantile") in _QUANTILES:
            quantile = _QUANTILES[labels["quantile"]]
            counts.quantiles_ms[quantile] = max(counts.quantiles_ms.get(quantile, 0.0), value / 1e3)
        return
    if name == "pytriton_responses" and labels["model"]:
        _add(sample.models.setdefault(labels["model"], ModelCounts()).outcomes, {labels["outcome"]: value})
    if name.startswith("pytriton_model_") and "le" not in labels:
        sample.uses.setdefault(labels["model"], ModelUse()).take(name, value)
    if "worker" not in labels:
        return
    key = (labels["model"], labels.get("version", ""), int(labels["worker"]))
    worker = sample.workers.setdefault(key, WorkerCounts(*key))
    if name in _WORKER_FIELDS:
        field_name, kind = _WORKER_FIELDS[name]
        setattr(worker, field_name, kind(value))
    elif name in _COSTS:
        counts = sample.models.setdefault(key[0], ModelCounts())
        setattr(counts, _COSTS[name], getattr(counts, _COSTS[name]) + value)
    elif name == "pytriton_failed_requests":
        worker.failed += value
        _add(sample.models.setdefault(key[0], ModelCounts()).callable_kinds, {labels.get("kind", "failed"): value})
    elif name == "pytriton_callable_seconds_bucket":
        _add(sample.models.setdefault(key[0], ModelCounts()).callable_buckets, {float(labels["le"]): value})


def _add(counts: dict[Any, float], others: Mapping[Any, float]) -> None:
    for name, count in others.items():
        counts[name] = counts.get(name, 0.0) + count


def _quantiles(before: Mapping[float, float], now: Mapping[float, float]) -> dict[str, float]:
    """Return the quantiles of the difference of two cumulative histograms, interpolated within buckets."""
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    if not counts or counts[-1][1] <= 0:
        return {}
    return {name: _quantile(counts, float(share)) for share, name in _QUANTILES.items()}


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    wanted = counts[-1][1] * share
    for (low, under), (high, count) in _steps(counts):
        if count >= wanted:
            if math.isinf(high):
                return low
            return low + (high - low) * (wanted - under) / (count - under) if count > under else high
    return counts[-1][0]


def _steps(counts: Sequence[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    yield from pairwise([(0.0, 0.0), *counts])
