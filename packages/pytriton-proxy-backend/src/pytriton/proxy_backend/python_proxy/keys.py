"""CURVE keys for workers and Python proxies that meet over TCP: always in files, never on a command line."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import ProxyBackendError


class KeyFileError(ProxyBackendError, ValueError):
    """A file with keys is missing, open to others, or holds none.

    Attributes:
        path: The file in question.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class KeysMissingError(ProxyBackendError, ValueError):
    """An address that others can reach is to be used without keys, and nobody has said that this is safe.

    Attributes:
        address: The address in question.
    """

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """The keys of a worker: it proves who it is, and knows whom it talks to."""

    secret_key_file: Path  # its own key pair, `<name>.key_secret`, which nobody else may read
    server_key_file: Path  # the public key of the proxy, `<name>.key`


def check_secret_file(path: Path) -> None:
    """Check that a file with a secret key is there and is for its owner alone."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error.strerror}", path=str(path)) from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise KeyFileError(
            f"the key file {path} must be a plain file that its owner alone may read, its mode is "
            f"{stat.S_IMODE(status.st_mode):o}: chmod 600 {path}",
            path=str(path),
        )


def check_keys_given(address: str, *, has_keys: bool, insecure: bool, remedy: str) -> None:
    """Check that both ends of a link prove who they are, unless the address itself keeps others out.

    Only the server's user can reach an `ipc://` socket. Anybody can reach a port, on loopback every user of the
    machine: whoever attaches there gets requests, and whoever takes the port first gets workers.
    """
    # A path in the file system, with or without "://", has an owner.
    if has_keys or insecure or "://" not in address or address.startswith("ipc:///"):
        return
    raise KeysMissingError(
        f"{address} can be reached by others, on the loopback interface by every user of this machine: whoever "
        f"attaches there gets the requests, and whoever listens there first gets the workers. {remedy}",
        address=address,
    )
