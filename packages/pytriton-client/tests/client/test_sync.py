from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient, ModelSpec, TensorSpec
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)

ROW = np.array([1.0, 2.0], dtype=np.float32)
ADD = ModelSpec(
    "add",
    None,
    8,
    True,
    False,
    (TensorSpec("a", (-1,), np.float32), TensorSpec("b", (-1,), np.float32, optional=True)),
    (TensorSpec("sum", (-1,), np.float32),),
)


def test_sample_has_no_batch_axis(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        result = client.infer_sample(ROW, ROW)
    assert list(result) == ["sum"]
    assert result["sum"].dtype == np.float32
    np.testing.assert_array_equal(result["sum"], [2.0, 4.0])


def test_batch_keeps_its_axis(server: Any) -> None:
    batch = np.arange(6, dtype=np.float32).reshape(3, 2)
    with ModelClient(server.url, "add") as client:
        by_position = client.infer_batch(batch, batch)
        by_name = client.infer_batch(b=batch, a=batch)
    np.testing.assert_array_equal(by_position["sum"], 2 * batch)
    np.testing.assert_array_equal(by_name["sum"], 2 * batch)


def test_model_without_batching(server: Any) -> None:
    with ModelClient(server.url, "single") as client:
        assert not client.is_batching_supported
        np.testing.assert_array_equal(client.infer_sample(ROW)["sum"], ROW)
        with pytest.raises(PyTritonClientModelDoesntSupportBatchingError, match="doesn't support batching - use"):
            client.infer_batch(ROW[np.newaxis])


def test_optional_input_may_be_left_out(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        np.testing.assert_array_equal(client.infer_sample(ROW)["sum"], ROW)
        np.testing.assert_array_equal(client.infer_sample(a=ROW)["sum"], ROW)


def test_non_contiguous_and_converted_inputs(server: Any) -> None:
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    with ModelClient(server.url, "add") as client:
        np.testing.assert_array_equal(client.infer_batch(wide[:, ::2])["sum"], wide[:, ::2])
        np.testing.assert_array_equal(client.infer_batch(wide.T)["sum"], wide.T)
        np.testing.assert_array_equal(client.infer_sample([1, 2.5])["sum"], np.array([1, 2.5], np.float32))
        np.testing.assert_array_equal(client.infer_sample(7)["sum"], np.array([7], np.float32))
        np.testing.assert_array_equal(client.infer_sample(np.array([1, 2], np.int16))["sum"], ROW)


def test_empty_tensors(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        assert client.infer_sample([])["sum"].shape == (0,)
        assert client.infer_batch(np.zeros((2, 0), np.float32))["sum"].shape == (2, 0)


@pytest.mark.parametrize("given", [["zażółć"], np.array(["zażółć"]), np.array(["zażółć"], object), ["zażółć".encode()]])
def test_text_travels_as_utf8(server: Any, given: Any) -> None:
    with ModelClient(server.url, "upper") as client:
        result = client.infer_sample(given)["upper"]
        assert client.model_config.inputs[0].dtype is np.bytes_
    assert server.last_datatypes == {"text": "BYTES"}
    assert result.dtype == object
    assert result.tolist() == ["zażółć".encode().upper()]


def test_bytes_keep_their_trailing_zeros(server: Any) -> None:
    with ModelClient(server.url, "upper") as client:
        assert client.infer_batch([[b"a\0"], [b""]])["upper"].tolist() == [[b"A\0"], [b""]]


def test_bfloat16(server: Any, make_model: Callable[..., Any]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensors = {"data_type": "TYPE_BF16", "dims": [2]}
    config = {"name": "half", "input": [{"name": "a", **tensors}], "output": [{"name": "b", **tensors}]}
    server.models["half"] = make_model(config, lambda arrays: {"b": arrays["a"]})
    with ModelClient(server.url, "half") as client:
        result = client.infer_sample([1.5, -2.0])["b"]
    assert result.dtype == ml_dtypes.bfloat16
    assert result.astype(np.float32).tolist() == [1.5, -2.0]


def test_more_than_a_grpc_message_holds(free_address: str) -> None:
    # One element seen 2**30 times: nothing of that size is in memory, unless somebody copies it.
    huge = np.broadcast_to(np.float32(0), (2**30,))
    with (
        ModelClient(f"grpc://{free_address}", "add", model_config=ADD, ensure_model_is_ready=False) as client,
        pytest.raises(PyTritonClientValueError, match=r"less than 2 GiB together.* received 4294967296 bytes"),
    ):
        client.infer_sample(huge)


def test_results_can_be_kept_and_changed(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        first = client.infer_sample(ROW)["sum"]
        client.infer_sample(10 * ROW)
        np.testing.assert_array_equal(first, ROW)
        first += 1
    np.testing.assert_array_equal(first, ROW + 1)


def test_two_control_round_trips_before_the_first_inference(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        assert sum(server.asked.values()) == 0
        for _ in range(3):
            client.infer_sample(ROW)
        assert client.model_config.max_batch_size == 8
        assert client.is_batching_supported
    assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 3}


def test_waiting_beforehand_is_not_repeated(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        client.wait_for_server(300)
        client.wait_for_model(300)
        client.infer_sample(ROW)
    assert dict(server.asked) == {"health": 1, "model-ready": 1, "model-config": 1, "inference": 1}


def test_not_lazy_asks_at_once(server: Any) -> None:
    with ModelClient(server.url, "add", lazy_init=False) as client:
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1}
        client.infer_sample(ROW)
    assert server.asked["model-config"] == 1


def test_known_model_needs_no_question(server: Any) -> None:
    with ModelClient(server.url, "add", model_config=ADD, ensure_model_is_ready=False) as client:
        client.infer_sample(ROW)
    assert dict(server.asked) == {"inference": 1}


def test_from_existing_client(server: Any) -> None:
    server.token, server.restricted = "secret", {"inference"}
    with (
        ModelClient(server.url, "add", "2", access_token="secret", inference_timeout_s=7, init_timeout_s=8) as first,
        ModelClient.from_existing_client(first) as before,
    ):
        first.infer_sample(ROW)
        asked = dict(server.asked)
        with ModelClient.from_existing_client(first) as second:
            second.infer_sample(ROW)
            assert second.model_config == first.model_config
            assert repr(second) == repr(first)
        assert server.asked["model-config"] == asked["model-config"]
        assert server.asked["model-ready"] == asked["model-ready"]
        before.infer_sample(ROW)


def test_model_config(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        assert client.model_config == ADD
    with ModelClient(server.url, "add", "2") as client:
        assert client.model_config.model_version == 2


def test_parameters_and_headers(server: Any) -> None:
    parameters: dict[str, Any] = {
        "text": "ü",
        "whole": -(2**63),
        "yes": True,
        "half": 0.5,
        "priority": 2,
        "timeout": 99,
    }
    with ModelClient(server.url, "add") as client:
        client.infer_sample(ROW, parameters=parameters, headers={"X-Trace": "abc", "x-count": 3})
    assert {name: server.last_parameters[name] for name in parameters} == parameters
    assert server.last_headers["x-trace"] == "abc"
    assert server.last_headers["x-count"] == "3"
    assert server.last_request_id.endswith("-0")


@pytest.mark.parametrize(
    "endpoints", [{"health"}, {"model-ready"}, {"model-config"}, {"inference"}, {"model-repository"}]
)
def test_access_token_on_every_kind_of_call(server: Any, endpoints: set[str]) -> None:
    server.token, server.restricted = "secret", endpoints

    def use(client: ModelClient) -> None:
        client.wait_for_server(300)
        client.wait_for_model(300)
        client.infer_sample(ROW)
        client.unload_model()
        client.load_model()

    with ModelClient(server.url, "add", access_token="secret") as client:
        use(client)
    with ModelClient(server.url, "add", access_token="wrong") as client:
        with pytest.raises(PyTritonClientInferenceServerError, match=r"restricted.* access_token=") as caught:
            use(client)
        assert caught.value.status == ("403" if server.protocol == "http" else "UNAVAILABLE")


def test_load_and_unload(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        client.infer_sample(ROW)
        client.unload_model()
        with pytest.raises(PyTritonClientModelUnavailableError):
            client.wait_for_model(0.1)
        server.models["add"].config["max_batch_size"] = 16
        client.load_model(config='{"max_batch_size": 16}', files={"file:1/model.bin": b"\0\xff"})
        assert client.model_config.max_batch_size == 16
    content = {"http": "AP8=", "grpc": b"\0\xff"}[server.protocol]
    assert server.loaded == [{"name": "add", "config": '{"max_batch_size": 16}', "file:1/model.bin": content}]


def test_load_of_a_model_that_is_not_there(server: Any) -> None:
    with (
        ModelClient(server.url, "nowhere") as client,
        pytest.raises(PyTritonClientInferenceServerError, match="failed to poll from model repository"),
    ):
        client.load_model()


def test_error_of_the_model(server: Any) -> None:
    with ModelClient(server.url, "fail") as client:
        with pytest.raises(PyTritonClientInferenceServerError, match="by zero") as caught:
            client.infer_sample([0])
        # The connection stays usable.
        np.testing.assert_array_equal(client.infer_batch([[1]])["out"], [1])
    error = caught.value
    assert error.status == {"http": "500", "grpc": "INTERNAL"}[server.protocol]
    assert error.server_message is not None
    assert error.server_message.startswith("Traceback")
    assert error.model_name == "fail"
    assert error.url == server.url


def test_decoupled_model_is_refused(server: Any) -> None:
    with (
        ModelClient(server.url, "stream") as client,
        pytest.raises(PyTritonClientInferenceServerError, match="Use DecoupledModelClient"),
    ):
        client.infer_sample(ROW)
    assert server.asked["inference"] == 0


def test_wrong_inputs_are_not_sent(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((ROW, ROW, ROW), {}),
            ((), {"b": ROW}),
            ((), {"a": ROW, "c": ROW}),
            ((ROW.astype(np.float64),), {}),
            (([[1.0], [2.0, 3.0]],), {}),
            ((), {}),
            ((ROW,), {"a": ROW}),
        ]
        for arguments, named in calls:
            with pytest.raises(PyTritonClientValueError):
                client.infer_sample(*arguments, **named)
        with pytest.raises(PyTritonClientValueError, match="one batch size"):
            client.infer_batch(np.zeros((2, 1), np.float32), np.zeros((3, 1), np.float32))
    assert server.asked["inference"] == 0


@pytest.mark.parametrize(
    ("model", "version", "missing"), [("nowhere", None, "model"), ("nowhere", "1", "model"), ("add", "3", "version")]
)
def test_missing_model(server: Any, model: str, version: str | None, missing: str) -> None:
    # Until the limit is enough for the answers that tell it.
    for limit_s in (0.3, 3.0, 30.0):
        with (
            ModelClient(server.url, model, version, init_timeout_s=limit_s) as client,
            pytest.raises(PyTritonClientTimeoutError) as caught,
        ):
            client.infer_sample(ROW)
        error = caught.value
        assert issubclass(caught.type, PyTritonClientModelUnavailableError)
        assert model in error.message
        assert error.timeout_s == limit_s
        if error.missing == missing:
            break
    assert error.missing == missing
    assert missing in error.message
    with ModelClient(server.url, model, version) as client:
        for call in (lambda: client.wait_for_model(0.1), lambda: client.with_options(timeout_s=0.1).infer_sample(ROW)):
            with pytest.raises(PyTritonClientModelUnavailableError):
                call()


def test_not_lazy_and_missing(server: Any) -> None:
    with pytest.raises(PyTritonClientTimeoutError, match="nowhere"):
        ModelClient(server.url, "nowhere", lazy_init=False, init_timeout_s=0.1)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_missing_server(scheme: str, free_address: str) -> None:
    with ModelClient(f"{scheme}://{free_address}", "add", init_timeout_s=0.3) as client:
        with pytest.raises(PyTritonClientModelUnavailableError, match=f"Connection to {scheme}://.* failed") as caught:
            client.infer_sample(ROW)
        assert isinstance(caught.value, PyTritonClientTimeoutError)
        assert caught.value.missing == "server"
        with pytest.raises(PyTritonClientTimeoutError, match="Waiting for server to be ready timed out"):
            client.wait_for_server(0.2)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_refused_connection_is_no_timeout(scheme: str, free_address: str) -> None:
    url = f"{scheme}://{free_address}"
    with ModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False) as client:
        with pytest.raises(PyTritonClientConnectionError, match=r"(?i)refused|failed to connect") as caught:
            client.infer_sample(ROW)
        assert not isinstance(caught.value, PyTritonClientTimeoutError)
        assert caught.value.url == url
        with pytest.raises(PyTritonClientConnectionError):
            client.load_model()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", f"{'x' * 70}.invalid"])
def test_host_that_does_not_exist(scheme: str, host: str) -> None:
    options: dict[str, Any] = {"model_config": ADD, "ensure_model_is_ready": False, "inference_timeout_s": 300}
    with (
        ModelClient(f"{scheme}://{host}", "add", **options) as client,
        pytest.raises(PyTritonClientConnectionError),
    ):
        client.infer_sample(ROW)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_frozen_server(scheme: str, frozen_address: str) -> None:
    url = f"{scheme}://{frozen_address}"
    with ModelClient(url, "add", init_timeout_s=0.3, inference_timeout_s=0.3) as client:
        for call in (
            lambda: client.infer_sample(ROW),
            lambda: client.wait_for_server(0.3),
            lambda: client.wait_for_model(0.3),
            client.load_model,
            client.unload_model,
            lambda: client.model_config,
        ):
            with pytest.raises(PyTritonClientTimeoutError) as caught:
                call()
            assert caught.value.url == url
    with ModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False, inference_timeout_s=0.3) as client:
        with pytest.raises(PyTritonClientTimeoutError, match="inference request") as caught:
            client.infer_sample(ROW)
        assert caught.value.timeout_s == 0.3


def test_stuck_inference_times_out_and_the_client_goes_on(server: Any) -> None:
    with ModelClient(server.url, "add", inference_timeout_s=0.3) as client:
        patient = client.with_options(timeout_s=300)
        patient.infer_sample(ROW)
        server.is_stuck = True
        with pytest.raises(PyTritonClientTimeoutError):
            client.infer_sample(ROW)
        server.is_stuck = False
        server.released.set()
        # An answer that came too late must not be taken for this one.
        np.testing.assert_array_equal(patient.infer_sample(5 * ROW)["sum"], 5 * ROW)


def test_waits_until_the_model_comes(server: Any) -> None:
    server.models["add"].is_ready = False
    timer = threading.Timer(0.3, lambda: setattr(server.models["add"], "is_ready", True))
    timer.start()
    with ModelClient(server.url, "add", init_timeout_s=300) as client:
        np.testing.assert_array_equal(client.infer_sample(ROW)["sum"], ROW)
    timer.join()


def test_server_that_is_not_ready(server: Any) -> None:
    server.is_ready = False
    with ModelClient(server.url, "add") as client:
        # Until the limit is enough for one answer.
        for limit_s in (0.1, 1.0, 10.0, 100.0):
            with pytest.raises(PyTritonClientTimeoutError) as caught:
                client.wait_for_server(limit_s)
            if "answers that it is not ready" in str(caught.value):
                break
    assert "answers that it is not ready" in str(caught.value)


def test_threads_share_a_client(server: Any) -> None:
    server.delay_s = 0.005
    barrier = threading.Barrier(8)

    def call(number: int) -> float:
        if number < 8:
            barrier.wait(300)
        return float(client.infer_sample(np.array([number], np.float32))["sum"][0])

    with ModelClient(server.url, "add") as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(80))) == list(range(80))
    assert server.asked["model-config"] == 1
    assert server.asked["model-ready"] == 1


def test_closed_client(server: Any) -> None:
    client = ModelClient(server.url, "add")
    client.infer_sample(ROW)
    client.close()
    client.close()
    for call in (
        lambda: client.infer_sample(ROW),
        lambda: client.infer_batch(ROW[np.newaxis]),
        lambda: client.wait_for_model(1),
        lambda: client.wait_for_server(1),
        lambda: client.model_config,
        client.load_model,
        client.unload_model,
    ):
        with pytest.raises(PyTritonClientClosedError, match="is closed"):
            call()


def test_close_ends_an_inference_in_another_thread(server: Any) -> None:
    errors: list[PyTritonClientError] = []

    def infer() -> None:
        try:
            client.infer_sample(ROW)
        except PyTritonClientError as error:
            errors.append(error)

    with ModelClient(server.url, "add") as client:
        client.infer_sample(ROW)
        server.is_stuck = True
        thread = threading.Thread(target=infer)
        thread.start()
        while server.asked["inference"] < 2:
            time.sleep(0.01)
    thread.join(300)
    assert [type(error) for error in errors] == [PyTritonClientClosedError]


def test_close_ends_a_wait_in_another_thread(server: Any) -> None:
    errors: list[PyTritonClientError] = []

    def wait() -> None:
        try:
            client.wait_for_model(300)
        except PyTritonClientError as error:
            errors.append(error)

    with ModelClient(server.url, "nowhere") as client:
        thread = threading.Thread(target=wait)
        thread.start()
        while not server.asked["model-ready"]:
            time.sleep(0.01)
    thread.join(300)
    assert [type(error) for error in errors] == [PyTritonClientClosedError]


def test_server_that_dies_under_an_inference(server: Any) -> None:
    """The connection breaks at once; nobody waits for the deadline."""
    relay = socket.create_server(("127.0.0.1", 0))
    pairs: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return  # the other direction has ended it

    def accept() -> None:
        host, port = server.url.partition("://")[2].split(":")
        inner, _ = relay.accept()
        outer = socket.create_connection((host, int(port)))
        pairs.extend((inner, outer))
        threads = [threading.Thread(target=copy, args=pair) for pair in ((inner, outer), (outer, inner))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

    def die() -> None:
        while not server.asked["inference"]:
            time.sleep(0.01)
        for connection in pairs:
            connection.shutdown(socket.SHUT_RDWR)

    url = f"{server.protocol}://127.0.0.1:{relay.getsockname()[1]}"
    threads = [threading.Thread(target=accept), threading.Thread(target=die)]
    for thread in threads:
        thread.start()
    server.is_stuck = True
    with (
        ModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False) as client,
        pytest.raises(PyTritonClientConnectionError),
    ):
        client.infer_sample(ROW)
    for thread in threads:
        thread.join(300)
    for connection in (*pairs, relay):
        connection.close()


def test_broken_answer_is_a_connection_error() -> None:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with (
            ModelClient(address, "add", model_config=ADD, ensure_model_is_ready=False) as client,
            pytest.raises(PyTritonClientConnectionError, match="expected 95 more bytes of a response"),
        ):
            client.infer_sample(ROW)
        thread.join(300)


@pytest.mark.parametrize(
    "options",
    [
        {"model_version": "newest"},
        {"init_timeout_s": 0},
        {"inference_timeout_s": -1.0},
        {"inference_timeout_s": float("nan")},
        {"access_token": "a\nb"},
        {"access_token": ""},
        {"model_config": {"name": "add"}},
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any]) -> None:
    with pytest.raises(PyTritonClientValueError):
        ModelClient("localhost", "add", **options)
    with pytest.raises(PyTritonClientValueError, match="name of a model"):
        ModelClient("localhost", "")


def test_a_wrong_shape_is_told_before_the_inputs_are_sent(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        client.infer_sample(np.array([1.0, 2.0], np.float32))
        for infer in (client.infer_sample, client.infer_batch):
            with pytest.raises(PyTritonClientValueError, match="Model add, input"):
                infer(np.zeros((1, 1, 2), np.float32))
    assert server.asked["inference"] == 1
    # Once at first, and once for the errors, because the model may have been loaded anew.
    assert server.asked["model-config"] == 2


def test_a_model_that_was_loaded_with_another_shape_gets_it(server: Any) -> None:
    def load(size: int) -> None:
        config = copy.deepcopy(server.models["add"].config)
        for tensor in config["input"]:
            tensor["dims"] = [size]
        server.models["add"].config = config

    load(2)
    with ModelClient(server.url, "add") as client:
        client.infer_sample(np.zeros(2, np.float32))
        load(3)
        client.infer_sample(np.zeros(3, np.float32))
        with pytest.raises(PyTritonClientValueError, match=r"expected the shape \(3\)"):
            client.infer_sample(np.zeros(2, np.float32))
    assert server.asked["inference"] == 2
