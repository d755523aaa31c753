"""Packets: what their headers say, which sizes they may have, and texts at the limit."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import ProtocolError
from pytriton.proxy_backend.wire import layout, messages
from pytriton.proxy_backend.wire.layout import MAX_PACKET, MAX_TEXT, MessageType, Operation


def test_the_size_of_a_packet_is_what_its_header_says() -> None:
    packet = messages.pack_cancel(7, 2)
    size = messages.HEADER_SIZE
    assert len(packet) == size
    # The rest of a buffer is none of the packet's business.
    assert messages.read_header(packet + b"more", size) == (messages.CANCEL, 0, size, 7, 0, 0, 2, 0, 0)
    for wrong in (size - 1, size + 1, MAX_PACKET + 1):
        with pytest.raises(ProtocolError, match=rf"a packet of {wrong} bytes came|{wrong} came"):
            messages.read_header(packet.ljust(MAX_PACKET + 1), wrong)
    largest = messages.pack_fail(7, 1, "x" * MAX_PACKET)
    assert messages.read_header(largest.ljust(MAX_PACKET), len(largest))[2] == len(largest)
    full = bytearray(largest.ljust(MAX_PACKET, b"x"))
    struct.pack_into("<I", full, 4, MAX_PACKET)
    assert messages.read_header(full, MAX_PACKET)[2] == MAX_PACKET


@given(st.integers(0, 2**32 - 1), st.integers(0, 48))
def test_the_segment_that_a_packet_names(number: int, cut: int) -> None:
    packet = messages.pack_release(number, 1 << 40)
    assert messages.named_segment(packet) == messages.read_header(packet, len(packet))[5] == number
    assert messages.named_segment(packet + b"text") == number
    assert messages.named_segment(packet[:cut]) == (number if cut == len(packet) else 0)


@given(st.text(max_size=MAX_TEXT * 2), st.integers(0, 7))
def test_reasons_are_cut_between_characters(text: str, flags: int) -> None:
    packet = messages.pack_fail(9, 3, text, flags)
    kind, said, size, batch, consumed, segment, code, offset, length = messages.read_header(packet, len(packet))
    assert (kind, said, batch, code) == (messages.FAIL, flags, 9, 3)
    assert (consumed, segment, offset, length) == (0, 0, 0, 0)
    assert size <= messages.HEADER_SIZE + MAX_TEXT
    kept = messages.read_reason(packet)
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(kept)
    left = whole[len(kept) :]
    assert not left or len((kept + left[0]).encode()) > MAX_TEXT


def test_reasons_that_are_no_utf8() -> None:
    lone = "\udcff"
    assert messages.read_reason(messages.pack_fail(9, 3, f"a{lone}b")) == "a?b"
    assert messages.read_reason(messages.pack_fail(9, 3, "") + b"a\xff") == "a\ufffd"


@pytest.mark.parametrize("text", ["", "model", "caf\udce9", "größer"])
def test_what_a_call_says(text: str) -> None:
    raw = text.encode("utf-8", "surrogateescape")
    packet = messages.pack_call(
        5, Operation.METRIC_SET, (1, 1 << 40, 64), text=text, subject=-1, value=0.5, parent=(1 << 40, 3), flags=4
    )
    size = messages.HEADER_SIZE + layout.CALL.size + len(raw)
    assert messages.read_header(packet, len(packet)) == (
        MessageType.CALL, 4, size, 5, 0, 1, Operation.METRIC_SET, 1 << 40, 64
    )  # fmt: skip
    assert packet[messages.HEADER_SIZE :] == struct.pack("<qdQI4x", -1, 0.5, 1 << 40, 3) + raw
    bare = messages.pack_call(5, Operation.LOG, (0, 0, 0), text=text)
    assert bare[messages.HEADER_SIZE :] == struct.pack("<qdQI4x", 0, 0.0, 0, 0) + raw
    assert messages.read_header(bare, len(bare))[1] == 0


def test_the_longest_name_of_a_call() -> None:
    most = MAX_PACKET - messages.HEADER_SIZE - layout.CALL.size
    assert len(messages.pack_call(5, Operation.LOG, (0, 0, 0), text="x" * most)) == MAX_PACKET
    with pytest.raises(ValueError, match=f"a name of {most + 1} bytes is too long"):
        messages.pack_call(5, Operation.LOG, (0, 0, 0), text="x" * (most + 1))


@given(st.floats(allow_nan=False))
def test_numbers_of_results(value: float) -> None:
    assert messages.as_float(int.from_bytes(struct.pack("<d", value), "little")) == value


def test_the_names_of_messages() -> None:
    assert [messages.name_of(kind) for kind in MessageType] == [kind.name for kind in MessageType]
    assert messages.name_of(99) == "of type 99"


def test_defaults_of_messages() -> None:
    assert messages.pack_batch(7, 1, 64, 128) == messages.pack_batch(7, 1, 64, 128, 0)
    assert messages.pack_fail(7, 1, "x") == messages.pack_fail(7, 1, "x", messages.BATCH_DONE)
    assert messages.pack_activity() == messages.pack_activity(0, 0)


@given(st.integers(0, 1 << 62), st.sampled_from([1, 8, 64, 4096]))
def test_rounding_up(value: int, alignment: int) -> None:
    rounded = layout.align(value, alignment)
    assert rounded % alignment == 0
    assert value <= rounded < value + alignment
    assert layout.align(value) == layout.align(value, 64)
