"""The access token of a server for commands of the same user on the same host, which find it by the server's port.

It is in a file that only this user can read, and which is locked for as long as the server's owner lives. So nobody is
sent the token who listens at the port of a server that has ended.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytriton.client.exceptions import PyTritonClientInvalidUrlError
from pytriton.client.management import TritonUrl
from pytriton.proxy_backend.system.forks import call_in_child, replace_descriptors
from pytriton.proxy_backend.system.home import HomeError, default_home

__all__ = ["find_token", "leave_token"]

logger = logging.getLogger(__name__)

_FOLDER = "tokens"
# Names of files that are not whole yet begin so.
_UNFINISHED = "."
_MOST_BYTES = 16 * 1024
_ATTEMPTS = 10


@contextlib.contextmanager
def leave_token(token: str, urls: Sequence[str]) -> Iterator[Path | None]:
    """Leave the token of a server that runs for others of this user, until the block ends.

    Args:
        token: The token.
        urls: Where the server listens.

    Yields:
        The file; None where none can be made, of which the log tells the reason at DEBUG.
    """
    try:
        file = _TokenFile(json.dumps({"urls": list(urls), "token": token}))
    except (OSError, HomeError) as error:
        logger.debug("The access token is left nowhere: %s", error)
        yield None
        return
    try:
        yield file.path
    finally:
        file.remove()


def find_token(url: TritonUrl) -> tuple[TritonUrl, str] | None:
    """Find the token that a server of this user on this host has left.

    Args:
        url: Where the server is, as somebody has written it.

    Returns:
        The address at which that server listens, without a proxy, and its token; None where there is none.
    """
    try:
        paths = sorted(_folder().iterdir())
    except (OSError, HomeError):
        return None
    for path in paths:
        left = _read(path)
        for address in () if left is None else left[0]:
            is_meant = url.hostname == address.hostname or (
                url.hostname == "localhost" and _is_loopback(address.hostname)
            )
            if (
                is_meant
                and (url.scheme, url.port) == (address.scheme, address.port)
                and not url.path
                and left is not None
            ):
                return dataclasses.replace(url, hostname=address.hostname, trust_env=False), left[1]
    return None


class _TokenFile:
    """A file with the token, locked by this process."""

    def __init__(self, text: str) -> None:
        folder = _folder()
        for _ in range(_ATTEMPTS):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder.lstat(), stat.S_ISDIR):
                raise PermissionError(f"{folder} is open to others than its owner")
            # Those of servers that were killed.
            for path in folder.iterdir():
                _read(path)
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed the folder, which was empty
                self.path, self._descriptor = _make(folder, text)
                call_in_child(self, _TokenFile._let_go_in_child)
                return
        raise FileNotFoundError(f"{folder} is removed again and again")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            # Where there is no other.
            self.path.parent.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _let_go_in_child(self) -> None:
        """In a forked child: the lock is the parent's, and lasts as long as any descriptor."""
        if self._descriptor >= 0:
            replace_descriptors([self._descriptor])


def _make(folder: Path, text: str) -> tuple[Path, int]:
    """Return a new file with a text, and the descriptor by which it is locked."""
    name = secrets.token_hex(8)
    unfinished, path = folder / f"{_UNFINISHED}{name}", folder / name
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, text.encode())
        unfinished.rename(path)
    except OSError:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return path, descriptor


def _folder() -> Path:
    return default_home() / _FOLDER


def _is_private(status: os.stat_result, is_kind: Any) -> bool:
    return bool(is_kind(status.st_mode)) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _is_loopback(hostname: str) -> bool:
    return hostname == "::1" or hostname.startswith("127.")


def _read(path: Path) -> tuple[list[TritonUrl], str] | None:
    """Return what a server has left there; None, and the file is gone, where that server is."""
    if path.name.startswith(_UNFINISHED):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _is_private(os.fstat(descriptor), stat.S_ISREG):
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            said = json.loads(os.read(descriptor, _MOST_BYTES))
            return [TritonUrl.from_url(url) for url in said["urls"]], str(said["token"])
        path.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, TypeError, PyTritonClientInvalidUrlError) as error:
        logger.debug("%s is no token that a server has left: %s", path, error)
    finally:
        os.close(descriptor)
    return None
