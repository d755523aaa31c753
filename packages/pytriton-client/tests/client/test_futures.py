from __future__ import annotations

import concurrent.futures
import gc
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest

from pytriton.client import FuturesModelClient, ModelClient
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientInvalidUrlError,
    PyTritonClientModelUnavailableError,
    PyTritonClientQueueFullError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from support.waiting import eventually

ROW = np.array([1.0, 2.0], dtype=np.float32)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pytriton-client-futures")]


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(300)
    assert error is not None
    return error


def test_results(server: Any) -> None:
    with FuturesModelClient(server.url, "add") as client:
        assert sum(server.asked.values()) == 0
        future = client.infer_sample(ROW, ROW)
        assert isinstance(future, concurrent.futures.Future)
        np.testing.assert_array_equal(future.result(300)["sum"], 2 * ROW)
        batch = np.arange(6, dtype=np.float32).reshape(3, 2)
        np.testing.assert_array_equal(client.infer_batch(a=batch, b=batch).result(300)["sum"], 2 * batch)
        assert client.model_config().result(300).max_batch_size == 8
        client.wait_for_model(300).result(300)
        client.wait_for_server(300).result(300)
        results = [client.infer_sample([number]) for number in range(200)]
        assert [float(result.result(300)["sum"][0]) for result in results] == list(range(200))
    assert (server.asked["model-config"], server.asked["health"]) == (1, 1)
    assert workers() == []


def test_threads_come_one_by_one_and_are_used_again(server: Any) -> None:
    with FuturesModelClient(server.url, "add", max_workers=3) as client:
        assert workers() == []
        for _ in range(5):
            client.infer_sample(ROW).result(300)
            eventually(lambda: client._pool._idle == len(workers()))
        assert len(workers()) == 1
        server.delay_s = 0.05
        for future in [client.infer_sample(ROW) for _ in range(9)]:
            future.result(300)
        assert len(workers()) == 3


def test_errors_are_those_of_the_future(server: Any) -> None:
    with FuturesModelClient(server.url, "fail") as client:
        assert isinstance(error_of(client.infer_sample()), PyTritonClientValueError)
        assert isinstance(error_of(client.infer_sample(a=[0], b=[1])), PyTritonClientValueError)
        error = error_of(client.infer_sample([0]))
        assert isinstance(error, PyTritonClientInferenceServerError)
        assert "by zero" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.status, again.model_name) == (str(error), error.status, "fail")
        np.testing.assert_array_equal(client.infer_batch([[1]]).result(300)["out"], [1])
        server.is_stuck = True
        hasty = client.with_options(timeout_s=0.5)
        assert isinstance(error_of(hasty.infer_sample([1])), PyTritonClientTimeoutError)
        server.released.set()


def test_missing_model_and_missing_server(server: Any, free_address: str) -> None:
    with FuturesModelClient(server.url, "nowhere", init_timeout_s=0.3) as client:
        futures: list[Future[Any]] = [client.infer_sample(ROW), client.wait_for_model(0.2), client.model_config()]
        for future in futures:
            assert isinstance(error_of(future), PyTritonClientTimeoutError)
        assert isinstance(error_of(futures[1]), PyTritonClientModelUnavailableError)
    with FuturesModelClient(server.url, "nowhere") as client:
        assert isinstance(error_of(client.load_model()), PyTritonClientInferenceServerError)
    with FuturesModelClient(f"{server.protocol}://{free_address}", "add", init_timeout_s=0.2) as client:
        assert isinstance(error_of(client.infer_sample(ROW)), PyTritonClientModelUnavailableError)
    with FuturesModelClient(f"{server.protocol}://{free_address}", "add") as client:
        assert isinstance(error_of(client.unload_model()), PyTritonClientConnectionError)


@pytest.mark.parametrize(
    "sizes", [{"max_workers": 0}, {"max_workers": -1}, {"max_queue_size": 0}, {"max_queue_size": 1.5}]
)
def test_sizes_that_cannot_be(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_\w+ must be greater than 0"):
        FuturesModelClient("localhost", "add", **sizes)
    assert workers() == []


def test_arguments_that_are_refused_by_the_constructor() -> None:
    with pytest.raises(PyTritonClientInvalidUrlError):
        FuturesModelClient("ftp://localhost", "add")
    with pytest.raises(PyTritonClientValueError):
        FuturesModelClient("localhost", "")
    assert workers() == []


def test_not_lazy(server: Any) -> None:
    with FuturesModelClient(server.url, "add", lazy_init=False) as client:
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1}
        client.infer_sample(ROW).result(300)
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 1}
    with pytest.raises(PyTritonClientModelUnavailableError):
        FuturesModelClient(server.url, "nowhere", lazy_init=False, init_timeout_s=0.1)


def test_unlimited(server: Any) -> None:
    server.delay_s = 0.01
    with FuturesModelClient(server.url, "add", max_workers=2, max_queue_size=None, non_blocking=True) as client:
        futures = [client.infer_sample(ROW) for _ in range(100)]
        assert len([future.result(300) for future in futures]) == 100
    with FuturesModelClient(server.url, "add", max_workers=None, max_queue_size=1, non_blocking=True) as client:
        futures = [client.infer_sample(ROW) for _ in range(20)]
        assert len([future.result(300) for future in futures]) == 20


def test_full_queue_without_blocking(server: Any) -> None:
    for _ in range(20):
        # From the very first call on, the queue has the room that it was given.
        client = FuturesModelClient(server.url, "add", max_workers=1, max_queue_size=1, non_blocking=True)
        server.is_stuck = True
        first, second = client.infer_sample(ROW), client.infer_sample(ROW)
        with pytest.raises(PyTritonClientQueueFullError, match=r"Queue is full: max_workers=1 .* max_queue_size=1"):
            client.infer_sample(ROW)
        server.is_stuck = False
        server.released.set()
        client.close()
        assert (first.done(), second.done()) == (True, True)
        server.released.clear()
    assert workers() == []


def test_full_queue_blocks_until_there_is_room_or_time_is_up(server: Any) -> None:
    server.is_stuck = True
    with FuturesModelClient(server.url, "add", max_workers=1, max_queue_size=1, inference_timeout_s=300) as client:
        futures = [client.infer_sample(ROW), client.infer_sample(ROW)]
        begin = time.monotonic()
        with pytest.raises(PyTritonClientQueueFullError, match=r"Waited 0\.3 s for room"):
            client.with_options(timeout_s=0.3).infer_sample(ROW)
        assert time.monotonic() - begin >= 0.25
        timer = threading.Timer(0.2, server.released.set)
        timer.start()
        futures.append(client.infer_sample(ROW))
        for future in futures:
            np.testing.assert_array_equal(future.result(300)["sum"], ROW)
        timer.join()


def test_cancel(server: Any) -> None:
    server.is_stuck = True
    with FuturesModelClient(server.url, "add", max_workers=1, max_queue_size=2, non_blocking=True) as client:
        running, queued, cancelled = (client.infer_sample(ROW) for _ in range(3))
        eventually(running.running)
        assert not running.cancel()
        assert cancelled.cancel()
        # There is room again.
        late = client.infer_sample(2 * ROW)
        with pytest.raises(PyTritonClientQueueFullError):
            client.infer_sample(ROW)
        server.released.set()
        np.testing.assert_array_equal(late.result(300)["sum"], 2 * ROW)
        assert running.done()
        assert queued.done()
        with pytest.raises(CancelledError):
            cancelled.result(300)
    assert server.asked["inference"] == 3


def test_time_limit_of_a_call_includes_its_time_in_the_queue(server: Any) -> None:
    server.is_stuck = True
    with FuturesModelClient(server.url, "add", max_workers=1, inference_timeout_s=300) as client:
        running = client.infer_sample(ROW)
        hasty = client.with_options(timeout_s=0.2).infer_sample(ROW)
        time.sleep(0.3)
        server.released.set()
        running.result(300)
        error = error_of(hasty)
        assert isinstance(error, PyTritonClientTimeoutError)
        assert error.waited_for == "a free thread"
    assert server.asked["inference"] == 1


def test_options(server: Any) -> None:
    with FuturesModelClient(server.url, "add") as client:
        view = client.with_options(request_id="mine", priority=2, parameters={"a": 1}, timeout_s=300)
        assert view.infer_sample(ROW, parameters={"b": 2}).result(300)["sum"].tolist() == [1, 2]
        assert server.last_request_id == "mine"
        assert {name: server.last_parameters[name] for name in ("a", "b", "priority")} == {
            "a": 1,
            "b": 2,
            "priority": 2,
        }
        client.infer_sample(ROW).result(300)
        assert server.last_request_id != "mine"


def test_access_token(server: Any) -> None:
    server.token = "secret"
    server.restricted = {"health", "model-ready", "model-config", "inference", "model-repository"}
    with FuturesModelClient(server.url, "add", access_token="secret") as client:
        client.wait_for_server(300).result(300)
        client.wait_for_model(300).result(300)
        futures = [client.infer_sample(ROW) for _ in range(5)]
        assert len([future.result(300) for future in futures]) == 5
        client.unload_model().result(300)
        client.load_model().result(300)
    with FuturesModelClient(server.url, "add", access_token="wrong") as client:
        assert isinstance(error_of(client.infer_sample(ROW)), PyTritonClientInferenceServerError)


def test_from_existing_client(server: Any) -> None:
    server.token, server.restricted = "secret", {"inference", "model-config"}
    with (
        ModelClient(server.url, "add", "2", access_token="secret") as sync,
        FuturesModelClient.from_existing_client(sync) as first,
    ):
        first.infer_sample(ROW).result(300)
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 1}
        with ModelClient.from_existing_client(first) as back:
            back.infer_sample(ROW)
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 2}
    small = FuturesModelClient(
        server.url, "add", max_workers=1, max_queue_size=1, non_blocking=True, access_token="secret"
    )
    with small, FuturesModelClient.from_existing_client(small) as copy:
        server.is_stuck = True
        futures = [copy.infer_sample(ROW), copy.infer_sample(ROW)]
        with pytest.raises(PyTritonClientQueueFullError):
            copy.infer_sample(ROW)
        server.released.set()
        assert len([future.result(300) for future in futures]) == 2


def test_close_waits_for_what_was_taken(server: Any) -> None:
    server.delay_s = 0.02
    client = FuturesModelClient(server.url, "add", max_workers=2)
    futures = [client.infer_sample([number]) for number in range(20)]
    client.close()
    assert all(future.done() for future in futures)
    assert [float(future.result()["sum"][0]) for future in futures] == list(range(20))
    assert workers() == []
    client.close()
    for call in (
        lambda: client.infer_sample(ROW),
        lambda: client.infer_batch(ROW),
        lambda: client.wait_for_model(1),
        lambda: client.wait_for_server(1),
        client.model_config,
        client.load_model,
        client.unload_model,
    ):
        with pytest.raises(PyTritonClientClosedError, match="is closed"):
            call()


def test_close_without_waiting(server: Any) -> None:
    server.is_stuck = True
    client = FuturesModelClient(server.url, "add", max_workers=1, max_queue_size=1)
    futures = [client.infer_sample(ROW), client.infer_sample(ROW)]
    blocked: list[BaseException] = []

    def submit() -> None:
        try:
            client.infer_sample(ROW)
        except PyTritonClientClosedError as error:
            blocked.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(0.1)
    client.close(wait=False)
    thread.join(300)
    assert len(blocked) == 1
    assert not futures[1].done()
    server.released.set()
    client.close()
    assert [future.done() for future in futures] == [True, True]
    assert workers() == []


def test_close_from_a_callback(server: Any) -> None:
    client = FuturesModelClient(server.url, "add")
    closed = threading.Event()

    def close(_: Future[Any]) -> None:
        client.close()
        closed.set()

    server.delay_s = 0.1
    client.infer_sample(ROW).add_done_callback(close)
    assert closed.wait(300)
    eventually(lambda: workers() == [])


def test_client_that_is_dropped_finishes_what_it_took(server: Any) -> None:
    server.delay_s = 0.1
    client = FuturesModelClient(server.url, "add", max_workers=1)
    view = client.with_options(timeout_s=300)
    futures = [client.infer_sample(ROW), view.infer_sample(ROW)]
    del client
    gc.collect()
    futures.append(view.infer_sample(ROW))
    del view
    gc.collect()
    for future in futures:
        np.testing.assert_array_equal(future.result(300)["sum"], ROW)
    eventually(lambda: workers() == [])


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_interpreter_ends_with_calls_under_way(scheme: str, frozen_address: str) -> None:
    program = f"""
from pytriton.client import FuturesModelClient, ModelSpec
client = FuturesModelClient("{scheme}://{frozen_address}", "add", max_workers=2, max_queue_size=None)
futures = [client.wait_for_server(600) for _ in range(6)]
while not futures[1].running():
    pass
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
