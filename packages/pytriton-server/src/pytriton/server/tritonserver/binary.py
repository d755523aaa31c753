"""Find the tritonserver executable and what belongs to it.

Places, in this order: the folder that the caller names, the one that the environment variable
`PYTRITON_TRITONSERVER_DIR` names, the server that came with this distribution, `/opt/tritonserver`, and where the
`tritonserver` on `PATH` is. What is named explicitly is never passed over: if it holds no server, that is an error.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytriton.exceptions import PyTritonError

ENVIRONMENT_VARIABLE = "PYTRITON_TRITONSERVER_DIR"
BUNDLED_FOLDER = Path(__file__).parent.parent / "_tritonserver"
SYSTEM_FOLDER = Path("/opt/tritonserver")


class TritonServerNotFoundError(PyTritonError):
    """There is no tritonserver that can be started.

    Args:
        message: The text of the error.
        searched: The places that were looked at, each with what was found there, in the order of the search.
    """

    def __init__(self, message: str, *, searched: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.searched = searched


@dataclass(frozen=True)
class TritonServerBinary:
    """A tritonserver, laid out as `/opt/tritonserver`."""

    executable: Path  # the file to start
    backends_dir: Path  # value for `--backend-directory`
    caches_dir: Path  # value for `--cache-directory`
    library_dirs: tuple[Path, ...]  # Folders with the server's own libraries. The executable finds them by itself.
    origin: str  # how it was found, in words, for logs and errors

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Make the environment to start the server in.

        Only Triton's Python backend needs more: its stub serves the first `python3` on `PATH`, which becomes the
        running interpreter.
        """
        environment = dict(os.environ if base is None else base)
        if sys.executable:
            folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
            environment["PATH"] = os.pathsep.join(folders)
        return environment


def find_tritonserver(explicit: Path | str | None = None) -> TritonServerBinary:
    """Find the server to start, in the search order of this module's description; `explicit` allows one folder only."""
    searched: list[tuple[str, str]] = []
    for origin, folder, is_named in _places(explicit):
        if folder is None:
            searched.append((origin, "not set" if is_named else "none"))
            continue
        problem = _problem(folder)
        if problem is None:
            return _describe(folder, origin)
        searched.append((f"{origin} ({folder})", problem))
        if is_named:
            raise TritonServerNotFoundError(
                f"Expected a tritonserver in {folder}, which {origin} names, but {problem}. "
                "Name a folder laid out as /opt/tritonserver (bin/tritonserver, lib/, backends/, caches/), or none.",
                searched=tuple(searched),
            )
    listed = "\n".join(f"  {number}. {place}: {problem}" for number, (place, problem) in enumerate(searched, 1))
    raise TritonServerNotFoundError(
        f"Found no tritonserver to start. Looked at:\n{listed}\n"
        "Install a wheel of pytriton-server that carries one (Linux on x86_64 or aarch64), or set "
        f"{ENVIRONMENT_VARIABLE} to a folder laid out as /opt/tritonserver.",
        searched=tuple(searched),
    )


def _places(explicit: Path | str | None) -> Iterator[tuple[str, Path | None, bool]]:
    """Yield the places of the search in order: origin, folder (`None` for nothing), and whether the user named it."""
    yield "the explicit setting", None if explicit is None else Path(explicit).expanduser(), True
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    yield f"the environment variable {ENVIRONMENT_VARIABLE}", Path(given).expanduser() if given else None, True
    yield "the server that came with pytriton-server", BUNDLED_FOLDER, False
    yield "the system's server", SYSTEM_FOLDER, False
    on_path = shutil.which("tritonserver")
    yield "tritonserver on PATH", Path(on_path).resolve().parent.parent if on_path else None, False


def _problem(folder: Path) -> str | None:
    """Return why the server in a folder cannot be started, or `None`."""
    executable = folder / "bin" / "tritonserver"
    if not folder.is_dir():
        return "there is no such folder"
    if not executable.is_file():
        return "it holds no bin/tritonserver"
    if not os.access(executable, os.X_OK):
        return "its bin/tritonserver is not executable for this user"
    return None


def _describe(folder: Path, origin: str) -> TritonServerBinary:
    # The target of a link, because the link may be changed while this server runs.
    folder = folder.resolve()
    libraries = folder / "lib"
    return TritonServerBinary(
        executable=folder / "bin" / "tritonserver",
        backends_dir=folder / "backends",
        caches_dir=folder / "caches",
        library_dirs=(libraries,) if libraries.is_dir() else (),
        origin=origin,
    )
