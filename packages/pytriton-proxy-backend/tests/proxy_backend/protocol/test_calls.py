"""The worker's end of a connection for calls: what it sends, what it takes, and when it lets its blocks go."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import AttachError, ProtocolError
from pytriton.proxy_backend.protocol.calls import CallsProtocol
from pytriton.proxy_backend.protocol.segments import State
from pytriton.proxy_backend.wire import layout, messages
from pytriton.proxy_backend.wire.greetings import Hello, Welcome
from pytriton.proxy_backend.wire.layout import CAPABILITIES, Capability, MessageType, Operation

SEGMENT = 3
SEGMENT_BYTES = 1 << 16
DONE = messages.BATCH_DONE
RELEASED = messages.INPUT_RELEASED


class Block(NamedTuple):
    """A block as the protocol sees it."""

    segment: int
    offset: int


def welcome(capabilities: int = CAPABILITIES | Capability.CALLS) -> bytes:
    return Welcome(
        model_name="model", model_version=1, batching=True, decoupled=False, capabilities=Capability(capabilities),
        arena_budget=SEGMENT_BYTES, arena_idle_s=1,
    ).pack()  # fmt: skip


class Side(CallsProtocol[Block]):
    """An attached connection that notes which blocks it has let go."""

    def __init__(self) -> None:
        self.freed: list[Block] = []
        super().__init__(Hello(name="worker", model_name="model", pid=7), self.freed.append)
        self.take(welcome())
        self.take(messages.pack_segment(SEGMENT, SEGMENT_BYTES), 1)

    def take(self, packet: bytes, descriptors: int = 0) -> Any:
        # A buffer is larger than the packet in it.
        return self.receive(bytearray(packet + b"\xff" * 8), len(packet), descriptors)


def response(number: int, flags: int = 0, *, offset: int = 0, length: int = 64) -> bytes:
    return messages.pack_response(number, SEGMENT, offset, length, flags)


def result(number: int, flags: int) -> bytes:
    size = layout.MESSAGE.size
    return layout.MESSAGE.pack(MessageType.RESULT, flags, size, number, 0, 0, 0, 0, 0)


def test_the_greeting_is_that_of_a_caller() -> None:
    hello = Hello(name="worker", model_name="model", pid=7)
    side = CallsProtocol[Block](hello, lambda block: None)
    assert side.greet() == hello.pack(MessageType.CALLER)
    states = [side.state]
    packet = welcome()
    assert side.receive(packet, len(packet))[0] == MessageType.WELCOME
    assert [*states, side.state] == [State.GREETING, State.ATTACHED]
    assert side.welcome.arena_budget == side.segments.budget == SEGMENT_BYTES


def test_a_proxy_backend_that_takes_no_calls_is_refused() -> None:
    side = CallsProtocol[Block](Hello(name="worker"), lambda block: None)
    packet = welcome(CAPABILITIES & ~Capability.CALLS)
    with pytest.raises(AttachError, match="takes no calls into its server"):
        side.receive(packet, len(packet))
    assert side.state is State.GREETING


def test_what_a_call_sends() -> None:
    side = Side()
    block = Block(2, 128)
    assert side.next_number == 1
    number, packet = side.call(
        Operation.METRIC_SET, block=block, length=64, text="text", subject=5, value=0.5, parent=(9, 2), stream=True
    )
    assert number == 1
    assert packet == messages.pack_call(
        1, Operation.METRIC_SET, (2, 128, 64), text="text", subject=5, value=0.5, parent=(9, 2), flags=messages.STREAM
    )
    assert side.calls == {1: (2, 128)}
    assert side.next_number == 2
    assert side.call(Operation.LOG) == (2, messages.pack_call(2, Operation.LOG, (0, 0, 0)))
    assert side.calls == {1: (2, 128), 2: None}
    assert side.cancel(2) == messages.pack_cancel(2, 0)
    assert side.cancel(3) is None


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["call", "bare call", "response", "fail", "result", "release"]),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_blocks_and_calls_live_as_long_as_the_answers_say(steps: list[tuple[str, int, int]]) -> None:
    """Random conversations against a model of them: each block is let go once, by an answer or a RELEASE."""
    side, lent, freed = Side(), dict[int, Block | None](), list[Block]()
    for step, (kind, which, flags) in enumerate(steps):
        flags = (RELEASED if flags & 1 else 0) | (DONE if flags & 2 else 0)
        if kind.endswith("call"):
            block = Block(1, step * 64) if kind == "call" else None
            number, _ = side.call(Operation.INFER, block=block, length=64)
            lent[number] = block
        elif lent:
            number = sorted(lent)[which % len(lent)]
            block = lent[number]
            if kind == "release":
                if block is not None:
                    side.take(messages.pack_release(*block))
                    freed.append(block)
                    side.calls[number] = lent[number] = None
            else:
                packets = {
                    "response": response(number, flags),
                    "fail": messages.pack_fail(number, 1, "text", flags),
                    "result": result(number, flags),
                }
                side.take(packets[kind])
                if flags & RELEASED and block is not None:
                    freed.append(block)
                    lent[number] = None
                if flags & DONE:
                    del lent[number]
        assert side.freed == freed
        assert side.calls == {number: block and tuple(block) for number, block in lent.items()}
    side.end()
    assert side.state is State.CLOSED
    assert side.calls == {}
    # What was under way is forgotten, not let go: the memory goes with the connection.
    assert side.freed == freed


@pytest.mark.parametrize(
    ("packet", "descriptors", "reason"),
    [
        (response(9), 0, "RESPONSE came for call 9, which is not under way"),
        (messages.pack_fail(9, 1, ""), 0, "FAIL came for call 9"),
        (response(1), 1, "RESPONSE came with 1 descriptors, and carries none"),
        (response(1, offset=32), 0, "does not lie inside"),
        (response(1, offset=64, length=SEGMENT_BYTES), 0, "does not lie inside"),
        (messages.pack_release(1, 0), 0, "the block at 0 of segment 1 was given back, and was not in use"),
        (messages.pack_segment(4, SEGMENT_BYTES), 1, "its budget is"),
        (messages.pack_segment(4, 64), 0, "announced with 0 descriptors"),
        (messages.pack_wake(), 0, "message 19 came, which a proxy backend does not send over a connection for calls"),
    ],
)
def test_what_is_no_answer_is_refused(packet: bytes, descriptors: int, reason: str) -> None:
    side = Side()
    side.call(Operation.INFER)
    with pytest.raises(ProtocolError) as caught:
        side.take(packet, descriptors)
    assert reason in str(caught.value)
    assert side.calls == {1: None}
    assert side.freed == []


def test_a_segment_that_is_closed_holds_no_answers() -> None:
    side = Side()
    side.call(Operation.INFER)
    side.take(response(1))
    assert side.take(messages.pack_segment_close(SEGMENT))[0] == messages.SEGMENT_CLOSE
    with pytest.raises(ProtocolError, match="does not lie inside"):
        side.take(response(1))


def test_blocks_of_answers_go_back_in_order() -> None:
    side = Side()
    assert side.release() == []
    side.segments.released.extend([(3, 64), (3, 0)])
    assert side.release() == [messages.pack_release(3, 64), messages.pack_release(3, 0)]
    assert side.release() == []
