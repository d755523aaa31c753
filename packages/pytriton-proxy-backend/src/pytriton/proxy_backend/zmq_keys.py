"""CURVE keys for workers and Python proxies that meet over a network: always in files, never on a command line."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from .errors import ProxyBackendError

__all__ = ["CurveKeys", "KeyFileError", "check_secret_file"]


class KeyFileError(ProxyBackendError, ValueError):
    """A file with keys is missing, open to others, or holds none.

    Attributes:
        path: The file in question.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """The keys of a worker: it proves who it is, and knows whom it talks to.

    Attributes:
        secret_key_file: Its own key pair, `<name>.key_secret`, which nobody else may read.
        server_key_file: The public key of the proxy, `<name>.key`.
    """

    secret_key_file: Path
    server_key_file: Path


def check_secret_file(path: Path) -> None:
    """Checks that a file with a secret key is there and is for its owner alone.

    Raises:
        KeyFileError: If not.
    """
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
