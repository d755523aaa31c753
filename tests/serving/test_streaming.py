"""Streams of decoupled models through the real server: many at once, ends, errors, callers that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from pytriton.client import AsyncioDecoupledModelClient, DecoupledModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import GuardConfig, Triton
from support.callables import X, Y
from support.servers import server_version
from support.serving import arena_mappings, local_config, running, short_home
from support.streams import Event, Stream
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

# A batch goes out when it is full, however long its last request takes to come.
FOUR = DynamicBatcher(preferred_batch_size=[4], max_queue_delay_microseconds=20_000_000)
MIB = 1 << 20
BUDGET = 16 * MIB
STREAMS = 300

entered = threading.Event()
left: list[str] = []
go_on = threading.Event()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    entered.clear()
    go_on.clear()
    left.clear()
    yield
    go_on.set()


def answer(value: float) -> dict[str, Array]:
    return {"y": np.full((1, 1), value, np.float32)}


class Crowd:
    """Answers when so many are in the room."""

    def __init__(self) -> None:
        self.inside = 0
        self.full = asyncio.Event()

    async def __call__(self, requests: list[Request]) -> AsyncIterator[Any]:
        value = float(requests[0]["x"].item())
        yield [answer(value)]
        self.inside += 1
        if self.inside == STREAMS:
            self.full.set()
        await self.full.wait()
        for step in range(2):
            yield [answer(value + step)]


def one_by_one(requests: list[Request]) -> Iterator[list[Any]]:
    """The request with x = n gets n responses; each ends before the next response is made."""
    rest = [int(request["x"].item()) for request in requests]
    step = 0
    while any(rest):
        step += 1
        results: list[Any] = []
        for index, count in enumerate(rest):
            rest[index] = max(count - 1, 0)
            results.append(None if count == 0 else Response(answer(step), {"step": step}, final=count == 1))
        yield results
        if not go_on.wait(PATIENCE_S):
            raise TimeoutError("nobody let the generator go on")
        go_on.clear()


async def one_by_one_async(requests: list[Request]) -> AsyncIterator[list[Any]]:
    for results in one_by_one(requests):
        await asyncio.sleep(0)
        yield results


def endless(requests: list[Request]) -> Iterator[list[Any]]:
    try:
        while True:
            yield [answer(0) for _ in requests]
            entered.set()
            time.sleep(0.005)
    except GeneratorExit:
        left.append("closed")
        raise


async def endless_async(requests: list[Request]) -> AsyncIterator[list[Any]]:
    try:
        while True:
            yield [answer(0) for _ in requests]
            entered.set()
            await asyncio.sleep(0.005)
    except (asyncio.CancelledError, GeneratorExit):
        left.append("closed")
        raise


def asks(requests: list[Request]) -> Iterator[list[Any]]:
    yield [answer(0) for _ in requests]
    entered.set()
    eventually(requests[0].is_cancelled)
    left.append("cancelled")


async def quiet(requests: list[Request]) -> AsyncIterator[list[Any]]:
    """Gives one response and then waits for something that does not come."""
    yield [answer(0) for _ in requests]
    entered.set()
    try:
        await asyncio.sleep(PATIENCE_S)
    except asyncio.CancelledError:
        left.append("cancelled")
        raise


async def torrent(requests: list[Request]) -> AsyncIterator[list[Any]]:
    """As many responses of a MiB as x says, without a pause."""
    count = int(requests[0]["x"].item())
    block = np.zeros((1, MIB // 4), np.float32)
    sent = 0
    try:
        while sent < count:
            block[0, 0] = sent
            sent += 1
            yield [{"y": block}]
            entered.set()
    finally:
        left.append("finished" if sent == count else "closed")


def breaks(requests: list[Request]) -> Iterator[list[Any]]:
    """Two responses; then x = 1 fails alone, and the rest one step later."""
    for step in range(2):
        yield [answer(step) for _ in requests]
    yield [ValueError("the first") if request["x"] == 1 else answer(2) for request in requests]
    raise RuntimeError("the others")


async def burst(requests: list[Request]) -> AsyncIterator[list[Any]]:
    """Counts without a pause: faster than the front ends send."""
    for number in range(int(requests[0]["x"][0, 0])):
        yield [answer(number)]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())

        def bind(name: str, infer_func: Callable[..., Any], **settings: Any) -> None:
            config = ModelConfig(**{"decoupled": True, "max_batch_size": 1, **settings})
            triton.bind(name, infer_func, X, Y, config=config)

        bind("crowd", Crowd())
        bind("one_by_one", one_by_one, max_batch_size=4, batcher=FOUR)
        bind("one_by_one_async", one_by_one_async, max_batch_size=4, batcher=FOUR)
        bind("endless", endless, max_batch_size=4)
        bind("endless_async", endless_async, max_batch_size=4)
        bind("pairs", endless_async, max_batch_size=2, batcher=DynamicBatcher(
            preferred_batch_size=[2], max_queue_delay_microseconds=20_000_000
        ))  # fmt: skip
        bind("asks", asks)
        bind("quiet", quiet)
        bind("torrent", torrent, arena_budget_bytes=BUDGET)
        bind("burst", burst)
        bind("breaks", breaks, max_batch_size=4, batcher=FOUR)
        with running(triton):
            yield triton


@pytest.fixture
def stream(triton: Triton) -> Iterator[Stream]:
    with Stream(triton) as stream:
        yield stream


def test_hundreds_of_streams_at_once(stream: Stream) -> None:
    """None of them goes on before all of them have begun."""
    for number in range(STREAMS):
        stream.send("crowd", number, str(number))
    values: dict[str, list[float]] = {str(number): [] for number in range(STREAMS)}
    ended = 0
    while ended < STREAMS:
        event = stream.next()
        assert event.error is None
        ended += event.final
        if event.value is not None:
            values[event.request_id].append(event.value)
    assert values == {str(number): [number, number, number + 1] for number in range(STREAMS)}


@pytest.mark.parametrize("model", ["one_by_one", "one_by_one_async"])
def test_each_request_of_a_batch_ends_when_its_own_responses_do(model: str, stream: Stream) -> None:
    for number in (3, 1, 4, 2):
        stream.send(model, number, str(number))
    for step in range(1, 5):
        # All responses of this step, and the end of one request among them, before the callable makes the next.
        events = sorted(stream.next() for _ in range(5 - step))
        assert [event.request_id for event in events] == [str(number) for number in range(step, 5)]
        assert [event.final for event in events] == [True] + [False] * (4 - step)
        assert {(event.value, event.parameters["step"], event.error) for event in events} == {(step, step, None)}
        go_on.set()


def read_burst(triton: Triton, count: int) -> list[float]:
    """Ask for a burst over HTTP and return its values; fails where the stream does not come to its end in time."""
    with httpx.stream(
        "POST",
        f"{triton.http_url}/v2/models/burst/generate_stream",
        json={"x": [float(count)]},
        timeout=PATIENCE_S,
    ) as events:
        assert events.status_code == 200
        return [json.loads(line.removeprefix("data: "))["y"] for line in events.iter_lines() if line]


def test_no_part_of_a_fast_stream_is_lost(triton: Triton, stream: Stream) -> None:
    """The server forgets a part over HTTP whose thread has 278 others to send, and the end of the answer likewise."""
    count, callers = 3000, 8
    with ThreadPoolExecutor(callers) as pool:
        over_http = [pool.submit(read_burst, triton, count) for _ in range(callers)]
        for number in range(callers):
            stream.send("burst", count, str(number))
        over_grpc: dict[str, list[float]] = {str(number): [] for number in range(callers)}
        ended = 0
        while ended < callers:
            event = stream.next()
            assert event.error is None
            ended += event.final
            if event.value is not None:
                over_grpc[event.request_id].append(event.value)
        for each in over_http:
            assert each.result(PATIENCE_S) == list(range(count))
    assert over_grpc == {str(number): list(range(count)) for number in range(callers)}


@pytest.mark.parametrize("model", ["endless", "endless_async"])
def test_a_stream_is_closed_when_its_caller_cancels(model: str, triton: Triton, stream: Stream) -> None:
    gone = Stream(triton)
    gone.send(model, 0)
    assert entered.wait(PATIENCE_S)
    gone.close(cancel=True)
    eventually(lambda: left == ["closed"])
    # The worker is free again.
    entered.clear()
    stream.send(model, 0)
    assert entered.wait(PATIENCE_S)
    stream.close(cancel=True)
    eventually(lambda: left == ["closed", "closed"])


@pytest.mark.parametrize("model", ["endless", "endless_async"])
def test_a_stream_over_http_is_closed_when_its_caller_goes_away(model: str, triton: Triton) -> None:
    host, _, port = str(triton.http_url).removeprefix("http://").partition(":")
    body = json.dumps({"x": [0.0]})
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        head = (
            f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(f"{head}{body}".encode())
        received = b""
        while b"data: " not in received:
            received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
    eventually(lambda: left == ["closed"])


def test_a_callable_that_asks_is_told(triton: Triton) -> None:
    gone = Stream(triton)
    gone.send("asks", 0)
    assert entered.wait(PATIENCE_S)
    gone.close(cancel=True)
    eventually(lambda: left == ["cancelled"])


def test_a_coroutine_that_waits_is_cancelled(triton: Triton) -> None:
    gone = Stream(triton)
    gone.send("quiet", 0)
    assert entered.wait(PATIENCE_S)
    gone.close(cancel=True)
    eventually(lambda: left == ["cancelled"])


def test_one_caller_of_a_batch_goes_away_and_the_other_reads_on(triton: Triton, stream: Stream) -> None:
    gone = Stream(triton)
    gone.send("pairs", 0)
    stream.send("pairs", 0)
    assert entered.wait(PATIENCE_S)
    gone.close(cancel=True)
    for _ in range(50):
        assert stream.next().value == 0
    assert not left
    stream.close(cancel=True)
    eventually(lambda: left == ["closed"])


def test_a_stream_without_a_pause_stops_for_its_cancellation_and_for_others(triton: Triton) -> None:
    """Its messages come as fast as they are read: nothing else would have its turn if they were read to the end."""
    with Stream(triton) as other:
        gone = Stream(triton)
        gone.send("torrent", 1500)
        assert entered.wait(PATIENCE_S)
        assert other.ask("torrent", 2) == ([0, 1], None)
        gone.close(cancel=True)
        eventually(lambda: len(left) == 2)
    assert left == ["finished", "closed"]


def test_a_stream_that_is_larger_than_its_memory(stream: Stream) -> None:
    """The generator waits until what it gave has been taken over; nothing is lost, and the budget holds."""
    count = 4 * BUDGET // MIB
    values, error = stream.ask("torrent", count)
    assert error is None
    assert values == list(range(count))
    # Inputs and outputs of all models are in these; those of the others are a MiB each at most.
    sizes = []
    for line in arena_mappings():
        begin, _, end = line.split()[0].partition("-")
        sizes.append(int(end, 16) - int(begin, 16))
    assert max(sizes) <= BUDGET
    assert sum(size for size in sizes if size > MIB) <= 2 * BUDGET


def test_errors_after_partial_results(stream: Stream) -> None:
    for number in range(4):
        stream.send("breaks", number, str(number))
    values: dict[str, list[float]] = {}
    errors: list[str] = []
    while len(errors) < 4:
        event = stream.next()
        if event.error is None:
            values.setdefault(event.request_id, []).append(event.value)
            assert not event.final
        else:
            errors.append(event.error)
    assert values == {"0": [0, 1, 2], "1": [0, 1], "2": [0, 1, 2], "3": [0, 1, 2]}
    # Errors of different requests may overtake each other on their way to the caller.
    assert sum("ValueError: the first" in error for error in errors) == 1
    assert sum("RuntimeError: the others" in error for error in errors) == 3


async def ends(requests: list[Request]) -> AsyncIterator[list[Any]]:
    """One response, which is the last one; x = 1 gets an error instead."""
    await asyncio.sleep(0.001)
    yield [ValueError("no") if request["x"] == 1 else Response(answer(0), final=True) for request in requests]


def test_streams_that_are_left_at_their_end_do_not_keep_their_model(
    triton: Triton, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton keeps a request for good that is cancelled while it ends, and a model that has one is never unloaded."""
    url = str(triton.grpc_url)
    triton.bind("ends", ends, X, Y, config=ModelConfig(decoupled=True, batcher=None))

    def leave(number: int) -> None:
        with DecoupledModelClient(url, "ends") as client:
            for _ in range(20):
                # The loop is left, and the stream closed, with the last response or its error.
                with contextlib.suppress(PyTritonClientInferenceServerError):
                    for _ in client.infer_sample(np.full(1, number % 2, np.float32)):
                        break

    async def leave_async() -> None:
        async with AsyncioDecoupledModelClient(url, "ends") as client:
            for number in range(80):
                with contextlib.suppress(PyTritonClientInferenceServerError):
                    async for _ in client.infer_sample(np.full(1, number % 2, np.float32)):
                        break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(8)))
    asyncio.run(leave_async())
    triton.unbind("ends")
    # It says so when requests are left that it has to cut off.
    assert not [record for record in caplog.records if record.name == "pytriton.server.lifecycle.deployment"]


def some(requests: list[Request]) -> Iterator[list[Any]]:
    """As many responses as can be made in a few milliseconds."""
    for number in range(20):
        yield [answer(number) for _ in requests]


def test_streams_that_are_left_in_their_midst_leave_the_server_as_it_was(triton: Triton) -> None:
    """Triton crashes, or stops for good, when a stream ends while it is being cancelled."""
    url = str(triton.grpc_url)
    triton.bind("some", [some] * 3, X, Y, config=ModelConfig(decoupled=True, max_batch_size=1))

    def leave(caller: int) -> None:
        random = np.random.default_rng(caller)
        with DecoupledModelClient(url, "some") as client:
            for _ in range(100):
                results = client.infer_sample(np.zeros(1, np.float32))
                for _ in range(random.integers(1, 20)):
                    next(results)
                results.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(6)))
    with DecoupledModelClient(url, "some") as client:
        assert [float(result["y"][0]) for result in client.infer_sample(np.zeros(1, np.float32))] == list(range(20))
    triton.unbind("some")


@pytest.mark.parametrize("infer", [endless, endless_async])
def test_the_end_of_the_server_cuts_streams_that_do_not_end(
    infer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with short_home():
        own = Triton(config=local_config(exit_timeout_secs=1))
        own.bind("endless", infer, X, Y, config=ModelConfig(decoupled=True))
        with own, ThreadPoolExecutor(1) as pool:
            asking = pool.submit(last_event, own)
            assert entered.wait(PATIENCE_S)
            with caplog.at_level(logging.INFO):
                assert own.stop()
            event = asking.result(PATIENCE_S)
    # The error comes from the server, which lived on to tell it and then ended in order.
    assert event.error is not None
    assert "was lost while it worked on this request" in event.error
    assert "SIGKILL" not in caplog.text
    assert "Exit timeout expired" not in caplog.text
    eventually(lambda: left == ["closed"])


def last_event(triton: Triton) -> Event:
    with Stream(triton) as stream:
        stream.send("endless", 0)
        while not (event := stream.next()).final:
            pass
        return event


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_stream_that_its_caller_keeps_open_does_not_keep_the_server(
    caplog: pytest.LogCaptureFixture, is_ours: bool
) -> None:
    with short_home():
        own = Triton(config=local_config(exit_timeout_secs=0), guard=GuardConfig(grpc_front_end=is_ours))
        own.bind("quiet", quiet, X, Y, config=ModelConfig(decoupled=True))
        with own, Stream(own) as stream:
            stream.send("quiet", 0)
            assert stream.next().value == 0
            assert own.stop()
            assert stream.next().error is not None
    # The front end of the guard does not wait for a stream, as Triton's does until it is killed, or ends by itself.
    ends = ["SIGKILL", *(["Exit timeout expired"] if server_version() >= (2, 70) else [])]
    assert any(end in caplog.text for end in ends) is not is_ours, caplog.text


BLOCKED_S, MANY_STREAMS = 6.5, 400


async def blocking(requests: list[Request]) -> AsyncIterator[list[Any]]:
    """Blocks the loop of its worker once, for longer than anybody should, and goes on."""
    if requests[0].parameters.get("blocks"):
        yield [{"y": request["x"]} for request in requests]
        time.sleep(BLOCKED_S)
    for _ in range(2):
        await asyncio.sleep(0)
        yield [{"y": request["x"]} for request in requests]


def test_a_worker_that_is_busy_is_not_taken_for_dead(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    x, y = (Tensor(name=name, dtype=np.int32, shape=(1,)) for name in "xy")
    triton.bind("blocking", blocking, [x], [y], config=ModelConfig(batching=False, decoupled=True))

    async def ask(client: AsyncioDecoupledModelClient, number: int, **options: Any) -> list[int]:
        view = client.with_options(**options)
        return [int(result["y"][0]) async for result in view.infer_sample(np.array([number], np.int32))]

    async def ask_all(url: str) -> list[list[int]]:
        async with AsyncioDecoupledModelClient(url, "blocking", inference_timeout_s=PATIENCE_S) as client:
            first = asyncio.ensure_future(ask(client, -1, parameters={"blocks": True}))
            await asyncio.sleep(0.5)  # It has begun to block by then, mostly; the rest comes meanwhile.
            rest = await asyncio.gather(*(ask(client, number) for number in range(MANY_STREAMS)))
            return [await first, *rest]

    answers = asyncio.run(ask_all(str(triton.grpc_url)))
    triton.unbind("blocking")
    assert answers == [[-1] * 3, *([number] * 2 for number in range(MANY_STREAMS))]
    assert "lost" not in caplog.text
    # Its author is told where, once, and for how long.
    [where, how_long] = [text for text in caplog.messages if "model blocking: the event loop" in text]
    assert "time.sleep(BLOCKED_S)" in where
    blocked_s = re.search(r"was blocked for (\d+\.\d) s", how_long)
    assert blocked_s is not None
    assert float(blocked_s[1]) > 0
