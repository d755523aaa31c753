"""Frames between the library inside tritonserver and the supervisor of hosts."""

import socket
import struct
from collections.abc import Iterator

import pytest

from pytriton.proxy_backend.hosting.control import (
    ControlError,
    Frame,
    FrameKind,
    has_ended,
    receive_frame,
    send_frame,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


def test_frames_are_what_they_were(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    fields = ("add_sub", "", "a\0b", "größer", "\udcff", "x" * 100_000)
    send_frame(mine, FrameKind.MODEL, fields)
    send_frame(mine, FrameKind.OK)
    assert receive_frame(theirs) == Frame(FrameKind.MODEL, fields)
    assert receive_frame(theirs) == Frame(FrameKind.OK, ())
    assert not has_ended(theirs)
    mine.shutdown(socket.SHUT_WR)
    assert has_ended(theirs)
    assert receive_frame(theirs) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<I", 3) + b"abc", "expected a frame of 4 to"),
        (struct.pack("<I", 1 << 30), "got one of 1073741824"),
        (struct.pack("<IHHI", 8, 1, 1, 1), "field 0 of a frame with 1 reaches past its 8 bytes"),
        (struct.pack("<IHHB", 5, 1, 1, 0), "field 0 of a frame with 1 reaches past its 5 bytes"),
        (struct.pack("<IHHB", 5, 1, 0, 0), "a frame has 1 bytes behind its 0 fields"),
        (struct.pack("<IH", 8, 1), "the connection ended after 2 of 8 bytes"),
        (b"\0", "the connection ended after 1 of 4 bytes"),
    ],
)
def test_what_is_no_frame(ends: tuple[socket.socket, socket.socket], data: bytes, said: str) -> None:
    mine, theirs = ends
    mine.sendall(data)
    mine.shutdown(socket.SHUT_WR)
    with pytest.raises(ControlError, match=said):
        receive_frame(theirs)
