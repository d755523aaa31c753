"""The model repository of a server: the files that tritonserver finds its models by."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.errors import WorkspaceError

CONFIG_FILE = "config.pbtxt"
"""Name of the file in the folder of a model that describes it."""

logger = logging.getLogger(__name__)


class ModelRepository:
    """A folder with one folder per model, as Triton wants it.

    tritonserver loads a version again only if its files are newer than the last time. So unchanged files are not
    written, undone changes get their old times back, and each write is newer than all before, even on a file system
    with a coarse clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Beside the repository, because inside it would count as a model.
        self._aside = path.with_name(f"{path.name}-replaced")
        self._newest_ns = 0

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def write(self, name: str, config: str, versions: Mapping[int, Iterable[tuple[str, str]]]) -> None:
        """Give a model these versions and no others. After an error nothing has changed."""
        with self.changed(name, config, versions):
            pass

    @contextlib.contextmanager
    def changed(self, name: str, config: str, versions: Mapping[int, Iterable[tuple[str, str]]]) -> Iterator[None]:
        """Write as `write` does. If the block raises, everything is put back as it was."""
        transaction = _Transaction(self._aside)
        model = self._path / name
        try:
            try:
                self._apply(transaction, model, config, {version: dict(files) for version, files in versions.items()})
            except OSError as error:
                raise WorkspaceError(
                    f"The files of model {name!r} cannot be written to {model}: "
                    + explain(error, "Is the disk full, or the workspace removed?"),
                    path=str(model),
                ) from error
            yield
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()

    def _apply(
        self, transaction: "_Transaction", model: Path, config: str, versions: Mapping[int, Mapping[str, str]]
    ) -> None:
        if not versions:
            transaction.remove(model)
            return
        if not model.exists():
            transaction.make(model)
        written = [model]
        for folder in sorted(model.iterdir()):
            if folder.is_dir() and folder.name not in map(str, versions):
                transaction.remove(folder)
        for version, files in versions.items():
            folder = model / str(version)
            if _texts(folder) != files:
                transaction.remove(folder)
                transaction.make(folder)
                for file_name, text in files.items():
                    (folder / file_name).write_text(text, encoding="utf-8")
                written.append(folder)
        if _texts(model) != {CONFIG_FILE: config}:
            file = model / CONFIG_FILE
            transaction.remove(file)
            transaction.added(file)
            file.write_text(config, encoding="utf-8")
            written.append(file)
        self._stamp(written)

    def _stamp(self, paths: Sequence[Path]) -> None:
        self._newest_ns = max(time.time_ns(), self._newest_ns + 1)
        for path in paths:
            os.utime(path, ns=(self._newest_ns, self._newest_ns))


class _Transaction:
    """A transaction: files and folders that were made and moved aside, to be kept or undone."""

    def __init__(self, aside: Path) -> None:
        self._aside = aside
        self._made: list[Path] = []
        self._removed: list[tuple[Path, Path]] = []

    def make(self, folder: Path) -> None:
        folder.mkdir()
        self._made.append(folder)

    def added(self, file: Path) -> None:
        self._made.append(file)

    def remove(self, path: Path) -> None:
        """Move a file or a folder aside, if it exists."""
        if path.exists():
            self._aside.mkdir(mode=0o700, exist_ok=True)
            place = self._aside / str(len(self._removed))
            path.rename(place)
            self._removed.append((path, place))

    def rollback(self) -> None:
        for path in reversed(self._made):
            _discard(path)
        for path, place in reversed(self._removed):
            try:
                place.rename(path)
            except OSError as error:
                logger.error("%s cannot be put back: %s", path, error)
        _discard(self._aside)

    def commit(self) -> None:
        _discard(self._aside)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _texts(folder: Path) -> dict[str, str]:
    """Return names and texts of the files in a folder; none if it does not exist."""
    if not folder.exists():
        return {}
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
