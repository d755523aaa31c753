"""What a worker tells of its requests: the access log, and metrics of OpenTelemetry."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy import tracers
from pytriton.proxy.types import Response
from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.runtime.meters import find_meters
from pytriton.triton import Triton
from support.serving import local_config
from support.waiting import PATIENCE_S, eventually

NUMBERS = Tensor(name="numbers", dtype=np.float32, shape=(1,))
TENSORS = ([NUMBERS], [NUMBERS])
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


def double(requests: list[Any]) -> list[Any]:
    if any((request["numbers"] < 0).any() for request in requests):
        raise ValueError("a negative number")
    return [ValueError("zero") if not request["numbers"].all() else dict(request) for request in requests]


def call(triton: Triton, number: float, request_id: str = "", headers: dict[str, str] | None = None) -> int:
    """Call the model with one number; return the status."""
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 1], "data": [number]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode()
    url = f"{triton.http_url}/v2/models/double/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers or {}), timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


# ---- the access log ------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """Keeps the records of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(json.loads(record.getMessage()))

    def of(self, *request_ids: str) -> list[dict[str, Any]]:
        """Wait for the records of these requests: a record comes after the answer."""

        def found() -> list[dict[str, Any]]:
            return [record for record in self.records if record["request_id"] in request_ids]

        eventually(lambda: len(found()) >= len(request_ids))
        return found()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("PYTRITON_ACCESS_LOG", "1")
    logger = logging.getLogger("pytriton.access")
    monkeypatch.setattr(logger, "level", logging.INFO)
    handler = Told()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_record_says_the_trace_of_its_request(told: Told) -> None:
    with Triton(config=local_config(http_header_forward_pattern="traceparent")) as triton:
        triton.bind("double", double, *TENSORS)
        assert call(triton, 1, "traced", {"traceparent": TRACEPARENT}) == 200
        assert call(triton, 1, "none") == 200
        assert call(triton, 1, "malformed", {"traceparent": f"00-{'0' * 32}-{SPAN}-01"}) == 200
        assert call(triton, -1, "failed", {"traceparent": TRACEPARENT}) == 500
        assert call(triton, 0, "returned", {"traceparent": TRACEPARENT}) == 500
        records = told.of("traced", "none", "malformed", "failed", "returned")
    assert [(record["request_id"], record["outcome"], record.get("trace_id")) for record in records] == [
        ("traced", "ok", TRACE),
        ("none", "ok", None),
        ("malformed", "ok", None),
        ("failed", "callable", TRACE),
        ("returned", "returned", TRACE),
    ]
    assert {record["span_id"] for record in records if "span_id" in record} == {SPAN}


def test_streams_of_one_batch_end_one_by_one(told: Told) -> None:
    """A stream has its record when it ends, and not when the longest one of its batch does."""
    go_on = threading.Event()

    def count(requests: list[Any]) -> Iterator[list[Any]]:
        wanted = [int(request["numbers"][0, 0]) for request in requests]
        for step in range(max(wanted)):
            if step == 1:
                assert go_on.wait(PATIENCE_S)
            yield [
                Response({"numbers": request["numbers"]}, final=step + 1 == count) if step < count else None
                for request, count in zip(requests, wanted, strict=True)
            ]

    config = ModelConfig(
        max_batch_size=2, decoupled=True, batcher=DynamicBatcher(max_queue_delay_microseconds=600_000_000)
    )
    answers: dict[int, int] = {}

    def ask(url: str, number: int) -> None:
        with DecoupledModelClient(url, "count", inference_timeout_s=PATIENCE_S) as client:
            answers[number] = len(list(client.infer_sample(np.array([number], np.float32))))

    with Triton(config=local_config()) as triton:
        triton.bind("count", count, *TENSORS, config=config)
        threads = [threading.Thread(target=ask, args=(triton.grpc_url, number)) for number in (1, 3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(told.records) == 1)
        [first] = told.records
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        eventually(lambda: len(told.records) == 2)
        last = told.records[1]
    assert answers == {1: 1, 3: 3}
    assert [(record["outcome"], record["batch"]) for record in told.records] == [("ok", 2), ("ok", 2)]
    assert last["duration_ms"] > first["duration_ms"]


# ---- metrics of OpenTelemetry --------------------------------------------------------------------------------------


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """A meter provider as a program sets it up, for this test alone."""
    found = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[found], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    yield found
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Return the data points by metric."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_metrics_count_what_the_worker_does(reader: InMemoryMetricReader) -> None:
    with Triton(config=local_config()) as triton:
        triton.bind("double", double, *TENSORS)
        with ModelClient(str(triton.http_url), "double") as client:
            for rows in (1, 3):
                client.infer_batch(np.ones((rows, 1), np.float32))
        assert [call(triton, number) for number in (1, -1, 0, 0)] == [200, 500, 500, 500]
    found = points(reader)
    model = {"triton.model_name": "double", "triton.model_version": 1}
    [requests] = found["pytriton.requests"]
    assert (dict(requests.attributes), requests.value) == (model, 6)
    assert {point.attributes["error.type"]: point.value for point in found["pytriton.failed_requests"]} == {
        "callable": 1,
        "returned": 2,
    }
    [rows] = found["pytriton.batch.rows"]
    assert (rows.count, rows.sum, rows.max) == (6, 8, 3)
    for name in ("pytriton.callable.duration", "pytriton.queue.duration"):
        [duration] = found[name]
        assert (dict(duration.attributes), duration.count) == (model, 6)
        assert 0 < duration.sum < PATIENCE_S


def test_a_measurement_in_a_trace_has_it_as_its_exemplar(
    reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracers, "_chosen", TracerProvider(shutdown_on_exit=False).get_tracer("test"))
    with Triton(config=local_config(http_header_forward_pattern="traceparent")) as triton:
        triton.bind("double", double, *TENSORS)
        assert call(triton, 1, headers={"traceparent": TRACEPARENT}) == 200
    [duration] = points(reader)["pytriton.callable.duration"]
    assert [f"{exemplar.trace_id:032x}" for exemplar in duration.exemplars] == [TRACE]


def test_a_stand_in_of_the_api_is_no_meter_provider(
    reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSpec(name="double", version=1, inputs=(), outputs=(), batching=True, max_batch_size=1)
    assert find_meters(model) is not None
    for provider in (metrics.NoOpMeterProvider(), metrics._internal._ProxyMeterProvider()):
        monkeypatch.setattr(metrics, "get_meter_provider", lambda provider=provider: provider)
        assert find_meters(model) is None
