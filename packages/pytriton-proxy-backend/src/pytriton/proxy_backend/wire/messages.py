"""Every message of the protocol but the greetings: one function that packs each, and one that reads them all.

A message that came is the plain tuple of its header's fields, since no object is to be made for it on the way of a
batch: `kind, flags, size, batch, consumed, segment, index, offset, length`. Kinds and flags are plain integers here,
since arithmetic on members of an enum costs a microsecond.
"""

from __future__ import annotations

import struct

from . import layout
from .errors import ProtocolError
from .layout import MAX_PACKET, MAX_TEXT, MessageFlag, MessageType, Operation

Header = tuple[int, int, int, int, int, int, int, int, int]
Buffer = bytes | bytearray | memoryview

HELLO = int(MessageType.HELLO)
WELCOME = int(MessageType.WELCOME)
REFUSE = int(MessageType.REFUSE)
SEGMENT = int(MessageType.SEGMENT)
SEGMENT_CLOSE = int(MessageType.SEGMENT_CLOSE)
BATCH = int(MessageType.BATCH)
RESPONSE = int(MessageType.RESPONSE)
FAIL = int(MessageType.FAIL)
RELEASE = int(MessageType.RELEASE)
CANCEL = int(MessageType.CANCEL)
DETACH = int(MessageType.DETACH)
ACTIVITY = int(MessageType.ACTIVITY)
CALLER = int(MessageType.CALLER)
CALL = int(MessageType.CALL)
RESULT = int(MessageType.RESULT)
EXECUTED = int(MessageType.EXECUTED)
PAUSE = int(MessageType.PAUSE)
RESUME = int(MessageType.RESUME)
WAKE = int(MessageType.WAKE)
RESPONSES = int(MessageType.RESPONSES)
INPUT_RELEASED = int(MessageFlag.INPUT_RELEASED)
BATCH_DONE = int(MessageFlag.BATCH_DONE)
STREAM = int(MessageFlag.STREAM)
EXECUTING = int(MessageFlag.EXECUTING)

HEADER_SIZE = layout.MESSAGE.size
_SEGMENT_FIELD = struct.Struct("<24xI20x")
_pack = layout.MESSAGE.pack
_unpack = layout.MESSAGE.unpack_from


def read_header(packet: Buffer, size: int) -> Header:
    """Read the header of a packet of `size` bytes, which may lie in a larger buffer; refuses one of a wrong size."""
    if not HEADER_SIZE <= size <= MAX_PACKET:
        raise ProtocolError(f"a packet of {size} bytes came, a message has {HEADER_SIZE} to {MAX_PACKET}")
    header: Header = _unpack(packet)
    if header[2] != size:
        raise ProtocolError(f"a message says that it has {header[2]} bytes, {size} came")
    return header


def named_segment(packet: Buffer) -> int:
    """Return the segment that a packet names; 0 if it names none."""
    return int(_SEGMENT_FIELD.unpack_from(packet)[0]) if len(packet) >= HEADER_SIZE else 0


def read_reason(packet: Buffer) -> str:
    """Return the text of a FAIL."""
    return bytes(packet[HEADER_SIZE:]).decode("utf-8", "replace")


def pack_greeting(kind: MessageType, body: bytes) -> bytes:
    """Pack HELLO, CALLER, WELCOME or REFUSE: see `greetings`, which makes the body."""
    return _pack(kind, 0, HEADER_SIZE + len(body), 0, 0, 0, 0, 0, 0) + body


def pack_segment(number: int, size: int) -> bytes:
    """Pack the announcement of a segment of `size` bytes; its descriptor goes with it."""
    return _pack(SEGMENT, 0, HEADER_SIZE, 0, 0, number, 0, 0, size)


def pack_segment_close(number: int) -> bytes:
    """Pack the end of a segment."""
    return _pack(SEGMENT_CLOSE, 0, HEADER_SIZE, 0, 0, number, 0, 0, 0)


def pack_batch(batch: int, segment: int, offset: int, length: int, consumed: int = 0) -> bytes:
    """Pack a batch, whose record of `length` bytes is there; acknowledges `consumed` responses."""
    return _pack(BATCH, 0, HEADER_SIZE, batch, consumed, segment, 0, offset, length)


def pack_response(batch: int, segment: int, offset: int, length: int, flags: int) -> bytes:
    """Pack answers to a batch, whose record of `length` bytes is there."""
    return _pack(RESPONSE, flags, HEADER_SIZE, batch, 0, segment, 0, offset, length)


def pack_responses(segment: int, offset: int, length: int) -> bytes:
    """Pack answers to several batches, whose records lie there, one behind the other."""
    return _pack(RESPONSES, 0, HEADER_SIZE, 0, 0, segment, 0, offset, length)


def pack_fail(batch: int, code: int, text: str, flags: int = BATCH_DONE) -> bytes:
    """Pack an error for all of a batch that has no answer yet; a long text is cut off."""
    raw = text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore").encode()
    return _pack(FAIL, flags, HEADER_SIZE + len(raw), batch, 0, 0, code, 0, 0) + raw


def pack_release(segment: int, offset: int) -> bytes:
    """Pack the release of a block of the peer's arena."""
    return _pack(RELEASE, 0, HEADER_SIZE, 0, 0, segment, 0, offset, 0)


def pack_acknowledge(consumed: int) -> bytes:
    """Pack a RELEASE that says how many responses were read."""
    return _pack(RELEASE, 0, HEADER_SIZE, 0, consumed, 0, 0, 0, 0)


def pack_cancel(batch: int, request: int) -> bytes:
    """Pack that nobody waits for one request of a batch any more."""
    return _pack(CANCEL, 0, HEADER_SIZE, batch, 0, 0, request, 0, 0)


def pack_pause(batch: int, request: int) -> bytes:
    """Pack that the caller of one request of a batch does not take its responses for now."""
    return _pack(PAUSE, 0, HEADER_SIZE, batch, 0, 0, request, 0, 0)


def pack_resume(batch: int, request: int) -> bytes:
    """Pack that the caller of a request takes its responses again."""
    return _pack(RESUME, 0, HEADER_SIZE, batch, 0, 0, request, 0, 0)


def pack_wake() -> bytes:
    """Pack that a batch waits, for a worker that is asleep."""
    return _pack(WAKE, 0, HEADER_SIZE, 0, 0, 0, 0, 0, 0)


def pack_executed(batch: int) -> bytes:
    """Pack that the callable has returned from a batch, and the next one may come."""
    return _pack(EXECUTED, 0, HEADER_SIZE, batch, 0, 0, 0, 0, 0)


def pack_detach() -> bytes:
    """Pack the wish to get no more batches; over ZeroMQ also the end of a connection."""
    return _pack(DETACH, 0, HEADER_SIZE, 0, 0, 0, 0, 0, 0)


def pack_activity(taken: int = 0, in_flight: int = 0) -> bytes:
    """Pack the question for the activity, or the answer: batches that there have been, and that are in flight."""
    return _pack(ACTIVITY, 0, HEADER_SIZE, taken, 0, 0, 0, 0, in_flight)


def pack_call(
    number: int,
    operation: Operation,
    place: tuple[int, int, int],
    *,
    text: str = "",
    subject: int = 0,
    value: float = 0.0,
    parent: tuple[int, int] = (0, 0),
    flags: int = 0,
) -> bytes:
    """Pack a call into the server, see `docs/protocol.md`; raises `ValueError` if the text does not fit into a packet.

    The text is a model, a metric family, or a file; a record of length 0 is none.
    """
    raw = layout.CALL.pack(subject, value, *parent) + text.encode("utf-8", "surrogateescape")
    size = HEADER_SIZE + len(raw)
    if size > MAX_PACKET:
        raise ValueError(f"a name of {size - HEADER_SIZE - layout.CALL.size} bytes is too long: {text[:60]!r}...")
    segment, offset, length = place
    return _pack(CALL, flags, size, number, 0, segment, operation, offset, length) + raw


def as_float(bits: int) -> float:
    """Return the floating-point number that a RESULT carries."""
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def name_of(kind: int) -> str:
    """Return what a kind of message is called."""
    return MessageType(kind).name if kind in MessageType.__members__.values() else f"of type {kind}"
