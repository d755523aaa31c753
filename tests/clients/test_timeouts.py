"""Time limits of the waiting clients hold: with a server that is stopped, cannot be reached, or is slow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientModelUnavailableError, PyTritonClientTimeoutError
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig
from pytriton.proxy.types import Request
from pytriton.triton import Triton
from support.callables import X, Y
from support.processes import stopped
from support.servers import needs_arrays_in_streams
from support.serving import local_config, open_sockets, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

LIMIT_S = 0.5
ROW = np.array([1.0, 2.0], np.float32)

go_on = threading.Event()


@batch
def echo(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": x}


@batch
def slow(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    go_on.wait(PATIENCE_S)
    return {"y": x}


def slow_stream(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    yield [{"y": request["x"]} for request in requests]
    go_on.wait(PATIENCE_S)
    yield [{"y": request["x"]} for request in requests]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config())
        server.bind("echo", echo, X, Y)
        server.bind("slow", slow, X, Y)
        server.bind("slow_stream", slow_stream, X, Y, config=ModelConfig(decoupled=True))
        with running(server):
            yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> Iterator[str]:
    go_on.clear()
    yield str(triton.http_url if request.param == "http" else triton.grpc_url)
    go_on.set()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """What a call that failed had opened is closed with its client."""
    sockets, threads = open_sockets(), set(threading.enumerate())
    yield
    eventually(lambda: open_sockets() <= sockets and set(threading.enumerate()) <= threads)


@contextmanager
def unreachable() -> Iterator[str]:
    """host:port where an attempt to connect gets no answer at all, as the queue of those to be accepted is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listening.getsockname()
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.2)
        with pytest.raises(TimeoutError):
            probe.connect(address)
        yield f"127.0.0.1:{address[1]}"


def check(call: Callable[[], object], limit_s: float = LIMIT_S) -> PyTritonClientTimeoutError:
    """The call ends with a timeout, not before its time, and not only at that of the client."""
    begin = time.monotonic()
    with pytest.raises(PyTritonClientTimeoutError) as caught:
        call()
    elapsed = time.monotonic() - begin
    assert limit_s * 0.8 <= elapsed <= PATIENCE_S / 2, elapsed
    return caught.value


def test_stopped_server(triton: Triton, url: str) -> None:
    with (
        ModelClient(url, "echo", inference_timeout_s=PATIENCE_S) as warm,
        ModelClient(url, "echo", init_timeout_s=LIMIT_S, inference_timeout_s=PATIENCE_S) as cold,
        DecoupledModelClient(url, "slow_stream") as streaming,
    ):
        warm.infer_sample(ROW)
        spec = streaming.model_config
        assert spec.decoupled
        with stopped(server_pid(triton)):
            limited = warm.with_options(timeout_s=LIMIT_S)
            assert check(lambda: limited.infer_sample(ROW)).waited_for == "inference request"
            assert check(lambda: next(streaming.with_options(timeout_s=LIMIT_S).infer_sample(ROW))).url == url
            error = check(lambda: cold.infer_sample(ROW))
            assert isinstance(error, PyTritonClientModelUnavailableError)
            assert error.missing == "server"
            for call in (
                lambda: cold.model_config,
                lambda: warm.wait_for_server(LIMIT_S),
                lambda: warm.wait_for_model(LIMIT_S),
                cold.load_model,
                cold.unload_model,
                lambda: ModelClient(url, "echo", lazy_init=False, init_timeout_s=LIMIT_S),
            ):
                check(call)
        # The answers that come too late are nobody's.
        for number in range(3):
            assert warm.infer_sample(number * ROW)["y"].tolist() == (number * ROW).tolist()


def test_slow_callable(url: str) -> None:
    with ModelClient(url, "slow", inference_timeout_s=LIMIT_S) as client:
        check(lambda: client.infer_sample(ROW))
        check(lambda: client.with_options(timeout_s=2 * LIMIT_S).infer_sample(ROW), 2 * LIMIT_S)
        go_on.set()
        assert client.with_options(timeout_s=PATIENCE_S).infer_sample(ROW)["y"].tolist() == [1.0, 2.0]


def test_slow_stream(url: str) -> None:
    needs_arrays_in_streams(url)
    with DecoupledModelClient(url, "slow_stream") as client:
        results = client.with_options(timeout_s=3).infer_sample(ROW)
        assert next(results)["y"].tolist() == [1.0, 2.0]
        check(lambda: next(results), 3)
        assert list(results) == []
        go_on.set()
        assert len(list(client.with_options(timeout_s=PATIENCE_S).infer_sample(ROW))) == 2


def test_a_stream_goes_on_over_inference_timeout_s(url: str) -> None:
    """Scripts for PyTriton give a stream's client short times: there they are no limit between responses."""
    needs_arrays_in_streams(url)
    with DecoupledModelClient(url, "slow_stream", inference_timeout_s=0.1) as client:
        results = client.infer_sample(ROW)
        assert next(results)["y"].tolist() == [1.0, 2.0]
        threading.Timer(5 * 0.1, go_on.set).start()
        assert next(results)["y"].tolist() == [1.0, 2.0]
        assert list(results) == []


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_unreachable_server(triton: Triton, scheme: str) -> None:
    with (
        ModelClient(str(triton.http_url), "echo") as known,
        DecoupledModelClient(str(triton.http_url), "slow_stream") as other,
    ):
        spec, stream_spec = known.model_config, other.model_config
    options: dict[str, Any] = {"ensure_model_is_ready": False, "inference_timeout_s": LIMIT_S}
    with unreachable() as address:
        url = f"{scheme}://{address}"
        with ModelClient(url, "echo", model_config=spec, **options) as client:
            check(lambda: client.infer_sample(ROW))
            check(lambda: client.wait_for_model(LIMIT_S))
            check(lambda: client.wait_for_server(LIMIT_S))
        with DecoupledModelClient(url, "slow_stream", model_config=stream_spec, **options) as streaming:
            check(lambda: next(streaming.with_options(timeout_s=LIMIT_S).infer_sample(ROW)))
        with ModelClient(url, "echo", init_timeout_s=LIMIT_S) as client:
            error = check(lambda: client.infer_sample(ROW))
            assert isinstance(error, PyTritonClientModelUnavailableError)
