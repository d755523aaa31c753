"""Checks what import-linter has no contract for: private names across distributions, and the size of folders.

`python3 tools/dev.py lint` runs it behind the contracts of `pyproject.toml`. The sources are read, not imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_MODULES = 16
# The guard against a foreign `pytriton` package has to run before anything else of a package is imported.
ALLOWED = "pytriton.server._namespace"


def sources(dist: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a distribution: their full names and files."""
    for path in sorted((dist / "src").rglob("*.py")):
        parts = path.relative_to(dist / "src").with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def private_imports(path: Path, own: set[str]) -> Iterator[str]:
    """Yield each import of a private name of another distribution of ours.

    Args:
        path: The file.
        own: The packages of its distribution, such as `pytriton.client`.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            foreign = parts[0] == "pytriton" and ".".join(parts[:2]) not in own
            private = any(part.startswith("_") for part in parts) and not name.startswith(ALLOWED)
            if foreign and private:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name} is private to another distribution"


def crowded_folders(root: Path) -> Iterator[str]:
    """Yield each folder below one that holds more modules than a reader takes in at once."""
    for folder in sorted({path.parent for path in root.rglob("*.py")}):
        count = len(list(folder.glob("*.py")))
        if count > MAX_MODULES and not any(part.startswith(".") for part in folder.relative_to(root).parts):
            yield f"{folder.relative_to(ROOT)}: {count} modules, the rule is {MAX_MODULES}"


def main() -> int:
    """Print what breaks the rules; return the exit code."""
    found: list[str] = []
    for dist in sorted((ROOT / "packages").iterdir()):
        modules = dict(sources(dist))
        own = {".".join(name.split(".")[:2]) for name in modules}
        for path in modules.values():
            found += private_imports(path, own)
        found += crowded_folders(dist / "src")
        found += crowded_folders(dist / "tests")
    found += crowded_folders(ROOT / "tests")
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
