"""Models of ours in the model repository of somebody else's tritonserver.

A model is one folder with one or more versions, which is put there, replaced and taken away as a whole: the other
versions go into the new folder as they are. A manifest in it says that it is ours and what was written; a folder
without one, or with anything else in it than what was written, is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..description import description_path, read_description, write_description
from ..errors import DescriptionError, DropInError
from ..model import ModelSpec
from ..system.shortage import explain
from .contents import CONFIG_NAME
from .manifest import MANIFEST_NAME, Manifest, difference, read_manifest, render_manifest

Outcome = Literal["added", "replaced", "unchanged"]

# URLs and file systems allow these characters.
_NAME = re.compile(r"(?!\.)[a-zA-Z0-9._-]+")
# A folder is made under such a name before it is moved into place; if that takes two steps, the old one is kept there
# meanwhile.
_STAGING = re.compile(r"\.pytriton-[0-9a-f]{8}")
_REPLACED = "replaced"
# A flag of renameat2(2), whose exchange leaves no moment without the model.
_NOREPLACE = 1
_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class DropInModel:
    """A folder of a model repository that is ours."""

    path: Path  # the folder
    manifest: Manifest | None  # what was written when, `None` if the manifest itself cannot be read
    edits: tuple[str, ...]  # in words, where the folder differs from its manifest; empty if nowhere


def add_model(
    repository: Path, model: ModelSpec, manifest: Manifest, files: Mapping[str, bytes], *, may_replace: bool = False
) -> Outcome:
    """Put a version of a model into a repository in one step, beside other versions.

    Returns what was done; an identical version is left alone, another one is replaced if `may_replace`. After an error
    nothing has changed.
    """
    target = repository / model.name
    with locked(repository):
        before = inspect_folder(target)
        wanted = manifest.with_files(files)
        old: Manifest | None = None
        if before is not None:
            old = unedited(before, "replace")
            kept = old.without(model.version)
            if kept.endpoints:
                _refuse_unlike(target, kept, wanted)
                wanted = _beside(wanted, kept)
            if old.same_as(wanted):
                _describe_endpoint(manifest, model)
                return "unchanged"
            if not may_replace and not _only_adds(old, wanted, model.version):
                raise DropInError(
                    f"{target} is a model of ours with another content. Ask for its replacement (--replace), or "
                    f"choose another name",
                    path=str(target),
                )
        elif os.path.lexists(target):
            raise foreign(target)
        _write_folder(repository, target, wanted, files, old)
        if old is not None and old.endpoints.get(model.version) not in (None, manifest.endpoints[model.version]):
            _forget_endpoint(old, model.version)
    _describe_endpoint(manifest, model)
    return "replaced" if old is not None and model.version in old.endpoints else "added"


def find_models(repository: Path) -> list[DropInModel]:
    """Return our models in a repository, by name."""
    found = [inspect_folder(folder) for folder in sorted(_entries(repository))]
    return [model for model in found if model is not None]


def models_at(repository: Path, endpoint: str) -> list[str]:
    """Say in words which of our models in a repository listen at one address; there should be one."""
    found = []
    for folder in sorted(_entries(repository)):
        # Only the manifests are read, because comparing all files takes time.
        with contextlib.suppress(DropInError):
            manifest = read_manifest(folder / MANIFEST_NAME)
            found += [
                f"model '{folder.name}' version {version}"
                for version, other in sorted(manifest.endpoints.items())
                # All converted models use the same socket, at which processes are asked for.
                if manifest.flavour != "hosts" and other.removeprefix("ipc://") == endpoint.removeprefix("ipc://")
            ]
    return found


def remove_model(repository: Path, name: str, version: int | None = None) -> None:
    """Take our model, or one version of it, out of a repository in one step. After an error nothing has changed."""
    check_name(name)
    target = repository / name
    with locked(repository):
        model = inspect_folder(target)
        if model is None:
            if os.path.lexists(target):
                raise foreign(target)
            raise DropInError(f"there is no model '{name}' in {repository}", path=str(target))
        manifest = unedited(model, "remove")
        if version is not None and version not in manifest.endpoints:
            there = ", ".join(map(str, sorted(manifest.endpoints)))
            raise DropInError(f"there is no version {version} in {target}; there are: {there}", path=str(target))
        gone = list(manifest.endpoints) if version is None else [version]
        if manifest.flavour == "hosts" and len(gone) < len(manifest.endpoints):
            raise DropInError(
                f"{target} was converted, and has the versions of its original: remove it as a whole, or convert what "
                "is left of the original once more (convert --replace)",
                path=str(target),
            )
        if len(gone) < len(manifest.endpoints):
            _write_folder(repository, target, manifest.without(gone[0]), {}, manifest)
        else:
            try:
                with staging_in(repository) as staging:
                    os.rename(target, staging / name)
            except OSError as error:
                raise DropInError(f"{target} cannot be removed: {error.strerror or error}", path=str(target)) from error
    for one in gone:
        _forget_endpoint(manifest, one)


def inspect_folder(folder: Path) -> DropInModel | None:
    """Return what one folder of a repository is; `None` if it is not ours."""
    if folder.is_symlink() or not folder.is_dir() or not (folder / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = read_manifest(folder / MANIFEST_NAME)
    except DropInError as error:
        return DropInModel(folder, None, (str(error),))
    return DropInModel(folder, manifest, tuple(difference(folder, manifest)))


def check_name(name: str) -> None:
    """Check that a model's name can be that of a folder, and be in a URL."""
    if not _NAME.fullmatch(name):
        raise DropInError(
            f"expected a model name of letters from a to z, digits, '-', '_' and '.' that does not begin with '.', got "
            f"{name!r}: clients reach it at /v2/models/NAME",
            path=name,
        )


# ---- the folder ----------------------------------------------------------------------------------------------------


def unedited(model: DropInModel, verb: str) -> Manifest:
    """Return what a folder is if it is as it was written; `verb` is for the error otherwise."""
    if model.edits or model.manifest is None:
        shown: Sequence[str] = model.edits[:5]
        raise DropInError(
            f"{model.path} was changed since it was written, so it is not for us to {verb} it: {'; '.join(shown)}. "
            f"Keep what you need of it, and remove the folder yourself",
            path=str(model.path),
        )
    return model.manifest


def _refuse_unlike(target: Path, kept: Manifest, wanted: Manifest) -> None:
    """Refuse a version that does not fit the existing versions."""
    problem = ""
    if kept.flavour != wanted.flavour:
        problem = "was converted" if kept.flavour == "hosts" else f"is served by the {kept.flavour} proxy"
    elif kept.files[CONFIG_NAME] != wanted.files[CONFIG_NAME]:
        problem = "has other tensors, or another configuration (config.pbtxt)"
    elif kept.protocol[0] != wanted.protocol[0]:
        problem = f"speaks protocol {kept.protocol[0]}.{kept.protocol[1]}"
    if problem:
        versions = " and ".join(map(str, sorted(kept.endpoints)))
        raise DropInError(
            f"{target} has version {versions}, which {problem}. Triton keeps one description for all versions of a "
            f"name: give the same, choose another name, or remove version {versions} first (remove --version)",
            path=str(target),
        )


def _beside(wanted: Manifest, kept: Manifest) -> Manifest:
    """Return one version, and others that stay."""
    return replace(
        wanted,
        endpoints={**kept.endpoints, **wanted.endpoints},
        files=dict(sorted({**kept.files, **wanted.files}.items())),
    )


def _only_adds(old: Manifest, wanted: Manifest, version: int) -> bool:
    """Return whether a version can be added without changing the existing ones."""
    return version not in old.endpoints and all(wanted.files.get(name) == digest for name, digest in old.files.items())


def _write_folder(
    repository: Path, target: Path, wanted: Manifest, files: Mapping[str, bytes], old: Manifest | None
) -> None:
    """Make the folder of a model, or replace it, in one step.

    `files` has contents that are not taken from the old folder.
    """
    try:
        with staging_in(repository) as staging:
            staged = staging / target.name
            contents = {name: files[name] if name in files else (target / name).read_bytes() for name in wanted.files}
            _write(staged, {**contents, MANIFEST_NAME: render_manifest(wanted).encode()})
            put_in_place(staged, target, old)
    except OSError as error:
        raise DropInError(
            f"{target} cannot be written, and nothing was changed: "
            + explain(error, "Is the disk full, or the repository read-only for this user?"),
            path=str(target),
        ) from error


def foreign(target: Path) -> DropInError:
    """Return the error for a place that is taken by something that is not ours."""
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
def locked(repository: Path) -> Iterator[None]:
    """Make other calls for the same repository wait, and clean up after killed ones.

    File systems without locks skip this.
    """
    try:
        fd = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DropInError(
            f"expected a model repository at {repository}: {error.strerror or error}", path=str(repository)
        ) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            _clear_up(repository)
        yield
    finally:
        os.close(fd)


def _clear_up(repository: Path) -> None:
    """Remove the files of killed calls; this call holds the lock now."""
    for left in filter(_is_staging, repository.iterdir()):
        replaced = left / _REPLACED
        if (replaced / MANIFEST_NAME).exists():
            # The process was killed between the two steps of a replacement, so the model may exist only here.
            with contextlib.suppress(DropInError):
                _move_in(replaced, repository / read_manifest(replaced / MANIFEST_NAME).name)
        shutil.rmtree(left, ignore_errors=True)


def _is_staging(path: Path) -> bool:
    return _STAGING.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


@contextlib.contextmanager
def staging_in(repository: Path) -> Iterator[Path]:
    """Make a folder on the file system of the locked repository, removed at the end.

    It is inside the repository, because no other place is known to be writable there. A server ignores it, because it
    has no configuration.
    """
    folder = repository / f".pytriton-{secrets.token_hex(4)}"
    try:
        # Inside the block, because an interrupt may come before mkdir has returned.
        folder.mkdir()
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            # The removal was interrupted; it runs again, and then the interrupt is raised.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def put_in_place(staged: Path, target: Path, old: Manifest | None) -> None:
    """Move a written folder to its place in one step; an `old` one moves to where the new one was."""
    if old is None:
        _move_in(staged, target)
    else:
        _swap(staged, target, staged.parent)


def _move_in(staged: Path, target: Path) -> None:
    try:
        _renameat2(staged, target, _NOREPLACE)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise foreign(target) from error
        if error.errno not in _UNSUPPORTED:
            raise
        # Plain rename(2) refuses an existing folder, too, unless it is empty.
        os.rename(staged, target)


def _swap(staged: Path, target: Path, staging: Path) -> None:
    try:
        _renameat2(staged, target, _EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        replaced = staging / _REPLACED
        os.rename(target, replaced)
        try:
            os.rename(staged, target)
        except BaseException:
            os.rename(replaced, target)
            raise


def _renameat2(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)  # glibc has it since 2.28
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


# ---- beside the socket ---------------------------------------------------------------------------------------------


def _described_at(manifest: Manifest, version: int) -> Path | None:
    endpoint = manifest.endpoints[version].removeprefix("ipc://")
    return description_path(Path(endpoint)) if endpoint.startswith("/") else None


def _describe_endpoint(manifest: Manifest, model: ModelSpec) -> None:
    """Write the description beside the socket, if its folder is on this machine; the model keeps its own."""
    path = _described_at(manifest, model.version)
    if path is not None:
        with contextlib.suppress(OSError):
            write_description(path, model)


def _forget_endpoint(manifest: Manifest, version: int) -> None:
    path = _described_at(manifest, version)
    if path is None:
        return
    with contextlib.suppress(OSError, DescriptionError):
        described = read_description(path)
        if (described.name, described.version) == (manifest.name, version):
            path.unlink()
