"""The trees of errors at the top of one module for each room show all classes, below what they derive from."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "packages"
# The modules with a tree, by the folder whose classes it shows. `tools/settings.py` writes the trees into the page.
TREES = {
    "pytriton-client/src/pytriton": "client/exceptions.py",
    "pytriton-decorators/src/pytriton": "exceptions/__init__.py",
    "pytriton-proxy-backend/src/pytriton": "proxy_backend/errors.py",
    "pytriton-server/src/pytriton": "server/errors.py",
    "pytriton-server/src/pytriton/inprocess": "capi/errors.py",
}
ROOTS = {"PyTritonClientError", "PyTritonError", "ProxyBackendError"}


@functools.cache
def classes() -> list[tuple[str, Path, list[str]]]:
    """Return each class of the sources with its file and what it derives from."""
    return [
        (node.name, path, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for path in sorted(PACKAGES.glob("*/src/**/*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]


def drawn(folder: str) -> dict[str, str]:
    """Return the parent of each class of a tree; that of its root is empty."""
    docstring = ast.get_docstring(ast.parse((PACKAGES / folder / TREES[folder]).read_text(encoding="utf-8")))
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (docstring or "").splitlines():
        shown = re.match(r"([ │├└─|+-]*)([A-Z]\w+)(?=\s{2}|$)", line)
        if shown is None:
            continue
        column, name = len(shown[1]), shown[2]
        above = [each for each in above if each[0] < column]
        found.setdefault(name, above[-1][1] if above else "")
        above.append((column, name))
    return found


def errors_of(folder: str) -> dict[str, list[str]]:
    """Return the errors that are defined in a folder, and in none below it that has a tree of its own."""
    bases = {name: parents for name, _, parents in classes()}

    def is_error(name: str) -> bool:
        return name in ROOTS or any(is_error(parent) for parent in bases.get(name, ()))

    others = [PACKAGES / other for other in TREES if other.startswith(f"{folder}/")]
    return {
        name: parents
        for name, path, parents in classes()
        if path.is_relative_to(PACKAGES / folder)
        and not any(path.is_relative_to(other) for other in others)
        and not name.startswith("_")
        # By its own parents: two rooms may have the same name for different things.
        and (name in ROOTS or any(map(is_error, parents)))
    }


@pytest.mark.parametrize("folder", TREES)
def test_a_tree_shows_every_error_below_what_it_derives_from(folder: str) -> None:
    tree, errors = drawn(folder), errors_of(folder)
    assert not errors.keys() - tree.keys(), "these are not in the tree"
    for name, parents in errors.items():
        if name not in ROOTS:
            assert tree[name] in parents, name
    # What the tree hangs on may be of another distribution.
    known = {name for other in TREES for name in errors_of(other)}
    assert not tree.keys() - known, "these are in the tree alone"
