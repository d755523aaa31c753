from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client._core.options import NO_OPTIONS, check_headers, check_parameters
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)

ROW = np.array([1.0, 2.0], dtype=np.float32)


def test_options_go_with_every_call(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        view = client.with_options(
            request_id="abc",
            priority=2,
            queue_timeout_s=0.25,
            parameters={"a": 1, "b": 1},
            headers={"x-a": "1", "x-b": "1"},
        )
        assert type(view) is ModelClient
        assert repr(view) == repr(client)
        result = view.infer_sample(ROW, parameters={"b": 2}, headers={"x-b": "2"})
        assert result.request_id == "abc"
        assert server.last_request_id == "abc"
        assert server.last_parameters["priority"] == 2
        assert server.last_parameters["timeout"] == 250_000
        assert {name: server.last_parameters[name] for name in ("a", "b")} == {"a": 1, "b": 2}
        assert (server.last_headers["x-a"], server.last_headers["x-b"]) == ("1", "2")
        # The client itself stays as it was.
        client.infer_sample(ROW)
        assert server.last_request_id.endswith("-1")
        assert not {"priority", "timeout", "a"} & set(server.last_parameters)
        assert "x-a" not in server.last_headers


def test_a_view_casts_arrays_of_the_same_kind(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        view = client.with_options(casting="same_kind").with_options(priority=1)
        view.infer_sample(np.array([1.0, 2.0]))
        with pytest.raises(PyTritonClientValueError, match="received an array of float64"):
            client.infer_sample(np.array([1.0, 2.0]))
        with pytest.raises(PyTritonClientValueError, match="one of 'safe', 'same_kind'; received 'unsafe'"):
            client.with_options(casting="unsafe")  # type: ignore[arg-type]


def test_views_of_views_add_up(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        first = client.with_options(request_id="abc", parameters={"a": 1, "b": 1})
        second = first.with_options(priority=1, parameters={"b": 2})
        second.infer_sample(ROW)
        assert server.last_request_id == "abc"
        assert {name: server.last_parameters[name] for name in ("a", "b", "priority")} == {
            "a": 1,
            "b": 2,
            "priority": 1,
        }
        first.infer_sample(ROW)
        assert "priority" not in server.last_parameters


def test_views_share_what_is_known_and_the_connections(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        for number in range(5):
            client.with_options(request_id=str(number)).infer_sample(ROW)
        client.infer_sample(ROW)
        assert client.is_batching_supported
    assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 6}


def test_closing_a_view_closes_the_client(server: Any) -> None:
    client = ModelClient(server.url, "add")
    view = client.with_options(timeout_s=5)
    view.infer_sample(ROW)
    view.close()
    with pytest.raises(PyTritonClientClosedError):
        client.infer_sample(ROW)


def test_views_in_threads(server: Any) -> None:
    def call(number: int) -> str:
        return client.with_options(request_id=f"id-{number}").infer_sample(ROW).request_id

    with ModelClient(server.url, "add") as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(40))) == [f"id-{number}" for number in range(40)]


def test_copy_of_a_client_keeps_the_options(server: Any) -> None:
    with (
        ModelClient(server.url, "add") as client,
        ModelClient.from_existing_client(client.with_options(request_id="abc")) as again,
    ):
        again.infer_sample(ROW)
    assert server.last_request_id == "abc"


def test_time_limit_of_a_call(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        client.infer_sample(ROW)
        server.is_stuck = True
        begin = time.monotonic()
        with pytest.raises(PyTritonClientTimeoutError) as caught:
            client.with_options(timeout_s=0.3).infer_sample(ROW)
        assert time.monotonic() - begin >= 0.25
        assert caught.value.timeout_s is not None
        assert caught.value.timeout_s <= 0.3
        server.is_stuck = False
        server.released.set()
        client.infer_sample(ROW)


def test_time_limit_of_a_call_holds_for_the_wait_before_it(free_address: str) -> None:
    # The client's own limit is longer than a test may take.
    with (
        ModelClient(free_address, "add", init_timeout_s=3600) as client,
        pytest.raises(PyTritonClientModelUnavailableError),
    ):
        client.with_options(timeout_s=0.3).infer_sample(ROW)


def test_time_limit_of_a_call_holds_for_the_wait_of_another_thread(free_address: str) -> None:
    def wait() -> None:
        with pytest.raises(PyTritonClientClosedError):
            client.infer_sample(ROW)

    with ModelClient(free_address, "add") as client:
        thread = threading.Thread(target=wait)
        thread.start()
        while not client._prepare_lock.locked():
            time.sleep(0.01)
        with pytest.raises(PyTritonClientModelUnavailableError, match="another thread"):
            client.with_options(timeout_s=0.2).infer_sample(ROW)
        client.close()
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"request_id": ""},
        {"request_id": 7},
        {"request_id": "a\nb"},
        {"request_id": "\ud800"},
        {"priority": -1},
        {"priority": 1.0},
        {"priority": True},
        {"queue_timeout_s": 0},
        {"parameters": [1]},
        {"parameters": {"a": None}},
        {"parameters": {"a": "cut \0 off"}},
        {"parameters": {"a\0b": 1}},
        {"parameters": {"triton_x": 1}},
        {"headers": {"a b": "1"}},
        {"headers": {"a": "ü"}},
        {"headers": {"Content-Length": "5"}},
        {"headers": {"Host": "elsewhere"}},
        {"headers": {"grpc-timeout": "1S"}},
        {"headers": {"x-bin": "bytes"}},
    ],
)
def test_options_that_cannot_be_sent(options: dict[str, Any]) -> None:
    with ModelClient("localhost", "add") as client, pytest.raises(PyTritonClientValueError):
        client.with_options(**options)


def test_inputs_called_parameters_and_headers(server: Any, make_model: Callable[..., Any]) -> None:
    tensors = [{"name": name, "data_type": "TYPE_FP32", "dims": [2]} for name in ("parameters", "headers")]
    config = {"name": "odd", "max_batch_size": 4, "input": tensors, "output": [tensors[0] | {"name": "sum"}]}
    server.models["odd"] = make_model(config, lambda arrays: {"sum": arrays["parameters"] + arrays["headers"]})
    with ModelClient(server.url, "odd") as client:
        by_name = {"parameters": ROW, "headers": ROW}
        assert client.infer_sample(**by_name)["sum"].tolist() == [2.0, 4.0]
        assert client.infer_sample(ROW, ROW, parameters={"a": 1})["sum"].tolist() == [2.0, 4.0]
        assert server.last_parameters["a"] == 1
        view = client.with_options(parameters={"a": 2}, headers={"x-a": "2"})
        view.infer_batch(**{name: value[np.newaxis] for name, value in by_name.items()})
        assert server.last_parameters["a"] == 2
        assert server.last_headers["x-a"] == "2"
    with ModelClient(server.url, "add") as client:
        with pytest.raises(PyTritonClientValueError, match=r"received 'a', 'parameters'"):
            client.infer_sample(a=ROW, parameters=ROW)
        with pytest.raises(PyTritonClientValueError, match=r"received 'a', 'headers'"):
            client.infer_sample(ROW, headers=ROW)


def test_numpy_scalars_are_parameters_and_headers() -> None:
    parameters = {
        "i": np.int64(1),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "s": np.str_("x"),
        "priority": np.uint8(3),
    }
    custom, options = check_parameters(parameters)
    assert custom == {"i": 1, "f": 0.5, "b": True, "s": "x"}
    assert [type(value) for value in custom.values()] == [int, float, bool, str]
    assert options == {"priority": 3}
    assert check_headers({"a": np.int64(1), "b": True}) == {"a": "1", "b": "True"}


def test_no_options_change_nothing() -> None:
    nothing = NO_OPTIONS.with_changes(
        timeout_s=None,
        request_id=None,
        priority=None,
        queue_timeout_s=None,
        parameters=None,
        headers=None,
        casting=None,
    )
    assert nothing == NO_OPTIONS
