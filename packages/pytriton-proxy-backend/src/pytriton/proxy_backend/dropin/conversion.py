"""Models written for Triton's Python backend, converted: a copy of the model's folder that our processes serve.

Triton looks for the library of a backend in the folder of a model before it looks where its own are. So in the copy our
library is that of the backend `python`, beside a file that says where it asks for processes. The original is read, and
nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import DropInError
from ..settings import HOSTS_FILE_NAME, hosts_text
from ..system.native import PYTHON_LIBRARY_NAME
from ..system.shortage import explain
from ..wire import layout
from .contents import CONFIG_NAME, machine_of
from .manifest import CACHE, MANIFEST_NAME, Manifest, digest_of, render_manifest
from .repository import Outcome, check_name, foreign, inspect_folder, locked, put_in_place, staging_in, unedited

SUFFIX = "_workers"
"""The default suffix of a converted model's name."""

_BACKEND = "python"
_DEFAULT_FILE = "model.py"
# A server may be told to use one of these further configurations (--model-config-name).
_CONFIGS = "configs/*.pbtxt"
# The tokens of protobuf's text format: comments, strings, names, and single characters.
_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|\S""")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be converted, and into what."""

    source: Path  # the folder of the model
    target: Path  # the folder to be, whose name is the new model's
    supervisor: Path  # the socket where processes are asked for
    attach_timeout_s: float  # how long a load, or a request, waits where nobody listens there, in seconds
    library: Path  # the native library
    made_by: str  # the version of this distribution


class _Value(NamedTuple):
    """The text of a field, and the place of its value in the configuration."""

    text: str
    begin: int
    end: int


def convert_model(conversion: Conversion, *, may_replace: bool = False) -> Outcome:
    """Write the copy of a model in one step, and return what was done.

    An identical folder is left alone; another one is replaced if `may_replace`. After an error nothing has changed.
    """
    source, target = conversion.source, conversion.target
    try:
        return _convert(conversion, may_replace)
    except OSError as error:
        place = error.filename or target
        raise DropInError(
            f"{source} cannot be converted, and nothing was changed: {place}: "
            + explain(error, "Is the disk full, or a file not for this user?"),
            path=str(target),
        ) from error


def _convert(conversion: Conversion, may_replace: bool) -> Outcome:
    source, target = conversion.source, conversion.target
    check_name(target.name)
    versions = _check_source(source)
    if target.resolve().is_relative_to(source.resolve()):
        raise DropInError(
            f"{target} would lie in the folder of the model that is converted: choose another place (--to)",
            path=str(target),
        )
    with locked(target.parent):
        before = inspect_folder(target)
        old = None if before is None else unedited(before, "replace")
        if old is None and os.path.lexists(target):
            raise foreign(target)
        with staging_in(target.parent) as staging:
            staged = staging / target.name
            wanted = _write(conversion, versions, staged)
            if old is not None and old.same_as(wanted):
                return "unchanged"
            if old is not None and not may_replace:
                raise DropInError(
                    f"{target} is a model of ours with another content. Ask for its replacement (--replace), or choose "
                    "another place (--to)",
                    path=str(target),
                )
            put_in_place(staged, target, old)
    return "added" if old is None else "replaced"


# ---- the original ---------------------------------------------------------------------------------------------------


def _check_source(source: Path) -> Sequence[int]:
    """Check that a folder is that of a model which can be converted; return its versions."""
    config = source / CONFIG_NAME
    if not source.is_dir():
        found = "it is no folder" if source.exists() else "there is none"
        raise DropInError(f"expected the folder of a model at {source}: {found}", path=str(source))
    if (source / MANIFEST_NAME).exists():
        raise DropInError(
            f"{source} was made by pytriton-proxy-backend (it has a {MANIFEST_NAME}): name the original, or the "
            "folder of another model",
            path=str(source),
        )
    if not config.is_file():
        raise DropInError(
            f"expected {config}, there is none: name the folder of a model in a model repository, and have its "
            f'configuration say `backend: "{_BACKEND}"`',
            path=str(source),
        )
    text = _read(config)
    backend, runtime, file = (_field(text, name) for name in ("backend", "runtime", "default_model_filename"))
    if backend is None or backend.text != _BACKEND:
        found = "no backend" if backend is None else f'`backend: "{backend.text}"`'
        raise DropInError(
            f'expected `backend: "{_BACKEND}"` in {config}, got {found}: only models written for Triton\'s Python '
            "backend, a model.py, run in processes of ours; Triton serves others as they are",
            path=str(source),
        )
    libraries = [PYTHON_LIBRARY_NAME, f"[0-9]*/{PYTHON_LIBRARY_NAME}"]
    own = [str(found) for pattern in libraries for found in source.glob(pattern)]
    if runtime is not None and runtime.text not in ("", PYTHON_LIBRARY_NAME):
        own.append(f'runtime: "{runtime.text}"')
    if own:
        raise DropInError(
            f"{source} names a library of its own as its backend ({own[0]}), which would be taken instead of ours: "
            "convert a model without one",
            path=str(source),
        )
    name = _DEFAULT_FILE if file is None else file.text
    versions = [int(path.name) for path in source.iterdir() if path.name.isdecimal() and (path / name).is_file()]
    if not versions:
        raise DropInError(
            f"expected a folder of a version with {name} in it, such as {source / '1' / name}: there is none",
            path=str(source),
        )
    return sorted(versions)


def _read(config: Path) -> str:
    try:
        return config.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DropInError(f"{config} is no text in UTF-8: {error}", path=str(config)) from error


def _field(text: str, name: str) -> _Value | None:
    """Return the text of a field at the top level of a configuration."""
    tokens = [found for found in _TOKEN.finditer(text) if not found[0].startswith("#")]
    depth = 0
    for number, token in enumerate(tokens):
        depth += (token[0] in "{[<") - (token[0] in "}]>")
        if depth or token[0] != name or number + 1 == len(tokens) or tokens[number + 1][0] != ":":
            continue
        parts = []
        # Adjacent strings are one string.
        for part in tokens[number + 2 :]:
            if part[0][0] not in "\"'":
                break
            parts.append(part)
        if parts:
            return _Value("".join(part[0][1:-1] for part in parts), parts[0].start(), parts[-1].end())
    return None


# ---- the copy -------------------------------------------------------------------------------------------------------


def _write(conversion: Conversion, versions: Sequence[int], staged: Path) -> Manifest:
    """Write the new folder; return its manifest."""
    source = conversion.source
    # All files except those below are as in the original.
    _copy(source, staged, root=source, above=())
    for path in [staged / CONFIG_NAME, *sorted(staged.glob(_CONFIGS))]:
        # The path may be a link to the original.
        original = source / path.relative_to(staged)
        text = _read(original)
        path.unlink()
        path.write_bytes(_renamed(text, staged.name).encode())
    library = conversion.library.read_bytes()
    (staged / PYTHON_LIBRARY_NAME).write_bytes(library)
    (staged / HOSTS_FILE_NAME).write_text(
        hosts_text(conversion.supervisor, conversion.attach_timeout_s), encoding="utf-8"
    )
    manifest = Manifest(
        name=staged.name,
        flavour="hosts",
        endpoints=dict.fromkeys(versions, str(conversion.supervisor)),
        made_by=conversion.made_by,
        protocol=(layout.MAJOR, layout.MINOR),
        machine=machine_of(library),
        files={str(path.relative_to(staged)): digest_of(path) for path in sorted(_files(staged))},
    )
    (staged / MANIFEST_NAME).write_text(render_manifest(manifest), encoding="utf-8")
    return manifest


def _renamed(text: str, name: str) -> str:
    """Return a configuration with another model name, if it has a name at all."""
    value = _field(text, "name")
    return text if value is None else f"{text[: value.begin]}{json.dumps(name)}{text[value.end :]}"


def _copy(source: Path, target: Path, *, root: Path, above: Sequence[Path]) -> None:
    """Copy a folder.

    Links stay links if they mean the same in the copy: absolute ones, and those that stay inside `root`. The targets of
    other links are copied. `above` are the folders on the way here, to find loops.
    """
    target.mkdir()
    real = source.resolve()
    if any(folder.is_relative_to(real) for folder in (*above, target.resolve())):
        raise DropInError(f"{source} leads to a folder that it is in: it cannot be copied", path=str(source))
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            path, copy = Path(entry.path), target / entry.name
            if entry.is_symlink() and _stays(path, root):
                copy.symlink_to(os.readlink(path))
            elif entry.is_dir():
                _copy(path, copy, root=path if entry.is_symlink() else root, above=(*above, real))
            elif entry.is_file() or entry.is_symlink():
                shutil.copy2(path, copy)
            else:
                raise DropInError(
                    f"{path} is neither a file, nor a folder, nor a link: it cannot be copied. Remove it, or convert "
                    "the model while nobody uses its folder",
                    path=str(path),
                )


def _stays(link: Path, root: Path) -> bool:
    leads_to = os.readlink(link)
    if os.path.isabs(leads_to):
        return True
    inside = os.path.normpath(os.path.join(link.parent.relative_to(root), leads_to))
    return inside != ".." and not inside.startswith("../")


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files that a manifest lists."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != CACHE:
                yield from _files(path)
        else:
            yield path
