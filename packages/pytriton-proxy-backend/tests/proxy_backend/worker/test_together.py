"""Responses of several streams that go in one message: each stream has its own, in order, whatever the others do."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import Request
from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
from pytriton.proxy_backend.errors import ArenaFullError
from pytriton.proxy_backend.transport.arena import OwnedBlock
from pytriton.proxy_backend.transport.together import TogetherConnection
from pytriton.proxy_backend.wire.layout import Capability, MessageType
from pytriton.proxy_backend.wire.record import Record
from support.waiting import PATIENCE_S

CAPABILITIES = Capability.DECOUPLED | Capability.CANCEL
MODEL = ModelSpec(
    name="model",
    version=1,
    inputs=(TensorSpec(name="x", dtype=np.dtype("float32"), shape=(1,)),),
    outputs=(TensorSpec(name="y", dtype=np.dtype("float32"), shape=(1,)),),
    batching=True,
    max_batch_size=8,
    decoupled=True,
)
Ask = Callable[[int], tuple[dict[int, list[float]], dict[int, str], list[Any]]]


@pytest.fixture
def serve(proxy: Any, golden: ModuleType) -> Iterator[Callable[..., Ask]]:
    """Starts a worker; gives a function that asks for so many streams, and returns values, errors and messages."""
    workers: list[Worker] = []

    def start(infer_func: Any, capabilities: int = CAPABILITIES | Capability.TOGETHER, **welcome: Any) -> Ask:
        proxy.listen()
        worker = Worker(infer_func, MODEL, proxy.endpoint)
        workers.append(worker)
        worker.start()
        peer = proxy.accept()
        hello = peer.welcome(model_flags=3, max_in_flight=64, capabilities=int(capabilities), **welcome)
        assert struct.unpack_from("<Q", hello.body, 24)[0] & Capability.TOGETHER
        worker.wait_attached(PATIENCE_S)

        def records(packet: Any) -> Iterator[Any]:
            """The records of a message, each as a message of its own."""
            if packet.kind == golden.RESPONSE:
                yield packet
                return
            memory, at, left = peer.outputs[packet.segment], packet.offset, packet.length
            while left:
                batch, _, length = struct.unpack_from("<QQQ", memory, at + 16)
                yield packet._replace(kind=golden.RESPONSE, batch=batch, offset=at, length=length)
                at, left = at + length, left - length

        def ask(count: int) -> tuple[dict[int, list[float]], dict[int, str], list[Any]]:
            for number in range(1, count + 1):
                x = golden.Tensor("x", golden.FP32, [1, 1], struct.pack("<f", number))
                peer.batch(number, bytes(golden.batch_record(number, [golden.Request(outputs=["y"])], [x])))
            values: dict[int, list[float]] = defaultdict(list)
            errors: dict[int, str] = {}
            packets: list[Any] = []
            answers = ended = 0
            while ended < count:
                packet = peer.answer()
                packets.append(packet)
                if packet.kind == golden.FAIL:
                    errors[packet.batch] = packet.body.decode()
                else:
                    for each in records(packet):
                        for response in peer.responses(each):
                            if response.outputs:
                                values[each.batch].append(float(response.outputs["y"][0, 0]))
                    answers += 1
                    peer.message(golden.RELEASE, consumed=answers)
                ended += bool(packet.flags & golden.BATCH_DONE)
            return values, errors, packets

        return ask

    yield start
    proxy.close()
    for worker in workers:
        worker.stop(PATIENCE_S)


async def count(requests: list[Request]) -> AsyncIterator[list[dict[str, Any]]]:
    """Twenty responses that take turns with other streams; they are written to the same array."""
    [request] = requests
    number, array = float(request["x"][0, 0]), np.zeros((1, 1), np.float32)
    del requests, request
    for step in range(20):
        array[...] = number * 100 + step
        yield [{"y": array}]
        await asyncio.sleep(0)


def test_what_streams_give_in_one_turn_goes_in_one_message(serve: Callable[..., Ask], golden: ModuleType) -> None:
    values, errors, packets = serve(count)(5)
    assert values == {number: [number * 100 + step for step in range(20)] for number in range(1, 6)}
    assert not errors
    together = [packet for packet in packets if packet.kind == MessageType.RESPONSES]
    assert together
    assert len(packets) < 60  # and not 105
    assert all(not packet.flags for packet in together)


def test_a_proxy_backend_that_does_not_know_them_gets_none(serve: Callable[..., Ask], golden: ModuleType) -> None:
    values, errors, packets = serve(count, CAPABILITIES)(5)
    assert values == {number: [number * 100 + step for step in range(20)] for number in range(1, 6)}
    assert not errors
    assert {packet.kind for packet in packets} == {golden.RESPONSE}


def test_what_came_before_an_error_is_told_first(serve: Callable[..., Ask]) -> None:
    async def fail(requests: list[Request]) -> AsyncIterator[list[dict[str, Any]]]:
        number = float(requests[0]["x"][0, 0])
        async for results in count(requests):
            yield results
            if number % 2 and float(results[0]["y"][0, 0]) == number * 100 + 7:
                await asyncio.sleep(0)
                raise ValueError("no more")

    values, errors, _ = serve(fail)(4)
    assert values == {
        number: [number * 100 + step for step in range(8 if number % 2 else 20)] for number in range(1, 5)
    }
    assert sorted(errors) == [1, 3]
    assert "no more" in errors[1]


@pytest.mark.parametrize("budget", [4096, 8192])
def test_an_arena_that_has_no_room_for_all_together(budget: int, serve: Callable[..., Ask]) -> None:
    values, errors, _ = serve(count, arena_budget=budget)(8)
    assert not errors
    assert values == {number: [number * 100 + step for step in range(20)] for number in range(1, 9)}


class _Full(TogetherConnection):
    """A connection whose arena has room for batch 2 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        self.flush()
        self._check_sent(number)
        if number != 2:
            self._room_for(record.layout.length)
        self.sent.append(number)

    def _room_for(self, length: int) -> OwnedBlock:
        raise ArenaFullError("full", needed=length, budget=0, in_use=0)

    def _send_all(self, packets: list[bytes]) -> None:
        raise AssertionError(packets)


def test_a_record_without_room_fails_its_own_stream_alone() -> None:
    from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter

    record = ResponseWriter().lay_out([ResponseData(0, {"y": np.zeros((1, 1), np.float32)}, final=False)])
    connection = _Full()
    for number in (1, 2, 1, 2):
        connection.respond_soon(number, record)
    connection.flush()
    assert connection.sent == [2, 2]
    for _ in range(2):
        # Nothing of that stream may follow what is missing.
        with pytest.raises(ArenaFullError):
            connection.respond_soon(1, record)
    with pytest.raises(ArenaFullError):
        connection.respond(1, record, done=True)
    connection.respond_soon(2, record)
    connection.respond(2, record, done=True)
    assert connection.sent == [2, 2, 2, 2]
