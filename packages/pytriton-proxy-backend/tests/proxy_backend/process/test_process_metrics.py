"""Metrics of worker processes: what is told, in how many messages, and how it is summed."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest

from pytriton.proxy_backend.errors import ProtocolError
from pytriton.proxy_backend.process import metrics
from pytriton.proxy_backend.process.messages import MAX_LINE_BYTES, encode_message
from pytriton.proxy_backend.process.metrics import (
    Family,
    GatheredMetrics,
    MetricsReport,
    ReceivedMetrics,
    family_of,
)

# The proxy backend does without it; where a callable's process has it, its metrics are gathered.
pytest.importorskip("prometheus_client")
import prometheus_client
from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """The default registry, as of a process of its own."""
    made = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", made)
    made.register(prometheus_client.PLATFORM_COLLECTOR)
    return made


class Parent:
    """Keeps the messages of a process, and reads them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.received = ReceivedMetrics()
        self.is_stuck = False

    def send(self, kind: str, **fields: object) -> bool:
        assert kind == "metrics"
        assert len(encode_message(kind, **fields)) < MAX_LINE_BYTES
        if not self.is_stuck:
            self.messages.append(fields)
        return not self.is_stuck

    def read(self) -> list[Family] | None:
        families = None
        for message in self.messages:
            families = self.received.take(message)
        self.messages.clear()
        return families


def samples(families: list[Family] | None) -> dict[tuple[str, ...], float]:
    assert families is not None
    return {
        (name, *(f"{key}={value}" for key, value in labels)): number
        for family in families
        for name, labels, number in family.samples
        if not name.endswith("_created")
    }


def test_what_is_registered_is_told_when_it_has_changed(registry: Any) -> None:
    parent = Parent()
    report = MetricsReport(parent.send)
    report.tell()
    # What prometheus_client itself registers is that of this process.
    assert parent.messages == []
    counter = prometheus_client.Counter("words", "Words", ["language"], registry=registry)
    counter.labels("de").inc(3)
    prometheus_client.Gauge("level", "Level", registry=registry).set(math.inf)
    report.tell()
    assert parent.messages == []  # it is too early
    report.tell(at_once=True)
    assert samples(parent.read()) == {("words_total", "language=de"): 3, ("level",): math.inf}
    report.tell(at_once=True)
    assert parent.messages == []
    counter.labels("de").inc()
    parent.is_stuck = True
    report.tell(at_once=True)
    parent.is_stuck = False
    report.tell(at_once=True)
    assert samples(parent.read())["words_total", "language=de"] == 4
    registry.unregister(counter)
    report.tell(at_once=True)
    assert samples(parent.read()) == {("level",): math.inf}


def test_many_metrics_take_several_messages(registry: Any) -> None:
    parent = Parent()
    counter = prometheus_client.Counter("words", "Words", ["word"], registry=registry)
    for number in range(2000):
        counter.labels(f"{number:0500}").inc()
    MetricsReport(parent.send).tell()
    assert len(parent.messages) > 2
    first = parent.messages[0]
    families = parent.read()
    assert len(samples(families)) == 2000
    # Of what was begun again, only the second time counts.
    parent.messages = [first, first, {"value": "[]", "first": False, "last": True}]
    assert len(samples(parent.read())) < 2000


def test_a_collector_that_fails_is_told_of_once(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        is_broken = False

        def collect(self) -> Iterator[Any]:
            if self.is_broken:
                raise ZeroDivisionError("in the collector")
            yield CounterMetricFamily("mine", "Mine", 3)

    parent, broken = Parent(), Broken()
    registry.register(broken)
    report = MetricsReport(parent.send)
    broken.is_broken = True
    for _ in range(3):
        report.tell(at_once=True)
    [record] = caplog.records
    assert "ZeroDivisionError: in the collector" in record.getMessage()
    broken.is_broken = False
    report.tell(at_once=True)
    assert samples(parent.read()) == {("mine_total",): 3}


@pytest.mark.parametrize("value", ["5", "[[1]]", '[["a", "counter", "", "", [["a_total", [], "x"]]]]', "nothing"])
def test_what_is_no_metric_is_refused(value: str) -> None:
    with pytest.raises(ProtocolError, match="metrics of a worker cannot be read"):
        ReceivedMetrics().take({"value": value, "first": True, "last": True})


def families(count: float, level: float) -> list[Family]:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("words", "Words", registry=registry).inc(count)
    histogram = prometheus_client.Histogram("seconds", "Seconds", buckets=[1, 2], registry=registry)
    histogram.observe(level)
    prometheus_client.Summary("sizes", "Sizes", registry=registry).observe(level)
    prometheus_client.Gauge("level", "Level", ["place"], registry=registry).labels("a").set(level)
    prometheus_client.Info("build", "Build", registry=registry).info({"version": "1"})
    return [family_of(metric) for metric in registry.collect()]


def test_metrics_are_summed_as_their_types_say() -> None:
    gathered = GatheredMetrics()
    for name, count, level in (("one", 1, 0.5), ("two", 2, 1.5)):
        gathered.update(name, {"pytriton_worker": name}, families(count, level))
    summed: dict[tuple[str, ...], float] = {
        ("words_total",): 3,
        ("seconds_bucket", "le=1.0"): 1,
        ("seconds_bucket", "le=2.0"): 2,
        ("seconds_bucket", "le=+Inf"): 2,
        ("seconds_count",): 2,
        ("seconds_sum",): 2,
        ("sizes_count",): 2,
        ("sizes_sum",): 2,
    }
    alone: dict[tuple[str, ...], float] = {
        ("level", "place=a", "pytriton_worker=one"): 0.5,
        ("level", "place=a", "pytriton_worker=two"): 1.5,
        ("build_info", "pytriton_worker=one", "version=1"): 1,
        ("build_info", "pytriton_worker=two", "version=1"): 1,
    }
    assert samples(gathered.collect([])) == {**summed, **alone}
    # A process that is gone has counted what it has counted.
    gathered.end("two")
    found = samples(gathered.collect([]))
    assert {key: found[key] for key in summed} == summed
    assert found.keys() == {*summed, *(key for key in alone if "pytriton_worker=two" not in key)}
    # The next one begins anew, and this process counts as well.
    gathered.update("two", {"pytriton_worker": "two"}, families(10, 3))
    found = samples(gathered.collect(families(100, 7)))
    assert found["words_total",] == 113
    assert found["level", "place=a"] == 7
    assert gathered.names == {"words", "seconds", "sizes", "level", "build"}


def test_the_oldest_process_says_since_when_is_counted() -> None:
    gathered = GatheredMetrics()
    for process, created in (("one", 5.0), ("two", 3.0), ("three", 4.0)):
        family = Family("words", "counter", "", "", (("words_created", (), created), ("words_total", (), 1.0)))
        gathered.update(process, {}, [family])
    [summed] = gathered.collect([])
    assert summed.samples == (("words_created", (), 3.0), ("words_total", (), 3.0))


def test_quantiles_are_those_of_a_process() -> None:
    family = SummaryMetricFamily("sizes", "Sizes", count_value=2, sum_value=5)
    family.add_sample("sizes", {"quantile": "0.5"}, 2)
    gathered = GatheredMetrics()
    for process in ("one", "two"):
        gathered.update(process, {"pytriton_worker": process}, [family_of(family)])
    assert samples(gathered.collect([])) == {
        ("sizes_count",): 4,
        ("sizes_sum",): 10,
        ("sizes", "pytriton_worker=one", "quantile=0.5"): 2,
        ("sizes", "pytriton_worker=two", "quantile=0.5"): 2,
    }


def test_processes_that_differ_in_a_type_are_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_told_of", set())
    gathered = GatheredMetrics()
    gathered.update("one", {}, [Family("level", "counter", "", "", (("level_total", (), 1.0),))])
    gathered.update("two", {}, [Family("level", "gauge", "", "", (("level", (), 5.0),))])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert samples(gathered.collect([])) == {("level_total",): 1}
    [record] = caplog.records
    assert "'level' is a counter in one process and a gauge in another one" in record.getMessage()
