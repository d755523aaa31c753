"""The proxy's end of a connection, apart from what the traces have: who may attach, time, and the end."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import pytest

from pytriton.proxy_backend.errors import AttachError, ProtocolError
from pytriton.proxy_backend.protocol.proxy import EndpointSettings, ProxyProtocol, SentBatch
from pytriton.proxy_backend.protocol.segments import State
from pytriton.proxy_backend.wire import messages
from pytriton.proxy_backend.wire.greetings import Hello, parse_answer
from pytriton.proxy_backend.wire.layout import MAX_PACKET
from pytriton.proxy_backend.wire.limits import ACKNOWLEDGED_LATER_BYTES, SILENCE_S

SETTINGS = EndpointSettings(
    model_name="model", model_version=3, batching=True, decoupled=False, tensors_digest="d" * 32, execution_timeout_s=5
)
HELLO = Hello(name="worker", max_in_flight=2)
SEGMENT, SEGMENT_BYTES = 1, 1 << 16


class Block(NamedTuple):
    """A block as the protocol sees it."""

    segment: int
    offset: int


class Side(ProxyProtocol[SentBatch]):
    """A proxy with a worker attached, which notes the blocks that it has let go."""

    def __init__(self, hello: Hello = HELLO, **changes: Any) -> None:
        self.freed: list[Any] = []
        super().__init__(dataclasses.replace(SETTINGS, **changes), self.freed.append)
        assert (self.state, self.refusal, self.acknowledgement_due) == (State.GREETING, "", False)
        assert self.acknowledge() == []
        self.answer = self.greet(hello.pack())
        if self.state is State.ATTACHED:
            self.take(messages.pack_segment(SEGMENT, SEGMENT_BYTES), 1)

    def take(self, packet: bytes, descriptors: int = 0) -> Any:
        return self.receive(bytearray(packet.ljust(MAX_PACKET, b"\xff")), len(packet), descriptors)

    def send(self, number: int, *, segment: int = 9, now: float = 0.0) -> SentBatch:
        batch = SentBatch()
        assert (batch.number, batch.block, batch.active_at, batch.is_expired) == (0, None, 0.0, False)
        batch.number, batch.block = number, Block(segment, 64 * number)
        self.send_batch(batch, 64, now)
        return batch

    def take_answer(self, packet: bytes, now: float = 0.0) -> bool:
        header, batch = self.take(packet)
        return self.answered(header, batch, now)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"model_name": "model"}, ""),
        ({"model_name": "other"}, "the worker is for model 'other' version 0"),
        ({"model_version": 3}, ""),
        ({"model_version": 1}, "this is model 'model' version 3, the worker is for model '' version 1"),
        ({"tensors_digest": "d" * 32}, ""),
        ({"tensors_digest": "e" * 32}, "with other tensors"),
    ],
)
def test_who_may_attach(changes: dict[str, Any], reason: str) -> None:
    side = Side(dataclasses.replace(HELLO, **changes))
    assert reason in side.refusal
    assert (side.refusal == "") == (reason == "")
    assert side.state is (State.CLOSED if reason else State.ATTACHED)
    assert side.takes_batches is not bool(reason)
    if reason:
        with pytest.raises(AttachError, match=re.escape(reason)):
            parse_answer(side.answer)
    else:
        welcome = parse_answer(side.answer)
        assert (welcome.model_name, welcome.model_version, welcome.max_in_flight) == ("model", 3, 2)
        assert (welcome.batching, welcome.decoupled, welcome.execution_timeout_s) == (True, False, 5)
        assert (welcome.arena_budget, welcome.arena_idle_s) == (SETTINGS.arena_budget_bytes, SETTINGS.arena_idle_s)


def test_models_without_a_digest_take_every_worker() -> None:
    assert Side(dataclasses.replace(HELLO, tensors_digest="e" * 32), tensors_digest="").state is State.ATTACHED


def test_blocks_are_lent_until_they_are_given_back() -> None:
    side = Side()
    first, second = side.send(1), side.send(2)
    # A record that came with its message lies in no segment, and is not lent.
    side.send(3, segment=0)
    assert side.lent == {(9, 64): (Block(9, 64), first), (9, 128): (Block(9, 128), second)}
    side.take(messages.pack_release(9, 64))
    assert (side.freed, first.block) == ([Block(9, 64)], None)
    with pytest.raises(ProtocolError, match="the block at 64 of segment 9 was given back, and was not in use"):
        side.take(messages.pack_release(9, 64))
    assert not side.take_answer(messages.pack_response(2, SEGMENT, 0, 64, messages.INPUT_RELEASED), 4.0)
    assert (side.freed, second.block, second.active_at) == ([Block(9, 64), Block(9, 128)], None, 4.0)
    # Nothing is given back twice.
    assert side.take_answer(messages.pack_response(2, SEGMENT, 0, 64, messages.INPUT_RELEASED | messages.BATCH_DONE))
    assert len(side.freed) == 2
    side.withdraw(side.in_flight[3])
    assert list(side.in_flight) == [1]
    fourth = side.send(4)
    side.withdraw(fourth)
    assert side.lent == {}
    assert side.take_answer(messages.pack_fail(1, 1, "why", 0))
    assert side.in_flight == {}


@pytest.mark.parametrize(
    ("decoupled", "length", "is_due"),
    [(False, ACKNOWLEDGED_LATER_BYTES, False), (False, ACKNOWLEDGED_LATER_BYTES + 1, True), (True, 64, True)],
)
def test_when_blocks_of_responses_go_back(decoupled: bool, length: int, is_due: bool) -> None:
    side = Side(decoupled=decoupled)
    side.take(messages.pack_segment(2, 1 << 24), 1)
    side.send(1)
    side.take_answer(messages.pack_response(1, 2, 0, length, 0))
    assert side.acknowledgement_due is is_due
    assert side.acknowledge() == [messages.pack_acknowledge(1)]
    assert side.acknowledgement_due is False
    assert side.acknowledge() == []
    # A FAIL, and a response whose record came with it, have no block.
    side.take_answer(messages.pack_fail(1, 1, "why", 0))
    assert side.acknowledge() == []
    batch = side.send(2)
    side.take_answer(messages.pack_response(2, 2, 0, 64, 0))
    # A batch acknowledges what came before it.
    batch.number = 3
    assert side.send_batch(batch, 64, 0.0) == messages.pack_batch(3, 9, 128, 64, 2)
    assert side.acknowledge() == []


def test_batches_that_take_too_long() -> None:
    side = Side()
    first = side.send(1, now=10.0)
    second = side.send(2, now=12.0)
    assert side.expire(14.9) == []
    assert side.expire(15.0) == [first]
    assert (first.is_expired, second.is_expired, side.silent_since) == (True, False, 15.0)
    assert not side.takes_batches
    assert side.expire(16.0) == []
    assert side.expire(17.0) == [second]
    # The silence began with the first of them.
    assert side.silent_since == 15.0
    assert not side.is_lost(15.0 + SILENCE_S - 0.01)
    assert side.is_lost(15.0 + SILENCE_S)
    side.take(messages.pack_detach())
    assert side.state is State.DETACHING
    assert not side.is_lost(1e9)
    assert not side.takes_batches


def test_a_worker_with_one_batch_at_a_time_is_lost_at_once() -> None:
    side = Side(dataclasses.replace(HELLO, max_in_flight=1))
    side.send(1)
    assert side.expire(4.0) == []
    assert side.silent_since is None
    assert not side.is_lost(4.0)
    side.expire(5.0)
    assert side.is_lost(5.0)


def test_without_a_limit_nothing_takes_too_long() -> None:
    side = Side(execution_timeout_s=None)
    side.send(1)
    assert side.expire(1e9) == []


def test_the_end_gives_back_what_is_not_done() -> None:
    side = Side()
    batches = [side.send(number) for number in (1, 2)]
    assert side.close() == batches
    assert (side.state, side.in_flight, side.lent) == (State.CLOSED, {}, {})
    assert side.close() == []


@pytest.mark.parametrize(
    ("packet", "descriptors", "reason"),
    [
        (messages.pack_response(9, SEGMENT, 0, 64, 0), 0, "it answered batch 9, which it does not have"),
        (messages.pack_response(1, SEGMENT, 0, 64, 0), 1, "RESPONSE came with 1 descriptors, and carries none"),
        (messages.pack_response(1, SEGMENT, 0, SEGMENT_BYTES + 1, 0), 0, "does not lie inside"),
        (messages.pack_wake(), 0, "it sent message 19, which a worker does not send"),
    ],
)
def test_what_no_worker_sends(packet: bytes, descriptors: int, reason: str) -> None:
    side = Side()
    side.send(1)
    with pytest.raises(ProtocolError) as caught:
        side.take(packet, descriptors)
    assert reason in str(caught.value)
    assert list(side.in_flight) == [1]


def test_a_segment_that_is_closed_holds_no_responses() -> None:
    side = Side()
    side.send(1)
    side.take(messages.pack_segment_close(SEGMENT))
    with pytest.raises(ProtocolError, match="does not lie inside"):
        side.take(messages.pack_response(1, SEGMENT, 0, 64, 0))
