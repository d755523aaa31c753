from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import AsyncioDecoupledModelClient, AsyncioModelClient, DecoupledModelClient, ModelResult
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from support.waiting import drive, eventually_async

Client = AsyncioDecoupledModelClient


async def read_into(came: list[ModelResult], results: AsyncIterator[ModelResult]) -> None:
    async for result in results:
        came.append(result)


async def numbers(results: AsyncIterator[ModelResult]) -> list[int]:
    return [int(result["i"].item()) async for result in results]


async def first_of(results: AsyncIterator[ModelResult]) -> ModelResult:
    return await results.__anext__()


def test_results_come_one_by_one(server: Any) -> None:
    async def main() -> None:
        async with Client(server.url, "count", inference_timeout_s=300) as client:
            results = client.infer_sample([3])
            assert (await first_of(results))["i"].shape == (1,)
            assert await numbers(results) == [1, 2]
            assert await numbers(results) == []
            assert await numbers(client.infer_sample([0])) == []
            batches = [result["i"].tolist() async for result in client.infer_batch([[2], [1]])]
            assert batches == [[[0], [0]], [[1], [1]]]
        assert server.asked["model-config"] == 1

    drive(main)


def test_connections_are_kept_after_a_stream(http_server: Any) -> None:
    async def main() -> None:
        async with Client(http_server.url, "count") as client:
            for _ in range(20):
                assert await numbers(client.infer_sample([2])) == [0, 1]

    connections: set[int] = set()
    begin = http_server.begin

    def note(*args: Any) -> None:
        connections.add(threading.get_ident())
        begin(*args)

    http_server.begin = note
    drive(main)
    # The server has a thread for each connection.
    assert len(connections) == 1


def test_error_comes_after_the_results_before_it(server: Any) -> None:
    async def main() -> None:
        async with Client(server.url, "count") as client:
            results = client.infer_sample([9])
            received = [int((await first_of(results))["i"].item()) for _ in range(5)]
            assert received == [0, 1, 2, 3, 4]
            with pytest.raises(PyTritonClientInferenceServerError, match="five is too many") as caught:
                await first_of(results)
            assert caught.value.model_name == "count"
            assert await numbers(client.infer_sample([2])) == [0, 1]
            server.models["count"].is_ready = False
            with pytest.raises(PyTritonClientInferenceServerError, match="unknown model"):
                await first_of(client.infer_sample([1]))

    drive(main)


def test_many_streams_at_once(server: Any) -> None:
    async def main() -> None:
        async with Client(server.url, "count") as client:
            counts = [1, 2, 3, 4] * 10
            streams = (numbers(client.infer_sample([count])) for count in counts)
            assert await asyncio.gather(*streams) == [list(range(count)) for count in counts]

    drive(main)


@pytest.mark.parametrize("how", ["aclose", "drop", "break", "cancel", "raise"])
def test_stream_that_is_not_read_to_its_end_is_cancelled(server: Any, how: str) -> None:
    async def read(client: Client) -> None:
        async for result in client.infer_sample([-1]):
            if how == "break":
                break
            if how == "raise" and int(result["i"].item()) == 1:
                raise KeyError("of the user")

    async def main() -> None:
        async with Client(server.url, "count", inference_timeout_s=300) as client:
            if how in ("break", "raise"):
                error = (await asyncio.gather(read(client), return_exceptions=True))[0]
                assert isinstance(error, KeyError) == (how == "raise")
                del error  # whose frames hold the generator
            elif how == "cancel":
                task = asyncio.ensure_future(read(client))
                await eventually_async(lambda: server.asked["inference"] == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                results = client.infer_sample([-1])
                await first_of(results)
                if how == "aclose":
                    await results.aclose()
                    assert await numbers(results) == []
                else:
                    del results
            gc.collect()
            await eventually_async(server.cancelled.is_set)
            assert await numbers(client.infer_sample([1])) == [0]

    drive(main)


def test_generator_that_is_never_iterated_holds_nothing(server: Any) -> None:
    async def main() -> None:
        async with Client(server.url, "count") as client:
            for _ in range(3):
                client.infer_sample([-1])
            await client.infer_sample([-1]).aclose()
            assert server.asked == {}
            assert await numbers(client.infer_sample([1])) == [0]

    drive(main)


def test_each_response_has_a_time_limit(server: Any) -> None:
    def slow(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"i": arrays["n"]}
        server.released.wait(300)
        yield {"i": arrays["n"]}

    server.models["count"].function = slow

    async def main() -> None:
        async with Client(server.url, "count") as client:
            # Until the limit is enough for the first response.
            for limit_s in (0.5, 5.0, 50.0):
                results = client.with_options(timeout_s=limit_s).infer_sample([7])
                came: list[ModelResult] = []
                begin = time.monotonic()
                with pytest.raises(PyTritonClientTimeoutError) as caught:
                    await read_into(came, results)
                assert time.monotonic() - begin > 0.9 * limit_s
                assert await numbers(results) == []
                if came:
                    break
            assert [result["i"].tolist() for result in came] == [[7]]
            assert caught.value.timeout_s == limit_s
            assert "streaming inference" in str(caught.value)

    drive(main)


def test_time_limit_is_neither_for_the_whole_stream_nor_for_its_reader(server: Any) -> None:
    async def main() -> None:
        # Until the limit is enough for each response.
        for limit_s in (0.5, 5.0, 50.0):
            async with Client(server.url, "count", inference_timeout_s=limit_s) as client:
                results = client.infer_sample([3])
                try:
                    await first_of(results)
                    await asyncio.sleep(1.1 * limit_s)
                    assert await numbers(results) == [1, 2]
                except PyTritonClientTimeoutError:
                    continue
                return
        pytest.fail("no response came in time")

    drive(main)


def test_closing_the_client_ends_a_stream(server: Any) -> None:
    def stuck(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"i": arrays["n"]}
        server.released.wait(300)

    server.models["count"].function = stuck

    async def main() -> None:
        client = Client(server.url, "count", inference_timeout_s=300)
        results, untouched = client.infer_sample([1]), client.infer_sample([1])
        await first_of(results)
        waiting = asyncio.ensure_future(first_of(results))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(PyTritonClientClosedError):
            await waiting
        with pytest.raises(PyTritonClientClosedError):
            await first_of(untouched)
        with pytest.raises(PyTritonClientClosedError):
            await first_of(client.infer_sample([1]))
        server.released.set()

    drive(main)


def test_parameters_headers_and_options(server: Any) -> None:
    server.response_parameters = {"tokens": 3, "text": "ü", "last": True, "score": 0.5}

    async def main() -> None:
        async with Client(server.url, "count") as client:
            view = client.with_options(request_id="abc", parameters={"a": 1, "b": 2}, headers={"x-one": "1"})
            result = await first_of(view.infer_sample([1], parameters={"b": 3.5}, headers={"x-two": "2"}))
            assert result.parameters == server.response_parameters
            assert (result.request_id, result.model_name, result.model_version) == ("abc", "count", "1")
            assert server.last_parameters == {"a": 1, "b": 3.5}
            assert (server.last_headers["x-one"], server.last_headers["x-two"]) == ("1", "2")

    drive(main)


def test_access_token(server: Any) -> None:
    server.token, server.restricted = "secret", {"inference", "model-config", "model-ready"}

    async def main() -> None:
        async with Client(server.url, "count", access_token="secret") as client:
            assert await numbers(client.infer_sample([2])) == [0, 1]
        server.restricted = {"inference"}
        async with Client(server.url, "count", access_token="wrong") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match=r"restricted.* access_token="):
                await first_of(client.infer_sample([1]))

    drive(main)


def test_wrong_calls(server: Any) -> None:
    async def main() -> None:
        async with Client(server.url, "add") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match=r"coupled\. Use AsyncioModelClient instead\."):
                await first_of(client.infer_sample([1.0]))
        async with Client(server.url, "count") as client:
            with pytest.raises(PyTritonClientValueError, match="Provide input data"):
                await first_of(client.infer_sample())
            with pytest.raises(PyTritonClientValueError, match="must be a dictionary"):
                client.infer_sample([1], parameters=7)  # type: ignore[arg-type] # what is tested
            with pytest.raises(PyTritonClientValueError, match="expected the input 'n'"):
                await first_of(client.infer_sample(m=[1]))
        server.models["count"].config["max_batch_size"] = 0
        async with Client(server.url, "count") as client:
            with pytest.raises(PyTritonClientModelDoesntSupportBatchingError):
                await first_of(client.infer_batch([[1]]))
        async with Client(server.url, "nowhere", init_timeout_s=0.1) as client:
            with pytest.raises(PyTritonClientModelUnavailableError):
                await first_of(client.infer_sample([1]))

    drive(main)
    assert server.asked["inference"] == 0


def test_from_existing_client(server: Any) -> None:
    async def main() -> None:
        with DecoupledModelClient(server.url, "count") as first:
            async with Client.from_existing_client(first) as second:
                assert await numbers(second.infer_sample([1])) == [0]
                coupled = AsyncioModelClient.from_existing_client(second)
                with pytest.raises(PyTritonClientInferenceServerError, match="Use AsyncioDecoupledModelClient instead"):
                    await coupled.infer_sample(np.array([1]))
                await coupled.close()
        # Once at first, and once more before the client that cannot serve says that it is the wrong one.
        assert server.asked["model-config"] == 2

    drive(main)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_server_and_frozen_server(scheme: str, free_address: str, frozen_address: str, server: Any) -> None:
    with DecoupledModelClient(server.url, "count") as known:
        spec = known.model_config
    options: dict[str, Any] = {"model_config": spec, "ensure_model_is_ready": False}

    async def main() -> None:
        async with Client(f"{scheme}://{free_address}", "count", **options) as client:
            with pytest.raises(PyTritonClientConnectionError):
                await first_of(client.infer_sample([1]))
        async with Client(f"{scheme}://{frozen_address}", "count", **options) as client:
            with pytest.raises(PyTritonClientTimeoutError):
                await first_of(client.with_options(timeout_s=0.4).infer_sample([1]))

    drive(main)


def test_http_connection_that_ends_before_the_stream(http_server: Any) -> None:
    with DecoupledModelClient(http_server.url, "count") as known:
        spec = known.model_config
    event = b'data: {"model_name":"count","model_version":"1","i":0}\n\n'

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            address = "{}:{}".format(*listening.sockets[0].getsockname())
            async with Client(address, "count", model_config=spec, ensure_model_is_ready=False) as client:
                results = client.infer_sample([1])
                assert (await first_of(results))["i"].tolist() == [0]
                with pytest.raises(PyTritonClientConnectionError, match="closed the connection"):
                    await first_of(results)

    drive(main)


def test_a_slow_reader_holds_the_server_back(http_server: Any) -> None:
    """What nobody reads stays with the server, and does not fill the memory of the client."""
    with DecoupledModelClient(http_server.url, "count") as known:
        spec = known.model_config
    event = b'data: {"model_name":"count","model_version":"1","i":0}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(event), event) * 1000
    sent = 0

    def serve() -> None:
        nonlocal sent
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.settimeout(1)
            try:
                for _ in range(2000):
                    connection.sendall(chunk)
                    sent += len(chunk)
            except TimeoutError:
                return

    async def main() -> None:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        async with Client(address, "count", model_config=spec, ensure_model_is_ready=False) as client:
            results = client.infer_sample([1])
            await first_of(results)
            await asyncio.to_thread(thread.join, 300)
            await results.aclose()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        drive(main)
    assert 0 < sent < 2000 * len(chunk)
