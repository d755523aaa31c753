"""`ask_activity` against peers that are not there, say nothing, or say something else."""

import socket
import threading
from pathlib import Path

import pytest

from pytriton.proxy_backend.transport.activity import EndpointActivity, ask_activity
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.layout import MessageType

DEADLINE_S = 30.0


def answer(kind: MessageType, length: int) -> bytes:
    return layout.MESSAGE.pack(kind, 0, layout.MESSAGE.size, 9, 0, 0, 0, 0, length)


def test_nobody_listens(tmp_path: Path) -> None:
    assert ask_activity(tmp_path / "nobody.sock", DEADLINE_S) is None
    (tmp_path / "file.sock").touch()
    assert ask_activity(tmp_path / "file.sock", DEADLINE_S) is None


def test_one_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        assert ask_activity(path, 0.05) is None


@pytest.mark.parametrize(
    ("packet", "expected"),
    [
        (answer(MessageType.ACTIVITY, 3), EndpointActivity(in_flight=3, taken=9)),
        (answer(MessageType.DETACH, 3), None),
        (answer(MessageType.ACTIVITY, 3)[:-1], None),
        (b"", None),
    ],
    ids=["activity", "another message", "cut off", "end of file"],
)
def test_what_is_said(tmp_path: Path, packet: bytes, expected: EndpointActivity | None) -> None:
    path = tmp_path / "x.sock"
    asked: list[bytes] = []

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            asked.append(peer.recv(layout.MAX_PACKET))
            if packet:
                peer.send(packet)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        assert ask_activity(path, DEADLINE_S) == expected
        thread.join(DEADLINE_S)
    assert asked == [layout.MESSAGE.pack(MessageType.ACTIVITY, 0, layout.MESSAGE.size, 0, 0, 0, 0, 0, 0)]
