"""Who is at the other end of a unix socket, as the kernel says."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")


class PeerCredentials(NamedTuple):
    """The process that made the other end, or listened for it, and its user at that time."""

    pid: int
    uid: int
    gid: int


def peer_credentials(channel: socket.socket) -> PeerCredentials:
    """Return the credentials of the peer of a connected unix socket."""
    return PeerCredentials(
        *_CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )
