"""ZeroMQ, as little of it as worker and Python proxy need. The one module that imports pyzmq.

A socket tells what came, and which of its connections ended: each message says over which connection (a number of the
process's own) it came, and the monitor of the socket says which of them are gone. Heartbeats, answered by pyzmq's own
thread whatever Python is busy with, make an end of a link that was cut.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from ..system.forks import call_in_child, replace_descriptors
from .keys import CurveKeys, KeyFileError, check_secret_file

logger = logging.getLogger(__name__)

# After this long without signs of life, both ends treat a link as lost. The worker uses the shorter of its own time and
# the proxy's.
LINK_TIMEOUT_S = 3.0
_HEARTBEATS_IN_TIME = 3
_HANDSHAKE_TIMEOUT_MS = 5000
_LINGER_MS = 1000
_QUEUED_RESPONSES = 64

_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED


class BindError(Exception):
    """An address cannot be listened at."""


class WouldBlockError(Exception):
    """There is no room for a message now."""


class UnreachableError(Exception):
    """The peer that a message is for is gone."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a connection."""

    kind: str  # "connected", "gone" or "refused" (by CURVE)
    link: int  # the number of the connection


class Message:
    """One message as it came."""

    __slots__ = ("link", "packet", "parts", "peer")

    def __init__(self, frames: Sequence[Any], *, has_peer: bool) -> None:
        self.peer = bytes(frames[0].buffer) if has_peer else b""  # whom it is from, where several may be connected
        self.link = int(frames[0].get(zmq.SRCFD))  # the number of the connection that it came over
        body = frames[1:] if has_peer else frames
        self.packet = bytes(body[0].buffer) if body else b""  # its first part
        # The memory of the others; it stays as long as anything refers to it.
        self.parts: list[memoryview] = [frame.buffer for frame in body[1:]]


class ZmqSocket:
    """A socket of one thread; only `wake` may be called from others."""

    def __init__(
        self,
        address: str,
        *,
        listen: bool,
        max_message_bytes: int = -1,
        client_keys: CurveKeys | None = None,
        server_keys: tuple[Path, Path] | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._closed = False
        self._wake_lock = threading.Lock()
        self._file: tuple[Path, int] | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll = select.epoll()
        self._listens = listen
        # The descriptors of its connections with their inodes, because ZeroMQ may close one before it reports that.
        self._links: dict[int, int] = {}
        call_in_child(self, ZmqSocket._let_go)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if listen else zmq.DEALER)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_GONE | _REFUSED | _CONNECTED)
        try:
            self._set_options(max_message_bytes, round(link_timeout_s * 1000))
            if server_keys is not None:
                self._serve_curve(*server_keys)
            if client_keys is not None:
                self._use_curve(client_keys)
            if listen:
                self._bind(address)
            else:
                self._socket.connect(address)
        except BaseException:
            self.close()
            raise
        for fd in (self._socket.fileno(), self._monitor.fileno(), self._wake_read):
            self._epoll.register(fd, select.EPOLLIN)

    def _set_options(self, max_message_bytes: int, link_timeout_ms: int) -> None:
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.IPV6: 1,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_TIMEOUT_MS,
            zmq.HEARTBEAT_IVL: link_timeout_ms // _HEARTBEATS_IN_TIME,
            zmq.HEARTBEAT_TIMEOUT: link_timeout_ms,
            # The peer learns this time, and uses it instead of its own.
            zmq.HEARTBEAT_TTL: link_timeout_ms,
            zmq.MAXMSGSIZE: max_message_bytes,
            zmq.IMMEDIATE: 1,
        }
        if self._listens:
            # The queue is bounded by the batches that workers take; an unknown peer has to be an error.
            options |= {zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 0}
        else:
            # After a lost connection the worker has to greet again, so ZeroMQ must not reconnect.
            options |= {
                zmq.RECONNECT_IVL: -1,
                zmq.SNDHWM: _QUEUED_RESPONSES,
                zmq.CONNECT_TIMEOUT: _HANDSHAKE_TIMEOUT_MS,
            }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def _bind(self, address: str) -> None:
        # The umask makes the file for its owner alone. Nothing else in this process makes files at this moment.
        path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if path is not None and path.exists() and not path.is_socket():
            # ZeroMQ would remove the file silently.
            raise BindError(f"{path} is there and is not a socket; remove it, or choose another endpoint")
        before = os.umask(0o177)
        try:
            self._socket.bind(address)
        finally:
            os.umask(before)
        if path is not None:
            self._file = (path, path.stat().st_ino)

    def _serve_curve(self, secret_key_file: Path, clients: Path) -> None:
        public, secret = _load_keys(secret_key_file, secret=True)
        if not clients.is_dir():
            raise KeyFileError(f"expected a folder with the public keys of workers at {clients}", path=str(clients))
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_KeyFolder(clients))
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret
        self._socket.curve_server = True

    def _use_curve(self, keys: CurveKeys) -> None:
        public, secret = _load_keys(keys.secret_key_file, secret=True)
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret
        self._socket.curve_serverkey = _load_keys(keys.server_key_file, secret=False)[0]

    # ---- what comes ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address, with the port that the system chose if it had to."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def fileno(self) -> int:
        """Return a descriptor that is readable when something may have come: then read until there is nothing more."""
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message may have come or `wake` was called; return False if the time is over."""
        woken = self._has_message() or bool(self._epoll.poll(timeout_s))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return woken

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def wake(self) -> None:
        """End a `wait`, from any thread; of a closed socket, nothing happens."""
        # A full pipe wakes the thread as well. The lock is needed because a closed descriptor's number may be reused.
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._wake_write, b"\0")

    def receive(self) -> Message | None:
        """Take a message that is there; `None` if there is none."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return Message(frames, has_peer=self._listens)

    def events(self) -> list[Event]:
        """Take the events of connections. They come before the messages that followed them."""
        found: list[Event] = []
        while True:
            try:
                raw = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            event = zmq.utils.monitor.parse_monitor_message(raw)
            kind = int(event["event"])
            name = (
                "connected" if kind & _CONNECTED else "refused" if kind & _REFUSED else "gone" if kind & _GONE else ""
            )
            if name:
                link = int(event["value"])
                self._links.pop(link, None)
                if name == "connected":
                    self._links[link] = _socket_inode(link)
                found.append(Event(name, link))

    # ---- what goes -------------------------------------------------------------------------------------------------

    def send(self, packet: bytes, *parts: Any, peer: bytes = b"") -> None:
        """Send a message. Large parts are not copied, so they must not change any more."""
        frames = [peer, packet, *parts] if self._listens else [packet, *parts]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise WouldBlockError from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise UnreachableError from error
            raise
        # Sending may process events, after which the descriptor does not signal them any more.
        if self._has_message():
            self.wake()

    def wait_writable(self, timeout_s: float) -> None:
        """Wait for room."""
        self._socket.poll(round(timeout_s * 1000), zmq.POLLOUT)

    def close(self) -> None:
        """Close it; sent messages still go out within a second if the peer takes them."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._file is not None:
            path, inode = self._file
            # The next model of this name may already listen at its place.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _let_go(self) -> None:
        """In a forked child, leave everything behind the descriptors to the parent."""
        links = [link for link, inode in self._links.items() if inode and _socket_inode(link) == inode]
        own = [] if self._closed else [self._epoll.fileno(), self._wake_read, self._wake_write]
        replace_descriptors([*links, *own])


def _socket_inode(descriptor: int) -> int:
    """Return the inode of a descriptor's socket; 0 if there is none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


class _KeyFolder:
    """Lets every peer connect whose public key is in a folder at that moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def callback(self, domain: str, key: bytes) -> bool:
        """Check a worker that connects; runs in the authenticator's thread."""
        try:
            paths = [path for path in self._folder.iterdir() if path.suffix == ".key"]
        except OSError as error:
            logger.error("the folder with the keys of workers cannot be read: %s", error)
            return False
        for path in paths:
            try:
                if zmq.auth.load_certificate(path)[0] == key:
                    return True
            except (OSError, ValueError) as error:
                logger.error("the key file %s cannot be read: %s", path, error)
        return False


def open_listener(
    address: str,
    *,
    max_message_bytes: int,
    keys: tuple[Path, Path] | None,
    link_timeout_s: float = LINK_TIMEOUT_S,
) -> ZmqSocket:
    """Return a listening socket, to which any number of peers may connect."""
    try:
        return ZmqSocket(
            address, listen=True, max_message_bytes=max_message_bytes, server_keys=keys, link_timeout_s=link_timeout_s
        )
    except zmq.ZMQError as error:
        raise BindError(str(error)) from error


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair in files that only their owner may read."""
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise KeyFileError(f"{path} is there already, and keys are never overwritten", path=str(path))
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(os.fspath(folder), name)
    except OSError as error:
        raise KeyFileError(f"the keys cannot be written to {folder}: {error.strerror}", path=str(folder)) from error
    finally:
        os.umask(before)
    return public, secret


def _load_keys(path: Path, *, secret: bool) -> tuple[bytes, bytes]:
    if secret:
        check_secret_file(path)
    try:
        public_key, secret_key = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error}", path=str(path)) from error
    if secret and secret_key is None:
        raise KeyFileError(f"{path} holds no secret key: name the file that ends with .key_secret", path=str(path))
    return public_key, secret_key or b""
