"""The files that tritonserver reads: its model repository, and the folder that it loads backends from."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from pytriton.proxy_backend import BACKEND_NAME, LIBRARY_NAME
from pytriton.server.errors import WorkspaceError

__all__ = ["ModelRepository", "link_backends"]

CONFIG_FILE = "config.pbtxt"


class ModelRepository:
    """A folder with one folder per model, laid out as Triton wants it.

    Args:
        path: The folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def add(self, name: str, version: int, config: str, side_files: Iterable[tuple[str, str]]) -> None:
        """Writes the files of one version of a model. The model's configuration is replaced if it is there already.

        Args:
            name: Name of the model.
            version: Its version.
            config: Text of the configuration.
            side_files: Names and texts of the files for the version's folder.

        Raises:
            WorkspaceError: A file cannot be written.
        """
        model = self._path / name
        folder = model / str(version)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file_name, text in side_files:
                (folder / file_name).write_text(text, encoding="utf-8")
            (model / CONFIG_FILE).write_text(config, encoding="utf-8")
        except OSError as error:
            raise WorkspaceError(
                f"The files of model {name!r} cannot be written to {folder}: {error.strerror or error}. Is the disk "
                "full, or the workspace removed?",
                path=str(folder),
            ) from error

    def remove(self, name: str, version: int) -> None:
        """Removes one version of a model, and the model with its last version. What is not there is fine."""
        model = self._path / name
        shutil.rmtree(model / str(version), ignore_errors=True)
        if not any(entry.is_dir() for entry in model.glob("*")):
            shutil.rmtree(model, ignore_errors=True)


def link_backends(folder: Path, library: Path, server_backends: Path | None) -> None:
    """Fills the folder that tritonserver loads backends from: the proxy, and links to the server's own backends.

    Args:
        folder: The folder to fill, which exists.
        library: The native proxy backend.
        server_backends: Folder of the backends that came with tritonserver, if it has any.

    Raises:
        WorkspaceError: A link cannot be made.
    """
    try:
        (folder / BACKEND_NAME).mkdir()
        (folder / BACKEND_NAME / LIBRARY_NAME).symlink_to(library)
        if server_backends is not None and server_backends.is_dir():
            for backend in sorted(server_backends.iterdir()):
                if backend.is_dir() and backend.name != BACKEND_NAME:
                    (folder / backend.name).symlink_to(backend.resolve())
    except OSError as error:
        raise WorkspaceError(
            f"The backends cannot be linked into {folder}: {error.strerror or error}. Is it on a file system without "
            "symbolic links? Set PYTRITON_HOME to a folder on another one.",
            path=str(folder),
        ) from error
