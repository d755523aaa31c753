"""Checks what import-linter has no contract for: private names, includes of C++, the size of folders and classes.

`python3 tools/dev.py lint` runs it behind the contracts of `pyproject.toml`. The sources are read, not imported. What
breaks a rule since before the rule was made stands in `tools/baseline.txt`. A line there that nothing needs any more is
an error, so that the file only gets shorter.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "tools" / "baseline.txt"
MAX_MODULES = 16
MAX_CLASS_LINES = 400
# The baseline names the size of a larger class in steps of so many lines, so that not every change of one changes it.
CLASS_STEP = 25
NATIVE = ROOT / "packages" / "pytriton-proxy-backend" / "native"
# The folders of C++, each of which includes files of itself and of those before it alone. The guard and its front end
# for gRPC call each other, as both stand between the same functions of the server: they are one layer.
NATIVE_LAYERS = (
    *(f"proxy/{room}" for room in ("text", "triton", "wire", "cache", "batch", "link", "calls")),
    *("proxy", "python", "accelerator", "inprocess", "guard"),
)
SAME_LAYER = {"grpc": "guard"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"\n]+)"', re.MULTILINE)
# The guard against a foreign `pytriton` package has to run before anything else of a package is imported.
NAMESPACE_GUARD = "._namespace.require_namespace_package"
# Attributes that Python and wrapt document although they begin with an underscore.
DOCUMENTED = {"_SubParsersAction", "_current_frames", "_exit", "_fields", "_getframe", "_handle", "_self_binding"}


def sources(dist: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a distribution: their full names and files."""
    for path in sorted((dist / "src").rglob("*.py")):
        parts = path.relative_to(dist / "src").with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_private(name: str) -> bool:
    """Return whether a name is for its module alone."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def house(module: str) -> str:
    """Return the package directly below `pytriton` that a module is in, such as `pytriton.client`."""
    return ".".join(module.split(".")[:2])


def private_imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield each import of a private name from another package directly below `pytriton`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            is_foreign = name.startswith("pytriton.") and house(name) != house(module)
            if is_foreign and any(map(is_private, name.split("."))) and not name.endswith(NAMESPACE_GUARD):
                yield f"private-import {module} {name}"


def members(tree: ast.Module) -> set[str]:
    """Return the names of what the classes of a module define: in their bodies, as slots, and at `self` and `cls`."""
    names: set[str] = set()
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in owner.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                names |= {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
        names |= {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and is_own(node.value)}
    return names


def is_own(node: ast.expr) -> bool:
    """Return whether an expression is the object, or the class, that the code around it belongs to."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def private_attributes(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield each private attribute that is none of a class of its own module, nor inherited from another."""
    known = members(tree) | DOCUMENTED
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and node.attr not in known
            and not is_own(node.value)
        ):
            yield f"private-attribute {module} {ast.unparse(node)}"


def large_classes(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield each class that a reader does not take in at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_CLASS_LINES:
                yield f"class-lines {module} {node.name} {-(-lines // CLASS_STEP) * CLASS_STEP}"


def crowded_folders(root: Path) -> Iterator[str]:
    """Yield each folder below one that holds more modules than a reader takes in at once."""
    for folder in sorted({path.parent for path in root.rglob("*.py")}):
        count = len(list(folder.glob("*.py")))
        if count > MAX_MODULES and not any(part.startswith(".") for part in folder.relative_to(root).parts):
            yield f"modules {folder.relative_to(ROOT)} {count}"


def native_layer(path: Path) -> int:
    """Return the layer that a file of C++ is in, by the innermost folder that has one.

    Raises:
        KeyError: If no folder around the file is in `NATIVE_LAYERS`.
    """
    for folder in path.relative_to(NATIVE).parents:
        name = SAME_LAYER.get(str(folder), str(folder))
        if name in NATIVE_LAYERS:
            return NATIVE_LAYERS.index(name)
    raise KeyError(f"Add the folder of {path.relative_to(ROOT)} to NATIVE_LAYERS of tools/rooms.py.")


def upward_includes() -> Iterator[str]:
    """Yield each include of a file that is in a higher layer of the C++ sources. Tests include what they test."""
    for path in sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cc", ".h")):
        if NATIVE / "tests" in path.parents:
            continue
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            included = Path(os.path.normpath(path.parent / name))
            if native_layer(included) > native_layer(path):
                yield f"include {path.relative_to(NATIVE)} {included.relative_to(NATIVE)}"


def main() -> int:
    """Print what breaks the rules; return the exit code."""
    found: set[str] = set()
    for dist in sorted((ROOT / "packages").iterdir()):
        for module, path in sources(dist):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {*private_imports(module, tree), *private_attributes(module, tree), *large_classes(module, tree)}
        found |= {*crowded_folders(dist / "src"), *crowded_folders(dist / "tests")}
    found |= {*crowded_folders(ROOT / "tests"), *upward_includes()}
    known = {line for line in BASELINE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}
    for line in sorted(found - known):
        print(f"Breaks a rule of tools/rooms.py: {line}")
    for line in sorted(known - found):
        print(f"Take this line out of tools/baseline.txt, nothing needs it any more: {line}")
    print(f"{len(found & known)} lines in tools/baseline.txt")
    return 1 if found != known else 0


if __name__ == "__main__":
    sys.exit(main())
