"""Shared memory beside a ZeroMQ link on one machine.

ZeroMQ carries no descriptors, so the memfds of both arenas cross on a unix socket beside the one of the link: the
worker connects to it and sends a token, and greets over ZeroMQ with the same token. The messages then say where a
record lies. A record for which an arena has no room is a part of its message, as between machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

from ..errors import ArenaFullError, ProtocolError
from ..model import MAX_ENDPOINT_BYTES
from ..protocol.segments import PeerSegments
from ..system.forks import close_in_child
from ..system.peers import peer_credentials
from ..transport.arena import OwnArena, OwnedBlock, PeerArena, ViewedBlock
from ..wire import layout
from ..wire.messages import HEADER_SIZE, SEGMENT, name_of, pack_segment, read_header
from .sockets import BindError

logger = logging.getLogger(__name__)

_SCHEME = "ipc://"
_SUFFIX = ".mem"
TOKEN_BYTES = 16
_BACKLOG = 128
# A worker has this much time between its connection here and its greeting.
_WAITING_S = 30.0
_MAX_WAITING = 256


def memory_path(address: str) -> Path | None:
    """Return the socket over which a link passes descriptors; `None` if its ends may be on different machines."""
    if not address.startswith(_SCHEME):
        return None
    path = Path(address.removeprefix(_SCHEME) + _SUFFIX)
    # If the path is too long, tensors travel in the messages of the link.
    return path if path.is_absolute() and len(os.fsencode(path)) <= MAX_ENDPOINT_BYTES else None


def _is_own_user(channel: socket.socket) -> bool:
    return peer_credentials(channel).uid == os.geteuid()


def _check_free(path: Path) -> None:
    """Refuse a path at which another server listens, because it would lose its workers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return  # nobody listens there, or the process was killed
        pid = peer_credentials(probe).pid
    # A process of the same server that this one replaces, or one whose server is gone, is no obstacle.
    if pid != os.getpid() and _parent_of(pid) not in (os.getppid(), 1):
        raise BindError(
            f"another server (process {pid}) already listens at {path}; give each server a folder of its own"
        )


def _parent_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # State and parent follow the name, which may contain blanks and brackets.
    return int(status.rpartition(")")[2].split()[1])


class MemoryListener:
    """Accepts workers of this machine that share memory. One thread uses it, and no method waits."""

    def __init__(self, path: Path) -> None:
        """Listen."""
        _check_free(path)
        self._path = path
        self._waiting: dict[bytes, tuple[socket.socket, float]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        close_in_child(self._socket)
        self._inode = 0
        try:
            with contextlib.suppress(FileNotFoundError):
                # Like ZeroMQ with the socket of the link: the process that loads a model replaces the socket.
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
            before = os.umask(0o177)
            try:
                self._socket.bind(os.fspath(path))
            finally:
                os.umask(before)
            self._inode = path.lstat().st_ino
            self._socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def accept(self, token: bytes, segments: PeerSegments) -> SharedMemory | None:
        """Return the memory of the worker that greets with a token; `None` if it shares none."""
        self._collect()
        channel, _ = self._waiting.pop(token, (None, 0.0))
        if channel is None:
            return None
        memory = SharedMemory(channel, segments)
        if not memory.offer():
            memory.close()
            return None
        return memory

    def _collect(self) -> None:
        now = time.monotonic()
        for token in [token for token, (_, since) in self._waiting.items() if now - since > _WAITING_S]:
            self._waiting.pop(token)[0].close()
        while len(self._waiting) < _MAX_WAITING:
            try:
                channel, _ = self._socket.accept()
            except OSError:  # nobody is there, or no descriptor is left
                return
            close_in_child(channel)
            channel.setblocking(False)
            # A worker sends its token before it greets.
            token = b""
            with contextlib.suppress(OSError):
                token = channel.recv(TOKEN_BYTES + 1)
            if len(token) == TOKEN_BYTES and _is_own_user(channel):
                self._waiting[token] = (channel, now)
            else:
                channel.close()

    def close(self) -> None:
        """End it; memory that is shared stays."""
        self._socket.close()
        for channel, _ in self._waiting.values():
            channel.close()
        self._waiting.clear()
        # The next model of this name may already listen at its place.
        with contextlib.suppress(OSError):
            if self._inode and self._path.lstat().st_ino == self._inode:
                self._path.unlink()


class MemoryCaller:
    """A worker's connection to a `MemoryListener`, before it has greeted."""

    def __init__(self, address: str) -> None:
        self.token = b""  # what to greet with; empty if there is nobody to share memory with
        self._channel: socket.socket | None = None
        path = memory_path(address)
        if path is None:
            return
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        close_in_child(channel)
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            channel.connect(os.fspath(path))
            if not _is_own_user(channel):
                raise PermissionError(f"{path} is another user's")
            channel.send(token)
        except OSError as error:
            logger.debug("no memory is shared with the proxy at %s: %s", address, error)
            channel.close()
            return
        self.token, self._channel = token, channel

    def accepted(self, segments: PeerSegments) -> SharedMemory | None:
        """Return the memory that is shared once the proxy has answered the greeting; `None` if it wants none."""
        if self._channel is None:
            return None
        memory = SharedMemory(self._channel, segments)
        self._channel = None
        if memory.read_segment():
            return memory
        memory.close()
        return None

    def close(self) -> None:
        """Give up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class SharedMemory:
    """Both arenas of a worker and its proxy: blocks of our own to write, and blocks of the peer to read.

    Blocks of our own may be taken and given back by different threads.
    """

    def __init__(self, channel: socket.socket, segments: PeerSegments) -> None:
        self._channel = channel
        self._segments = segments
        self._lock = threading.Lock()
        self._own = OwnArena(segments.budget)
        self._theirs = PeerArena(segments.released)
        self._closed = False

    # ---- blocks of our own ------------------------------------------------------------------------------------------

    def offer(self) -> bool:
        """Announce a first segment; return whether that worked."""
        with self._lock:
            return self._grow(1)

    def allocate(self, length: int, *, at_most: int | None = None, grow: bool = True) -> OwnedBlock | None:
        """Take a block; `None` if there is no room."""
        with self._lock:
            if self._closed or (at_most is not None and self._own.in_use + length > at_most):
                return None
            block = self._own.allocate(length)
            if block is None and grow and self._grow(length):
                block = self._own.allocate(length)
            return block

    def _grow(self, length: int) -> bool:
        if self._closed or not self._own.can_grow(length):
            return False
        try:
            segment = self._own.add_segment(length)
        except ArenaFullError:
            return False
        packet = pack_segment(segment.number, segment.size)
        try:
            socket.send_fds(self._channel, [packet], [segment.fd], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            # The peer does not know this memory, so no more is shared.
            logger.warning("no more memory is shared: %s", error)
            self._closed = True
            return False
        finally:
            os.close(segment.fd)
        return True

    def give_back(self, block: OwnedBlock) -> None:
        """Free a block that the peer has read, or never learnt of."""
        with self._lock:
            self._own.release(block)

    def mark_cancelled(self, block: OwnedBlock, request: int) -> None:
        """Set the byte `cancelled` of a request of the batch in that block."""
        entry = block.offset + layout.RECORD.size + request * layout.REQUEST.size
        block.memory[entry + layout.REQUEST_CANCELLED_OFFSET] = 1

    def trim(self, idle_s: float) -> list[int]:
        """Drop segments that were unused for `idle_s` seconds; return their numbers for the peer."""
        with self._lock:
            return self._own.trim(idle_s) if self._own.has_idle() else []

    # ---- blocks of the peer ----------------------------------------------------------------------------------------

    def read_segments_until(self, number: int) -> None:
        """Read the peer's announcements on the other socket, up to a segment that its message names."""
        # Announcements there arrive before the message that names them.
        while number and number not in self._segments.sizes and self.read_segment():
            pass

    def view(self, segment: int, offset: int, length: int) -> tuple[ViewedBlock, Any]:
        """Return a block of the peer, see `PeerArena.block`."""
        return self._theirs.block(segment, offset, length)

    def forget(self, segment: int) -> None:
        """Drop a segment that the peer has closed."""
        self._theirs.detach(segment)

    def read_segment(self) -> bool:
        """Read an announcement; return whether there was one."""
        try:
            packet, fds, _, _ = socket.recv_fds(
                self._channel, HEADER_SIZE + 1, 4, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return False
        try:
            if not packet:
                return False
            kind, _, _, _, _, number, _, _, size = read_header(packet, len(packet))
            if kind != SEGMENT:
                raise ProtocolError(f"{name_of(kind)} came instead of a segment")
            self._segments.announce(number, size, len(fds))
            self._theirs.attach(number, fds.pop(), size)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def close(self) -> None:
        """Stop sharing memory; it stays as long as views of it do."""
        with self._lock:
            self._closed = True
        self._channel.close()
