"""The waiting clients against the real server: what they send, what comes back, and what they leave behind."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton, TritonSecurityConfig
from support.callables import X, Y
from support.faults.relay import Relay
from support.servers import needs_arrays_in_streams
from support.serving import local_config, open_sockets, running, short_home
from support.waiting import PATIENCE_S, eventually

TOKEN = "a-token"
ROW = np.array([1.0, 2.0], np.float32)

N = [Tensor((1,), np.int64, "n")]
I = [Tensor((1,), np.int64, "i")]  # noqa: E741 - short like the others
STREAMING = ModelConfig(decoupled=True, max_batch_size=4, batcher=None)

# What the callables saw.
seen: list[Request] = []
cancelled = threading.Event()


@batch
def double(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": 2 * x}


def inspect(requests: list[Request]) -> list[Response]:
    seen.extend(requests)
    return [
        Response({"y": request["x"]}, parameters={"tokens": 7, "why": "ü", "last": True, "score": 0.5})
        for request in requests
    ]


def fail(requests: list[Request]) -> Any:
    raise ValueError("nothing to see here")


def count(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    """Yields 0, 1, ... up to `n`; fails at 5; without an end where `n` is negative, until somebody cancels it."""
    seen.extend(requests)
    (request,) = requests
    limit = int(request["n"].max())
    number = 0
    while number != limit:
        if request.is_cancelled():
            cancelled.set()
            return
        if number == 5 and limit > 0:
            raise ValueError("five is too many")
        yield [{"i": np.full(request["n"].shape, number, np.int64)}]
        number += 1
        time.sleep(0.01 if limit < 0 else 0)


def echo_types(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    for _ in range(2):
        yield [{f"out_{name}": value for name, value in request.items()} for request in requests]


TYPES: dict[str, Any] = {
    "flags": np.array([True, False]),
    "small": np.array([[-128, 127]], np.int8),
    "large": np.array([2**64 - 1], np.uint64),
    "half": np.array([0.1, -1e300], np.float64),
    "text": np.array(["zażółć".encode(), b"", b'"\\\n\0'], object),
}


def types_model(suffix: str = "") -> list[Tensor]:
    shapes = {"flags": (2,), "small": (1, -1), "large": (1,), "half": (-1,), "text": (3,)}
    dtypes = {name: bytes if value.dtype == object else value.dtype.type for name, value in TYPES.items()}
    return [Tensor(shapes[name], dtypes[name], suffix + name) for name in TYPES]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    """A server that protects all it can, with a token."""
    security = TritonSecurityConfig(
        access_token=TOKEN,
        restricted_endpoints=["health", "metadata", "inference", "model-config", "model-repository"],
    )
    with short_home():
        server = Triton(config=local_config(), security_config=security)
        server.bind("double", double, X, Y, config=ModelConfig(max_batch_size=8))
        server.bind("inspect", inspect, X, Y)
        server.bind("single", inspect, X, Y, config=ModelConfig(batching=False))
        server.bind("fail", fail, X, Y)
        server.bind("count", count, N, I, config=STREAMING)
        server.bind("types", echo_types, types_model(), types_model("out_"), config=STREAMING)
        server.bind(
            "halves", echo_types, [Tensor((1,), np.float16, "h")], [Tensor((1,), np.float16, "out_h")], config=STREAMING
        )
        with running(server):
            yield server
            seen.clear()  # which keeps the memory of the inputs


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> str:
    """The address of the server, over each protocol in turn."""
    seen.clear()
    cancelled.clear()
    return str(triton.http_url if request.param == "http" else triton.grpc_url)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No thread and no socket of a client stays after a test."""
    sockets, threads = open_sockets(), set(threading.enumerate())
    yield
    # gRPC closes its sockets and ends its threads a little later than its channel.
    eventually(lambda: open_sockets() <= sockets and not set(threading.enumerate()) - threads)


def numbers(results: Any) -> list[int]:
    return [int(result["i"].item()) for result in results]


def test_results_and_what_comes_along_with_them(url: str) -> None:
    with ModelClient(url, "inspect", access_token=TOKEN) as client:
        view = client.with_options(
            request_id="abc", priority=0, queue_timeout_s=20, timeout_s=PATIENCE_S, parameters={"a": 1, "b": "ü"}
        )
        result = view.infer_sample(ROW, parameters={"c": 0.5, "d": True})
        assert client.infer_batch(ROW[np.newaxis])["y"].tolist() == [[1.0, 2.0]]
    assert result["y"].tolist() == [1.0, 2.0]
    assert result.parameters == {"tokens": 7, "why": "ü", "last": True, "score": 0.5}
    assert (result.request_id, result.model_name, result.model_version) == ("abc", "inspect", "1")
    assert seen[0].request_id == "abc"
    assert {name: seen[0].parameters[name] for name in "abcd"} == {"a": 1, "b": "ü", "c": 0.5, "d": True}
    assert seen[0].timeout_us == 20_000_000
    assert seen[1].request_id.endswith("-1")


def test_model_without_batching(url: str) -> None:
    with ModelClient(url, "single", access_token=TOKEN) as client:
        assert not client.is_batching_supported
        result = client.infer_sample(ROW)
    assert result["y"].tolist() == [1.0, 2.0]
    assert result.parameters["tokens"] == 7


def test_token_on_every_kind_of_call(url: str) -> None:
    def use(client: ModelClient) -> None:
        client.wait_for_server(PATIENCE_S)
        client.wait_for_model(PATIENCE_S)
        assert client.model_config.model_name == "double"
        assert client.infer_sample(ROW)["y"].tolist() == [2.0, 4.0]

    with (
        ModelClient(url, "double", access_token=TOKEN, lazy_init=False) as client,
        ModelClient.from_existing_client(client) as again,
        DecoupledModelClient(url, "count", access_token=TOKEN, lazy_init=False) as decoupled,
        DecoupledModelClient.from_existing_client(decoupled) as decoupled_again,
    ):
        use(client)
        use(again)
        assert numbers(decoupled.infer_sample([2])) == [0, 1]
        assert numbers(decoupled_again.infer_sample([2])) == [0, 1]
    for kind in (ModelClient, DecoupledModelClient):
        for token in (None, "wrong"):
            with kind(url, "double", access_token=token) as client:
                for call in (
                    lambda: client.wait_for_server(PATIENCE_S),
                    lambda: client.wait_for_model(PATIENCE_S),
                    lambda: client.infer_sample(ROW),
                    client.load_model,
                ):
                    # At once, and not after the time limit.
                    with pytest.raises(PyTritonClientInferenceServerError, match=r"restricted.* access_token="):
                        call()


def test_error_of_the_callable(url: str) -> None:
    with ModelClient(url, "fail", access_token=TOKEN) as client:
        with pytest.raises(PyTritonClientInferenceServerError, match="nothing to see here") as caught:
            client.infer_sample(ROW)
        assert client.model_config.model_name == "fail"
    assert caught.value.status == ("500" if url.startswith("http") else "INTERNAL")
    assert caught.value.model_name == "fail"
    assert "Traceback" not in caught.value.message


def test_error_of_the_server(url: str) -> None:
    with (
        ModelClient(url, "double", access_token=TOKEN) as client,
        pytest.raises(PyTritonClientInferenceServerError, match="batch-size must be <= 8") as caught,
    ):
        client.infer_batch(np.zeros((9, 1), np.float32))
    assert caught.value.status == ("400" if url.startswith("http") else "INVALID_ARGUMENT")


def test_model_that_is_missing(url: str) -> None:
    with (
        ModelClient(url, "nowhere", access_token=TOKEN, init_timeout_s=2) as client,
        pytest.raises(PyTritonClientModelUnavailableError) as caught,
    ):
        client.infer_sample(ROW)
    assert isinstance(caught.value, PyTritonClientTimeoutError)
    assert caught.value.missing == "model"


def test_version_that_cannot_come_is_told_at_once(url: str) -> None:
    # Nobody waits for as long as it would take otherwise.
    day_s = 24 * 3600
    with ModelClient(url, "double", "3", access_token=TOKEN, init_timeout_s=day_s) as client:
        for call in (lambda: client.infer_sample(ROW), lambda: client.wait_for_model(day_s)):
            with pytest.raises(PyTritonClientModelUnavailableError, match="has no version 3") as caught:
                call()
            assert isinstance(caught.value, PyTritonClientTimeoutError)
            assert caught.value.missing == "version"
    with ModelClient(url, "double", "1", access_token=TOKEN) as client:
        assert client.infer_sample(ROW).model_version == "1"


@pytest.mark.parametrize("kind", [ModelClient, DecoupledModelClient])
def test_round_trips_before_the_first_inference(triton: Triton, kind: type[ModelClient]) -> None:
    model, value = ("count", [1]) if kind is DecoupledModelClient else ("double", [1.0])
    with Relay(str(triton.http_url)) as relay:
        with kind(f"http://127.0.0.1:{relay.port}", model, access_token=TOKEN) as client:
            assert relay.sent == b""
            list(client.infer_sample(value))
            list(client.infer_sample(value))
        assert relay.connections == 1
        lines = re.findall(rb"(?:GET|POST) \S+ HTTP/1\.1", relay.sent)
    endpoint = b"generate_stream" if kind is DecoupledModelClient else b"infer"
    path = b"/v2/models/" + model.encode()
    assert lines == [
        b"GET " + path + b"/ready HTTP/1.1",
        b"GET " + path + b"/config HTTP/1.1",
        *[b"POST " + path + b"/" + endpoint + b" HTTP/1.1"] * 2,
    ]


def test_connection_that_breaks_is_replaced(url: str) -> None:
    scheme = url.partition("://")[0]
    with Relay(url) as relay, ModelClient(f"{scheme}://127.0.0.1:{relay.port}", "double", access_token=TOKEN) as client:

        def works() -> bool:
            try:
                return bool(client.infer_sample(ROW)["y"].tolist() == [2.0, 4.0])
            except PyTritonClientConnectionError:
                return False  # it was on its way already

        assert works()
        for broken in (1, 2, 3):
            relay.drop()
            # Whatever is idle when it breaks is replaced before the next call.
            eventually(works)
            assert works()
            assert relay.connections >= broken


def test_stream(url: str) -> None:
    needs_arrays_in_streams(url)
    with DecoupledModelClient(url, "count", access_token=TOKEN) as client:
        view = client.with_options(request_id="abc", timeout_s=PATIENCE_S)
        results = list(view.infer_sample([3], parameters={"a": 1}))
        assert numbers(results) == [0, 1, 2]
        assert {(result.request_id, result.model_version) for result in results} == {("abc", "1")}
        assert (seen[0].request_id, seen[0].parameters["a"]) == ("abc", 1)
        assert [result["i"].tolist() for result in client.infer_batch([[2], [1]])] == [[[0], [0]], [[1], [1]]]
        assert list(client.infer_sample([0])) == []


def test_stream_that_fails_after_some_results(url: str) -> None:
    with DecoupledModelClient(url, "count", access_token=TOKEN) as client:
        results = client.infer_sample([9])
        assert [int(next(results)["i"].item()) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(PyTritonClientInferenceServerError, match="five is too many"):
            next(results)
        assert list(results) == []
        assert numbers(client.infer_sample([2])) == [0, 1]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_callable_learns_that_its_caller_left(url: str, how: str) -> None:
    with DecoupledModelClient(url, "count", access_token=TOKEN) as client:
        results = client.infer_sample([-1])
        assert int(next(results)["i"].item()) == 0
        if how == "close":
            results.close()
        else:
            del results
        assert cancelled.wait(PATIENCE_S)
        assert numbers(client.infer_sample([1])) == [0]


def test_client_that_is_closed_during_a_stream(url: str) -> None:
    client = DecoupledModelClient(url, "count", access_token=TOKEN)
    results = client.infer_sample([-1])
    next(results)
    client.close()
    with pytest.raises(PyTritonClientClosedError):
        for _ in results:
            pass
    assert cancelled.wait(PATIENCE_S)


def test_many_streams_of_many_threads(url: str) -> None:
    with DecoupledModelClient(url, "count", access_token=TOKEN) as client, ThreadPoolExecutor(6) as pool:
        counts = [1, 2, 3, 4] * 6
        assert list(pool.map(lambda count: len(list(client.infer_sample([count]))), counts)) == counts
        together = [client.infer_sample([3]) for _ in range(3)]
        assert [numbers(row) for row in zip(*together, strict=True)] == [[0] * 3, [1] * 3, [2] * 3]


@pytest.mark.parametrize("is_batch", [False, True])
def test_types_of_a_stream(url: str, is_batch: bool) -> None:
    needs_arrays_in_streams(url)
    given: dict[str, Any] = {name: np.stack([value, value]) if is_batch else value for name, value in TYPES.items()}
    if is_batch and url.startswith("http"):
        # JSON says no shapes, so a batch may have no other free axis than the one of the batch.
        with DecoupledModelClient(url, "types", access_token=TOKEN) as client:
            with pytest.raises(PyTritonClientValueError, match=r"the input 'small' .* Use a grpc:// address"):
                client.infer_batch(**given)
            return
    with DecoupledModelClient(url, "types", access_token=TOKEN) as client:
        results = list((client.infer_batch if is_batch else client.infer_sample)(**given))
    assert len(results) == 2
    for result in results:
        for name, value in given.items():
            np.testing.assert_array_equal(result[f"out_{name}"], value)
            assert result[f"out_{name}"].dtype == value.dtype


def test_type_that_json_cannot_carry(url: str) -> None:
    with DecoupledModelClient(url, "halves", access_token=TOKEN) as client:
        if url.startswith("http"):
            with pytest.raises(PyTritonClientValueError, match=r"'out_h' of another type than FP16.* Use a grpc://"):
                client.infer_sample([0.5])
        else:
            assert [result["out_h"].tolist() for result in client.infer_sample([0.5])] == [[0.5]] * 2


def test_wrong_kind_of_client(url: str) -> None:
    with (
        ModelClient(url, "count", access_token=TOKEN) as client,
        pytest.raises(PyTritonClientInferenceServerError, match=r"is decoupled\. Use DecoupledModelClient instead"),
    ):
        client.infer_sample([1])
    with (
        DecoupledModelClient(url, "double", access_token=TOKEN) as decoupled,
        pytest.raises(PyTritonClientInferenceServerError, match=r"is coupled\. Use ModelClient instead"),
    ):
        decoupled.infer_sample(ROW)
    assert seen == []


@contextmanager
def ipv6_relay(target: str) -> Iterator[str]:
    try:
        probe = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    probe.close()
    with Relay(target, host="::1") as relay:
        yield f"[::1]:{relay.port}"


def test_ipv6(url: str) -> None:
    scheme = url.partition("://")[0]
    with ipv6_relay(url) as address:
        with ModelClient(f"{scheme}://{address}", "double", access_token=TOKEN) as client:
            assert client.infer_sample(ROW)["y"].tolist() == [2.0, 4.0]
            assert repr(client) == f"<ModelClient for double/<latest> at {scheme}://{address}>"
        with DecoupledModelClient(f"{scheme}://{address}", "count", access_token=TOKEN) as decoupled:
            assert numbers(decoupled.infer_sample([2])) == [0, 1]
