"""What is known of the connections of callers: whether answers are still on their way over them."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["has_connections", "has_unsent"]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# As in the kernel's net/tcp_states.h: established, half closed by one side or the other.
_OPEN = frozenset({"01", "04", "05", "08", "09", "0B"})


def has_connections(ports: Collection[int]) -> bool:
    """Tell whether somebody is connected to one of these TCP ports of this machine."""
    return any(True for _ in _unsent(ports))


def has_unsent(ports: Collection[int]) -> bool:
    """Tell whether a connection to one of these ports has bytes on it that the other side has not got."""
    return any(_unsent(ports))


def _unsent(ports: Collection[int]) -> Iterator[int]:
    """Return for each open connection how many bytes wait in the system to be sent, or for their acknowledgement."""
    for table in _TABLES:
        # Without it, as in some sandboxes, nothing is known.
        with contextlib.suppress(OSError):
            for row in table.read_text().splitlines()[1:]:
                # Number local remote state unsent:unread ..., in hexadecimal.
                _, local, _, state, queues, *_ = row.split(maxsplit=5)
                if state in _OPEN and int(local.rpartition(":")[2], 16) in ports:
                    yield int(queues.partition(":")[0], 16)
