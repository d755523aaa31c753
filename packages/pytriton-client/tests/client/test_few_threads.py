"""Clients in a process that the system lets have no more threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pytriton.client import AsyncioModelClient, DecoupledModelClient, FuturesModelClient, ModelClient
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientModelNotReadyError,
    PyTritonClientQueueFullError,
    PyTritonClientTimeoutError,
)

ROW = np.ones(2, np.float32)
# More than gRPC sends without a thread.
LARGE = np.ones(1 << 15, np.float32)


@pytest.fixture
def let_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets this thread start so many threads and no more."""
    start, here, left = threading.Thread.start, threading.current_thread(), 0

    def refuse(thread: threading.Thread) -> None:
        nonlocal left
        if threading.current_thread() is here:
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    def let(count: int) -> None:
        nonlocal left
        left = count
        monkeypatch.setattr(threading.Thread, "start", refuse)

    return let


@pytest.mark.parametrize("model", ["count", "single"])
def test_calls_keep_their_time_limits_after_a_thread_did_not_start(
    server: Any, let_start: Callable[[int], None], model: str
) -> None:
    """Whichever start fails, the call says so, and neither it nor a later one waits for a thread that is not there."""
    make: Any = DecoupledModelClient if model == "count" else ModelClient

    def ask(client: Any) -> list[Any]:
        return list(client.infer_sample([2])) if model == "count" else [client.infer_sample(LARGE)]

    failures = []
    for count in range(4):
        with make(server.url, model, inference_timeout_s=300) as client:
            let_start(1000)
            client.wait_for_model(300)
            assert client.model_config
            let_start(count)
            try:
                ask(client)
            except PyTritonClientConnectionError as error:
                failures.append(error.message)
            let_start(1000)
            ask(client)
            server.is_stuck = True
            with pytest.raises(PyTritonClientTimeoutError):
                ask(client.with_options(timeout_s=0.2))
            server.is_stuck = False
            server.released.set()
            server.released.clear()
    assert all("can't start new thread" in text and "ulimit -u" in text for text in failures)
    assert len(failures) == (0 if server.protocol == "http" else 2 if model == "count" else 1)


@pytest.mark.parametrize("server", ["grpc"], indirect=True)
@pytest.mark.parametrize(("model", "count"), [("count", 0), ("count", 1), ("single", 0)])
def test_a_call_whose_thread_did_not_start_is_cancelled(
    server: Any, let_start: Callable[[int], None], model: str, count: int
) -> None:
    """The server may have the request already, whose answer nobody will read."""
    make: Any = DecoupledModelClient if model == "count" else ModelClient
    with make(server.url, model, inference_timeout_s=300) as client:
        let_start(1000)
        client.wait_for_model(300)
        assert client.model_config
        server.is_stuck = True
        let_start(count)
        with pytest.raises(PyTritonClientConnectionError, match="can't start new thread"):
            list(client.infer_sample([2])) if model == "count" else client.infer_sample(LARGE)
        try:
            assert server.asked["inference"] == 0 or server.cancelled.wait(60)
        finally:
            server.released.set()


def test_futures(http_server: Any, let_start: Callable[[int], None]) -> None:
    with FuturesModelClient(http_server.url, "add") as client:
        let_start(0)
        with pytest.raises(PyTritonClientQueueFullError, match="can't start new thread"):
            client.infer_sample(ROW)
        let_start(1)
        http_server.is_stuck = True
        futures: list[Future[Any]] = [client.infer_sample(ROW) for _ in range(3)]
        http_server.released.set()
        for future in futures:
            np.testing.assert_array_equal(future.result(300)["sum"], ROW)


def test_an_event_loop(server: Any, let_start: Callable[[int], None]) -> None:
    async def ask(timeout_s: float) -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            await client.wait_for_model(timeout_s)

    let_start(0)
    if server.protocol == "http":
        asyncio.run(ask(300))
    else:
        with pytest.raises(PyTritonClientModelNotReadyError, match="can't start new thread"):
            asyncio.run(ask(0.3))
    let_start(1000)
    asyncio.run(ask(300))
