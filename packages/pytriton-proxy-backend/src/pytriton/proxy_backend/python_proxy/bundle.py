"""The Python proxy as one file, which a model folder ships: a zip of the modules that it needs, and no others.

The wheel has it, made by `hatch_build.py`. A source tree has none, which could be older than the sources: it is made
there when it is asked for. This module needs the standard library alone, since the build loads it by its path.
"""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

BUNDLE_NAME = "pytriton_python_proxy.zip"
# The modules have their own name, because another version of this distribution may be installed in the server's Python.
PACKAGE = "pytriton_python_proxy"

_ENTRY = Path("python_proxy", "model.py")
# The earliest time of a zip file. The file must be the same whenever it is made, so it is not compressed: zlib's output
# differs between versions.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


def read_bundle() -> bytes:
    """Return the content of the file."""
    built = Path(__file__).with_name(BUNDLE_NAME)
    return built.read_bytes() if built.is_file() else make_bundle(Path(__file__).parent.parent)


def make_bundle(sources: Path) -> bytes:
    """Make the file of the sources of `pytriton.proxy_backend`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for path in needed_modules(sources):
            # The package's own __init__.py imports modules that the proxy does not need.
            content = b"" if path == Path("__init__.py") else (sources / path).read_bytes()
            entry = zipfile.ZipInfo(f"{PACKAGE}/{path.as_posix()}", _TIME)
            entry.external_attr = _MODE
            bundle.writestr(entry, content)
    return buffer.getvalue()


def needed_modules(sources: Path) -> list[Path]:
    """Return the files that the `model.py` imports, directly or not, relative to the sources; with their packages."""
    found: set[Path] = set()
    waiting = [_ENTRY]
    while waiting:
        path = waiting.pop()
        if path in found or not (sources / path).is_file():
            continue
        found.add(path)
        waiting += [parent / "__init__.py" for parent in path.parents]
        if path != Path("__init__.py"):
            waiting += _imports(path, ast.parse((sources / path).read_bytes()))
    return sorted(found)


def _imports(path: Path, tree: ast.AST) -> Iterator[Path]:
    """Yield the files that relative imports of a module may name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            yield base.with_suffix(".py")
            for name in node.names:
                yield base / f"{name.name}.py"
        yield from _imports(path, node)
