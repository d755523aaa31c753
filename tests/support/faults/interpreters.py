"""Other interpreters for worker processes: environments with the packages of this one, and our sources or copies."""

import os
import shutil
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytriton.decorators
import pytriton.proxy_backend

SOURCES = {Path(str(module.__file__)).parents[2] for module in (pytriton.decorators, pytriton.proxy_backend)}
"""What a worker process needs of ours, as folders of a search path."""

_NEEDED = ("numpy", "wrapt", "zmq", "typing_inspect", "typing_extensions", "mypy_extensions")


def make_interpreter(folder: Path, sources: Iterable[Path] = SOURCES) -> Path:
    """Make an environment without server and client, and return its interpreter.

    Args:
        folder: Where it is made.
        sources: Of our packages.
    """
    venv.create(folder, with_pip=False)
    site = site_packages(folder)
    (site / "sources.pth").write_text("\n".join(map(str, sources)))
    for name in _NEEDED:
        for entry in Path(sysconfig.get_path("purelib")).glob(f"{name}*"):
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def site_packages(environment: Path) -> Path:
    """Return where an environment has its packages."""
    (found,) = (environment / "lib").glob("python*/site-packages")
    return found


def make_other_version(folder: Path, changes: Mapping[str, tuple[str, str]], version: str = "0.2.0") -> Path:
    """Make an environment with another version of pytriton-proxy-backend, and return its interpreter.

    Args:
        folder: Where it is made.
        changes: What its version has in place of what ours has: texts by the file in `proxy_backend`.
        version: What its metadata say.
    """
    (own,) = (path for path in SOURCES if (path / "pytriton" / "proxy_backend").is_dir())
    copy = folder / "other"
    shutil.copytree(own, copy, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
    change(copy, changes)
    python = make_interpreter(folder / "env", [*SOURCES - {own}, copy])
    described = site_packages(folder / "env") / f"pytriton_proxy_backend-{version}.dist-info"
    described.mkdir()
    described.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: pytriton-proxy-backend\nVersion: {version}\n"
    )
    return python


def change(copy: Path, changes: Mapping[str, tuple[str, str]]) -> None:
    """Change files of a copied `proxy_backend`, all of which there have to be."""
    for name, (old, new) in changes.items():
        file = copy / "pytriton" / "proxy_backend" / name
        text = file.read_text()
        assert old in text, f"{name} has no {old!r} any more"
        file.write_text(text.replace(old, new, 1))
        # Written within the same second, perhaps, as what was compiled.
        stamp = file.stat().st_mtime + 2
        os.utime(file, (stamp, stamp))
