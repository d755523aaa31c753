"""What the library inside tritonserver and the supervisor of hosts say to each other: frames on a unix stream socket.

Each model, and each of its instances, has a connection of its own, whose end is the end of both sides' part in it. The
other side is `native/proxy/control.h`. Little-endian:

    u32 size of all that follows, u16 kind, u16 count, then `count` fields, each a u32 length and its bytes

A library and a supervisor may be of different versions. Whatever a frame is to say otherwise than today gets another
kind or another number of fields: both sides compare these and say so, and the form of an ERROR stays.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..wire.limits import MAX_FRAME_BYTES

_SIZE = struct.Struct("<I")
_HEADER = struct.Struct("<HH")
_POLLRDHUP = 0x2000


class ControlError(Exception):
    """The received bytes are no frame, or end in the middle of one."""


class FrameKind(enum.IntEnum):
    """The kinds of frames."""

    MODEL = 1
    """Model, version, its folder, its configuration as JSON, the command line's settings of the backend as JSON, "1"
    where the configuration is to be completed, name and folder of the backend. Answered with the completed
    configuration, or nothing, and the text of a side file, whose endpoint those of the instances begin with."""
    INSTANCE = 2
    """The model's endpoint, the instance's name, its kind, its device, its endpoint. Answered when `initialize` is
    over. Nothing else is sent on the connection: its writing end is shut down when the instance is to finish."""
    OK = 100
    """The answer to either: it succeeded."""
    ERROR = 101
    """The other answer, with the text of the load error."""


class Frame(NamedTuple):
    """One frame."""

    kind: int
    fields: tuple[str, ...]


def send_frame(channel: socket.socket, kind: FrameKind, fields: Sequence[str] = ()) -> None:
    """Send a frame."""
    body = bytearray(_HEADER.pack(kind, len(fields)))
    for field in fields:
        encoded = field.encode("utf-8", errors="surrogateescape")
        body += _SIZE.pack(len(encoded)) + encoded
    channel.sendall(_SIZE.pack(len(body)) + body)


def receive_frame(channel: socket.socket) -> Frame | None:
    """Wait for a frame; `None` if the other side has closed the connection."""
    head = _receive(channel, _SIZE.size)
    if not head:
        return None
    (size,) = _SIZE.unpack(head)
    if not _HEADER.size <= size <= MAX_FRAME_BYTES:
        raise ControlError(f"expected a frame of {_HEADER.size} to {MAX_FRAME_BYTES} bytes, got one of {size}")
    body = _receive(channel, size)
    kind, count = _HEADER.unpack_from(body)
    fields = []
    at = _HEADER.size
    for number in range(count):
        end = at + _SIZE.size
        length = _SIZE.unpack_from(body, at)[0] if end <= size else size
        if end + length > size:
            raise ControlError(f"field {number} of a frame with {count} reaches past its {size} bytes")
        fields.append(body[end : end + length].decode("utf-8", errors="surrogateescape"))
        at = end + length
    if at != size:
        raise ControlError(f"a frame has {size - at} bytes behind its {count} fields")
    return Frame(kind, tuple(fields))


def has_ended(channel: socket.socket) -> bool:
    """Return whether the other side has closed its end."""
    poller = select.poll()
    poller.register(channel, _POLLRDHUP)
    return bool(poller.poll(0))


def _receive(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 1 << 20))
        if not piece:
            if not data and size == _SIZE.size:
                return b""
            raise ControlError(f"the connection ended after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)
