"""The sockets that a server listens at. The guard of the server hands them on to the server that replaces it."""

import contextlib
import enum
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

from pytriton.proxy_backend.system.forks import call_in_child, replace_descriptors
from pytriton.proxy_backend.system.memory_files import make_memory_file
from pytriton.server.tritonserver.guard import Part

HANDOVER_VARIABLE = "PYTRITON_GUARD_HANDOVER"
"""Environment variable for the guard: the descriptors of the channel and of the page."""


class Role(enum.IntEnum):
    """What one of two servers at the same sockets does; `native/guard/shared.h` is written from it."""

    STANDING_BY = 0
    """It accepts no connections. Those that it has are answered, and then closed."""
    SERVING = 1
    """It accepts connections."""
    LEFT = 2
    """As `STANDING_BY`; and who asks over such a connection is told to ask again over another one."""


class Protection(enum.Enum):
    """What the guard does; the value says what that is. `native/guard/shared.h` is written from it."""

    HTTP_REQUESTS = "requests over HTTP are looked at before the server parses them"
    HTTP_RESPONSES = "the memory of HTTP requests is counted until they are answered, and statuses are set right"
    HTTP_CALLERS = "callers over HTTP who leave are noticed"
    HTTP_THREADS = "HTTP connections are spread over the threads of the front end"
    HTTP_DEFERRALS = "parts of answers over HTTP are not lost where the thread that sends them is behind"
    HTTP_ENDS = "what is known of an HTTP connection ends with it"
    COMPRESSED_BODIES = "compressed requests are looked at, and may not grow beyond all bounds"
    SHAPES = "shapes of inputs that ask for too much memory are refused"
    REQUESTED_OUTPUTS = "an output that is asked for twice is refused"
    CLASSIFICATION = "the classification of texts divides by no zero"
    INPUT_DATA = "inputs with sizes that overflow are refused"
    REQUEST_ENDS = "the memory of requests is counted until they end"
    SHARED_MEMORY = "shared memory of Triton's Python backend cannot be registered"
    SHARED_FILES = "one file cannot be registered as shared memory twice, nor end the server by getting shorter"
    CRASHES = "a crashed server ends at once"
    GRPC_FRONT_END = "callers over gRPC who cancel their calls do not end the server"
    GRPC_CALLS = "calls over gRPC are read by the guard's own front end"
    GRPC_CONNECTIONS = "callers over gRPC are told to ask the server that replaces this one"
    REPLACEMENT = "the server can hand its sockets over to another one"
    INSTANCES = "the threads of models are known"
    MODEL_DELETION = "a model is deleted only when its threads have settled"

    @property
    def part(self) -> Part:
        """The part of the guard that it belongs to."""
        return _PARTS.get(self, Part.REFUSE)


_PARTS = {
    Protection.HTTP_RESPONSES: Part.ANSWERS,
    Protection.HTTP_CALLERS: Part.FRONTEND,
    Protection.HTTP_THREADS: Part.FRONTEND,
    Protection.HTTP_DEFERRALS: Part.WORKAROUNDS,
    Protection.HTTP_ENDS: Part.ANSWERS,
    Protection.CRASHES: Part.WORKAROUNDS,
    Protection.GRPC_FRONT_END: Part.FRONTEND,
    Protection.GRPC_CALLS: Part.FRONTEND,
    Protection.GRPC_CONNECTIONS: Part.HANDOVER,
    Protection.REPLACEMENT: Part.HANDOVER,
    Protection.INSTANCES: Part.WORKAROUNDS,
    Protection.MODEL_DELETION: Part.WORKAROUNDS,
}

ROLE_PLACE = 0
"""Where the server's role is in the page that it shares with its starter."""
TRIED_PLACE = 1
"""Not 0 while the starter tries out what is in force: what is refused meanwhile is its own."""
COMPLETE_PLACE = 2
"""Not 0 once the script has bound all of its models: no other is about to come."""
ENDING_PLACE = 3
"""Not 0 once the server is to end, and takes no more requests for inference."""
REQUESTS_PLACE = 4
"""How many requests for inference there are in the server, a number of four bytes."""
REACHED_PLACE = 8
"""From here on a byte for each `Protection`, not 0 if it was reached."""
_REQUESTS = struct.Struct("=I")


class Handover:
    """What one server and its starter share: its listening sockets, and which of two at the same sockets it is.

    Two servers, one after the other, have the same sockets, and so one queue of connections, of which none is lost.
    The copies here wait unread until they are asked for.

    Args:
        listeners: Those of the server before; the guard takes them where the new one binds the same addresses.
        role: What the server is to do at first.
        complete: Whether it takes the place of one with all of its models, see `mark_complete`.

    Raises:
        OSError: The system is out of descriptors or memory.
    """

    def __init__(
        self, listeners: Sequence[socket.socket] = (), *, role: Role = Role.SERVING, complete: bool = False
    ) -> None:
        self._page_descriptor = make_memory_file("pytriton-handover")
        try:
            os.ftruncate(self._page_descriptor, REACHED_PLACE + len(Protection))
            self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except BaseException:
            os.close(self._page_descriptor)
            raise
        self._ours.setblocking(False)
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self.is_complete = False
        self.assign(role)
        if complete:
            self.mark_complete()
        for listener in listeners:
            socket.send_fds(self._ours, [b"L"], [listener.fileno()])
        call_in_child(self, lambda handover: replace_descriptors(handover._descriptors()))

    @property
    def given(self) -> tuple[int, int]:
        """The descriptors of channel and page that the server inherits."""
        return self._theirs.fileno(), self._page_descriptor

    @property
    def listeners(self) -> Sequence[socket.socket]:
        """Copies of the sockets that the server listens at by now; none once it is closed."""
        with self._lock, contextlib.suppress(OSError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not message:
                    break
                self._listeners += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return tuple(self._listeners)

    def assign(self, role: Role) -> None:
        """Let the server do something else from now on."""
        self._write(bytes([role]), ROLE_PLACE)

    def mark_complete(self) -> None:
        """Tell the guard that all models are there, so that it can say so to callers who ask for an unknown one."""
        self.is_complete = True
        self._write(b"\1", COMPLETE_PLACE)

    def reached(self) -> frozenset[Protection]:
        """Return what the guard has come to do so far; nothing once this is closed."""
        with self._lock, contextlib.suppress(OSError):
            page = os.pread(self._page_descriptor, REACHED_PLACE + len(Protection), 0)
            return frozenset(each for each, mark in zip(Protection, page[REACHED_PLACE:], strict=True) if mark)
        return frozenset()

    def end_requests(self) -> None:
        """Have the server refuse requests for inference from now on; those that it has go on."""
        self._write(b"\1", ENDING_PLACE)

    def count_requests(self) -> int | None:
        """Return how many requests for inference the server has; None if the guard does not count them."""
        if Protection.REQUEST_ENDS not in self.reached():
            return None
        with self._lock, contextlib.suppress(OSError):
            return int(_REQUESTS.unpack(os.pread(self._page_descriptor, _REQUESTS.size, REQUESTS_PLACE))[0])
        return None

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Have the guard log nothing of what it refuses within: it is asked by who tries it out."""
        self._write(b"\1", TRIED_PLACE)
        try:
            yield
        finally:
            self._write(b"\0", TRIED_PLACE)

    def _write(self, content: bytes, place: int) -> None:
        """Write to the page, unless the server has gone, which another thread may notice at any time."""
        with self._lock:
            if self._page_descriptor >= 0:
                os.pwrite(self._page_descriptor, content, place)

    def close_given(self) -> None:
        """Close what the server has inherited."""
        self._theirs.close()

    def close(self) -> None:
        """Let go of all sockets: with the server gone, nobody listens any more."""
        with self._lock:
            # With the sockets that wait in it.
            self._ours.close()
            self._theirs.close()
            while self._listeners:
                self._listeners.pop().close()
            descriptor, self._page_descriptor = self._page_descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _descriptors(self) -> list[int]:
        sockets = [self._ours, self._theirs, *self._listeners]
        return [*(each.fileno() for each in sockets), self._page_descriptor]
