"""`ask_activity` against peers that are not there, say nothing, or say something else."""

import socket
import threading
from pathlib import Path

import pytest

from pytriton.proxy_backend.transport.activity import EndpointActivity, ask_activity
from pytriton.proxy_backend.wire import messages

DEADLINE_S = 300.0
ANSWER = messages.pack_activity(taken=9, in_flight=3)


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
        (ANSWER, EndpointActivity(in_flight=3, taken=9)),
        (messages.pack_detach(), None),
        (ANSWER[:-1], None),
        (ANSWER + b"more", None),
        (b"", None),
    ],
    ids=["activity", "another message", "cut off", "too long", "end of file"],
)
def test_what_is_said(tmp_path: Path, packet: bytes, expected: EndpointActivity | None) -> None:
    path = tmp_path / "x.sock"
    asked: list[bytes] = []

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            asked.append(peer.recv(4096))
            if packet:
                peer.send(packet)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        assert ask_activity(path, DEADLINE_S) == expected
        thread.join(DEADLINE_S)
    assert asked == [messages.pack_activity()]
