"""`pytriton-server` without each of its guests: the rest is imported and serves as before."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

import pytest

from support.paths import ROOT
from support.serving import serve_command
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow(seconds=40)

GUESTS = ("console", "dynamo", "inprocess", "mcp", "openai", "ray")
# Options and commands of `pytriton` by the guest that they come from.
OPTIONS = {
    "console": ("--console", "--console-port"),
    "dynamo": ("--dynamo", "--dynamo-discovery"),
    "mcp": ("--mcp", "--mcp-key-file"),
    "openai": ("--openai", "--openai-key-file"),
    "ray": ("--ray", "--replicas"),
}
# No path of the environment leads to the sources of this checkout then, but the variable does.
PYTHON = (sys.executable, "-S")

# Packages of guests are imported for what the command needs of them: the rest takes their extras.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys

folder, guests, gone = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
assert importlib.util.find_spec(f"pytriton.{gone}") is None
for found in pkgutil.walk_packages([folder], "pytriton.", onerror=lambda name: None):
    place = found.name.split(".")
    if place[-1] in ("__main__", "stub_utils") or (place[1] in guests and place[2:] not in ([], ["command"])):
        continue
    importlib.import_module(found.name)
    print(found.name)
"""

APP = """
from pytriton.decorators import model

@model
def shout(text: str) -> str:
    return text.upper()
"""


def build_without(guests: Collection[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a tree of pytriton-server without guests, and let programs import it and no other; return its packages."""
    built = folder / "built" / "pytriton"
    built.mkdir(parents=True)
    for path in (ROOT / "packages" / "pytriton-server" / "src" / "pytriton").iterdir():
        if path.name not in guests:
            (built / path.name).symlink_to(path)
    siblings = [
        str(ROOT / "packages" / f"pytriton-{name}" / "src") for name in ("client", "decorators", "proxy-backend")
    ]
    # Python reads no .pth file in a folder that a variable names.
    installed = list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(built.parent), *siblings, *installed]))
    monkeypatch.setenv("COLUMNS", "200")
    return built


def run(*arguments: str) -> str:
    done = subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("guest", GUESTS)
def test_the_rest_is_imported(guest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_without([guest], tmp_path, monkeypatch)

    imported = run("-c", IMPORT_ALL, str(built), ",".join(GUESTS), guest).split()
    assert {"pytriton.cli.serve", "pytriton.triton", "pytriton.server.lifecycle.session"} < set(imported)

    told = run("-m", "pytriton", "serve", "--help").replace("│", " ").split()
    for other, options in OPTIONS.items():
        assert [option for option in options if (option in told) != (other != guest)] == []
    commands = run("-m", "pytriton", "--help").replace("│", " ").split("\n")
    present = {line.split()[0] for line in commands if line.strip()}
    assert {"console", "mcp", "openai"} - present == {guest} & {"console", "mcp", "openai"}


def test_a_server_without_any_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_without(GUESTS, tmp_path, monkeypatch)
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", python=PYTHON) as server:
        assert server.ask("shout", "hello") == "HELLO"
