"""File locks of models that several processes serve together on one server: who serves them, and who is the last.

```
<endpoints>/<name>.users   locked, shared, by each process that serves the model `name` there
<endpoints>/<name>.load    locked by the process that is about to load it again
```

The locks go with their processes, however these end.
"""

import contextlib
import fcntl
import hashlib
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytriton.proxy_backend.system.forks import call_in_child, close_in_child, replace_descriptors
from pytriton.proxy_backend.system.processes import open_pidfd
from pytriton.server.models.service import WorkerService
from pytriton.server.models.worker_watch import sockets_at
from pytriton.server.tritonserver.ports import process_with_sockets
from pytriton.server.workspace import USERS_SUFFIX

ENDPOINT_PARAMETER = "pytriton_endpoint"
"""Parameter of the configuration that has the path of the model's socket."""
DIGEST_PARAMETER = "pytriton_digest"
"""Parameter of the configuration that has `models_digest` the model."""
REPLACED_PARAMETER = "pytriton_replaced"
"""This parameter in a configuration marks a model that replaced one of the server's own repository."""

_LOAD_SUFFIX = ".load"
_POLL_S = 0.02


def models_digest(models: Sequence[WorkerService], cache_bytes: int) -> str:
    """Return a digest that is equal in two processes that bind the same names, versions, tensors and configuration."""
    parts = [models[0].definition.comparable_text]
    for model in models:
        # The path of the socket does not matter; the other settings of the proxy do.
        anywhere = Path("/")
        settings = [line for _, text in model.side_files(anywhere, cache_bytes) for line in text.splitlines()]
        parts += [str(model.version), *(line for line in settings if not line.startswith("endpoint"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class ModelOnServer:
    """A model on the server, whoever loaded it."""

    endpoint: Path | None
    """The socket of its workers; None if this package did not make the model, or it has several versions."""
    digest: str | None
    """See `models_digest`; None if this package did not make the model."""
    has_replaced: bool = False
    """Whether this package made the model, in place of one of the server's repository."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelOnServer":
        """Parse the configuration that the server reports."""
        parameters = config.get("parameters") or {}
        texts = {name: str(value.get("string_value", "")) for name, value in parameters.items()}
        endpoint = texts.get(ENDPOINT_PARAMETER)
        return cls(
            endpoint=Path(endpoint) if endpoint else None,
            digest=texts.get(DIGEST_PARAMETER),
            has_replaced=REPLACED_PARAMETER in texts,
        )

    @property
    def is_within_reach(self) -> bool:
        """Whether its socket is there, and a process of this user has made it."""
        try:
            return (
                self.endpoint is not None and self.endpoint.is_socket() and self.endpoint.stat().st_uid == os.getuid()
            )
        except OSError:
            return False


class Membership:
    """A shared lock on a model, held by each process that serves it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._path = folder / f"{name}{USERS_SUFFIX}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_ino != os.stat(self._path).st_ino:
                raise FileNotFoundError(f"{self._path} was removed meanwhile")
        except BaseException:
            os.close(self._fd)
            raise
        call_in_child(self, Membership._release_in_child)

    def is_shared(self) -> bool:
        """Return whether other processes serve the model, too."""
        is_shared = not self.try_upgrade()
        # A failed upgrade loses the lock; the others hold shared locks only.
        with contextlib.suppress(BlockingIOError):
            self.downgrade()
        return is_shared

    def try_upgrade(self) -> bool:
        """Make the lock exclusive if nobody else holds it; return whether that worked.

        If not, the lock is lost. `close` or `downgrade` has to follow.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def downgrade(self) -> None:
        """Make the lock shared again."""
        fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """End it. The file goes with the last one."""
        if self._fd >= 0:
            if self.try_upgrade():
                for suffix in (USERS_SUFFIX, _LOAD_SUFFIX):
                    self._path.with_suffix(suffix).unlink(missing_ok=True)
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _release_in_child(self) -> None:
        """In a forked child: the share is the parent's."""
        replace_descriptors([self._fd])
        self._fd = -1


@contextlib.contextmanager
def load_lock(folder: Path, name: str, timeout_s: float) -> Iterator[bool]:
    """Hold the lock under which one of the processes loads a model again; yield whether it was acquired."""
    fd = os.open(folder / f"{name}{_LOAD_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        close_in_child(file)
        deadline = time.monotonic() + timeout_s
        is_acquired = False
        while not is_acquired:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_acquired = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
        yield is_acquired


class ServerProcessWatch:
    """Detects that the process behind a socket has ended, even if another process has replaced it."""

    def __init__(self, endpoint: Path) -> None:
        # A process in another container may have no process id here, or the system cannot watch it.
        pid = process_with_sockets({inode for _, inode in sockets_at(endpoint)})
        self._pidfd = None if pid is None else open_pidfd(pid)
        call_in_child(self, lambda watch: replace_descriptors([watch._pidfd]))

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, as far as that can be known."""
        if self._pidfd is None:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Stop watching."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
