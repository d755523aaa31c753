from __future__ import annotations

import asyncio
import socket
import threading
import time
import warnings
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    ModelClient,
    ModelSpec,
    TensorSpec,
    TlsSettings,
)
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientInvalidUrlError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from support.waiting import drive, eventually_async

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


def open_sockets() -> int:
    """How many sockets this process has open, where the system tells."""
    count = 0
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            count += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return count


async def error_of(call: Awaitable[Any]) -> BaseException:
    try:
        await call
    except Exception as error:
        return error
    raise AssertionError("expected an error")


def test_sample_and_batch(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            result = await client.infer_sample(ROW, ROW)
            assert list(result) == ["sum"]
            assert result["sum"].dtype == np.float32
            np.testing.assert_array_equal(result["sum"], 2 * ROW)
            result["sum"] += 1  # it may be changed
            batch = np.arange(6, dtype=np.float32).reshape(3, 2)
            np.testing.assert_array_equal((await client.infer_batch(batch, batch))["sum"], 2 * batch)
            np.testing.assert_array_equal((await client.infer_batch(b=batch, a=batch))["sum"], 2 * batch)
            assert await client.is_batching_supported
            assert (await client.model_config) == ADD

    drive(main)


def test_texts_empty_and_converted_arrays(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "upper") as client:
            assert (await client.infer_sample(["zażółć"]))["upper"].tolist() == ["zażółć".encode().upper()]
            assert (await client.infer_batch([[b"a\0"], [b""]]))["upper"].tolist() == [[b"A\0"], [b""]]
        async with AsyncioModelClient(server.url, "add") as client:
            assert (await client.infer_sample([]))["sum"].shape == (0,)
            assert (await client.infer_batch(np.zeros((2, 0), np.float32)))["sum"].shape == (2, 0)
            np.testing.assert_array_equal((await client.infer_sample([1, 2]))["sum"], ROW)
            wide = np.arange(12, dtype=np.float32).reshape(3, 4)
            np.testing.assert_array_equal((await client.infer_batch(wide[:, ::2]))["sum"], wide[:, ::2])

    drive(main)


def test_many_megabytes(http_server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(http_server.url, "add") as client:
            wide = np.arange(3_000_000, dtype=np.float32)
            np.testing.assert_array_equal((await client.infer_sample(wide))["sum"], wide)

    drive(main)


def test_model_without_batching(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "single") as client:
            assert not await client.is_batching_supported
            np.testing.assert_array_equal((await client.infer_sample(ROW))["sum"], ROW)
            with pytest.raises(PyTritonClientModelDoesntSupportBatchingError):
                await client.infer_batch(ROW[np.newaxis])

    drive(main)


def test_two_control_round_trips_for_many_first_calls(server: Any) -> None:
    server.delay_s = 0.05

    async def main() -> None:
        client = AsyncioModelClient(server.url, "add")
        assert sum(server.asked.values()) == 0
        numbers = [np.array([number], np.float32) for number in range(20)]
        results = await asyncio.gather(*(client.infer_sample(number) for number in numbers))
        assert [float(result["sum"][0]) for result in results] == list(range(20))
        await client.close()

    drive(main)
    assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 20}


def test_waiting_beforehand_is_not_repeated(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", lazy_init=False) as client:
            assert dict(server.asked) == {"model-ready": 1, "model-config": 1}
            for _ in range(3):
                await client.infer_sample(ROW)
        assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 3}
        server.asked.clear()
        async with AsyncioModelClient(server.url, "add") as client:
            await client.wait_for_server(300)
            await client.wait_for_model(300)
            await client.infer_sample(ROW)
        assert dict(server.asked) == {"health": 1, "model-ready": 1, "model-config": 1, "inference": 1}

    drive(main)


def test_not_lazy_and_missing(server: Any) -> None:
    async def main() -> None:
        client = AsyncioModelClient(server.url, "nowhere", lazy_init=False, init_timeout_s=0.2)
        with pytest.raises(PyTritonClientModelUnavailableError, match="nowhere"):
            async with client:
                raise AssertionError("it was entered")
        with pytest.raises(PyTritonClientClosedError):
            await client.infer_sample(ROW)

    drive(main)


def test_calls_that_wait_for_a_missing_model_all_say_so(server: Any) -> None:
    async def main() -> None:
        # Until the limit is enough for one answer.
        for limit_s in (0.4, 4.0, 40.0):
            async with AsyncioModelClient(server.url, "nowhere", init_timeout_s=limit_s) as client:
                errors = await asyncio.gather(*(client.infer_sample(ROW) for _ in range(5)), return_exceptions=True)
            for error in errors:
                assert isinstance(error, PyTritonClientModelUnavailableError)
                assert isinstance(error, PyTritonClientTimeoutError)
            missing = {getattr(error, "missing", None) for error in errors}
            if missing != {"server"}:
                break
        assert missing == {"model"}

    drive(main)


def test_call_that_asks_is_cancelled_and_another_one_takes_over(server: Any) -> None:
    server.models["add"].is_ready = False

    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", init_timeout_s=300) as client:
            first = asyncio.ensure_future(client.infer_sample(ROW))
            second = asyncio.ensure_future(client.infer_sample(ROW))
            await eventually_async(lambda: server.asked["model-ready"] > 1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            server.models["add"].is_ready = True
            np.testing.assert_array_equal((await second)["sum"], ROW)

    drive(main)


def test_call_with_less_time_does_not_wait_for_the_one_that_asks(server: Any) -> None:
    server.models["add"].is_ready = False

    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", init_timeout_s=300) as client:
            patient = asyncio.ensure_future(client.infer_sample(ROW))
            await eventually_async(lambda: server.asked["model-ready"] > 0)
            with pytest.raises(PyTritonClientTimeoutError, match=r"Waited 0\.2 s .* another call"):
                await client.with_options(timeout_s=0.2).infer_sample(ROW)
            server.models["add"].is_ready = True
            await patient

    drive(main)


def test_options_parameters_and_headers(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            await client.infer_sample(ROW, parameters={"text": "ü", "half": 0.5, "priority": 2}, headers={"X-A": 3})
            assert server.last_parameters["text"] == "ü"
            assert server.last_parameters["half"] == 0.5
            assert server.last_parameters["priority"] == 2
            assert server.last_headers["x-a"] == "3"
            view = client.with_options(request_id="mine", priority=1, parameters={"b": True}, headers={"x-b": "y"})
            await view.infer_sample(ROW)
            assert server.last_request_id == "mine"
            assert server.last_parameters["b"] is True
            assert server.last_parameters["priority"] == 1
            assert server.last_headers["x-b"] == "y"

    drive(main)


@pytest.mark.parametrize(
    "endpoints", [{"health"}, {"model-ready"}, {"model-config"}, {"inference"}, {"model-repository"}]
)
def test_access_token_on_every_kind_of_call(server: Any, endpoints: set[str]) -> None:
    server.token, server.restricted = "secret", endpoints

    async def use(client: AsyncioModelClient) -> None:
        await client.wait_for_server(300)
        await client.wait_for_model(300)
        await client.infer_sample(ROW)
        await client.unload_model()
        await client.load_model()

    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", access_token="secret") as client:
            await use(client)
        async with AsyncioModelClient(server.url, "add", access_token="wrong") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match="restricted"):
                await use(client)

    drive(main)


def test_load_and_unload(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            await client.infer_sample(ROW)
            await client.unload_model()
            with pytest.raises(PyTritonClientModelUnavailableError):
                await client.wait_for_model(0.1)
            server.models["add"].config["max_batch_size"] = 16
            await client.load_model(config='{"max_batch_size": 16}', files={"file:1/model.bin": b"\0\xff"})
            assert (await client.model_config).max_batch_size == 16
        async with AsyncioModelClient(server.url, "nowhere") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match="failed to poll"):
                await client.load_model()

    drive(main)
    content = {"http": "AP8=", "grpc": b"\0\xff"}[server.protocol]
    assert server.loaded[0] == {"name": "add", "config": '{"max_batch_size": 16}', "file:1/model.bin": content}


def test_error_of_the_model(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "fail") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match="by zero") as caught:
                await client.infer_sample([0])
            assert caught.value.status == {"http": "500", "grpc": "INTERNAL"}[server.protocol]
            assert caught.value.model_name == "fail"
            np.testing.assert_array_equal((await client.infer_batch([[1]]))["out"], [1])

    drive(main)


def test_wrong_calls_are_not_sent(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
                ((ROW, ROW, ROW), {}),
                ((), {"b": ROW}),
                ((ROW.astype(np.float64),), {}),
                (([[1.0], [2.0, 3.0]],), {}),
                ((), {}),
                ((ROW,), {"a": ROW}),
                ((ROW,), {"parameters": {1: 2}}),
                ((ROW,), {"headers": {"a": "b\n"}}),
            ]
            for arguments, named in calls:
                with pytest.raises(PyTritonClientValueError):
                    await client.infer_sample(*arguments, **named)
        async with AsyncioModelClient(server.url, "stream") as client:
            with pytest.raises(PyTritonClientInferenceServerError, match="decoupled"):
                await client.infer_sample(ROW)

    drive(main)
    assert server.asked["inference"] == 0
    with pytest.raises(PyTritonClientInvalidUrlError):
        AsyncioModelClient("ftp://localhost", "add")
    with pytest.raises(PyTritonClientValueError):
        AsyncioModelClient(server.url, "add", inference_timeout_s=0)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_missing_server(scheme: str, free_address: str) -> None:
    async def main() -> None:
        url = f"{scheme}://{free_address}"
        async with AsyncioModelClient(url, "add", init_timeout_s=0.3) as client:
            with pytest.raises(PyTritonClientModelUnavailableError, match=f"Connection to {scheme}://.* failed"):
                await client.infer_sample(ROW)
            with pytest.raises(PyTritonClientTimeoutError, match="Waiting for server to be ready timed out"):
                await client.wait_for_server(0.2)
        async with AsyncioModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False) as client:
            with pytest.raises(PyTritonClientConnectionError, match=r"(?i)refused|failed to connect"):
                await client.infer_sample(ROW)

    drive(main)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", f"{'x' * 70}.invalid"])
def test_host_that_does_not_exist(scheme: str, host: str) -> None:
    options: dict[str, Any] = {"model_config": ADD, "ensure_model_is_ready": False, "inference_timeout_s": 300}

    async def main() -> None:
        async with AsyncioModelClient(f"{scheme}://{host}", "add", **options) as client:
            with pytest.raises(PyTritonClientConnectionError):
                await client.infer_sample(ROW)

    drive(main)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_frozen_server(scheme: str, frozen_address: str) -> None:
    async def main() -> None:
        url = f"{scheme}://{frozen_address}"
        async with AsyncioModelClient(url, "add", init_timeout_s=0.3, inference_timeout_s=0.3) as client:
            for call in (
                client.infer_sample(ROW),
                client.wait_for_server(0.3),
                client.wait_for_model(0.3),
                client.load_model(),
                client.unload_model(),
                client.model_config,
            ):
                started = time.monotonic()
                error = await error_of(call)
                assert isinstance(error, PyTritonClientTimeoutError)
                assert error.url == url
                assert time.monotonic() - started >= 0.25
        options: dict[str, Any] = {"model_config": ADD, "ensure_model_is_ready": False, "inference_timeout_s": 0.3}
        async with AsyncioModelClient(url, "add", **options) as client:
            # One that is larger than what the kernel takes, too.
            for inputs in (ROW, np.zeros(8_000_000, np.float32)):
                with pytest.raises(PyTritonClientTimeoutError, match="inference request") as caught:
                    await client.infer_sample(inputs)
                assert caught.value.timeout_s == 0.3

    drive(main)


def test_stuck_inference_times_out_and_the_client_goes_on(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", inference_timeout_s=0.3) as client:
            patient = client.with_options(timeout_s=300)
            await patient.infer_sample(ROW)
            server.is_stuck = True
            with pytest.raises(PyTritonClientTimeoutError):
                await client.infer_sample(ROW)
            with pytest.raises(PyTritonClientTimeoutError) as caught:
                await client.with_options(timeout_s=0.1).infer_sample(ROW)
            assert caught.value.timeout_s is not None
            assert caught.value.timeout_s <= 0.1
            server.is_stuck = False
            server.released.set()
            # An answer that came too late must not be taken for this one.
            np.testing.assert_array_equal((await patient.infer_sample(5 * ROW))["sum"], 5 * ROW)

    drive(main)


def test_cancelled_call_leaves_nothing_and_the_client_goes_on(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            await client.infer_sample(ROW)
            server.is_stuck = True
            asked = server.asked["inference"]
            calls = [asyncio.ensure_future(client.infer_sample(7 * ROW)) for _ in range(3)]
            await eventually_async(lambda: server.asked["inference"] == asked + 3)
            for call in calls:
                call.cancel()
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, asyncio.CancelledError)
            server.is_stuck = False
            server.released.set()
            np.testing.assert_array_equal((await client.infer_sample(5 * ROW))["sum"], 5 * ROW)

    drive(main)


def test_call_that_is_cancelled_at_any_time(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            await client.infer_sample(ROW)
            for number in range(60):
                call = asyncio.ensure_future(client.infer_sample(np.array([number], np.float32)))
                await asyncio.sleep(number * 0.0001)
                call.cancel()
                try:
                    assert float((await call)["sum"][0]) == number
                except asyncio.CancelledError:
                    continue
            assert float((await client.infer_sample([5]))["sum"][0]) == 5

    drive(main)


def test_waits_until_the_model_comes(server: Any) -> None:
    server.models["add"].is_ready = False

    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", init_timeout_s=300) as client:
            call = asyncio.ensure_future(client.infer_sample(ROW))
            await eventually_async(lambda: server.asked["model-ready"] > 1)
            server.models["add"].is_ready = True
            np.testing.assert_array_equal((await call)["sum"], ROW)

    drive(main)


def test_one_client_serves_one_loop_after_the_other(server: Any) -> None:
    client = AsyncioModelClient(server.url, "add")

    async def infer() -> None:
        await asyncio.gather(*(client.infer_sample(ROW) for _ in range(4)))

    for _ in range(3):
        drive(infer)
    drive(client.close)
    assert server.asked["model-config"] == 1
    assert server.asked["inference"] == 12


def test_one_client_serves_loops_in_several_threads(server: Any) -> None:
    client = AsyncioModelClient(server.url, "add")
    results: list[float] = []

    async def infer(number: int) -> None:
        for _ in range(5):
            results.append(float((await client.infer_sample([number]))["sum"][0]))

    threads = [threading.Thread(target=asyncio.run, args=(infer(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(results) == [number for number in range(4) for _ in range(5)]
    drive(client.close)


def test_close_reaches_the_connections_of_another_loop(server: Any) -> None:
    client = AsyncioModelClient(server.url, "add")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(client.infer_sample(ROW), loop).result(300)
        server.is_stuck = True
        stuck = asyncio.run_coroutine_threadsafe(client.infer_sample(ROW), loop)
        asyncio.run(eventually_async(lambda: server.asked["inference"] == 2))
        drive(client.close)
        with pytest.raises(PyTritonClientClosedError):
            stuck.result(300)
    finally:
        server.released.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(300)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_closed_client(server: Any) -> None:
    async def main() -> None:
        client = AsyncioModelClient(server.url, "add")
        await client.infer_sample(ROW)
        view = client.with_options(timeout_s=3)
        await client.close()
        await client.close()
        for call in (
            client.infer_sample(ROW),
            view.infer_batch(ROW[np.newaxis]),
            client.wait_for_model(1),
            client.wait_for_server(1),
            client.model_config,
            client.is_batching_supported,
            client.load_model(),
            client.unload_model(),
        ):
            assert isinstance(await error_of(call), PyTritonClientClosedError)

    drive(main)


def test_close_ends_calls_that_wait(server: Any) -> None:
    async def main() -> None:
        client = AsyncioModelClient(server.url, "add", init_timeout_s=300)
        await client.infer_sample(ROW)
        waits = AsyncioModelClient(server.url, "nowhere", init_timeout_s=300)
        server.is_stuck = True
        asked = server.asked["model-ready"]
        calls = [asyncio.ensure_future(client.infer_sample(ROW)) for _ in range(3)]
        await eventually_async(lambda: server.asked["inference"] == 4)
        server.is_stuck = False
        calls += [asyncio.ensure_future(waits.infer_sample(ROW)) for _ in range(2)]
        await eventually_async(lambda: server.asked["model-ready"] > asked)
        await client.close()
        await waits.close()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, PyTritonClientClosedError)
        server.released.set()

    drive(main)


def test_from_existing_client_of_every_class(server: Any) -> None:
    server.token, server.restricted = "secret", {"inference", "model-config"}

    async def main() -> None:
        with ModelClient(server.url, "add", "2", access_token="secret", inference_timeout_s=7) as first:
            first.infer_sample(ROW)
            async with AsyncioModelClient.from_existing_client(first) as second:
                await second.infer_sample(ROW)
                assert await second.model_config == first.model_config
                with ModelClient.from_existing_client(second) as third:
                    await asyncio.to_thread(third.infer_sample, ROW)
                    assert repr(third) == repr(first)
            decoupled = AsyncioDecoupledModelClient.from_existing_client(second)
            assert repr(decoupled) == repr(first).replace("ModelClient", "AsyncioDecoupledModelClient")

    drive(main)
    assert dict(server.asked) == {"model-ready": 1, "model-config": 1, "inference": 3}


def test_unclosed_client_is_told_of_and_leaves_no_connection(server: Any) -> None:
    async def main() -> None:
        before = open_sockets()
        async with AsyncioModelClient(server.url, "add") as closed:
            await closed.infer_sample(ROW)
        await eventually_async(lambda: open_sockets() <= before)
        client = AsyncioModelClient(server.url, "add")
        await client.infer_sample(ROW)
        view = client.with_options(timeout_s=5)
        del client
        await view.infer_sample(ROW)  # it keeps what it shares with the client
        with pytest.warns(ResourceWarning, match=r"AsyncioModelClient for add/<latest> .* await its close"):
            del view
        unused = AsyncioModelClient(server.url, "add")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del unused
        # The loop closes the connections by and by.
        await eventually_async(lambda: open_sockets() <= before)

    drive(main)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_server_that_breaks_off(answer: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = "http://{}:{}".format(*listening.sockets[0].getsockname())
            async with AsyncioModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False) as client:
                for _ in range(3):
                    error = await error_of(client.infer_sample(ROW))
                    assert isinstance(error, PyTritonClientConnectionError)
                    assert error.url == url

    drive(main)


def test_idle_connection_that_the_server_closes() -> None:
    async def main() -> None:
        requests: list[bytes] = []
        noticed: list[bytes] = []  # by the client, which has closed its side, too

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append(head)
            body = b'{"outputs":[]}' if head.startswith(b"POST") else b""
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.write_eof()
            await reader.read()
            noticed.append(head)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = "http://{}:{}".format(*listening.sockets[0].getsockname())
            async with AsyncioModelClient(url, "add", model_config=ADD, ensure_model_is_ready=False) as client:
                for _ in range(3):
                    # At once, when nobody may have noticed yet: a question can be asked again.
                    await client.wait_for_server(300)
                for _ in range(3):
                    # An inference cannot, so it takes another connection where the end has been noticed.
                    await eventually_async(lambda: noticed == requests)
                    assert await client.infer_sample(ROW) == {}
        assert len(requests) == 6

    drive(main)


def test_more_calls_than_connections(http_server: Any) -> None:
    http_server.delay_s = 0.001

    async def main() -> None:
        async with AsyncioModelClient(http_server.url, "add") as client:
            calls = (client.infer_sample([number]) for number in range(600))
            results = await asyncio.gather(*calls)
            assert [float(result["sum"][0]) for result in results] == list(range(600))

    drive(main)


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Host: [::1]:" in head
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "::1", 0) as listening:
            url = f"http://[::1]:{listening.sockets[0].getsockname()[1]}"
            async with AsyncioModelClient(url, "add") as client:
                await client.wait_for_server(300)

    drive(main)


def test_tritonclient_for_what_is_missing_here(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            assert client.get_lib().__name__ == f"tritonclient.{server.protocol}.aio"
            other = client.create_client_from_url(server.url)
            try:
                assert await other.is_server_ready()
            finally:
                await other.close()

    drive(main)


def test_errors_are_ours(server: Any) -> None:
    async def main() -> None:
        async with AsyncioModelClient(server.url, "add", "7", init_timeout_s=0.2) as client:
            error = await error_of(client.infer_sample(ROW))
            assert isinstance(error, PyTritonClientError)
            assert "7" in str(error)

    drive(main)


def test_server_with_a_certificate(encrypted_server: Any, certificates: Any) -> None:
    tls = TlsSettings(ca_file=certificates.ca)
    large = np.arange(100_000, dtype=np.float32)
    client = AsyncioModelClient(encrypted_server.url, "add", tls=tls, init_timeout_s=300)

    async def main() -> None:
        for _ in range(3):
            assert (await client.infer_sample(ROW))["sum"].tolist() == [1.0, 2.0]
        await asyncio.gather(*(client.infer_sample(ROW) for _ in range(8)))
        np.testing.assert_array_equal((await client.infer_sample(large))["sum"], large)
        async with AsyncioDecoupledModelClient(encrypted_server.url, "count", tls=tls) as decoupled:
            for _ in range(2):
                assert [int(result["i"].item()) async for result in decoupled.infer_sample([3])] == [0, 1, 2]
            async for _result in decoupled.infer_sample([-1]):
                break
            await eventually_async(encrypted_server.cancelled.is_set)

    drive(main)
    drive(main)
    drive(client.close)


def test_server_that_is_not_trusted(encrypted_server: Any, certificates: Any) -> None:
    async def main() -> None:
        for tls in (None, TlsSettings(ca_file=certificates.other_ca)):
            # Waiting would not help, so nobody waits the 300 s that a client has for its server to start.
            async with AsyncioModelClient(encrypted_server.url, "add", tls=tls) as client:
                with pytest.raises(PyTritonClientConnectionError, match=r"tls=TlsSettings\(ca_file=\.\.\.\)"):
                    await client.infer_sample(ROW)

    drive(main)
    assert sum(encrypted_server.asked.values()) == 0


def test_server_that_asks_for_a_certificate(mutual_server: Any, certificates: Any) -> None:
    own = {"certificate_file": certificates.client, "key_file": certificates.client_key}

    async def main() -> None:
        async with AsyncioModelClient(mutual_server.url, "add", tls=TlsSettings(certificates.ca, **own)) as client:
            assert (await client.infer_sample(ROW))["sum"].tolist() == [1.0, 2.0]
        tls = TlsSettings(certificates.ca)
        async with AsyncioModelClient(mutual_server.url, "add", tls=tls, init_timeout_s=0.5) as client:
            assert isinstance(await error_of(client.infer_sample(ROW)), PyTritonClientError)

    drive(main)


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_frozen_server_with_tls(scheme: str, frozen_address: str) -> None:
    options: dict[str, Any] = {"model_config": ADD, "ensure_model_is_ready": False, "inference_timeout_s": 0.3}

    async def main() -> None:
        async with AsyncioModelClient(f"{scheme}://{frozen_address}", "add", **options) as client:
            with pytest.raises(PyTritonClientTimeoutError):
                await client.infer_sample(ROW)

    drive(main)


def test_a_wrong_shape_is_told_before_the_inputs_are_sent(server: Any) -> None:
    async def ask() -> None:
        async with AsyncioModelClient(server.url, "add") as client:
            with pytest.raises(PyTritonClientValueError, match="Did you mean infer_sample"):
                await client.infer_batch(np.array([1.0, 2.0], np.float32))
            await client.infer_sample(np.array([1.0, 2.0], np.float32))

    asyncio.run(ask())
    assert server.asked["inference"] == 1
