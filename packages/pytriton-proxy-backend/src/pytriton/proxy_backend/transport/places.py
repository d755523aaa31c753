"""Where the proxy backend of a model listens, also while another server takes the place of the running one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

SUFFIX = ".sock"
"""Of the socket of a model."""
PARKED_SUFFIX = ".last"
"""Of the socket that a server goes on with while the next one has its path; as long, since a path has little room."""


def connect_to(peer: socket.socket, endpoint: Path) -> None:
    """Connect a socket to the proxy backend at an endpoint; of two servers, to the one that still has requests.

    So a worker that wakes or is started again meanwhile serves those that wait for it there.
    """
    if endpoint.suffix == SUFFIX:
        # Mostly there is none, or one that a server which was killed has left.
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            peer.connect(os.fspath(endpoint.with_suffix(PARKED_SUFFIX)))
            return
    peer.connect(os.fspath(endpoint))
