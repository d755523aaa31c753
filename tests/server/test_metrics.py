"""The page of metrics of a real server: Triton's, those of the callables, the user's own."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.server.errors import PortInUseError
from pytriton.triton import Triton
from support.serving import local_config, open_sockets, running
from support.waiting import PATIENCE_S, eventually

NUMBERS = Tensor(name="numbers", dtype=np.float32, shape=(2,))
TENSORS = ([NUMBERS], [NUMBERS])


def metrics_config(**settings: object) -> Any:
    return local_config(allow_metrics=True, **{"metrics_port": 0, **settings})


@batch
def echo(numbers: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"numbers": numbers}


def fail(requests: list[Any]) -> list[Any]:
    raise ValueError("not today")


def fail_some(requests: list[Any]) -> list[Any]:
    return [ValueError("this one not") if request["numbers"][0, 0] < 0 else request for request in requests]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=metrics_config())
    # Batches of one caller's making only.
    config = ModelConfig(max_batch_size=16, batcher=DynamicBatcher())
    triton.bind("echo", echo, *TENSORS, config=config)
    triton.bind("fail", fail, *TENSORS, config=config)
    triton.bind("fail_some", fail_some, *TENSORS, config=config)
    triton.bind("versions", [echo, lambda requests: requests], *TENSORS, model_version=3)
    with running(triton):
        yield triton


def page_of(triton: Triton) -> Mapping[str, Any]:
    """The families of the page by name; each there once, as the format wants it."""
    assert triton.metrics_url is not None
    with urllib.request.urlopen(triton.metrics_url, timeout=PATIENCE_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {family.name: family for family in families}


def value_of(page: Mapping[str, Any], name: str, **labels: str) -> float:
    for family in page.values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"there is no {name} of {labels} on the page")


def infer(triton: Triton, model: str, rows: int = 1, value: float = 1.0) -> None:
    assert triton.http_url is not None
    with ModelClient(triton.http_url, model) as client:
        client.infer_batch(np.full((rows, 2), value, np.float32))


def test_what_a_callable_did(served: Triton) -> None:
    labels = {"model": "echo", "version": "1", "worker": "0"}
    before = page_of(served)
    for rows in (1, 3, 8):
        infer(served, "echo", rows)
    page = page_of(served)

    def growth(name: str, **more: str) -> float:
        return value_of(page, name, **labels, **more) - value_of(before, name, **labels, **more)

    assert growth("pytriton_requests_total") == 3
    assert growth("pytriton_input_bytes_total") == growth("pytriton_output_bytes_total") == 12 * 8
    assert growth("pytriton_batch_rows_count") == 3
    assert growth("pytriton_batch_rows_sum") == 12
    assert [growth("pytriton_batch_rows_bucket", le=le) for le in ("1", "2", "4", "8", "+Inf")] == [1, 1, 2, 3, 3]
    assert growth("pytriton_callable_seconds_count") == 3
    assert 0 < growth("pytriton_callable_seconds_sum") < PATIENCE_S
    assert growth("pytriton_callable_seconds_bucket", le="+Inf") == 3
    assert 0 < growth("pytriton_queue_seconds_total") < PATIENCE_S
    assert growth("pytriton_failed_requests_total", kind="callable") == 0
    assert growth("pytriton_cancelled_requests_total") == 0
    assert value_of(page, "pytriton_worker_attached", **labels) == 1
    assert value_of(page, "pytriton_worker_pid", **labels) == os.getpid()
    assert value_of(page, "pytriton_worker_ends_total", **labels) == 0
    # Triton's own, of the same requests, which it counts a moment after the answer.
    success = "nv_inference_request_success_total"
    eventually(lambda: value_of(page_of(served), success, model="echo", version="1") >= 3)


def test_failed_requests_by_their_kind(served: Triton) -> None:
    with pytest.raises(PyTritonClientInferenceServerError, match="not today"):
        infer(served, "fail")
    with pytest.raises(PyTritonClientInferenceServerError, match="this one not"):
        infer(served, "fail_some", value=-1)
    infer(served, "fail_some")
    page = page_of(served)
    assert value_of(page, "pytriton_failed_requests_total", model="fail", kind="callable") == 1
    assert value_of(page, "pytriton_requests_total", model="fail") == 1
    assert value_of(page, "pytriton_failed_requests_total", model="fail_some", kind="returned") == 1
    assert value_of(page, "pytriton_failed_requests_total", model="fail_some", kind="callable") == 0
    assert value_of(page, "pytriton_requests_total", model="fail_some") == 2


def test_each_callable_of_a_list_has_numbers_of_its_own(served: Triton) -> None:
    for _ in range(4):
        infer(served, "versions")
    page = page_of(served)
    requests = [
        value_of(page, "pytriton_requests_total", model="versions", version="3", worker=worker) for worker in "01"
    ]
    assert sum(requests) == 4


def test_metrics_of_the_user_are_on_the_page(served: Triton) -> None:
    counter = prometheus_client.Counter("pytriton_test_words", "Words that were counted", ["language"])
    try:
        counter.labels("de").inc(5)
        assert value_of(page_of(served), "pytriton_test_words_total", language="de") == 5
    finally:
        prometheus_client.REGISTRY.unregister(counter)


def test_the_page_of_triton_is_for_this_machine_only(served: Triton) -> None:
    assert served.metrics_url is not None
    page = page_of(served)
    assert value_of(page, "pytriton_metrics_up", source="tritonserver") == 1
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(served.metrics_url.removesuffix("metrics"), timeout=PATIENCE_S)


def test_totals_go_on_when_the_callable_is_replaced_and_the_server_restarted() -> None:
    triton = Triton(config=metrics_config())
    triton.bind("echo", echo, *TENSORS)

    def total() -> float:
        return value_of(page_of(triton), "pytriton_requests_total", model="echo")

    sockets = open_sockets()
    with triton:
        infer(triton, "echo")
        triton.rebind("echo", lambda requests: requests)
        assert total() == 1
        infer(triton, "echo")
        assert total() == 2
        triton.rebind("echo", echo, config=ModelConfig(max_batch_size=32))
        infer(triton, "echo")
        assert total() == 3
    assert open_sockets() == sockets
    with triton:
        assert total() == 3
        infer(triton, "echo")
        assert total() == 4
        triton.unbind("echo")
        with pytest.raises(AssertionError, match="there is no pytriton_requests_total"):
            total()


def test_the_port_that_was_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"metrics_port={port} cannot be bound"):
            Triton(config=metrics_config(metrics_port=port)).run()
    triton = Triton(config=metrics_config(metrics_port=port, metrics_address="localhost"))
    # And once more: nothing of the first run is in the way of the second.
    for _ in range(2):
        with triton:
            assert triton.metrics_url == f"http://127.0.0.1:{port}/metrics"
            assert value_of(page_of(triton), "pytriton_metrics_up", source="tritonserver") == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_without_metrics_nobody_listens() -> None:
    triton = Triton(config=local_config(allow_metrics=False))
    with triton:
        assert triton.metrics_url is None
