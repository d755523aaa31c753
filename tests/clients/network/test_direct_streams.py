"""Streams that are read without the library of gRPC: as with it, and whatever a server may send."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import socket
import struct
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from pytriton.client import AsyncioDecoupledModelClient, ModelSpec, TensorSpec
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)
from pytriton.client.management import DirectStreamsClient
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.faults.hostile_grpc import DATA_FRAME, GOAWAY, HEADERS, RST, SETTINGS, frame, response
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, drive, eventually_async

PING, WINDOW_UPDATE, CONTINUATION = 6, 8, 9
CONFIG = ModelConfig(batching=False, decoupled=True)
MIB = 1 << 20

ended: list[int] = []


def grow(requests: Any) -> Iterator[Any]:
    """Answers with one array after the other, each as long as the input says; below zero it fails."""
    for at, size in enumerate(requests[0]["sizes"].tolist()):
        if size < 0:
            raise ValueError(f"no size: {size}")
        yield [{"data": np.full(size, at, np.int32), "text": np.array([f"{at} ü".encode()], object)}]


async def endless(requests: Any) -> AsyncIterator[Any]:
    """Answers until its caller has gone."""
    try:
        number = 0
        while True:
            yield [{"number": np.array([number], np.int64), "filling": np.zeros(10_000, np.int8)}]
            number += 1
            await asyncio.sleep(0)
    finally:
        ended.append(number)


async def chatter(requests: Any) -> AsyncIterator[Any]:
    """The same with texts, many at a time."""
    try:
        for number in itertools.count():
            yield [{"text": np.array([str(number).encode()], object)}]
            if number % 100 == 99:
                await asyncio.sleep(0)
    finally:
        ended.append(number)


def echo(requests: Any) -> Iterator[Any]:
    yield [{"y": requests[0]["x"]}]


def say(requests: Any) -> Iterator[Any]:
    """Answers with texts of these sizes, each of another letter; below zero it fails."""
    for at, size in enumerate(requests[0]["sizes"].ravel().tolist()):
        if size < 0:
            raise ValueError(f"no size: {size}")
        yield [{"text": np.array([letter(at) * size], object)}]


async def say_at_once(requests: Any) -> AsyncIterator[Any]:
    for result in say(requests):
        yield result


def say_two(requests: Any) -> Iterator[Any]:
    for result in say(requests):
        [text] = result[0]["text"]
        yield [{"text": np.array([text, b"!"], object)}]


def say_batched(requests: Any) -> Iterator[Any]:
    for result in say(requests):
        yield [{"text": result[0]["text"].reshape(1, 1)}]


def letter(at: int) -> bytes:
    return bytes([ord("a") + at % 26])


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config())
        data, text = Tensor((-1,), np.int32, "data"), Tensor((1,), bytes, "text")
        server.bind("grow", grow, [Tensor((-1,), np.int64, "sizes")], [data, text], config=CONFIG)
        number, filling = Tensor((1,), np.int64, "number"), Tensor((-1,), np.int8, "filling")
        server.bind("endless", endless, [Tensor((1,), np.int8, "x")], [number, filling], config=CONFIG)
        server.bind("chatter", chatter, [Tensor((1,), np.int8, "x")], [text], config=CONFIG)
        server.bind("echo", echo, [Tensor((-1,), np.int8, "x")], [Tensor((-1,), np.int8, "y")], config=CONFIG)
        sizes = [Tensor((-1,), np.int64, "sizes")]
        for func, output in ((say, text), (say_at_once, text), (say_two, Tensor((2,), bytes, "text"))):
            server.bind(func.__name__, func, sizes, [output], config=CONFIG)
        batched = ModelConfig(decoupled=True, max_batch_size=1)
        server.bind("say_batched", say_batched, sizes, [text], config=batched)
        with running(server):
            yield server


async def told(client: Any, *inputs: Any) -> list[Any]:
    """Return all that a stream gives, an error in the end included."""
    came: list[Any] = []
    try:
        async for result in client.infer_sample(*inputs):
            came.append({name: value.tolist() for name, value in result.items()})
    except PyTritonClientError as error:
        text = error.server_message if isinstance(error, PyTritonClientInferenceServerError) else None
        came.append((type(error), getattr(error, "status", None), (text or "").splitlines()[:1]))
    return came


def test_it_is_as_with_grpc(triton: Triton) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    sizes = [[], [0], [1] * 300, [5_000_000], [300_000] * 12, [10, -1], [-1], [1_000_000, 0, 3, -5]]
    sizes += [[chance.choice([0, 1, 100, 4096, 16_384, 70_000]) for _ in range(20)] for _ in range(10)]

    async def main() -> None:
        url = str(triton.grpc_url)
        async with AsyncioDecoupledModelClient(url, "grow") as usual, DirectStreamsClient(url, "grow") as direct:
            wanted = [await told(usual, np.array(each, np.int64)) for each in sizes]
            got = await asyncio.gather(*(told(direct, np.array(each, np.int64)) for each in sizes))
            for each, (one, other) in zip(sizes, zip(wanted, got, strict=True), strict=True):
                assert one == other, f"seed {seed}: {each}"

    drive(main)


@pytest.mark.parametrize("name", ["say", "say_at_once", "say_two", "say_batched", "grow"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_texts_alone(triton: Triton, protocol: str, name: str) -> None:
    url = str(triton.grpc_url if protocol == "grpc" else triton.http_url)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    asked = [
        [],
        [1],
        [0],
        [0, 1, 0],
        [3, -1],
        [-1],
        [5] * 500,
        [*range(300)],
        [127, 128, 129, 16_383, 16_384, 70_000] * 3,
    ]
    asked += [[chance.choice([0, 1, 2, 3, 120, 130, 4096]) for _ in range(chance.randrange(200))] for _ in range(10)]
    # Over HTTP a request has no empty arrays.
    asked = [sizes for sizes in asked if sizes or protocol == "grpc"]
    end = b"!" if name == "say_two" else b""

    def expected(sizes: list[int]) -> list[bytes]:
        whole = sizes[: sizes.index(-1)] if -1 in sizes else sizes
        if name == "grow":
            return [f"{at} ü".encode() for at in range(len(whole))]
        return [letter(at) * size + end for at, size in enumerate(whole)]

    async def ask(client: DirectStreamsClient, sizes: list[int]) -> None:
        came: list[bytes] = []
        fails = pytest.raises(PyTritonClientInferenceServerError, match="no size: -1")
        with fails if -1 in sizes else contextlib.nullcontext():
            async for texts in client.infer_texts("text", sizes=np.array(sizes, np.int64)):
                assert texts
                came += texts
        assert came == expected(sizes), f"seed {seed}: {sizes}"

    async def main() -> None:
        async with DirectStreamsClient(url, name) as client:
            for sizes in asked:
                await ask(client, sizes)
            await asyncio.gather(*(ask(client, sizes) for sizes in asked))

    drive(main)


def test_large_requests_wait_for_room(triton: Triton) -> None:
    async def main() -> None:
        async with DirectStreamsClient(str(triton.grpc_url), "echo") as client:
            sent = [np.random.default_rng(at).integers(-100, 100, 3 * MIB + at, np.int8) for at in range(6)]

            async def ask(array: Any) -> None:
                [result] = [each async for each in client.infer_sample(array)]
                np.testing.assert_array_equal(result["y"], array)

            await asyncio.gather(*map(ask, sent))

    drive(main)


@pytest.mark.parametrize("how", ["close", "cancel", "drop"])
@pytest.mark.parametrize("reads", ["results", "texts"])
def test_whoever_leaves_ends_the_generator(triton: Triton, reads: str, how: str) -> None:
    async def main() -> None:
        ended.clear()
        async with DirectStreamsClient(str(triton.grpc_url), "endless" if reads == "results" else "chatter") as client:

            def ask() -> AsyncIterator[Any]:
                one = np.zeros(1, np.int8)
                return client.infer_sample(one) if reads == "results" else client.infer_texts("text", x=one)

            def is_first(result: Any) -> bool:
                return bool(result["number"] == [0] if reads == "results" else result[0] == b"0")

            async def leave() -> None:
                results = ask()
                assert is_first(await anext(results))
                if how == "close":
                    assert isinstance(results, AsyncGenerator)
                    await results.aclose()
                elif how == "cancel":
                    task = asyncio.ensure_future(_read_all(results))
                    await asyncio.sleep(0.01)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task

            await asyncio.gather(*(leave() for _ in range(8)))
            gc.collect()
            await eventually_async(lambda: len(ended) == 8)
            # Others go on.
            assert is_first(await anext(ask()))
        # So that the generator of that one does not count in the next test.
        await eventually_async(lambda: len(ended) == 9)

    drive(main)


async def _read_all(results: AsyncIterator[Any]) -> None:
    async for _ in results:
        await asyncio.sleep(0)


def test_who_does_not_read_is_not_sent_more(triton: Triton) -> None:
    async def main() -> None:
        async with DirectStreamsClient(str(triton.grpc_url), "endless") as client:
            slow = client.infer_sample(np.zeros(1, np.int8))
            assert (await anext(slow))["number"] == [0]
            other = client.infer_sample(np.zeros(1, np.int8))
            # Much more than the window of one stream, on the connection that both share.
            for number in range(600):
                assert (await anext(other))["number"] == [number]
            for number in range(1, 300):
                assert (await anext(slow))["number"] == [number]
            await slow.aclose()
            await other.aclose()

    drive(main)


def test_a_client_that_is_closed(triton: Triton) -> None:
    async def main() -> None:
        client = DirectStreamsClient(str(triton.grpc_url), "endless")
        results = client.infer_sample(np.zeros(1, np.int8))
        await anext(results)
        await client.close()
        with pytest.raises(PyTritonClientClosedError):
            async for _ in results:
                pass
        with pytest.raises(PyTritonClientClosedError):
            await anext(client.infer_sample(np.zeros(1, np.int8)))

    drive(main)


# ---- what a server may send --------------------------------------------------------------------------------------

SPEC = ModelSpec("d", None, 4, True, True, (TensorSpec("x", (-1,), np.float32),), (TensorSpec("y", (-1,), np.float32),))
GOOD = [[1.0, 2.0]]


class Peer:
    """A server that speaks HTTP/2 by hand.

    Args:
        serve: What it does with a connection.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self.connections: list[socket.socket] = []
        self.problems: list[BaseException] = []
        self.url = f"grpc://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Peer:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by now
        self._accepting.join(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.problems, self.problems

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._threads.append(threading.Thread(target=self._run, args=(connection,)))
            self._threads[-1].start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._serve(Connection(connection))
            except OSError:
                return  # the client has gone
            except BaseException as error:
                self.problems.append(error)


class Connection:
    """A connection of a client, from the server's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self._encoder = hpack.Encoder()
        self.bodies: dict[int, bytes] = {}
        assert self._take(24) == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    def send(self, *frames: bytes, piece: int = 1 << 30) -> None:
        data = b"".join(frames)
        for at in range(0, len(data), piece):
            self._socket.sendall(data[at : at + piece])

    def read(self) -> tuple[int, int, int, bytes] | None:
        """Return the next frame; `None` when the client has closed the connection."""
        head = self._take(9)
        if not head:
            return None
        return head[3], head[4], struct.unpack(">I", head[5:])[0], self._take(int.from_bytes(head[:3], "big"))

    def requested(self) -> int:
        """Return the stream of the next request whose body is whole."""
        while (got := self.read()) is not None:
            kind, flags, number, content = got
            if kind == DATA_FRAME:
                self.bodies[number] = self.bodies.get(number, b"") + content
                if flags & 1:
                    return number
        return 0

    def headers(self, *headers: tuple[str, str]) -> bytes:
        return self._encoder.encode(headers)

    def last(self, number: int, *headers: tuple[str, str]) -> bytes:
        """Return headers that end a stream."""
        return frame(HEADERS, 5, number, self.headers(*headers))

    def answer(self, number: int, *messages: bytes, status: str = "0", text: str = "") -> bytes:
        """Return the frames of a good answer."""
        parts = [frame(HEADERS, 4, number, self.headers((":status", "200"), ("content-type", "application/grpc")))]
        body = b"".join(b"\0" + struct.pack(">I", len(each)) + each for each in messages)
        parts += [frame(DATA_FRAME, 0, number, body[at : at + 16_384]) for at in range(0, len(body), 16_384)]
        return b"".join([*parts, self.last(number, ("grpc-status", status), ("grpc-message", text))])

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            data = self._socket.recv(65_536)
            if not data:
                return b""
            self._received += data
        taken, self._received = self._received[:size], self._received[size:]
        return taken


def message(final: bool = False) -> bytes:
    answered = response()
    if final:
        answered.parameters["triton_final_response"].bool_param = True
    content: bytes = service_pb2.ModelStreamInferResponse(infer_response=answered).SerializeToString()
    return content


async def asked(url: str, size: int = 2, **options: Any) -> list[list[float]]:
    options = {"inference_timeout_s": PATIENCE_S, "model_config": SPEC, "ensure_model_is_ready": False, **options}
    async with DirectStreamsClient(url, "d", **options) as client:
        return [result["y"].tolist() async for result in client.infer_sample(np.ones(size, np.float32))]


def test_a_stream_that_is_left_ends_although_more_of_it_is_always_there() -> None:
    was_reset = threading.Event()

    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, b""))
        number = connection.requested()

        def read() -> None:
            with contextlib.suppress(OSError):
                while (got := connection.read()) is not None:
                    if (got[0], got[2]) == (RST, number):
                        was_reset.set()
                        return

        reading = threading.Thread(target=read)
        reading.start()
        content = message()
        connection.send(
            frame(HEADERS, 4, number, connection.headers((":status", "200"), ("content-type", "application/grpc")))
        )
        many = frame(DATA_FRAME, 0, number, b"\0" + struct.pack(">I", len(content)) + content) * 1000
        try:
            while not was_reset.is_set():
                connection.send(many)
        finally:
            reading.join(PATIENCE_S)

    async def main(url: str) -> None:
        async with DirectStreamsClient(url, "d", model_config=SPEC, ensure_model_is_ready=False) as client:
            results = client.infer_sample(np.ones(2, np.float32))
            assert isinstance(results, AsyncGenerator)
            await anext(results)
            await results.aclose()
            await eventually_async(was_reset.is_set)

    with Peer(serve) as peer:
        drive(lambda: main(peer.url))


def test_frames_in_any_pieces() -> None:
    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, b""))
        number = connection.requested()
        block = connection.headers((":status", "200"), ("content-type", "application/grpc"), ("x-long", "v" * 40_000))
        body = b"".join(b"\0" + struct.pack(">I", len(each)) + each for each in [message()] * 3)
        connection.send(
            frame(HEADERS, 8, number, b"\3" + block[:100] + b"\0" * 3),
            frame(CONTINUATION, 0, number, block[100:16_000]),
            frame(CONTINUATION, 0, number, block[16_000:32_000]),
            frame(CONTINUATION, 4, number, block[32_000:]),
            frame(PING, 0, 0, b"12345678"),
            frame(SETTINGS, 0, 0, b""),
            frame(99, 0, 0, b"what later versions have"),
            *(frame(DATA_FRAME, 8, number, b"\2" + body[at : at + 1] + b"\0\0") for at in range(len(body))),
            frame(DATA_FRAME, 0, number, b""),
            connection.last(number, ("grpc-status", "0")),
            piece=7,
        )
        kinds = []
        while (got := connection.read()) is not None:
            kinds.append(got[:2])
        assert (PING, 1) in kinds
        assert (SETTINGS, 1) in kinds

    with Peer(serve) as peer:
        drive(lambda: _expect(asked(peer.url), GOOD * 3))


async def _expect(work: Any, wanted: Any) -> None:
    assert await work == wanted


def test_one_request_at_a_time() -> None:
    calls = threading.Semaphore(0)

    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 1)))
        while number := connection.requested():
            calls.release()
            connection.send(connection.answer(number, message(final=True)))

    async def main() -> None:
        options: dict[str, Any] = {"model_config": SPEC, "ensure_model_is_ready": False}
        async with DirectStreamsClient(peer.url, "d", **options) as client:

            async def ask() -> None:
                came = [result["y"].tolist() async for result in client.infer_sample(np.ones(2, np.float32))]
                assert came == GOOD

            await ask()
            await asyncio.gather(*(ask() for _ in range(5)))

    with Peer(serve) as peer:
        drive(main)
        assert all(calls.acquire(blocking=False) for _ in range(6))


def test_small_windows() -> None:
    """A server that takes ten bytes at a time, and grants more as they come."""

    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
        taken, largest = 0, 0
        while (got := connection.read()) is not None:
            kind, flags, number, content = got
            if kind == DATA_FRAME:
                taken += len(content)
                largest = max(largest, len(content))
                credit = struct.pack(">I", len(content))
                connection.send(frame(WINDOW_UPDATE, 0, number, credit), frame(WINDOW_UPDATE, 0, 0, credit))
                if flags & 1:
                    assert taken > 400
                    connection.send(connection.answer(number, message(final=True)))

    with Peer(serve) as peer:
        drive(lambda: _expect(asked(peer.url, 100), GOOD))


def ends(*frames: Callable[[Connection, int], bytes]) -> Callable[[Connection], None]:
    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, b""))
        while number := connection.requested():
            connection.send(*(make(connection, number) for make in frames))

    return serve


def reset(code: int) -> Callable[[Connection, int], bytes]:
    return lambda _, number: frame(RST, 0, number, struct.pack(">I", code))


@pytest.mark.parametrize(
    ("frames", "status", "text"),
    [
        ([lambda it, n: it.answer(n, status="5", text="no%20such%20model %C3%BC")], "NOT_FOUND", "no such model ü"),
        ([lambda it, n: it.last(n, (":status", "200"), ("grpc-status", "8"))], "RESOURCE_EXHAUSTED", ""),
        ([reset(7)], "UNAVAILABLE", "reset"),
        ([reset(2)], "INTERNAL", "reset"),
        ([lambda it, n: it.last(n, (":status", "200"))], "UNKNOWN", ""),
    ],
    ids=["status", "headers alone", "refused", "reset", "no status"],
)  # fmt: skip
def test_ends(frames: Sequence[Any], status: str, text: str) -> None:
    async def main() -> None:
        with pytest.raises(PyTritonClientInferenceServerError) as caught:
            await asked(peer.url)
        assert caught.value.status == status
        assert text in (caught.value.server_message or "")

    with Peer(ends(*frames)) as peer:
        drive(main)


def test_goodbye_while_calls_run() -> None:
    """What the server has begun it ends; what it has not touched goes to it once more, by a new connection."""

    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, b""))
        if len(peer.connections) == 1:
            first, second = connection.requested(), connection.requested()
            assert second
            connection.send(frame(GOAWAY, 0, 0, struct.pack(">II", first, 0)))
            connection.send(connection.answer(first, message(final=True)))
        while number := connection.requested():
            connection.send(connection.answer(number, message(final=True)))

    async def main() -> None:
        options: dict[str, Any] = {"model_config": SPEC, "ensure_model_is_ready": False}
        async with DirectStreamsClient(peer.url, "d", **options) as client:

            async def ask() -> Any:
                return [result["y"].tolist() async for result in client.infer_sample(np.ones(2, np.float32))]

            assert list(await asyncio.gather(ask(), ask())) == [GOOD, GOOD]
        assert len(peer.connections) == 2

    with Peer(serve) as peer:
        drive(main)


def test_nothing_comes() -> None:
    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, b""))
        number = connection.requested()
        while (got := connection.read()) is not None:
            assert got[0] != RST or got[2] == number

    async def main() -> None:
        with pytest.raises(PyTritonClientTimeoutError):
            await asked(peer.url, inference_timeout_s=0.2)

    with Peer(serve) as peer:
        drive(main)


def closes_at_once(connection: Connection) -> None:
    return None


def says_goodbye_at_once(connection: Connection) -> None:
    connection.send(frame(SETTINGS, 0, 0, b""), frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
    while connection.read() is not None:
        pass


@pytest.mark.parametrize("serve", [closes_at_once, says_goodbye_at_once])
def test_connections_that_end_at_once_are_told_at_once(serve: Callable[[Connection], None]) -> None:
    """As of a load balancer whose server starts again: not after the time that an answer has."""

    async def main() -> None:
        for _ in range(10):
            with pytest.raises(PyTritonClientConnectionError):
                await asked(peer.url)

    with Peer(serve) as peer:
        drive(main)


def test_more_calls_than_a_server_takes() -> None:
    def serve(connection: Connection) -> None:
        running, most = 0, 2
        connection.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 3, most)))
        numbers: list[int] = []
        while (got := connection.read()) is not None:
            kind, flags, number, _ = got
            if kind == HEADERS:
                running += 1
                if running > most:
                    connection.send(frame(RST, 0, number, struct.pack(">I", 7)))
            elif kind == DATA_FRAME and flags & 1:
                numbers.append(number)
                if len(numbers) == most:
                    connection.send(*(connection.answer(each, message(final=True)) for each in numbers))
                    running -= len(numbers)
                    numbers.clear()

    async def main() -> None:
        options: dict[str, Any] = {"model_config": SPEC, "ensure_model_is_ready": False}
        async with DirectStreamsClient(peer.url, "d", inference_timeout_s=PATIENCE_S, **options) as client:

            async def ask() -> None:
                came = [result["y"].tolist() async for result in client.infer_sample(np.ones(2, np.float32))]
                assert came == GOOD

            await asyncio.gather(*(ask() for _ in range(8)))

    with Peer(serve) as peer:
        drive(main)


def test_close_while_the_server_reads_nothing() -> None:
    is_over = threading.Event()

    def serve(connection: Connection) -> None:
        connection.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)))
        connection.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30)))
        assert is_over.wait(PATIENCE_S)

    async def main() -> None:
        client = DirectStreamsClient(
            peer.url, "d", model_config=SPEC, ensure_model_is_ready=False, inference_timeout_s=PATIENCE_S
        )
        task = asyncio.ensure_future(anext(client.infer_sample(np.ones(10 * MIB, np.float32))))
        await eventually_async(lambda: bool(peer.connections))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(PyTritonClientClosedError):
            await task

    with Peer(serve) as peer:
        drive(main)
        is_over.set()
