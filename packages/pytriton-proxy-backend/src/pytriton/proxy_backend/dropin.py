"""Models of ours in the model repository of somebody else's tritonserver.

A model is one folder, which is put there, replaced and taken away as a whole. A manifest in it says that it is ours and
what was written; a folder without one, or with anything else in it than what was written, is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ._dropin_files import MANIFEST_NAME, Manifest, difference, read_manifest, render_manifest
from .description import description_path, read_description, write_description
from .errors import DescriptionError, DropInError
from .model import ModelSpec

__all__ = ["DropInModel", "add_model", "find_models", "remove_model"]

Outcome = Literal["added", "replaced", "unchanged"]

# Of renameat2(2). The exchange leaves no moment in which the model is not there.
_NOREPLACE = 1
_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class DropInModel:
    """A folder of a model repository that is ours.

    Attributes:
        path: The folder.
        manifest: What was written when, `None` where the manifest itself cannot be read.
        edits: In words, where the folder differs from its manifest; empty if nowhere.
    """

    path: Path
    manifest: Manifest | None
    edits: tuple[str, ...]


def add_model(
    repository: Path, model: ModelSpec, manifest: Manifest, files: Mapping[str, bytes], *, replace: bool = False
) -> Outcome:
    """Puts a model into a repository, in one step.

    Args:
        repository: The model repository, which exists.
        model: The model; its description goes beside its socket, too, where that folder is there already.
        manifest: What the folder is; the hashes of the files are added here.
        files: The content of every file, by its path relative to the model's folder.
        replace: Whether a model of ours that differs may be there already, and is to be replaced.

    Returns:
        What was done. A model that is there as it would be written is left alone.

    Raises:
        DropInError: If there is no such repository, it cannot be written to, or the name is taken: by something that is
            not ours, has local edits, or (without `replace`) differs. Nothing has changed then.
    """
    target = repository / model.name
    with _locked(repository):
        before = inspect_folder(target)
        wanted = manifest.with_files(files)
        if before is not None:
            if not before.edits and before.manifest is not None and before.manifest.same_as(wanted):
                _describe_endpoint(manifest, model)
                return "unchanged"
            _refuse_edited(before, "replace")
            if not replace:
                raise DropInError(
                    f"{target} is a model of ours with another content. Ask for its replacement (--replace), or "
                    f"choose another name",
                    path=str(target),
                )
        elif os.path.lexists(target):
            raise _foreign(target)
        try:
            with _staging(repository) as staging:
                staged = staging / model.name
                _write(staged, {**files, MANIFEST_NAME: render_manifest(wanted).encode()})
                if before is None:
                    _move_in(staged, target)
                else:
                    _swap(staged, target, staging)
        except OSError as error:
            raise DropInError(
                f"{target} cannot be written: {error.strerror or error}. Nothing was changed. Is the disk full, or the "
                f"repository read-only for this user?",
                path=str(target),
            ) from error
        if before is not None and before.manifest is not None and before.manifest.endpoint != manifest.endpoint:
            _forget_endpoint(before.manifest)
    _describe_endpoint(manifest, model)
    return "added" if before is None else "replaced"


def find_models(repository: Path) -> list[DropInModel]:
    """The models of ours in a repository, by name.

    Raises:
        DropInError: If there is no such repository.
    """
    found = [inspect_folder(folder) for folder in sorted(_entries(repository))]
    return [model for model in found if model is not None]


def remove_model(repository: Path, name: str) -> None:
    """Takes a model of ours out of a repository, in one step.

    Raises:
        DropInError: If there is none of this name, it is not ours, has local edits, or cannot be removed. Nothing has
            changed then.
    """
    check_name(name)
    target = repository / name
    with _locked(repository):
        model = inspect_folder(target)
        if model is None:
            if os.path.lexists(target):
                raise _foreign(target)
            raise DropInError(f"there is no model '{name}' in {repository}", path=str(target))
        _refuse_edited(model, "remove")
        try:
            with _staging(repository) as staging:
                os.rename(target, staging / name)
        except OSError as error:
            raise DropInError(f"{target} cannot be removed: {error.strerror or error}", path=str(target)) from error
    if model.manifest is not None:
        _forget_endpoint(model.manifest)


def inspect_folder(folder: Path) -> DropInModel | None:
    """What one folder of a repository is; `None` if it is not ours."""
    if folder.is_symlink() or not folder.is_dir() or not (folder / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = read_manifest(folder / MANIFEST_NAME)
    except DropInError as error:
        return DropInModel(folder, None, (str(error),))
    return DropInModel(folder, manifest, tuple(difference(folder, manifest)))


def check_name(name: str) -> None:
    """Checks that a model's name can be that of a folder.

    Raises:
        DropInError: If not.
    """
    if not name or name.startswith(".") or not all(char.isalnum() or char in "-_. " for char in name):
        raise DropInError(
            f"expected a model name of letters, digits, '-', '_', '.' and blanks that does not begin with '.', got "
            f"{name!r}",
            path=name,
        )


# ---- the folder ----------------------------------------------------------------------------------------------------


def _refuse_edited(model: DropInModel, verb: str) -> None:
    if model.edits:
        shown: Sequence[str] = model.edits[:5]
        raise DropInError(
            f"{model.path} was changed since it was written, so it is not for us to {verb} it: {'; '.join(shown)}. "
            f"Keep what you need of it, and remove the folder yourself",
            path=str(model.path),
        )


def _foreign(target: Path) -> DropInError:
    return DropInError(
        f"{target} is there already and was not made by pytriton-proxy-backend (it has no {MANIFEST_NAME}): choose "
        f"another name, or remove it yourself",
        path=str(target),
    )


def _entries(repository: Path) -> list[Path]:
    try:
        return list(repository.iterdir())
    except OSError as error:
        raise DropInError(
            f"expected a model repository at {repository}: {error.strerror or error}", path=str(repository)
        ) from error


@contextlib.contextmanager
def _locked(repository: Path) -> Iterator[None]:
    """Keeps other calls for the same repository waiting; on file systems without locks it does nothing."""
    try:
        fd = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DropInError(
            f"expected a model repository at {repository}: {error.strerror or error}", path=str(repository)
        ) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _staging(repository: Path) -> Iterator[Path]:
    """A folder on the same file system, whose content is gone afterwards.

    Inside the repository, because nothing else is known to be on its file system and writable. A server that looks at
    the repository at this very moment finds no model in it: it has no configuration.
    """
    folder = repository / f".pytriton-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _move_in(staged: Path, target: Path) -> None:
    try:
        _renameat2(staged, target, _NOREPLACE)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise _foreign(target) from error
        if error.errno not in _UNSUPPORTED:
            raise
        # What is there is refused by plain rename(2) as well, unless it is an empty folder.
        os.rename(staged, target)


def _swap(staged: Path, target: Path, staging: Path) -> None:
    try:
        _renameat2(staged, target, _EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        replaced = staging / "replaced"
        os.rename(target, replaced)
        try:
            os.rename(staged, target)
        except BaseException:
            os.rename(replaced, target)
            raise


def _renameat2(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)  # glibc has it from 2.28 on
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


# ---- beside the socket ---------------------------------------------------------------------------------------------


def _described_at(manifest: Manifest) -> Path | None:
    endpoint = manifest.endpoint.removeprefix("ipc://")
    return description_path(Path(endpoint)) if endpoint.startswith("/") else None


def _describe_endpoint(manifest: Manifest, model: ModelSpec) -> None:
    """Writes the description beside the socket, where that folder is on this machine; the one in the model stays."""
    path = _described_at(manifest)
    if path is not None:
        with contextlib.suppress(OSError):
            write_description(path, model)


def _forget_endpoint(manifest: Manifest) -> None:
    path = _described_at(manifest)
    if path is None:
        return
    with contextlib.suppress(OSError, DescriptionError):
        described = read_description(path)
        if (described.name, described.version) == (manifest.name, manifest.version):
            path.unlink()
