"""The folder that holds the files of one server: where it is, who owns it, and when it goes.

```
<workspace>/            0700
    .lock               locked by the owner for as long as it lives
    models/             model repository
    folders/            links to models of the user's that are served as they are
    backends/           what tritonserver loads its backends from
    endpoints/          unix sockets between tritonserver and the workers
    hosts/              the same for the processes of `model.py` models, where workers serve these
```
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from pytriton.proxy_backend.system.forks import call_in_child, replace_descriptors
from pytriton.proxy_backend.system.home import HomeError, check_utf8, default_home
from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.errors import WorkspaceError

__all__ = ["USERS_SUFFIX", "Workspace", "default_home", "remove_abandoned"]

_PREFIX = "server-"
_LOCK = ".lock"
_ATTEMPTS = 10
_CONTENTS = {_LOCK, "models", "folders", "backends", "endpoints", "hosts"}
USERS_SUFFIX = ".users"
"""The suffix of files beside the sockets. While one of them is locked, the folder stays, see `sharing`."""

logger = logging.getLogger(__name__)


class Workspace:
    """A folder for the files of one server. Nothing is written before `create`.

    Args:
        workspace_path: Where to make the folder. It must not exist yet, so that nobody's files are removed with it.
            None takes a new folder under `default_home()`.

    Raises:
        FileExistsError: `workspace_path` exists.
        WorkspaceError: Nothing says where the folder is to be, or a path that is no UTF-8.
    """

    def __init__(self, workspace_path: "str | os.PathLike[str] | None" = None) -> None:
        self._automatic = workspace_path is None
        self._lock_fd: int | None = None
        self._folder_fd: int | None = None
        self._created = False
        call_in_child(self, Workspace._release_in_child)
        if workspace_path is None:
            self._path = self._new_path()
        else:
            self._path = Path(workspace_path).expanduser().absolute()
            with _as_workspace_error(workspace_path):
                check_utf8(self._path, "Triton(workspace=...)")
            self._refuse_existing()

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return self._path

    @property
    def model_store_path(self) -> Path:
        """The model repository."""
        return self._path / "models"

    @property
    def folders_path(self) -> Path:
        """A model repository of links to folders of the user's; made on demand."""
        return self._path / "folders"

    @property
    def backends_path(self) -> Path:
        """The folder that tritonserver looks for backends in."""
        return self._path / "backends"

    @property
    def endpoints_path(self) -> Path:
        """The folder of the sockets between tritonserver and the workers."""
        return self._path / "endpoints"

    @property
    def hosts_path(self) -> Path:
        """The folder of the sockets between tritonserver and the processes of `model.py` models; made on demand."""
        return self._path / "hosts"

    def exists(self) -> bool:
        """Tell whether the folder is there."""
        return self._path.exists()

    @property
    def is_damaged(self) -> bool:
        """Whether something is gone that `create` has made."""
        return self._created and not all(path.exists() for path in (self._path / _LOCK, *self._folders))

    @property
    def _folders(self) -> tuple[Path, ...]:
        return self.model_store_path, self.backends_path, self.endpoints_path

    def is_empty(self) -> bool:
        """Tell whether the folder holds no file, its own sub-folders aside."""
        return not any(files for _, _, files in os.walk(self._path) if files != [_LOCK])

    def create(self) -> None:
        """Make the folder. For an automatic one, removes those of owners that died first.

        Raises:
            FileExistsError: Somebody else made the folder in the meantime.
            WorkspaceError: The folder cannot be made or written.
        """
        if self._created:
            return
        try:
            if self._automatic:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _sweep(self._path.parent)
                self._create_automatic()
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._refuse_existing()
                self._path.mkdir(mode=0o700)
                self._lock_fd = _lock_if_possible(self._path)
            self._created = True
            for folder in self._folders:
                folder.mkdir(mode=0o700)
            self._keep_cleaners_out()
        except FileExistsError as error:
            if self._automatic:
                raise self._unusable(error) from error
            raise
        except OSError as error:
            # This comes before the folder is removed, because the next attempt uses another one.
            unusable = self._unusable(error)
            self.clean()
            raise unusable from error

    def restore(self) -> None:
        """Make the folder anew that somebody has removed, in the same place, with nothing in it.

        Raises:
            OSError: It cannot be made.
        """
        self._let_go()
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = _lock_if_possible(self._path)
        for folder in self._folders:
            folder.mkdir(mode=0o700, exist_ok=True)
        self._keep_cleaners_out()

    def _keep_cleaners_out(self) -> None:
        """Lock the folder itself, because systemd-tmpfiles does not remove old files from a locked one."""
        self._folder_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # some file systems lack such locks
            fcntl.flock(self._folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _let_go(self) -> None:
        for descriptor in (self._lock_fd, self._folder_fd):
            if descriptor is not None:
                os.close(descriptor)
        self._lock_fd = self._folder_fd = None

    def clean(self) -> None:
        """Remove the folder with everything in it. Does nothing where `create` did not make it.

        What cannot be removed is named in a warning of the log.
        """
        if self._created:
            self._created = False
            try:
                if _is_in_use(self._path):
                    logger.info("%s stays as long as others serve models at the sockets in it.", self._path)
                else:
                    _remove(self._path)
            except OSError as error:
                logger.warning("The workspace %s is left: %s Remove it by hand.", self._path, explain(error))
        self._let_go()
        if self._automatic:
            # A second start gets a new name, because files of the first may be left.
            self._path = self._new_path()

    def _release_in_child(self) -> None:
        """In a forked child: the folder is the parent's, and so is the lock, which lasts as long as any descriptor."""
        self._created = False
        replace_descriptors([self._lock_fd, self._folder_fd])

    @staticmethod
    def _new_path() -> Path:
        with _as_workspace_error(None):
            return default_home() / f"{_PREFIX}{secrets.token_hex(4)}"

    def _create_automatic(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                self._path.mkdir(mode=0o700)
            except FileExistsError:
                self._path = self._new_path()
                continue
            self._lock_fd = _lock_or_remove(self._path)
            if self._lock_fd is not None:
                return
            self._path = self._new_path()
        raise WorkspaceError(
            f"No folder could be made under {self._path.parent} in {_ATTEMPTS} attempts: others remove them at once.",
            path=str(self._path.parent),
        )

    def _refuse_existing(self) -> None:
        if self._path.exists() or self._path.is_symlink():
            raise FileExistsError(
                f"The workspace {self._path} exists already. It is made for one server and removed with it: give a "
                "path that does not exist yet, or none at all."
            )

    def _unusable(self, error: OSError) -> WorkspaceError:
        advice = (
            "Set PYTRITON_HOME (or XDG_CACHE_HOME) to a folder that you may write to, or pass Triton(workspace=...)."
            if self._automatic
            else "Pass Triton(workspace=...) a path inside a folder that you may write to, or none at all."
        )
        return WorkspaceError(
            f"The workspace {self._path} cannot be made: {error.filename or self._path}: {explain(error, advice)}",
            path=str(self._path),
        )


@contextlib.contextmanager
def _as_workspace_error(path: "str | os.PathLike[str] | None") -> Iterator[None]:
    try:
        yield
    except HomeError as error:
        raise WorkspaceError(str(error), path=None if path is None else os.fspath(path)) from error


def _lock_or_remove(path: Path) -> int | None:
    """Lock a folder that was just made; remove it if that fails."""
    try:
        return _lock_new(path)
    except _LockDeniedError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise WorkspaceError(
            f"The workspace {path} cannot be locked: flock: {explain(error)} Without a lock, other servers would take "
            "it for one whose owner has died, and remove it. Set PYTRITON_HOME to a folder on a local file system, or "
            "pass Triton(workspace=...), a folder that nobody else removes.",
            path=str(path),
        ) from error
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def _lock_if_possible(path: Path) -> int | None:
    """Lock a folder that the user named if possible; nobody sweeps it, so it needs no lock."""
    try:
        return _lock_new(path)
    except _LockDeniedError as error:
        logger.debug("The workspace %s cannot be locked: %s", path, error)
        return None


class _LockDeniedError(OSError):
    """The file system, or a sandbox, knows no locks."""


def _lock_new(path: Path) -> int | None:
    """Lock a new folder for its owner; None when a sweep of another process was faster."""
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path / _LOCK).st_ino:
            return fd
    except (FileNotFoundError, BlockingIOError):
        # Another process removed it between the two calls.
        pass
    except OSError as error:
        os.close(fd)
        raise _LockDeniedError(error.errno, error.strerror) from error
    os.close(fd)
    return None


def _sweep(home: Path) -> None:
    """Remove the automatic workspaces in `home` whose lock nobody holds, because their owner is gone."""
    for candidate in _automatic_workspaces(home):
        try:
            # A folder without the file is being made right now, or is not ours.
            fd = os.open(candidate / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            if _is_in_use(candidate):
                continue
            logger.info("Removing %s: its owner ended without removing it.", candidate)
            _remove(candidate)
        finally:
            os.close(fd)


def remove_abandoned(path: Path) -> None:
    """Remove a workspace without owner and users; other folders are left alone."""
    try:
        # A server that others use as well named this path, so only a folder that looks like a workspace is removed.
        if path.is_symlink() or path.stat().st_uid != os.getuid() or not set(os.listdir(path)) <= _CONTENTS:
            return
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        if not _is_in_use(path):
            _remove(path)
    finally:
        os.close(fd)


def _is_in_use(path: Path) -> bool:
    """Return whether somebody serves models at the sockets in a workspace."""
    for file in (path / "endpoints").glob(f"*{USERS_SUFFIX}"):
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False


def _automatic_workspaces(home: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(home) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(_PREFIX) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                yield Path(entry.path)


def _remove(path: Path) -> None:
    failed: list[tuple[str, BaseException]] = []
    shutil.rmtree(path, onerror=lambda _function, name, info: failed.append((name, info[1])))
    if path.exists():
        name, error = failed[0] if failed else (str(path), None)
        reason = explain(error) if isinstance(error, OSError) else "."
        logger.warning(
            "The workspace %s could not be removed completely, because of %s: %s Remove it by hand.", path, name, reason
        )
