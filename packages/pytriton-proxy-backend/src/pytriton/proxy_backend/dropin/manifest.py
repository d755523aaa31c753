"""What is in the folder of a drop-in model, and the manifest that says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DropInError

MANIFEST_NAME = "pytriton-manifest.json"
FORMAT = 2
CACHE = "__pycache__"
"""Python's caches in folders that it may write to; manifests do not list them."""
# A manifest has a line for each file, and a model may bring a whole environment of Python.
_MAX_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_SHA256 = "sha256:"
_LINK = "link:"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of a model repository is."""

    name: str  # the model
    flavour: str  # "native" or "python", after the proxy; "hosts" for a model written for Triton's Python backend
    # Where workers attach, by version of the model: the path of a socket or an address of ZeroMQ. "hosts" stands for
    # where processes are requested.
    endpoints: Mapping[int, str]
    made_by: str  # the version of this distribution that wrote it last
    protocol: tuple[int, int]  # major and minor version of the protocol that its proxy speaks
    machine: str  # the architecture that its library is for; empty for the Python proxy
    # The SHA-256 of every file but the manifest, or where a link leads, by its path in the folder.
    files: Mapping[str, str] = field(default_factory=dict)

    def files_of(self, version: int) -> list[str]:
        """Return the files of one version alone."""
        return [name for name in self.files if name.startswith(f"{version}/")]

    def without(self, version: int) -> Manifest:
        """Return the same without one version and its files."""
        gone = self.files_of(version)
        return dataclasses.replace(
            self,
            endpoints={known: endpoint for known, endpoint in self.endpoints.items() if known != version},
            files={name: digest for name, digest in self.files.items() if name not in gone},
        )

    def with_files(self, files: Mapping[str, bytes]) -> Manifest:
        """Return the same with the hashes of these files."""
        return dataclasses.replace(self, files={name: _hash(content) for name, content in sorted(files.items())})

    def same_as(self, other: Manifest) -> bool:
        """Return whether both describe the same content, whoever wrote it."""
        return dataclasses.replace(self, made_by="") == dataclasses.replace(other, made_by="")


def render_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a hash of itself."""
    fields = {
        "format": FORMAT,
        **dataclasses.asdict(manifest),
        # JSON keys are strings.
        "endpoints": {str(version): endpoint for version, endpoint in manifest.endpoints.items()},
        "protocol": list(manifest.protocol),
    }
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no plain file")  # a pipe, of which a read would never end
        with path.open("rb") as file:
            fields: Any = json.loads(file.read(_MAX_BYTES + 1))
    except (OSError, RecursionError, ValueError) as error:
        raise DropInError(f"its manifest {path.name} cannot be read: {error}", path=str(path.parent)) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DropInError(
            f"its manifest {path.name} has a format that this version of pytriton-proxy-backend does not read: "
            f"expected {FORMAT}, got {fields.get('format') if isinstance(fields, dict) else fields!r}",
            path=str(path.parent),
        )
    checksum = fields.pop("checksum", None)
    if checksum != _checksum(fields):
        raise DropInError(f"its manifest {path.name} was edited", path=str(path.parent))
    fields.pop("format")
    try:
        endpoints = {int(version): endpoint for version, endpoint in fields["endpoints"].items()}
        return Manifest(**{**fields, "endpoints": endpoints, "protocol": tuple(fields["protocol"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DropInError(f"its manifest {path.name} lacks a field: {error}", path=str(path.parent)) from error


def difference(folder: Path, manifest: Manifest) -> list[str]:
    """Say in words where a folder differs from its manifest; empty if nowhere."""
    problems = []
    if folder.name != manifest.name:
        problems.append(f"it was written as '{manifest.name}' and renamed")
    found = {str(path.relative_to(folder)): path for path in _walk(folder)}
    found.pop(MANIFEST_NAME, None)
    for name, expected in manifest.files.items():
        path = found.pop(name, None)
        if path is None:
            problems.append(f"{name} is missing")
        elif path.is_symlink() != expected.startswith(_LINK) or not (path.is_symlink() or path.is_file()):
            problems.append(f"{name} is no {'link' if expected.startswith(_LINK) else 'plain file'} any more")
        elif digest_of(path) != expected:
            problems.append(f"{name} was edited")
    problems += [f"{name} was added" for name in sorted(found)]
    return problems


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder, except Python's caches."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != CACHE:
                    yield from _walk(Path(entry.path))
            else:
                yield Path(entry.path)


def _hash(content: bytes) -> str:
    return f"{_SHA256}{hashlib.sha256(content).hexdigest()}"


def digest_of(path: Path) -> str:
    """Return the digest of a file, or the target of a link."""
    try:
        if path.is_symlink():
            return f"{_LINK}{os.readlink(path)}"
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        return f"{_SHA256}{digest.hexdigest()}"
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _checksum(fields: Mapping[str, object]) -> str:
    return _hash(json.dumps(fields, sort_keys=True).encode())
