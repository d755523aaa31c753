"""Virtual environments of the peers, in a cache folder, made once and used again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_INSTALL_TIMEOUT_S = 900
_PROBE_TIMEOUT_S = 20
_PROBE = """
import json, os, sys, sysconfig
folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME") or ""
folders = [folder, os.path.join(folder, sysconfig.get_config_var("MULTIARCH") or "")] if folder else []
holders = [each for each in folders if ".so" in name and os.path.exists(os.path.join(each, name))]
print(json.dumps([sys.version_info[0], sys.version_info[1], sys.executable, holders[0] if holders else None]))
"""


class PeerMissingError(Exception):
    """A peer cannot be run here; the message is the reason that the table gives."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that may run a peer."""

    executable: str
    version: tuple[int, int]
    libpython_folder: str | None
    """Where its shared libpython lies; `None` when it has none."""


def inspect_interpreter(executable: str) -> Interpreter | None:
    """Ask an interpreter for its version and library; `None` when it does not run."""
    try:
        output = subprocess.run(
            [executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        ).stdout
        major, minor, path, folder = json.loads(output)
    except (OSError, subprocess.SubprocessError, ValueError):  # a pyenv shim of a version that is not selected, say
        return None
    return Interpreter(path, (major, minor), folder)


def base_interpreter() -> str:
    """Return the interpreter that this one's virtual environment was made from, or this one."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def cache_folder() -> Path:
    """Return the folder that keeps what a run made for the next one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytriton-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(name: str, interpreter: str, requirements: Sequence[str]) -> Path:
    """Return the `python` of a virtual environment with `requirements`, made now unless an earlier run made it.

    Raises:
        PeerMissingError: it cannot be made; with the last lines of the installer.
    """
    key = hashlib.sha256("\n".join([os.path.realpath(interpreter), *requirements]).encode()).hexdigest()[:12]
    cache = cache_folder()
    folder = cache / f"{name}-{key}"
    python, done = folder / "bin" / "python", folder / "complete"
    with (cache / f"{name}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        if not (done.exists() and python.exists()):  # its link dangles when the interpreter was removed
            print(f"{name}: installing {', '.join(requirements)} into {folder}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            _create(interpreter, folder, requirements)
            done.touch()
    return python


def installed_versions(python: Path | str, distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of those `distributions` that are installed in an environment."""
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))\n"
    )
    output = subprocess.run(
        [str(python), "-c", script, *distributions],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=True,
    ).stdout
    found: dict[str, str] = json.loads(output)
    return found


def _create(interpreter: str, folder: Path, requirements: Sequence[str]) -> None:
    python = str(folder / "bin" / "python")
    installer = [python, "-m", "pip"]
    try:
        _run([interpreter, "-m", "venv", str(folder)])
    except PeerMissingError:
        # Debian splits ensurepip off; the interpreter's own pip can install into an environment without one.
        shutil.rmtree(folder, ignore_errors=True)
        _run([interpreter, "-m", "venv", "--without-pip", str(folder)])
        installer = [interpreter, "-m", "pip", "--python", python]
    _run([*installer, "install", "--quiet", "--disable-pip-version-check", *requirements])


def _run(command: Sequence[str]) -> None:
    # The lock of our checks is not that of the peers.
    variables = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=True,
            env=variables,
        )
    except subprocess.CalledProcessError as error:
        tail = " / ".join((error.stderr or error.stdout).strip().splitlines()[-3:])
        raise PeerMissingError(f"`{' '.join(command)}` ended with exit code {error.returncode}: {tail}") from None
    except subprocess.TimeoutExpired:
        raise PeerMissingError(f"waited {_INSTALL_TIMEOUT_S} s for `{' '.join(command)}`") from None
    except OSError as error:
        raise PeerMissingError(f"`{' '.join(command)}` did not start: {error}") from None
