"""The Python of a model that names one, `EXECUTION_ENV_PATH`: a folder, or an archive that is unpacked once.

As with Triton's Python backend, a folder is an environment of conda or a virtual environment, and an archive what
`conda-pack` or `venv-pack` makes of one. What its `bin/activate` exports is what the processes of the model get.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path, PurePosixPath

import pytriton.proxy

from ..process.child import Launch
from ..system.shortage import explain

_ACTIVATION_TIMEOUT_S = 120.0
# These variables belong to a shell.
_OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "PS1"})
_INTERPRETERS = ("python3", "python")


class ModelRefused(Exception):
    """A Python model cannot be loaded; the text is the load error."""


class Environments:
    """The environments of the models of one server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # Unpacked archives by device, inode, size and time of the file.
        self._unpacked: dict[tuple[int, int, int, int], Path] = {}
        self._launches: dict[Path, Launch] = {}

    def launch(self, path: str) -> Launch:
        """Return how a process is started with the interpreter of an environment, a folder or an archive."""
        try:
            # If several loads use one environment, the first one unpacks it.
            with self._lock:
                place = Path(path).resolve()
                if not place.exists():
                    raise ModelRefused(f"Failed to get the canonical path for {path}.")
                root = place if place.is_dir() else self._unpack(place)
                if root not in self._launches:
                    self._launches[root] = self._find(root)
                return self._launches[root]
        except (OSError, tarfile.TarError, EOFError) as error:
            reason = explain(error) if isinstance(error, OSError) else str(error)
            raise ModelRefused(f"EXECUTION_ENV_PATH {path} cannot be used: {reason}") from error

    def _unpack(self, archive: Path) -> Path:
        status = archive.stat()
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in self._unpacked:
            target = self._folder / str(next(self._numbers))
            target.mkdir(parents=True)
            try:
                with tarfile.open(archive) as tar:
                    _unpack(tar, target)
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
            self._unpacked[key] = target
        return self._unpacked[key]

    def _find(self, root: Path) -> Launch:
        candidates = [root / "bin" / name for name in _INTERPRETERS]
        python = next((each for each in candidates if os.access(each, os.X_OK)), None)
        if python is None:
            raise ModelRefused(f"EXECUTION_ENV_PATH {root} holds no interpreter that can be run: {candidates[0]}")
        variables: dict[str, str | None] = dict(_activated(root))
        own = str(self._own_package())
        inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [own, inherited]))
        # These variables are about the server's own Python.
        variables |= dict.fromkeys(("PYTHONHOME", "PYTHONEXECUTABLE"))
        return Launch(python=str(python), environment=variables)

    def _own_package(self) -> Path:
        """Return a folder with the modules of a host, and no other installed package."""
        folder = self._folder / "lib"
        for source in (Path(__file__).resolve().parent.parent, Path(pytriton.proxy.__path__[0]).resolve()):
            link = folder / "pytriton" / source.name
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source, target_is_directory=True)
        return folder


def _unpack(tar: tarfile.TarFile, target: Path) -> None:
    """Unpack an archive into a folder and nowhere else.

    The rules are those of the standard library's data filter, which older Pythons lack or get wrong, so the place where
    each member would be written is checked.
    """
    # The members are checked here, in addition to the library's own checks.
    tar.extraction_filter = staticmethod(lambda each, _: each)
    interpreters = []
    for member in tar:
        _check_place(member.name, target)
        if member.issym() and _is_interpreter(member.name):
            interpreters.append(member)
            continue
        if member.issym():
            _check_link(member, target)
        elif member.islnk():
            _check_hard_link(member, target)
        elif not (member.isfile() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name!r} is neither a file, nor a folder, nor a link")
        _clear(target / member.name)
        safe = tarfile.data_filter(member, str(target)) if hasattr(tarfile, "data_filter") else member
        safe.uid, safe.gid, safe.uname, safe.gname = os.getuid(), os.getgid(), "", ""
        safe.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
        tar.extract(safe, target)
    # The interpreter of a virtual environment is a link to another Python. These links come last, so that nothing is
    # written through them.
    for member in interpreters:
        _check_place(member.name, target)
        _clear(target / member.name)
        (target / member.name).parent.mkdir(exist_ok=True)
        (target / member.name).symlink_to(member.linkname)


def _is_interpreter(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parent == PurePosixPath("bin") and path.name.startswith("python")


def _check_place(name: str, target: Path) -> None:
    path = PurePosixPath(name)
    parent = target / path.parent
    if path.is_absolute() or ".." in path.parts or parent.resolve() != target.resolve() / path.parent:
        raise tarfile.ExtractError(f"{name!r} would lie outside of the folder that it is unpacked into")


def _check_link(member: tarfile.TarInfo, target: Path) -> None:
    place = target / PurePosixPath(member.name).parent / member.linkname
    if os.path.isabs(member.linkname) or not place.resolve().is_relative_to(target.resolve()):
        raise tarfile.ExtractError(
            f"{member.name!r} is a link out of the folder that it is unpacked into, to {member.linkname!r}; only those "
            "of interpreters, bin/python*, may be. Pack what it leads to in its place"
        )


def _check_hard_link(member: tarfile.TarInfo, target: Path) -> None:
    _check_place(member.linkname, target)
    place = target / member.linkname
    # For a missing target, the library would unpack another member of that name.
    if place.is_symlink() or not place.is_file():
        raise tarfile.ExtractError(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file before it")


def _clear(place: Path) -> None:
    """Make room for an archive member, so that it is not written through a link."""
    if place.is_symlink() or place.is_file():
        place.unlink()


def _activated(root: Path) -> dict[str, str]:
    """Return the variables that the activation of an environment changes."""
    script = root / "bin" / "activate"
    if not script.is_file():
        return {"PATH": os.pathsep.join([str(root / "bin"), os.environ.get("PATH", os.defpath)])}
    command = 'source "$0" >&2 && exec env -0'
    try:
        done = subprocess.run(
            ["bash", "-c", command, str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ACTIVATION_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise ModelRefused(f"{script} ended with exit code {error.returncode}: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"{script} did not end within {_ACTIVATION_TIMEOUT_S:g} s") from error
    variables = dict(item.split("=", 1) for item in os.fsdecode(done.stdout).split("\0") if "=" in item)
    before = os.environ
    return {
        name: text
        for name, text in variables.items()
        if before.get(name) != text and name not in _OF_THE_SHELL and not name.startswith("BASH_FUNC_")
    }
