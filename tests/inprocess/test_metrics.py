"""Metrics of the user's own in process: counters, gauges and histograms, and the errors of Triton for them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pytriton import inprocess
from pytriton.inprocess import Metric, MetricFamily, MetricKind, Server

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def name() -> str:
    """A name for a family: Triton keeps those for as long as the process lives."""
    return f"pytriton_test_{next(_numbers)}"


def samples(server: Server, name: str) -> dict[str, float]:
    lines = [line for line in server.metrics().splitlines() if line.startswith(name)]
    return {sample.removeprefix(name): float(value) for sample, value in (line.rsplit(" ", 1) for line in lines)}


def test_counter_counts_per_labels(server: Server, name: str) -> None:
    family = MetricFamily(MetricKind.COUNTER, name, "what it counts")
    first, second = Metric(family, {"model": "a"}), Metric(family, {"model": "b"})

    first.increment(2)
    first.increment(0.5)
    second.increment(1)

    assert (first.value, second.value, first.kind) == (2.5, 1.0, MetricKind.COUNTER)
    assert samples(server, name) == {'{model="a"}': 2.5, '{model="b"}': 1.0}
    assert f"# HELP {name} what it counts" in server.metrics()


def test_gauge_is_set_and_moved(server: Server, name: str) -> None:
    gauge = Metric(MetricFamily(MetricKind.GAUGE, name, ""))

    gauge.set_value(10)
    gauge.increment(-3)

    assert gauge.value == 7.0
    assert samples(server, name) == {"": 7.0}


def test_histogram_counts_in_buckets(server: Server, name: str) -> None:
    """Triton's own API has histograms; NVIDIA's package does not reach them."""
    histogram = Metric(MetricFamily(MetricKind.HISTOGRAM, name, ""), {"a": "b"}, buckets=[0.1, 1, 10])

    for value in (0.05, 0.5, 0.6, 50):
        histogram.observe(value)

    found = samples(server, name)
    assert found['_bucket{a="b",le="0.1"}'] == 1
    assert found['_bucket{a="b",le="1"}'] == 3
    assert found['_bucket{a="b",le="10"}'] == 3
    assert found['_bucket{a="b",le="+Inf"}'] == 4
    assert found['_count{a="b"}'] == 4
    assert found['_sum{a="b"}'] == pytest.approx(51.15)


def test_same_name_and_labels_are_the_same_metric(server: Server, name: str) -> None:
    first = Metric(MetricFamily(MetricKind.COUNTER, name, ""), {"a": "b"})
    second = Metric(MetricFamily(MetricKind.COUNTER, name, ""), {"a": "b"})

    first.increment(1)
    del first
    gc.collect()
    second.increment(1)

    assert second.value == 2.0
    assert samples(server, name) == {'{a="b"}': 2.0}


def test_metric_is_gone_with_its_object(server: Server, name: str) -> None:
    family = MetricFamily(MetricKind.COUNTER, name, "")
    metric = Metric(family, {"a": "b"})
    assert samples(server, name)

    del metric
    gc.collect()

    assert not samples(server, name)
    assert Metric(family, {"a": "b"}).value == 0.0


def test_metric_keeps_its_family(name: str) -> None:
    metric = Metric(MetricFamily(MetricKind.COUNTER, name, ""))
    gc.collect()

    metric.increment(1)

    assert metric.value == 1.0


def test_family_that_triton_refuses_is_an_error(name: str) -> None:
    """NVIDIA's package ignores the error and goes on with a null pointer."""
    MetricFamily(MetricKind.COUNTER, name, "")

    with pytest.raises(inprocess.InvalidArgumentError, match="type"):
        MetricFamily(MetricKind.GAUGE, name, "")
    with pytest.raises(inprocess.InvalidArgumentError, match="name") as caught:
        MetricFamily(MetricKind.COUNTER, "not-a-name", "")
    assert (caught.value.received, caught.value.where) == ("not-a-name", "MetricFamily")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, "a", ""), "MetricKind"),
        ((MetricKind.COUNTER, 1, ""), "name"),
        ((MetricKind.COUNTER, "a", None), "description"),
        ((MetricKind.COUNTER, "\udc80", ""), "UTF-8"),
    ],
)
def test_family_checks_types(arguments: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match=complaint):
        MetricFamily(*arguments)


def test_operations_of_other_kinds_are_refused(name: str) -> None:
    counter = Metric(MetricFamily(MetricKind.COUNTER, name, ""))
    histogram = Metric(MetricFamily(MetricKind.HISTOGRAM, name + "_h", ""), buckets=[1])

    for amount in (-1, float("nan")):
        with pytest.raises(inprocess.InvalidArgumentError, match="not negative"):
            counter.increment(amount)
    with pytest.raises(inprocess.UnsupportedError, match="GAUGE") as caught:
        counter.set_value(1)
    assert (caught.value.received, caught.value.where) == (MetricKind.COUNTER, f"metric {name!r}")
    with pytest.raises(inprocess.UnsupportedError):
        counter.observe(1)
    with pytest.raises(inprocess.UnsupportedError):
        _ = histogram.value
    with pytest.raises(inprocess.UnsupportedError):
        histogram.increment(1)
    with pytest.raises(inprocess.InvalidArgumentError, match="number"):
        counter.increment("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [{"a": 1}, {1: "a"}, ["a"], {"not-a-label": "a"}])
def test_labels_are_checked(name: str, labels: Any) -> None:
    family = MetricFamily(MetricKind.COUNTER, name, "")

    with pytest.raises(inprocess.InvalidArgumentError, match="label"):
        Metric(family, labels)


@pytest.mark.parametrize("buckets", [None, [], [2, 1], [1, 1], ["a"], "12", 1, [float("nan")], [1, float("inf")]])
def test_buckets_are_checked(name: str, buckets: Any) -> None:
    family = MetricFamily(MetricKind.HISTOGRAM, name, "")

    with pytest.raises(inprocess.InvalidArgumentError, match=name):
        Metric(family, buckets=buckets)


def test_buckets_belong_to_histograms(name: str) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match="histogram only"):
        Metric(MetricFamily(MetricKind.GAUGE, name, ""), buckets=[1])


def test_metrics_of_triton_are_there(server: Server) -> None:
    assert "nv_cpu_memory_total_bytes" in server.metrics()
    assert "nv_cpu_memory_total_bytes" in server.metrics(metric_format=inprocess.MetricFormat.PROMETHEUS)


def test_format_is_checked(server: Server) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match="MetricFormat"):
        server.metrics("prometheus")  # type: ignore[arg-type]
