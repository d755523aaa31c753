"""The page of metrics of a real server: Triton's, those of the callables, the user's own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.server.errors import PortInUseError
from pytriton.triton import ProcessWorker, Triton
from support import python_models
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

    # Before its first value, a histogram has one bucket.
    if value_of(before, "pytriton_batch_rows_count", **labels) == 0:
        before = page_of(served)
        for rows in (1, 3, 8):
            infer(served, "echo", rows)
        page = page_of(served)
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


def test_metrics_of_worker_processes_are_on_the_page() -> None:
    triton = Triton(config=metrics_config())
    worker = ProcessWorker("support.process_models:make_counting", copies=2)
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")

    def counted(sign: str) -> float:
        with contextlib.suppress(AssertionError):
            return value_of(page_of(triton), "pytriton_test_numbers_total", sign=sign)
        return 0

    def last() -> list[dict[str, str]]:
        family = page_of(triton).get("pytriton_test_last")
        return [] if family is None else [sample.labels for sample in family.samples]

    with triton:
        triton.bind("counting", worker, [x], [y])
        with ModelClient(str(triton.grpc_url), "counting", inference_timeout_s=PATIENCE_S) as client:
            for _ in range(6):
                client.infer_batch(np.ones((2, 1), np.float32))
            eventually(lambda: counted("plus") == 12)
            # Each process has a level of its own.
            assert {labels["pytriton_worker"] for labels in last()} == {"counting.0", "counting.1"}
            pids = {labels["pid"] for labels in last()}
            workers = page_of(triton)["pytriton_worker_pid"].samples
            assert {str(int(sample.value)) for sample in workers} == pids
            # A process that has gone has counted what it has counted.
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            eventually(lambda: value_of(page_of(triton), "pytriton_worker_ends_total", worker="0") == 1)
            eventually(lambda: value_of(page_of(triton), "pytriton_worker_ends_total", worker="1") == 1)
            client.infer_batch(np.ones((1, 1), np.float32))
            eventually(lambda: counted("plus") == 13)
            assert pids.isdisjoint(labels["pid"] for labels in last())
        triton.unbind("counting")
        assert counted("plus") == 13
        assert last() == []


def test_what_a_process_has_counted_stays_when_it_is_killed() -> None:
    triton = Triton(config=metrics_config())
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
    with triton:
        triton.bind("mortal", ProcessWorker("support.process_models:make"), [x], [y])
        assert value_of(page_of(triton), "pytriton_worker_memory_bytes", model="mortal") > 1 << 20
        assert value_of(page_of(triton), "pytriton_server_memory_bytes") > 1 << 20
        with ModelClient(str(triton.grpc_url), "mortal", inference_timeout_s=PATIENCE_S) as client:
            for _ in range(7):
                client.infer_batch(np.ones((2, 1), np.float32))
            os.kill(int(value_of(page_of(triton), "pytriton_worker_pid")), signal.SIGKILL)
            eventually(lambda: value_of(page_of(triton), "pytriton_worker_ends_total") == 1)
            page = page_of(triton)
            assert value_of(page, "pytriton_requests_total", model="mortal") == 7
            assert value_of(page, "pytriton_batch_rows_sum", model="mortal") == 14
            client.infer_batch(np.ones((2, 1), np.float32))
        assert value_of(page_of(triton), "pytriton_requests_total", model="mortal") == 8


def test_the_time_to_the_first_response_of_streams(tmp_path: Path) -> None:
    def count(requests: list[Any]) -> Iterator[Any]:
        for _ in range(3):
            yield [{"numbers": request["numbers"]} for request in requests]

    source = python_models.HEAD + (
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        for request in requests:\n"
        "            sender = request.get_response_sender()\n"
        "            for _ in range(3):\n"
        "                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('y', np.zeros(1, np.float32))]))\n"
        "            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
    )
    config = python_models.CONFIG + "model_transaction_policy { decoupled: true }\n"
    python_models.write(tmp_path, "hosted", source, config)
    triton = Triton(config=metrics_config(python_models="workers", model_repository=tmp_path))
    triton.bind("stream", count, *TENSORS, config=ModelConfig(decoupled=True))
    triton.bind("plain", echo, *TENSORS)
    first = "pytriton_first_response_seconds_count"
    with triton:
        for model in ("stream", "hosted"):
            assert value_of(page_of(triton), first, model=model) == 0
            values = np.zeros((1, 2) if model == "stream" else 1, np.float32)
            with DecoupledModelClient(str(triton.grpc_url), model, inference_timeout_s=PATIENCE_S) as client:
                for _ in range(4):
                    infer_stream = client.infer_batch if model == "stream" else client.infer_sample
                    assert len(list(infer_stream(values))) == 3
            page = page_of(triton)
            assert value_of(page, first, model=model) == 4
            assert 0 < value_of(page, first.replace("count", "sum"), model=model) < PATIENCE_S
        with pytest.raises(AssertionError, match="there is no pytriton_first"):
            value_of(page, first, model="plain")


def test_metrics_of_a_python_model_are_on_the_page(tmp_path: Path) -> None:
    source = python_models.MODEL.replace("import numpy", "import prometheus_client\nimport numpy", 1)
    source = source.replace(
        "FACTOR =", 'ASKED = prometheus_client.Counter("pytriton_test_asked", "Requests")\nFACTOR =', 1
    ).replace("            if x[0] == 13:", "            ASKED.inc()\n            if x[0] == 13:", 1)
    python_models.write(tmp_path, "model", source)
    with Triton(config=metrics_config(python_models="workers", model_repository=tmp_path)) as triton:
        for _ in range(3):
            python_models.infer(triton, "model", 1, 2)
        eventually(lambda: "pytriton_test_asked" in page_of(triton))
        eventually(lambda: value_of(page_of(triton), "pytriton_test_asked_total") == 3)


def test_the_page_of_triton_is_for_this_machine_only(served: Triton) -> None:
    assert served.metrics_url is not None
    page = page_of(served)
    assert value_of(page, "pytriton_metrics_up", source="tritonserver") == 1
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(served.metrics_url.removesuffix("metrics"), timeout=PATIENCE_S)
    caught.value.close()


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


def test_of_a_model_that_is_gone_stays_what_was_counted() -> None:
    triton = Triton(config=metrics_config())

    def lines() -> list[str]:
        with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as response:
            text: str = response.read().decode()
        return [line for line in text.splitlines() if 'model="echo"' in line]

    with triton:
        triton.bind("echo", echo, *TENSORS)
        infer(triton, "echo")
        assert len(lines()) > 50
        triton.unbind("echo")
        assert lines() == ['pytriton_responses_total{model="echo",outcome="ok",protocol="http"} 1.0']
        triton.bind("echo", echo, *TENSORS)
        assert len(lines()) > 50
        infer(triton, "echo")
        assert value_of(page_of(triton), "pytriton_responses_total", model="echo", outcome="ok", protocol="http") == 2


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
