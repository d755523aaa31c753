"""What the numbers of a server say."""

from __future__ import annotations

import pytest

from pytriton.console.samples import ModelCounts, read_metrics, read_statistics, since, total

PAGE = """
# HELP nv_inference_request_success Number of successful inference requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="a",version="1"} 10
nv_inference_request_success{model="a",version="2"} 5
nv_inference_request_success{model="b",version="1"} 1
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="a",reason="BACKEND",version="1"} 4
nv_inference_request_failure{model="a",reason="REJECTED",version="1"} 2
# TYPE nv_inference_count counter
nv_inference_count{model="a",version="1"} 30
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="a",version="1"} 15
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{model="a",version="1"} 15000
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="a",version="1"} 3000
# TYPE nv_inference_compute_input_duration_us counter
nv_inference_compute_input_duration_us{model="a",version="1"} 1000
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{model="a",version="1"} 2000
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="a",version="1"} 7
# TYPE pytriton_failed_requests_total counter
pytriton_failed_requests_total{kind="callable",model="a",version="1",worker="0"} 4
# TYPE pytriton_worker_attached gauge
pytriton_worker_attached{model="a",version="1",worker="0"} 1
pytriton_worker_attached{model="a",version="1",worker="1"} 0
# TYPE pytriton_worker_pid gauge
pytriton_worker_pid{model="a",version="1",worker="0"} 123
# TYPE pytriton_worker_ends_total counter
pytriton_worker_ends_total{model="a",version="1",worker="1"} 3
# TYPE pytriton_callable_seconds histogram
pytriton_callable_seconds_bucket{le="0.001",model="a",version="1",worker="0"} 50
pytriton_callable_seconds_bucket{le="0.002",model="a",version="1",worker="0"} 100
pytriton_callable_seconds_bucket{le="+Inf",model="a",version="1",worker="0"} 100
pytriton_callable_seconds_sum{model="a",version="1",worker="0"} 0.15
# TYPE other gauge
other{model="c"} 1
"""


def test_a_page_of_metrics() -> None:
    sample = read_metrics(PAGE, 5.0)
    assert set(sample.models) == {"a", "b"}
    found = sample.models["a"]
    assert (found.succeeded, found.failed, found.pending) == (15, 6, 7)
    assert found.failures == {"rejected": 2, "callable": 4}
    first, second = (sample.workers["a", "1", place] for place in (0, 1))
    assert (first.attached, first.pid, first.ends, first.failed, first.busy_s) == (True, 123, 0, 4, 0.15)
    assert (second.attached, second.pid, second.ends) == (False, None, 3)


def test_what_happened_between_two_samples() -> None:
    now = read_metrics(PAGE, 5.0).models["a"]
    point = since(ModelCounts(), now, 3.0)
    assert point is not None
    assert point.requests_s == 7
    assert point.failures_s == {"rejected": pytest.approx(2 / 3), "callable": pytest.approx(4 / 3)}
    assert point.all_failures_s == pytest.approx(2)
    assert (point.latency_ms, point.queue_ms, point.compute_ms) == (1.0, 0.2, 0.2)
    assert (point.batch_rows, point.pending) == (2, 7)
    assert point.of_callable
    assert [point.p50_ms, point.p99_ms] == pytest.approx([1.0, 1.98])


def test_the_padding_of_batches() -> None:
    page = PAGE + (
        "# TYPE pytriton_batch_cost histogram\n"
        'pytriton_batch_cost_bucket{model="a",version="1",worker="0",le="+Inf"} 2\n'
        'pytriton_batch_cost_count{model="a",version="1",worker="0"} 2\n'
        'pytriton_batch_cost_sum{model="a",version="1",worker="0"} 100\n'
        'pytriton_batch_cost_sum{model="a",version="1",worker="1"} 100\n'
        "# TYPE pytriton_batch_padding_total counter\n"
        'pytriton_batch_padding_total{model="a",version="1",worker="0"} 20\n'
        'pytriton_batch_padding_total{model="a",version="1",worker="1"} 30\n'
    )
    now = read_metrics(page, 5.0).models
    points = {name: since(ModelCounts(), now[name], 3.0) for name in ("a", "b")}
    assert {name: point and point.padding for name, point in points.items()} == {"a": 0.25, "b": None}
    nothing = since(now["a"], now["a"], 3.0)
    assert nothing is not None
    assert nothing.padding is None


def test_the_outcomes_of_the_guard_come_first() -> None:
    page = PAGE + (
        "# TYPE pytriton_responses_total counter\n"
        'pytriton_responses_total{model="a",outcome="ok",protocol="http"} 15\n'
        'pytriton_responses_total{model="a",outcome="queue_full",protocol="http"} 600\n'
        'pytriton_responses_total{model="a",outcome="queue_full",protocol="grpc"} 300\n'
        'pytriton_responses_total{model="",outcome="invalid",protocol="grpc"} 7\n'
    )
    sample = read_metrics(page, 5.0)
    assert set(sample.models) == {"a", "b"}
    point = since(ModelCounts(), sample.models["a"], 3.0)
    assert point is not None
    assert (point.requests_s, point.failures_s) == (305, {"queue_full": 300})
    # Those of all models, of which some have no outcomes, as on a server whose model was just loaded.
    assert total(sample).failures == {"queue_full": 900}


def test_nothing_happened() -> None:
    now = read_metrics(PAGE, 5.0).models["a"]
    point = since(now, now, 2.0)
    assert point is not None
    assert (point.requests_s, point.all_failures_s) == (0, 0)
    assert (point.latency_ms, point.p50_ms, point.batch_rows) == (None, None, None)


def test_counters_that_began_anew_tell_nothing() -> None:
    assert since(read_metrics(PAGE, 1.0).models["a"], ModelCounts(succeeded=1), 2.0) is None


def test_the_quantiles_of_the_server_come_first() -> None:
    page = PAGE + (
        "# TYPE nv_inference_request_summary_us summary\n"
        'nv_inference_request_summary_us{model="a",version="1",quantile="0.5"} 900\n'
        'nv_inference_request_summary_us{model="a",version="1",quantile="0.99"} 2500\n'
        'nv_inference_request_summary_us{model="b",version="1",quantile="0.99"} nan\n'
    )
    point = since(ModelCounts(), read_metrics(page, 5.0).models["a"], 3.0)
    assert point is not None
    assert (point.p50_ms, point.p99_ms, point.of_callable) == (0.9, 2.5, False)


def test_statistics_where_there_is_no_page() -> None:
    stats = {"success": {"count": "4", "ns": "8000000"}, "fail": {"count": 1}, "queue": {"count": 4, "ns": 4000000}}
    item = {"name": "a", "version": "1", "inference_count": 8, "execution_count": 2, "inference_stats": stats}
    sample = read_statistics([item, {**item, "version": "2"}], 1.0)
    point = since(ModelCounts(), total(sample), 2.0)
    assert point is not None
    assert (point.requests_s, point.failures_s, point.latency_ms, point.queue_ms) == (5, {"failed": 1}, 2, 1)
    assert (point.batch_rows, point.pending, point.p50_ms) == (4, None, None)


@pytest.mark.parametrize("page", ["<html>", "nv_inference_count{model=", "nv_inference_count{} x"])
def test_what_is_no_page(page: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_metrics(page, 1.0)
