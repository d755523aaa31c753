"""Callables that stop their server, unbind or rebind themselves: they must not wait for themselves."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.triton import RemoteTriton, Triton
from support.callables import X, Y
from support.http import infer
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

# Where a callable waits for itself, its request is cut off after this time, and gets no answer.
LONG_S = 600

Asked = list[Any]


def calling(action: Callable[[], Any], asked: Asked) -> Callable[[Any], Any]:
    """Doubles after it has called something."""

    def call(requests: Any) -> Any:
        asked.append(action())
        return [{"y": request["x"] * np.float32(2)} for request in requests]

    return call


def calling_async(action: Callable[[], Any], asked: Asked) -> Callable[[Any], Any]:
    async def call(requests: Any) -> Any:
        asked.append(action())
        return [{"y": request["x"] * np.float32(2)} for request in requests]

    return call


def calling_in_thread(action: Callable[[], Any], asked: Asked) -> Callable[[Any], Any]:
    async def call(requests: Any) -> Any:
        # Noted in the thread: a stop may cancel this task before the thread has come back.
        await asyncio.to_thread(lambda: asked.append(action()))
        return [{"y": request["x"] * np.float32(2)} for request in requests]

    return call


MAKERS = pytest.mark.parametrize("make", [calling, calling_async, calling_in_thread])


def no_thread_left() -> None:
    wait_for_threads()


@MAKERS
def test_stop(make: Any) -> None:
    asked: Asked = []
    with short_home():
        triton = Triton(config=local_config(exit_timeout_secs=LONG_S))
        triton.bind("m", make(lambda: triton.stop(), asked), X, Y)
        served = threading.Thread(target=triton.serve)
        served.start()
        eventually(triton.is_alive)
        assert infer(triton.http_url, "m", 1) == [2]
        served.join(PATIENCE_S)
        assert not served.is_alive()
        assert asked == [True]
        assert not triton.stop()
        no_thread_left()


def test_stop_beside_others_answers_them_all() -> None:
    asked: Asked = []
    started, release = threading.Event(), threading.Event()

    def slow(requests: Any) -> Any:
        started.set()
        release.wait(PATIENCE_S)
        return [{"y": request["x"]} for request in requests]

    with short_home(), ThreadPoolExecutor() as pool:
        triton = Triton(config=local_config(exit_timeout_secs=LONG_S))
        triton.bind("m", calling(lambda: triton.stop(), asked), X, Y)
        triton.bind("slow", slow, X, Y)
        with running(triton):
            url = triton.http_url
            other = pool.submit(infer, url, "slow", 3)
            assert started.wait(PATIENCE_S)
            # Asked for twice, it is done once.
            assert infer(url, "m", 1) == [2]
            release.set()
            assert other.result(PATIENCE_S) == [3]
            eventually(lambda: not triton.is_connected())
            triton.stop()
            no_thread_left()
    assert asked == [True]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_stop_of_remote(protocol: str) -> None:
    asked: Asked = []
    with short_home():
        server = Triton(config=local_config())
        with running(server):
            url = server.http_url if protocol == "http" else server.grpc_url
            assert url is not None
            remote = RemoteTriton(url, access_token=server.get_access_token())
            remote.bind("m", calling(lambda: remote.stop(), asked), X, Y)
            served = threading.Thread(target=remote.serve)
            served.start()
            eventually(remote.is_alive)
            assert infer(server.http_url, "m", 1) == [2]
            served.join(PATIENCE_S)
            assert not served.is_alive()
            assert asked == [True]


@MAKERS
def test_unbind(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    asked: Asked = []
    with short_home():
        triton = Triton(config=local_config(exit_timeout_secs=LONG_S))
        triton.bind("m", make(lambda: triton.unbind("m", timeout_s=LONG_S), asked), X, Y)
        with running(triton):
            assert infer(triton.http_url, "m", 1) == [2]
            eventually(lambda: "Model m (version 1) is not served any more" in caplog.text)
            assert asked == [None]
            with pytest.raises(PyTritonInvalidOperationError, match="There is no model 'm'"):
                triton.unbind("m")


@MAKERS
def test_rebind(make: Any) -> None:
    asked: Asked = []
    with short_home():
        triton = Triton(config=local_config(exit_timeout_secs=LONG_S))
        action = lambda: triton.rebind("m", calling(lambda: None, []), timeout_s=LONG_S)  # noqa: E731
        triton.bind("m", make(action, asked), X, Y)
        with running(triton):
            assert infer(triton.http_url, "m", 1) == [2]
            eventually(lambda: infer(triton.http_url, "m", 1) == [2] and len(asked) < len(infers(triton)))


def infers(triton: Triton) -> list[int]:
    """One for each request that the model `m` has answered."""
    session = triton._server
    assert session is not None
    return [1] * int(session.server.control.statistics("m", 1)["inference_count"])


def test_rebind_of_what_is_wrong_is_refused_at_once() -> None:
    errors: Asked = []

    def wrong() -> None:
        with pytest.raises(PyTritonValidationError) as caught:
            triton.rebind("m", 3)  # type: ignore[arg-type]
        errors.append(str(caught.value))

    with short_home():
        triton = Triton(config=local_config())
        triton.bind("m", calling(wrong, []), X, Y)
        with running(triton):
            assert infer(triton.http_url, "m", 1) == [2]
            assert len(errors) == 1


def test_a_change_during_the_stop_is_refused() -> None:
    """Else the stop would wait for the callable, and the callable for the stop."""
    started = threading.Event()
    errors: Asked = []

    def change() -> None:
        started.set()
        eventually(lambda: triton._life.orders)
        with pytest.raises(PyTritonInvalidOperationError, match="is being stopped") as caught:
            triton.bind("other", calling(lambda: None, []), X, Y)
        errors.append(str(caught.value))

    with short_home(), ThreadPoolExecutor() as pool:
        triton = Triton(config=local_config(exit_timeout_secs=LONG_S))
        triton.bind("m", calling(change, []), X, Y)
        with running(triton):
            answer = pool.submit(infer, triton.http_url, "m", 1)
            assert started.wait(PATIENCE_S)
            triton.stop()
            assert answer.result(PATIENCE_S) == [2]
            assert len(errors) == 1


@MAKERS
@pytest.mark.parametrize("what", ["stop", "unbind"])
def test_in_process(make: Any, what: str) -> None:
    asked: Asked = []
    with short_home():
        server = inprocess.Server(exit_timeout=LONG_S)
        action = server.stop if what == "stop" else lambda: server.unbind("m", timeout_s=LONG_S)
        model = server.bind("m", make(action, asked), X, Y)
        server.start()
        # A stop cancels what runs: its request gets the answer, or the error that says so.
        list(model.infer(inputs={"x": np.ones((1, 1), np.float32)}, raise_on_error=False))
        eventually(lambda: asked)
        if what == "unbind":
            eventually(lambda: not server.models(exclude_not_ready=True))
        server.stop()
        no_thread_left()
    assert asked == [None]
