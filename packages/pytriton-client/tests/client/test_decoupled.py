from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient, ModelResult, _sync
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from support.waiting import eventually


def numbers(results: Iterator[ModelResult]) -> list[int]:
    return [int(result["i"].item()) for result in results]


@pytest.fixture
def client(server: Any) -> Iterator[DecoupledModelClient]:
    """A client of the model that counts, which leaves no thread behind."""
    before = threading.active_count()
    with DecoupledModelClient(server.url, "count", inference_timeout_s=300) as opened:
        yield opened
    server.released.set()
    del opened
    eventually(lambda: "pytriton-client-watchdog" not in {thread.name for thread in threading.enumerate()})
    if server.protocol == "http":
        eventually(lambda: threading.active_count() <= before)


def test_results_come_one_by_one(client: DecoupledModelClient) -> None:
    results = client.infer_sample([3])
    assert next(results)["i"].shape == (1,)
    assert numbers(results) == [1, 2]
    assert list(results) == []
    assert list(client.infer_sample([0])) == []


def test_batch(client: DecoupledModelClient) -> None:
    results = list(client.infer_batch([[2], [1]]))
    assert [result["i"].tolist() for result in results] == [[[0], [0]], [[1], [1]]]
    results = list(client.infer_batch(n=np.array([[1]])))
    assert [result["i"].tolist() for result in results] == [[[0]]]


def test_error_comes_after_the_results_before_it(server: Any, client: DecoupledModelClient) -> None:
    results = client.infer_sample([9])
    assert numbers(itertools.islice(results, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(PyTritonClientInferenceServerError, match="five is too many") as caught:
        next(results)
    assert caught.value.server_message == "ValueError: five is too many"
    assert caught.value.model_name == "count"
    assert caught.value.url == server.url
    assert numbers(client.infer_sample([2])) == [0, 1]


def test_error_in_place_of_the_first_result(server: Any, client: DecoupledModelClient) -> None:
    client.model_config  # noqa: B018 # which asks for it
    server.models["count"].is_ready = False
    with pytest.raises(PyTritonClientInferenceServerError, match="unknown model") as caught:
        next(client.infer_sample([1]))
    assert caught.value.status == (None if server.protocol == "grpc" else "400")


def test_many_streams_at_once(client: DecoupledModelClient) -> None:
    first, second = client.infer_sample([4]), client.infer_sample([3])
    assert [(int(one["i"].item()), int(two["i"].item())) for one, two in zip(first, second, strict=False)] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    with ThreadPoolExecutor(8) as pool:
        assert (
            list(pool.map(lambda count: len(list(client.infer_sample([count]))), [1, 2, 3, 4] * 6)) == [1, 2, 3, 4] * 6
        )


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_stream_that_is_not_read_to_its_end_is_cancelled(server: Any, client: DecoupledModelClient, how: str) -> None:
    if how == "break":
        for result in client.infer_sample([-1]):
            assert int(result["i"].item()) == 0
            break
    else:
        results = client.infer_sample([-1])
        next(results)
        if how == "close":
            results.close()
            assert list(results) == []
        else:
            del results
    gc.collect()
    assert server.cancelled.wait(300)
    assert numbers(client.infer_sample([1])) == [0]


def test_generator_that_is_never_iterated_holds_nothing(server: Any, client: DecoupledModelClient) -> None:
    for _ in range(3):
        client.infer_sample([-1])
    client.infer_sample([-1]).close()
    assert server.asked["inference"] == 0
    assert numbers(client.infer_sample([1])) == [0]


def test_each_response_has_a_time_limit(server: Any, client: DecoupledModelClient) -> None:
    def slow(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"i": arrays["n"]}
        server.released.wait(300)
        yield {"i": arrays["n"]}

    server.models["count"].function = slow
    # Until the limit is enough for the first response.
    for limit_s in (0.5, 5.0, 50.0):
        results = client.with_options(timeout_s=limit_s).infer_sample([7])
        came: list[ModelResult] = []
        begin = time.monotonic()
        with pytest.raises(PyTritonClientTimeoutError) as caught:
            came.extend(results)
        assert time.monotonic() - begin > 0.9 * limit_s
        assert list(results) == []
        if came:
            break
    assert [result["i"].tolist() for result in came] == [[7]]
    assert caught.value.timeout_s == limit_s
    assert "streaming inference" in str(caught.value)


def test_time_limit_is_neither_for_the_whole_stream_nor_for_its_reader(client: DecoupledModelClient) -> None:
    # Until the limit is enough for each response.
    for limit_s in (0.5, 5.0, 50.0):
        results = client.with_options(timeout_s=limit_s).infer_sample([3])
        try:
            next(results)
            time.sleep(1.1 * limit_s)
            assert numbers(results) == [1, 2]
        except PyTritonClientTimeoutError:
            continue
        return
    pytest.fail("no response came in time")


def test_closing_the_client_ends_a_stream(server: Any, client: DecoupledModelClient) -> None:
    def stuck(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"i": arrays["n"]}
        server.released.wait(300)

    server.models["count"].function = stuck
    results, untouched = client.infer_sample([1]), client.infer_sample([1])
    next(results)
    timer = threading.Timer(0.2, client.close)
    timer.start()
    with pytest.raises(PyTritonClientClosedError):
        next(results)
    timer.join()
    with pytest.raises(PyTritonClientClosedError):
        next(untouched)
    with pytest.raises(PyTritonClientClosedError):
        client.infer_sample([1])


def test_parameters_headers_and_options(server: Any, client: DecoupledModelClient) -> None:
    server.response_parameters = {"tokens": 3, "text": "ü", "last": True, "score": 0.5}
    view = client.with_options(request_id="abc", parameters={"a": 1, "b": 2}, headers={"x-one": "1"})
    results = list(view.infer_sample([1], parameters={"b": 3.5}, headers={"x-two": "2"}))
    assert results[0].parameters == server.response_parameters
    assert (results[0].request_id, results[0].model_name, results[0].model_version) == ("abc", "count", "1")
    assert server.last_request_id == "abc"
    assert server.last_parameters == {"a": 1, "b": 3.5}
    assert (server.last_headers["x-one"], server.last_headers["x-two"]) == ("1", "2")
    assert next(client.infer_sample([1])).request_id.endswith("-1")


def test_access_token(server: Any) -> None:
    server.token, server.restricted = "secret", {"inference", "model-config", "model-ready"}
    with DecoupledModelClient(server.url, "count", access_token="secret") as client:
        assert numbers(client.infer_sample([2])) == [0, 1]
    server.restricted = {"inference"}
    with (
        DecoupledModelClient(server.url, "count", access_token="wrong") as client,
        pytest.raises(PyTritonClientInferenceServerError, match=r"restricted.* access_token="),
    ):
        next(client.infer_sample([1]))


def test_wrong_kind_of_model(server: Any) -> None:
    with (
        DecoupledModelClient(server.url, "add") as client,
        pytest.raises(PyTritonClientInferenceServerError, match=r"Model config is coupled. Use ModelClient instead\."),
    ):
        client.infer_sample([1.0])
    assert server.asked["inference"] == 0


def test_what_is_wrong_is_raised_by_the_call_itself(server: Any, client: DecoupledModelClient) -> None:
    with pytest.raises(PyTritonClientValueError, match="Provide input data"):
        client.infer_sample()
    with pytest.raises(PyTritonClientValueError, match="expected the input 'n'"):
        client.infer_sample(m=[1])
    with pytest.raises(PyTritonClientValueError, match="must be a dictionary"):
        client.infer_sample([1], parameters=7)  # type: ignore[arg-type] # what is tested
    server.models["count"].config["max_batch_size"] = 0
    with (
        DecoupledModelClient(server.url, "count") as other,
        pytest.raises(PyTritonClientModelDoesntSupportBatchingError),
    ):
        other.infer_batch([[1]])
    with (
        DecoupledModelClient(server.url, "nowhere", init_timeout_s=0.1) as other,
        pytest.raises(PyTritonClientModelUnavailableError),
    ):
        other.infer_sample([1])
    assert server.asked["inference"] == 0


def test_from_existing_client(server: Any, client: DecoupledModelClient) -> None:
    assert numbers(client.infer_sample([1])) == [0]
    with (
        ModelClient.from_existing_client(client) as coupled,
        DecoupledModelClient.from_existing_client(coupled) as again,
    ):
        with pytest.raises(PyTritonClientInferenceServerError, match="Use DecoupledModelClient instead"):
            coupled.infer_sample([1])
        assert numbers(again.infer_sample([2])) == [0, 1]
    # Once at first, and once more before the client that cannot serve says that it is the wrong one.
    assert server.asked["model-config"] == 2


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_server_and_frozen_server(scheme: str, free_address: str, frozen_address: str, server: Any) -> None:
    with DecoupledModelClient(server.url, "count") as known:
        spec = known.model_config
    options: dict[str, Any] = {"model_config": spec, "ensure_model_is_ready": False}
    with DecoupledModelClient(f"{scheme}://{free_address}", "count", **options) as client:
        results = client.infer_sample([1])
        with pytest.raises(PyTritonClientConnectionError):
            next(results)
    with (
        DecoupledModelClient(f"{scheme}://{frozen_address}", "count", **options) as client,
        pytest.raises(PyTritonClientTimeoutError),
    ):
        next(client.with_options(timeout_s=0.4).infer_sample([1]))


@pytest.mark.parametrize(("given_s", "limit_s"), [(0.1, 0.3), (0.6, 0.6)])
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_how_long_a_stream_may_be_silent(
    scheme: str, given_s: float, limit_s: float, frozen_address: str, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _sync._LEAST_RESPONSE_TIMEOUT_S == 60
    monkeypatch.setattr(_sync, "_LEAST_RESPONSE_TIMEOUT_S", 0.3)
    with DecoupledModelClient(server.url, "count") as known:
        spec = known.model_config
    options: dict[str, Any] = {"model_config": spec, "ensure_model_is_ready": False, "inference_timeout_s": given_s}
    with DecoupledModelClient(f"{scheme}://{frozen_address}", "count", **options) as client:
        with pytest.raises(PyTritonClientTimeoutError) as caught:
            next(client.infer_sample([1]))
        assert caught.value.timeout_s == limit_s


def test_http_connection_that_ends_before_the_stream(server: Any) -> None:
    with DecoupledModelClient(server.url, "count") as known:
        spec = known.model_config
    event = b'data: {"model_name":"count","model_version":"1","i":0}\n\n'

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with DecoupledModelClient(address, "count", model_config=spec, ensure_model_is_ready=False) as client:
            results = client.infer_sample([1])
            assert next(results)["i"].tolist() == [0]
            with pytest.raises(PyTritonClientConnectionError, match="closed the connection"):
                next(results)
        thread.join(300)
