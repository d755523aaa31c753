"""What a proxy backend is at: how many batches are in flight, and how many there have been."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from ..wire import messages
from ..wire.errors import ProtocolError
from ..wire.layout import MAX_PACKET
from .places import connect_to

_ANSWER = (messages.ACTIVITY, messages.HEADER_SIZE)


@dataclass(frozen=True)
class EndpointActivity:
    """The activity of a proxy backend, for all its workers together."""

    in_flight: int
    """Batches that are not answered yet, including those that wait for a worker."""
    taken: int
    """Batches that it has got since its model was loaded."""


def ask_activity(endpoint: Path, timeout_s: float) -> EndpointActivity | None:
    """Ask a native proxy backend what it is doing; `None` if it does not answer in time."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(timeout_s)
            connect_to(peer, endpoint)
            peer.send(messages.pack_activity())
            packet = peer.recv(MAX_PACKET)
        kind, _, size, taken, _, _, _, _, in_flight = messages.read_header(packet, len(packet))
    except (OSError, ProtocolError):
        return None
    return EndpointActivity(in_flight=in_flight, taken=taken) if (kind, size) == _ANSWER else None
