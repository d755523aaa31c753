"""The futures client against the real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed
from typing import Any

import numpy as np
import pytest

from pytriton.client import FuturesModelClient
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientQueueFullError,
    PyTritonClientTimeoutError,
)
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonSecurityConfig
from support.serving import local_config, open_sockets, running
from support.waiting import PATIENCE_S, eventually

TOKEN = "secret"

go_on = threading.Event()


@batch
def double(x: Any) -> dict[str, Any]:
    if (x < 0).any():
        raise ValueError("negative")
    return {"y": 2 * x}


def wait(requests: list[Request]) -> list[Any]:
    go_on.wait(PATIENCE_S)
    return [{"y": request["x"]} for request in requests]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    security = TritonSecurityConfig(access_token=TOKEN, restricted_endpoints=["inference", "model-config", "health"])
    server = Triton(config=local_config(), security_config=security)
    x, y = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")]
    server.bind("double", double, x, y, config=ModelConfig(max_batch_size=64))
    server.bind("wait", wait, x, y, config=ModelConfig(batching=False))
    with running(server):
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> Iterator[str]:
    go_on.clear()
    address = triton.http_url if request.param == "http" else triton.grpc_url
    assert address is not None
    yield address
    go_on.set()


def workers() -> int:
    return sum(thread.name.startswith("pytriton-client-futures") for thread in threading.enumerate())


def test_many_workers(url: str) -> None:
    before = open_sockets()
    with FuturesModelClient(url, "double", access_token=TOKEN) as client:
        futures = [client.infer_sample([number]) for number in range(500)]
        assert sorted(float(future.result()["y"][0]) for future in as_completed(futures, PATIENCE_S)) == [
            2.0 * number for number in range(500)
        ]
        assert 1 < workers() <= 128
        rows = np.ones((64, 1), np.float32)
        np.testing.assert_array_equal(client.infer_batch(rows).result(PATIENCE_S)["y"], 2 * rows)
        assert client.model_config().result(PATIENCE_S).max_batch_size == 64
    assert workers() == 0
    eventually(lambda: open_sockets() <= before + 2)  # gRPC keeps a pair of its own


def test_errors(url: str) -> None:
    with FuturesModelClient(url, "double", access_token=TOKEN) as client:
        with pytest.raises(PyTritonClientInferenceServerError, match="negative"):
            client.infer_sample([-1]).result(PATIENCE_S)
        assert client.infer_sample([1]).result(PATIENCE_S)["y"].tolist() == [2.0]
    with FuturesModelClient(url, "double") as client, pytest.raises(PyTritonClientInferenceServerError) as caught:
        client.infer_sample([1]).result(PATIENCE_S)
    assert "access_token=" in str(caught.value)
    with FuturesModelClient(url, "nowhere", access_token=TOKEN, init_timeout_s=0.3) as client:
        futures = [client.infer_sample([1]) for _ in range(4)]
        for future in futures:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, PyTritonClientTimeoutError)
            assert isinstance(error, PyTritonClientModelUnavailableError)


def test_queue_and_cancel(url: str) -> None:
    sizes: dict[str, Any] = {"max_workers": 1, "max_queue_size": 1, "non_blocking": True}
    with FuturesModelClient(url, "wait", access_token=TOKEN, inference_timeout_s=PATIENCE_S, **sizes) as client:
        running_call, queued = client.infer_sample([1]), client.infer_sample([2])
        with pytest.raises(PyTritonClientQueueFullError, match="Queue is full"):
            client.infer_sample([3])
        eventually(running_call.running)
        assert not running_call.cancel()
        assert queued.cancel()
        last = client.infer_sample([4])
        go_on.set()
        assert running_call.result(PATIENCE_S)["y"].tolist() == [1.0]
        assert last.result(PATIENCE_S)["y"].tolist() == [4.0]
        with pytest.raises(CancelledError):
            queued.result(PATIENCE_S)


def test_time_is_up(url: str) -> None:
    with FuturesModelClient(url, "wait", access_token=TOKEN, inference_timeout_s=0.5) as client:
        client.model_config().result(PATIENCE_S)
        begin = time.monotonic()
        with pytest.raises(PyTritonClientTimeoutError):
            client.infer_sample([1]).result(PATIENCE_S)
        assert time.monotonic() - begin > 0.45
        go_on.set()


def test_close_drains(url: str) -> None:
    client = FuturesModelClient(url, "double", max_workers=4, access_token=TOKEN)
    futures = [client.infer_sample([number]) for number in range(100)]
    client.close()
    assert [float(future.result(0)["y"][0]) for future in futures] == [2.0 * number for number in range(100)]
    with pytest.raises(PyTritonClientClosedError):
        client.infer_sample([1])
    assert workers() == 0
