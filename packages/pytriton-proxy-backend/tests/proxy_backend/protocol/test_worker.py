"""The worker's end of a connection, apart from what the traces have: acknowledgements, pauses, streams."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import ProtocolError
from pytriton.proxy_backend.protocol import worker
from pytriton.proxy_backend.protocol.segments import PeerSegments, State
from pytriton.proxy_backend.protocol.worker import STREAM_WINDOW, WorkerProtocol
from pytriton.proxy_backend.wire import messages
from pytriton.proxy_backend.wire.greetings import Hello, parse_answer
from pytriton.proxy_backend.wire.layout import ALIGNMENT, MAX_PACKET
from pytriton.proxy_backend.wire.limits import MAX_SEGMENTS

WELCOME = parse_answer((Path(__file__).parents[2] / "golden" / "welcome.bin").read_bytes())
SEGMENT = 2
SEGMENT_BYTES = 4096
MOST_ON_THE_WAY = 64  # docs/protocol.md


class Block(NamedTuple):
    """A block as the protocol sees it."""

    segment: int
    offset: int


class Side(WorkerProtocol[Block]):
    """An attached worker that notes which blocks it has let go."""

    def __init__(self, *, decoupled: bool = True) -> None:
        self.freed: list[Block] = []
        super().__init__(Hello(name="worker", model_name="model"), self.freed.append)
        states = [self.state]
        self.take(dataclasses.replace(WELCOME, decoupled=decoupled).pack())
        assert [*states, self.state] == [State.GREETING, State.ATTACHED]
        self.take(messages.pack_segment(SEGMENT, SEGMENT_BYTES), 1)

    def take(self, packet: bytes, descriptors: int = 0) -> None:
        # The packet lies at the begin of a larger buffer, as it does where it is received.
        self.receive(bytearray(packet.ljust(MAX_PACKET, b"\xff")), len(packet), descriptors)

    def take_batch(self, number: int, *, offset: int = 0, length: int = 64, consumed: int = 0) -> None:
        self.take(messages.pack_batch(number, SEGMENT, offset, length, consumed))


def test_a_batch_may_end_where_its_segment_does() -> None:
    side = Side()
    side.take_batch(1, offset=SEGMENT_BYTES - 64)
    assert side.batches == {1: (SEGMENT, SEGMENT_BYTES - 64)}
    assert side.segments.held == {(SEGMENT, SEGMENT_BYTES - 64)}
    assert side.is_woken is False
    for offset, length in ((SEGMENT_BYTES - 64, 65), (32, 64), (SEGMENT_BYTES, 64)):
        with pytest.raises(ProtocolError, match=f"a block of {length} bytes at {offset} of segment {SEGMENT} "):
            side.take_batch(2, offset=offset, length=length)
    side.take(messages.pack_segment_close(SEGMENT))
    with pytest.raises(ProtocolError, match="its size: unknown"):
        side.take_batch(2)
    assert list(side.batches) == [1]


@given(
    steps=st.lists(st.tuples(st.sampled_from(["respond", "together", "read", "stale"]), st.integers(1, 3)), max_size=60)
)
@settings(deadline=None)
def test_blocks_of_responses_are_let_go_in_order(steps: list[tuple[str, int]]) -> None:
    side, sent = Side(), list[Block]()
    side.take_batch(1)
    for step, (kind, count) in enumerate(steps):
        block = Block(1, step * 64)
        if kind == "respond":
            packet, before = side.respond(1, block, 64, done=False)
            assert (packet, before) == (messages.pack_response(1, *block, 64, 0), [])
            sent.append(block)
        elif kind == "together":
            assert side.respond_together(block, 128) == messages.pack_responses(*block, 128)
            sent.append(block)
        elif kind == "read":
            before_all = len(side.freed)
            consumed = min(before_all + count, len(sent))
            side.take(messages.pack_acknowledge(consumed))
            assert side.freed == sent[:consumed]
        else:
            # A count that falls, as where two messages cross, says nothing new.
            side.take(messages.pack_acknowledge(max(len(side.freed) - count, 0)))
        assert side.sent == len(sent)
        assert side.consumed == len(side.freed)
        assert list(side.unacknowledged) == sent[len(side.freed) :]
    with pytest.raises(ProtocolError, match=f"{len(sent) + 1} responses acknowledged, {len(sent)} sent"):
        side.acknowledge(len(sent) + 1)


def test_the_answers_of_a_batch_say_what_becomes_of_it() -> None:
    side = Side()
    side.take_batch(1)
    side.take_batch(2, offset=64)
    side.segments.released.extend([(SEGMENT, 128), (SEGMENT, 0)])
    packet, before = side.respond(1, Block(1, 0), 64, done=False, executing=True)
    # EXECUTING is of the last answer alone. What is released with others goes before it.
    assert packet == messages.pack_response(1, 1, 0, 64, messages.INPUT_RELEASED)
    assert before == [messages.pack_release(SEGMENT, 128)]
    assert side.batches == {1: None, 2: (SEGMENT, 64)}
    assert side.segments.held == {(SEGMENT, 64)}
    # The block may be that of another batch from now on, whose place goes by itself.
    side.segments.released.append((SEGMENT, 0))
    packet, before = side.respond(1, Block(1, 64), 64, done=True, executing=True)
    assert packet == messages.pack_response(1, 1, 64, 64, messages.BATCH_DONE | messages.EXECUTING)
    assert before == [messages.pack_release(SEGMENT, 0)]
    assert side.batches == {2: (SEGMENT, 64)}
    assert side.executed(1) == messages.pack_executed(1)
    assert side.fail(2, 3, "why") == (messages.pack_fail(2, 3, "why", messages.BATCH_DONE), [])
    assert side.batches == {}
    # One that is not there any more, such as where its connection was replaced, ends like the others.
    assert side.fail(2, 3, "why") == (messages.pack_fail(2, 3, "why", messages.BATCH_DONE), [])


def test_streams_wait_for_callers_and_for_the_proxy_backend() -> None:
    side, resumed = Side(), list[int]()
    for number in (1, 2, 3):
        side.take_batch(number, offset=64 * number)
        side.resumptions[number] = lambda number=number: resumed.append(number)  # type: ignore[misc]
    assert not side.must_pause(1)
    for number, request in ((1, 0), (1, 1), (2, 0)):
        side.take(messages.pack_pause(number, request))
    # One that has ended already.
    side.take(messages.pack_pause(9, 0))
    assert side.paused == {1: {0, 1}, 2: {0}}
    assert [side.must_pause(number) for number in (1, 2, 3)] == [True, True, False]
    # Of those that wait for the proxy backend, those go on whose callers take their responses, one at a time.
    side.resume_next()
    assert resumed == [3]
    side.resume_next()
    assert resumed == [3]
    side.take(messages.pack_resume(1, 0))
    assert resumed == [3]
    side.take(messages.pack_resume(1, 1))
    assert resumed == [3, 1]
    assert side.paused == {2: {0}}
    # None of these has anything to do.
    for number, request in ((1, 1), (9, 0)):
        side.take(messages.pack_resume(number, request))
    side.fail(2, 1, "")
    assert side.paused == {}
    assert side.resumptions == {}
    side.take(messages.pack_pause(3, 0))
    side.take(messages.pack_resume(3, 0))
    assert resumed == [3, 1]


def test_how_many_responses_may_be_on_their_way() -> None:
    side, resumed = Side(), list[int]()
    side.take_batch(1)
    for count in range(MOST_ON_THE_WAY + 1):
        assert not side.must_pause(1)
        side.respond(1, Block(1, count * 64), 64, done=False)
    assert side.must_pause(1)
    side.resumptions[1] = lambda: resumed.append(1)
    side.resume_next()
    assert resumed == []
    side.take(messages.pack_acknowledge(1))
    assert resumed == [1]
    assert not side.must_pause(1)
    assert worker._MOST_ON_THE_WAY == MOST_ON_THE_WAY


@pytest.mark.parametrize(
    ("decoupled", "waiting", "in_use", "waits"),
    [
        (True, True, STREAM_WINDOW - 63, True),
        (True, True, STREAM_WINDOW - 64, False),
        (True, False, STREAM_WINDOW, False),
        (False, True, STREAM_WINDOW, False),
    ],
)
def test_the_window_of_streams(decoupled: bool, waiting: bool, in_use: int, waits: bool) -> None:
    side = Side(decoupled=decoupled)
    if waiting:
        side.respond(1, Block(1, 0), 64, done=False)
    assert side.must_wait(in_use, 64) is waits


def test_blocks_that_nobody_uses_go_back_in_order() -> None:
    side = Side()
    side.take_batch(1)
    side.take_batch(2, offset=64)
    assert side.release() == []
    side.segments.released.extend([(SEGMENT, 64), (SEGMENT, 0)])
    assert side.release() == [messages.pack_release(SEGMENT, 64), messages.pack_release(SEGMENT, 0)]
    assert side.segments.held == set()
    assert side.release() == []
    assert side.detach() == messages.pack_detach()
    assert side.state is State.DETACHING


def test_before_it_is_attached_nothing_may_be_named() -> None:
    side = WorkerProtocol[Block](Hello(name="worker"), lambda block: None)
    assert (side.segments.budget, side.segments.sizes, side.is_woken) == (0, {}, False)


def test_the_budget_of_segments_is_what_they_have_together() -> None:
    segments = PeerSegments(3 * ALIGNMENT - 1)
    segments.announce(1, ALIGNMENT, 1)
    segments.announce(2, 2 * ALIGNMENT, 1)
    with pytest.raises(ProtocolError, match="the arena would have 256 bytes, its budget is 191"):
        segments.announce(3, ALIGNMENT, 1)
    with pytest.raises(ProtocolError, match="segment 2 was announced twice"):
        segments.announce(2, 0, 1)
    segments.close(2)
    segments.close(7)
    segments.announce(3, ALIGNMENT, 1)
    assert segments.sizes == {1: ALIGNMENT, 3: ALIGNMENT}
    for number in range(4, MAX_SEGMENTS + 2):
        segments.announce(number, 0, 1)
    assert len(segments.sizes) == MAX_SEGMENTS
    with pytest.raises(ProtocolError, match=f"is one of more than {MAX_SEGMENTS}"):
        segments.announce(0, 0, 1)
