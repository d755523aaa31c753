"""The access token of a server for programs of the same user on the same host, which find it by the server's port.

It is in a file that only this user can read, and which is locked for as long as the server's owner lives. So nobody is
sent the token who listens at the port of a server that has ended. Its name tells where that server listens: on which
boot of which host, in which network namespace. A home may be shared between hosts and containers, and 127.0.0.1 is
another address in each; what is of another is left alone.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytriton.proxy_backend.system.forks import call_in_child, replace_descriptors
from pytriton.proxy_backend.system.home import HomeError, default_home

if TYPE_CHECKING:
    from pytriton.client.management import TritonUrl

logger = logging.getLogger(__name__)

_FOLDER = "tokens"
# The second group is the address. The names of unfinished files begin with a point.
_NAME = re.compile(r"(\.?)([0-9a-f]{16})-[0-9a-f]{16}")
_MOST_BYTES = 16 * 1024
_ATTEMPTS = 10


class FoundToken(NamedTuple):
    """What a server of this user on this host has left for its address."""

    url: "TritonUrl"
    token: str
    metrics_port: int | None


class _Left(NamedTuple):
    urls: list[str]
    token: str
    metrics_port: int | None


@contextlib.contextmanager
def leave_token(token: str, urls: Sequence[str], metrics_port: int | None = None) -> Iterator[Path | None]:
    """Leave the token of a running server, and the port of its metrics, for other processes of this user.

    It is removed when the block ends.

    Yields the file, or None if it cannot be written.
    """
    try:
        file = _TokenFile(json.dumps({"urls": list(urls), "token": token, "metrics_port": metrics_port}))
    except (OSError, HomeError) as error:
        logger.debug("The access token is left nowhere: %s", error)
        yield None
        return
    try:
        yield file.path
    finally:
        file.remove()


def use_token(url: "TritonUrl", access_token: str | None) -> tuple["TritonUrl", str | None]:
    """Return the address and the token to ask a server with: those given, or else those that `find_token` finds."""
    found = None if access_token else find_token(url)
    return (url, access_token) if found is None else (found.url, found.token)


def find_token(url: "TritonUrl") -> FoundToken | None:
    """Find the token that a server of this user on this host has left.

    Returns where it listens, the token, and the port of its metrics if it has one; None if there is no such server.
    """
    # Imported late, because a server that leaves its token needs no client.
    from pytriton.client.exceptions import PyTritonClientInvalidUrlError
    from pytriton.client.management import TritonUrl

    try:
        with _opened(default_home() / _FOLDER) as folder:
            all_left = _read_all(folder)
    except (OSError, HomeError):
        return None
    for left in all_left:
        try:
            addresses = [TritonUrl.from_url(each) for each in left.urls]
        except PyTritonClientInvalidUrlError as error:
            logger.debug("A server has left no addresses: %s", error)
            continue
        for address in addresses:
            is_meant = url.hostname == address.hostname or (
                url.hostname == "localhost" and _is_loopback(address.hostname)
            )
            if is_meant and (url.scheme, url.port) == (address.scheme, address.port) and not url.path:
                own_url = dataclasses.replace(url, hostname=address.hostname, trust_env=False)
                return FoundToken(own_url, left.token, left.metrics_port)
    return None


class _TokenFile:
    """A file with the token, locked by this process."""

    def __init__(self, text: str) -> None:
        path = default_home() / _FOLDER
        for _ in range(_ATTEMPTS):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Other processes may remove the empty folder, and unfinished files that are not locked yet.
            with contextlib.suppress(FileNotFoundError, BlockingIOError), _opened(path) as folder:
                # This removes the files of servers that were killed.
                _read_all(folder)
                name, self._descriptor = _make(folder, text)
                self.path = path / name
                call_in_child(self, _TokenFile._let_go_in_child)
                return
        raise FileNotFoundError(f"{path} is removed again and again")

    def remove(self) -> None:
        path = self.path.parent
        with contextlib.suppress(OSError):
            with _opened(path) as folder:
                _unlink(self.path.name, folder, self._descriptor)
            # The folder is removed if it is empty.
            path.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _let_go_in_child(self) -> None:
        """In a forked child: the lock is the parent's, and lasts as long as any descriptor."""
        if self._descriptor >= 0:
            replace_descriptors([self._descriptor])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the folder, so that nobody can replace it meanwhile."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(folder), stat.S_ISDIR):
            raise PermissionError(f"{path} is another's, or open to others than its owner")
        yield folder
    finally:
        os.close(folder)


def _make(folder: int, text: str) -> tuple[str, int]:
    """Return the name of a new file with a text, and the descriptor by which it is locked."""
    name = f"{_place()}-{secrets.token_hex(8)}"
    unfinished = f".{name}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, text.encode())
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        for each in (unfinished, name):
            with contextlib.suppress(OSError):
                _unlink(each, folder, descriptor)
        os.close(descriptor)
        raise
    return name, descriptor


def _place() -> str:
    """Return a mark of the boot, the host and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net")
    return hashlib.sha256(f"{boot} {network.st_dev} {network.st_ino}".encode()).hexdigest()[:16]


def _unlink(name: str, folder: int, descriptor: int) -> None:
    """Remove a file if it is the one that is open."""
    if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(descriptor)):
        os.unlink(name, dir_fd=folder)


def _is_private(status: os.stat_result, is_kind: Any) -> bool:
    return bool(is_kind(status.st_mode)) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _is_loopback(hostname: str) -> bool:
    return hostname == "::1" or hostname.startswith("127.")


def _read_all(folder: int) -> list[_Left]:
    """Return the files of the running servers of this host, and remove those of killed ones."""
    place = _place()
    found = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None or match[2] != place:
            continue
        try:
            left = _read(name, folder, is_finished=not match[1])
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("%s is no token that a server has left: %s", name, error)
            continue
        if left is not None:
            found.append(left)
    return found


def _read(name: str, folder: int, *, is_finished: bool) -> _Left | None:
    """Return what a server has left in a file; None if the server is gone, which removes the file."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        if not _is_private(os.fstat(descriptor), stat.S_ISREG):
            return None
        is_held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        left = _parse(os.read(descriptor, _MOST_BYTES)) if is_finished else None
        if is_held:
            return left
        _unlink(name, folder, descriptor)
    finally:
        os.close(descriptor)
    return None


def _parse(text: bytes) -> _Left:
    said = json.loads(text)
    # Servers of older versions leave no port.
    urls, token, metrics_port = said["urls"], said["token"], said.get("metrics_port")
    if not isinstance(urls, list) or not isinstance(token, str) or not isinstance(metrics_port, int | None):
        raise TypeError(
            f"expected URLs, a token and a port, got {urls!r:.100}, one of {type(token)}, {metrics_port!r:.20}"
        )
    return _Left(urls, token, metrics_port)
