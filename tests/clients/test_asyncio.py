"""The asyncio clients against the real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import AsyncioDecoupledModelClient, AsyncioModelClient, FuturesModelClient, ModelClient
from pytriton.client.asyncio_utils import asyncio_get_model_config, asyncio_wait_for_model_ready
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton
from support.processes import stopped
from support.servers import needs_arrays_in_streams
from support.serving import local_config, running, server_pid
from support.waiting import PATIENCE_S, drive, eventually, eventually_async

ROW = np.array([1, 2], np.float32)

cancelled = threading.Event()
entered = threading.Event()


@batch
def add(a: Any, b: Any) -> dict[str, Any]:
    if (a < 0).any():
        raise ValueError("negative")
    return {"sum": a + b}


def upper(requests: list[Request]) -> list[Any]:
    answers = []
    for request in requests:
        text = np.char.upper(request["text"].astype(bytes)).astype(object)
        answers.append(Response({"upper": text}, parameters={"id": request.request_id, "n": 3, **request.parameters}))
    return answers


def patient(requests: list[Request]) -> list[Any]:
    entered.set()
    eventually(requests[0].is_cancelled)
    cancelled.set()
    return [{"x": request["x"]} for request in requests]


def count(requests: list[Request]) -> Iterator[list[Any]]:
    """As many responses as the input says; for -1 without end, for -2 two and an error."""
    number = int(requests[0]["n"].reshape(-1)[0])
    index = 0
    try:
        while index != number:
            if number == -2 and index == 2:
                raise ValueError("two is enough")
            if requests[0].is_cancelled():
                cancelled.set()
                return
            yield [{"i": np.full_like(request["n"], index)} for request in requests]
            if number == -1:
                time.sleep(0.005)
            index += 1
    except GeneratorExit:
        cancelled.set()
        raise


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    server = Triton(config=local_config())
    row = ModelConfig(max_batch_size=16)
    server.bind(
        "add",
        add,
        [Tensor((-1,), np.float32, "a"), Tensor((-1,), np.float32, "b")],
        [Tensor((-1,), np.float32, "sum")],
        config=row,
    )
    server.bind("upper", upper, [Tensor((1,), bytes, "text")], [Tensor((1,), bytes, "upper")], config=row)
    one = ModelConfig(batching=False)
    server.bind("patient", patient, [Tensor((1,), np.int32, "x")], [Tensor((1,), np.int32, "x")], config=one)
    stream = ModelConfig(max_batch_size=4, decoupled=True, batcher=None)  # each request is a batch of its own
    server.bind("count", count, [Tensor((1,), np.int64, "n")], [Tensor((1,), np.int64, "i")], config=stream)
    with running(server):
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> str:
    cancelled.clear()
    entered.clear()
    address = triton.http_url if request.param == "http" else triton.grpc_url
    assert address is not None
    return address


def test_inference_at_the_same_time(url: str) -> None:
    async def main() -> None:
        async with AsyncioModelClient(url, "add") as client:
            numbers = range(200)
            results = await asyncio.gather(*(client.infer_sample([number], [1]) for number in numbers))
            assert [float(result["sum"][0]) for result in results] == [number + 1 for number in numbers]
            rows = np.ones((16, 3), np.float32)
            np.testing.assert_array_equal((await client.infer_batch(rows, rows))["sum"], 2 * rows)
            wide = np.arange(1_000_000, dtype=np.float32)
            np.testing.assert_array_equal((await client.infer_sample(wide, wide))["sum"], 2 * wide)
            with pytest.raises(PyTritonClientInferenceServerError, match="negative"):
                await client.infer_sample([-1], [0])
            with pytest.raises(PyTritonClientInferenceServerError, match="batch-size must be <= 16"):
                await client.infer_batch(np.ones((17, 1), np.float32), np.ones((17, 1), np.float32))
            assert (await client.model_config).max_batch_size == 16

    drive(main)


def test_strings_and_what_a_response_says_besides(url: str) -> None:
    async def main() -> None:
        async with AsyncioModelClient(url, "upper") as client:
            view = client.with_options(request_id="mine", parameters={"a": 1.5})
            result = await view.infer_sample(["zażółć".encode("ascii", "ignore")], parameters={"b": True, "c": "x"})
            assert result["upper"].tolist() == [b"ZA"]
            assert result.request_id == "mine"
            assert (result.model_name, result.model_version) == ("upper", "1")
            expected = {"id": "mine", "n": 3, "a": 1.5, "b": True, "c": "x"}
            assert {name: result.parameters[name] for name in expected} == expected

    drive(main)


def test_one_client_in_loops_and_classes(url: str) -> None:
    client = AsyncioModelClient(url, "add")

    async def infer() -> None:
        await asyncio.gather(*(client.infer_sample(ROW, ROW) for _ in range(5)))

    for _ in range(2):
        drive(infer)
    with ModelClient.from_existing_client(client) as sync, FuturesModelClient.from_existing_client(client) as futures:
        np.testing.assert_array_equal(sync.infer_sample(ROW, ROW)["sum"], 2 * ROW)
        np.testing.assert_array_equal(futures.infer_sample(ROW, ROW).result(PATIENCE_S)["sum"], 2 * ROW)
    drive(client.close)


def test_cancelled_call_is_cancelled_in_the_callable(triton: Triton) -> None:
    cancelled.clear()
    entered.clear()

    async def main() -> None:
        assert triton.grpc_url is not None
        async with AsyncioModelClient(triton.grpc_url, "patient") as client:
            task = asyncio.ensure_future(client.infer_sample([1]))
            await eventually_async(entered.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually_async(cancelled.is_set)
            # The same for a call whose time is up.
            cancelled.clear()
            with pytest.raises(PyTritonClientTimeoutError):
                await client.with_options(timeout_s=0.3).infer_sample([1])
            await eventually_async(cancelled.is_set)

    drive(main)


def test_streams(url: str) -> None:
    needs_arrays_in_streams(url)

    async def main() -> None:
        async with AsyncioDecoupledModelClient(url, "count") as client:

            async def read(number: int) -> list[int]:
                return [int(result["i"][0]) async for result in client.infer_sample([number])]

            assert await asyncio.gather(*(read(number % 5) for number in range(20))) == [
                list(range(number % 5)) for number in range(20)
            ]
            batches = [result["i"].tolist() async for result in client.infer_batch([[2], [2]])]
            assert batches == [[[0], [0]], [[1], [1]]]
            results = client.infer_sample([-2])
            assert [int((await results.__anext__())["i"][0]) for _ in range(2)] == [0, 1]
            with pytest.raises(PyTritonClientInferenceServerError, match="two is enough"):
                await results.__anext__()
            assert await read(1) == [0]
        async with AsyncioDecoupledModelClient(url, "add") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match="coupled"):
                await client.infer_sample(ROW, ROW).__anext__()

    drive(main)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
def test_stream_that_is_left_ends_the_callable(url: str, how: str) -> None:
    async def read(client: AsyncioDecoupledModelClient) -> None:
        async for result in client.infer_sample([-1]):
            entered.set()
            if how == "break" and int(result["i"][0]) == 2:
                break

    async def main() -> None:
        async with AsyncioDecoupledModelClient(url, "count") as client:
            if how == "break":
                await read(client)
            elif how == "aclose":
                results = client.infer_sample([-1])
                await results.__anext__()
                await results.aclose()
            else:
                task = asyncio.ensure_future(read(client))
                await eventually_async(entered.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await eventually_async(cancelled.is_set)
            assert [int(result["i"][0]) async for result in client.infer_sample([1])] == [0]

    drive(main)


def test_what_a_stream_over_http_cannot_carry(triton: Triton) -> None:
    async def main() -> None:
        assert triton.http_url is not None
        async with AsyncioDecoupledModelClient(triton.http_url, "count") as client:
            with pytest.raises(PyTritonClientValueError, match="grpc://"):
                await client.infer_sample([1], parameters={"n": 1}).__anext__()

    drive(main)


def test_missing_model_version_and_server(url: str) -> None:
    async def main() -> None:
        async with AsyncioModelClient(url, "nowhere", init_timeout_s=0.3) as client:
            errors = await asyncio.gather(*(client.infer_sample(ROW) for _ in range(4)), return_exceptions=True)
            for error in errors:
                assert isinstance(error, PyTritonClientModelUnavailableError)
                assert isinstance(error, PyTritonClientTimeoutError)
                assert error.missing == "model"
        async with AsyncioModelClient(url, "add", "7") as client:
            # The model is loaded with other versions, so nobody waits the 300 s.
            with pytest.raises(PyTritonClientModelUnavailableError, match="7"):
                await client.infer_sample(ROW, ROW)

    drive(main)


def test_helpers_for_clients_of_tritonclient(url: str) -> None:
    async def main() -> None:
        async with AsyncioModelClient(url, "add") as client:
            other = client.create_client_from_url(url)
            await asyncio_wait_for_model_ready(other, "add", timeout_s=PATIENCE_S)
            assert (await asyncio_get_model_config(other, "add")).inputs[0].name == "a"
            await other.close()

    drive(main)


def test_server_that_is_stopped_for_a_while(triton: Triton) -> None:
    pid = server_pid(triton)

    async def main() -> None:
        for address in (triton.http_url, triton.grpc_url):
            assert address is not None
            async with AsyncioModelClient(address, "add", inference_timeout_s=1) as client:
                await client.with_options(timeout_s=PATIENCE_S).infer_sample(ROW, ROW)
                with stopped(pid):
                    for call in (client.infer_sample(ROW, ROW), client.wait_for_server(1)):
                        started = time.monotonic()
                        with pytest.raises(PyTritonClientTimeoutError):
                            await call
                        assert time.monotonic() - started > 0.9
                result = await client.with_options(timeout_s=PATIENCE_S).infer_sample(ROW, ROW)
                np.testing.assert_array_equal(result["sum"], 2 * ROW)

    drive(main)


def test_server_that_goes_away() -> None:
    server = Triton(config=local_config())
    inputs = [Tensor((-1,), np.float32, name) for name in ("a", "b")]
    server.bind("add", add, inputs, [Tensor((-1,), np.float32, "sum")])

    async def main() -> None:
        clients = []
        for address in (server.http_url, server.grpc_url):
            assert address is not None
            client = AsyncioModelClient(address, "add", inference_timeout_s=PATIENCE_S)
            clients.append(client)
            await client.infer_sample(ROW, ROW)
        await asyncio.to_thread(server.stop)
        for client in clients:
            with pytest.raises(PyTritonClientConnectionError):
                await client.infer_sample(ROW, ROW)
            await client.close()

    server.run()
    try:
        drive(main)
    finally:
        server.stop()
