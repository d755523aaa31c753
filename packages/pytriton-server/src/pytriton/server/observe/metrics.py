"""The text of the metrics page: Triton's metrics, those of the callables, and the user's own.

The only module that imports `prometheus_client`. It is itself imported when the page is asked for first, because that
takes longer than the rest of the start of a server.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, product
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pytriton.proxy_backend import Histogram
from pytriton.proxy_backend.process.metrics import GATHERED, family_of
from pytriton.server.control.metrics import read_metrics
from pytriton.server.observe.metrics_totals import CallableTotals, SleepFacts
from pytriton.server.tritonserver.outcomes import OUTCOMES, PROTOCOLS
from pytriton.server.tritonserver.ports import Endpoint

_LABELS = ("model", "version", "worker")

# Triton drops most metrics of an unloaded model. The rest, mostly zeros, would grow with each name ever bound.
_LOADED = re.compile(rb"^nv_inference_request_success\{([^}]*)\}", re.MULTILINE)
_LEFT_OVER = re.compile(rb"^nv_inference_request_failure\{([^}]*)\} 0\n", re.MULTILINE)

logger = logging.getLogger(__name__)


class MeasuredModel(Protocol):
    """The part of a bound model that metrics need."""

    name: str
    version: int
    has_cost: bool
    """Whether it says what a batch may cost."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may get any number of responses."""
        ...

    def read_totals(self) -> Sequence[CallableTotals]:
        """Return the counts of its callables."""
        ...

    def read_sleep(self) -> SleepFacts | None:
        """Return what is known of it as a model that may sleep; None of one that never does."""
        ...


class ModelTexts:
    """The samples of each model as text, kept from one page to the next: only what has changed is written anew."""

    def __init__(self) -> None:
        self._kept: dict[str, Mapping[Hashable, tuple[object, Mapping[bytes, bytes]]]] = {}

    def part(self, name: str, models: Mapping[Hashable, tuple[object, Collector]]) -> bytes:
        """Make the text of a part of the page.

        Only models whose facts are others than on the page before are made anew.
        """
        kept: dict[Hashable, tuple[object, Mapping[bytes, bytes]]] = {}
        families: dict[bytes, list[bytes]] = {}
        of_before = self._kept.get(name, {})
        for key, (facts, collector) in models.items():
            before = of_before.get(key)
            kept[key] = before if before is not None and before[0] == facts else (facts, _families(collector))
            for head, samples in kept[key][1].items():
                families.setdefault(head, []).append(samples)
        self._kept[name] = kept
        return b"".join(part for head, samples in families.items() for part in (head, *samples))


def render_metrics(
    triton: Endpoint,
    models: Callable[[], Iterable[MeasuredModel]],
    guard: Callable[[], Mapping[str, bool]] = dict,
    files: Callable[[], tuple[int, int] | None] = lambda: None,
    memory: Callable[[], int | None] = lambda: None,
    outcomes: Mapping[tuple[str, str, str], int] | None = None,
    texts: ModelTexts | None = None,
    budget: Callable[[], tuple[int, int] | None] = lambda: None,
) -> bytes:
    """Make the text of the page. A part that fails is left out, and `pytriton_metrics_up` shows that.

    Tritonserver has its own page at `triton`; `memory` is what it has resident, `files` how many it has open and may
    have. Sizes are in bytes; `budget` is None if there is none.
    """
    texts = ModelTexts() if texts is None else texts
    loaded: set[tuple[str, str]] = set()

    def fetch_triton() -> bytes:
        page = read_metrics(triton)
        loaded.update(_model_of(labels) for labels in _LOADED.findall(page))
        return _LEFT_OVER.sub(lambda line: line[0] if _model_of(line[1]) in loaded else b"", page)

    sources: dict[str, Callable[[], bytes]] = {
        "tritonserver": fetch_triton,
        "callables": lambda: _render_callables(models(), texts),
        "user": lambda: _rendered(_User()),
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
    parts += [_rendered(_Sources(is_up)), _rendered(_Guard(guard())), _rendered(_Server(files(), memory(), budget()))]
    if outcomes is not None:
        names = {"", *(model.name for model in models()), *(name for name, _ in loaded)}
        parts.append(_render_responses(outcomes, names, texts))
    return b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in parts)


class _User(Collector):
    """The metrics that were registered in this process and in its worker processes."""

    def collect(self) -> Iterator[Metric]:
        gathered = GATHERED.names
        shared = []
        for metric in REGISTRY.collect():
            if metric.name in gathered:
                shared.append(family_of(metric))
            else:
                yield metric
        for family in GATHERED.collect(shared):
            metric = Metric(family.name, family.documentation, family.type, family.unit)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


def _model_of(labels: bytes) -> tuple[str, str]:
    """Return the name and the version of the model that a sample of Triton's is of."""
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels.decode(errors="replace")))
    return found.get("model", ""), found.get("version", "")


def _render_callables(models: Iterable[MeasuredModel], texts: ModelTexts) -> bytes:
    wanted: dict[Hashable, tuple[object, Collector]] = {}
    sleeping: dict[Hashable, tuple[object, Collector]] = {}
    for model in models:
        totals = model.read_totals()
        if (sleep := model.read_sleep()) is not None:
            sleeping[model.name, model.version] = (sleep, _Sleeping(model.name, model.version, sleep))
        facts = (model.decoupled, [(each, each.memory) for each in totals])
        wanted[model.name, model.version] = (facts, _Callables(model, totals))
    return texts.part("callables", wanted) + texts.part("sleeping", sleeping)


def _render_responses(outcomes: Mapping[tuple[str, str, str], int], loaded: Set[str], texts: ModelTexts) -> bytes:
    none = dict.fromkeys(product(PROTOCOLS, OUTCOMES), 0)
    counts: dict[str, dict[tuple[str, str], int]] = {name: dict(none) for name in loaded}
    for (name, protocol, outcome), count in outcomes.items():
        counts.setdefault(name, {})[protocol, outcome] = count
    wanted: dict[Hashable, tuple[object, Collector]] = {
        name: (counts[name], _Responses(name, counts[name])) for name in sorted(counts)
    }
    return texts.part("responses", wanted)


def _families(collector: Collector) -> Mapping[bytes, bytes]:
    """Return the samples of each family that has some as text, by the lines in front of them."""
    families: dict[bytes, bytes] = {}
    for family in re.split(rb"(?=^# HELP )", _rendered(collector), flags=re.MULTILINE):
        head = b"".join(re.findall(rb"^#.*\n", family, re.MULTILINE))
        if samples := family[len(head) :]:
            families[head] = samples
    return families


def _rendered(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


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


class _Guard(Collector):
    """The results of the guard's self-test."""

    def __init__(self, states: Mapping[str, bool]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "pytriton_guard_protection",
            "Whether a protection of the guard is in force; those that nothing has come to yet are not there",
            labels=["protection"],
        )
        for name, is_in_force in self._states.items():
            states.add_metric([name], float(is_in_force))
        if self._states:
            yield states


class _Server(Collector):
    """The resources that tritonserver uses; those that cannot be seen are left out."""

    def __init__(self, files: tuple[int, int] | None, memory: int | None, budget: tuple[int, int] | None) -> None:
        self._files = files
        self._memory = memory
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        if self._files is not None:
            is_open, most = map(float, self._files)
            yield GaugeMetricFamily("pytriton_server_open_files", "Files that tritonserver has open", value=is_open)
            yield GaugeMetricFamily("pytriton_server_max_files", "Files that tritonserver may have open", value=most)
        if self._memory is not None:
            yield GaugeMetricFamily(
                "pytriton_server_memory_bytes",
                "Resident memory of tritonserver, that included which it shares with workers",
                value=float(self._memory),
            )
        if self._budget is not None:
            used, limit = map(float, self._budget)
            text = "Memory that worker processes take together, each its part of what they share (PSS)"
            yield GaugeMetricFamily("pytriton_memory_budget_used_bytes", text, value=used)
            text = "Memory that worker processes may take together"
            yield GaugeMetricFamily("pytriton_memory_budget_bytes", text, value=limit)


class _Responses(Collector):
    """How the requests for one model have ended.

    A loaded model has every way from the start, because a rate needs the zero before; the counts of an unloaded model
    stay.
    """

    def __init__(self, model: str, counts: Mapping[tuple[str, str], int]) -> None:
        self._model = model
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "pytriton_responses",
            "Requests for inference by how they ended; the model is empty where there is none of that name",
            labels=["model", "protocol", "outcome"],
        )
        for (protocol, outcome), count in sorted(self._counts.items()):
            responses.add_metric([self._model, protocol, outcome], count)
        yield responses


class _Sleeping(Collector):
    """What there is to know of one model whose processes may sleep, have a memory budget, or come and go."""

    def __init__(self, name: str, version: int, facts: SleepFacts) -> None:
        self._labels = [name, str(version)]
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts, names = self._facts, _LABELS[:2]
        memory = GaugeMetricFamily(
            "pytriton_model_memory_bytes",
            "Memory of the worker processes of the model, of what they share with others their part (PSS)",
            labels=names,
        )
        memory.add_metric(self._labels, facts.memory)
        used = GaugeMetricFamily(
            "pytriton_model_last_used_timestamp_seconds",
            "When somebody called the model last, or it came awake",
            labels=names,
        )
        used.add_metric(self._labels, facts.last_used)
        seconds = HistogramMetricFamily(
            "pytriton_model_wake_seconds",
            "Time from the request that wakes the model until one of its workers is attached",
            labels=names,
        )
        seconds.add_metric(self._labels, _buckets(facts.wakes), facts.wakes.sum)
        refused = CounterMetricFamily(
            "pytriton_model_wakes_refused",
            "How often the model was to wake, and the memory budget had no room",
            labels=names,
        )
        refused.add_metric(self._labels, facts.wakes_refused)
        yield from (memory, used, seconds, refused)
        if (scaling := facts.scaling) is None:
            return
        running = GaugeMetricFamily(
            "pytriton_model_workers_running", "Worker processes of the model that are attached", labels=names
        )
        running.add_metric(self._labels, scaling.running)
        wanted = GaugeMetricFamily(
            "pytriton_model_workers_wanted", "Worker processes that the model is to have, by its load", labels=names
        )
        wanted.add_metric(self._labels, scaling.wanted)
        changes = CounterMetricFamily(
            "pytriton_model_scalings",
            "How often the number of worker processes went up or down, or was to go up and could not",
            labels=[*names, "change"],
        )
        for change, count in sorted(dataclasses.asdict(scaling.counts).items()):
            changes.add_metric([*self._labels, change], count)
        yield from (running, wanted, changes)


class _Callables(Collector):
    """The counts of the callables of one model."""

    def __init__(self, model: MeasuredModel, totals: Sequence[CallableTotals]) -> None:
        self._model = model
        self._totals = totals

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
            "pytriton_cancelled_requests",
            "Requests of which the worker was told that nobody waits for them any more",
            labels=_LABELS,
        )
        rows = HistogramMetricFamily(
            "pytriton_batch_rows", "Rows of the batches that the inference callable was called with", labels=_LABELS
        )
        seconds = HistogramMetricFamily(
            "pytriton_callable_seconds", "Time in the inference callable, for each batch", labels=_LABELS
        )
        first = HistogramMetricFamily(
            "pytriton_first_response_seconds",
            "Time from the call of the inference callable of a decoupled model to the first response of a request",
            labels=_LABELS,
        )
        queued = CounterMetricFamily(
            "pytriton_queue_seconds", "Time that batches waited for the worker after they were sent", labels=_LABELS
        )
        costs = HistogramMetricFamily(
            "pytriton_batch_cost",
            "What the batches of a model with a Cost took of its limit, with their padding",
            labels=_LABELS,
        )
        padding = CounterMetricFamily(
            "pytriton_batch_padding", "How much of the cost of the batches was padding", labels=_LABELS
        )
        received = CounterMetricFamily("pytriton_input_bytes", "Bytes of the inputs", labels=_LABELS)
        sent = CounterMetricFamily("pytriton_output_bytes", "Bytes of the outputs", labels=_LABELS)
        attached = GaugeMetricFamily(
            "pytriton_worker_attached", "Whether the worker of the callable is attached to the server", labels=_LABELS
        )
        asleep = GaugeMetricFamily(
            "pytriton_worker_asleep",
            "Whether the worker has ended until a request comes; left out where it never does",
            labels=_LABELS,
        )
        process = GaugeMetricFamily(
            "pytriton_worker_pid", "Process of the worker; left out while it has none", labels=_LABELS
        )
        memory = GaugeMetricFamily(
            "pytriton_worker_memory_bytes",
            "Resident memory of the process of the worker, that of others that it shares included; left out where it is"
            " the process of this page",
            labels=_LABELS,
        )
        ends = CounterMetricFamily(
            "pytriton_worker_ends", "Processes of the worker that ended by themselves", labels=_LABELS
        )
        golden = CounterMetricFamily(
            "pytriton_worker_golden_failures",
            "Processes of the worker that did not give the known answer to their warm-up; left out where that is not"
            " compared",
            labels=_LABELS,
        )
        model = self._model
        for totals in self._totals:
            labels = [model.name, str(model.version), str(totals.place)]
            statistics = totals.statistics
            requests.add_metric(labels, statistics.requests)
            for kind, count in statistics.failed_requests.items():
                failed.add_metric([*labels, kind], count)
            cancelled.add_metric(labels, statistics.cancelled_requests)
            rows.add_metric(labels, _buckets(statistics.rows), statistics.rows.sum)
            seconds.add_metric(labels, _buckets(statistics.callable_seconds), statistics.callable_seconds.sum)
            if model.decoupled:
                waits = statistics.first_response_seconds
                first.add_metric(labels, _buckets(waits), waits.sum)
            if model.has_cost:
                costs.add_metric(labels, _buckets(statistics.costs), statistics.costs.sum)
                padding.add_metric(labels, statistics.padding)
            queued.add_metric(labels, statistics.queued_seconds)
            received.add_metric(labels, statistics.input_bytes)
            sent.add_metric(labels, statistics.output_bytes)
            if totals.attached is not None:
                attached.add_metric(labels, float(totals.attached))
            if totals.asleep is not None:
                asleep.add_metric(labels, float(totals.asleep))
            if totals.pid is not None:
                process.add_metric(labels, totals.pid)
            if (resident := totals.memory) is not None:
                memory.add_metric(labels, resident)
            ends.add_metric(labels, totals.ends)
            if totals.golden_failures is not None:
                golden.add_metric(labels, totals.golden_failures)
        yield from (requests, failed, cancelled, rows, seconds, first, costs, padding, queued, received, sent)
        yield from (attached, asleep, process, memory, ends, golden)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the upper bounds as text, each with the count of all values up to it.

    Before the first value there is the last one alone: most of many models are never called.
    """
    if not any(histogram.counts):
        return [("+Inf", 0.0)]
    bounds = [*(f"{bound:.9g}" for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, (float(count) for count in accumulate(histogram.counts)), strict=True))
