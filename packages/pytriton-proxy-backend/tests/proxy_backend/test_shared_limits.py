"""What Python and C++ both know has one home: C++ takes it from headers that are written from Python.

Found is a number that has one name in both languages, and a text. A copy under another name is found by nobody but a
reader; `wire/limits.py` is where such a number belongs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

NATIVE = ROOT / "packages" / "pytriton-proxy-backend" / "native"
PYTHON = [
    ROOT / "packages" / "pytriton-proxy-backend" / "src" / "pytriton" / "proxy_backend",
    ROOT / "packages" / "pytriton-server" / "src" / "pytriton" / "inprocess",
    ROOT / "packages" / "pytriton-server" / "src" / "pytriton" / "server",
]
WRITTEN = "// Written by `python3 tools/dev.py reference`"
# The numbers of the protocol stand in both languages, and test_protocol_document.py compares each of them.
COMPARED = {NATIVE / "proxy" / "wire" / "protocol.h", PYTHON[0] / "wire" / "layout.py"}
SCALES = {"S": 1e9, "SECONDS": 1e9, "MS": 1e6, "US": 1e3, "NS": 1.0, "BYTES": 1.0}
CONSTANT = re.compile(r"^\s*(?:static )?constexpr [\w:]+ k(\w+) = ([^;\"]+);", re.MULTILINE)
TEXT = re.compile(r'"((?:PYTRITON_|pytriton[-_.])[\w.-]+)"')
SAME_NUMBER = {
    "NOEXEC_SEAL": "a number of Linux",
    "TICK": "each waits on its own for something else",
}
SAME_TEXT = {
    "pytriton-arena": "a name that people see in /proc, and nobody looks for",
    "pytriton-self-test": "the self-test and the guard each try something of their own under it",
}


def plain(name: str, value: float) -> tuple[str, float]:
    """Return a limit as both languages would have it: `READY_GRACE` of 5e8, for kReadyGraceNs as for _READY_GRACE_S."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper().strip("_")
    stem, _, unit = words.rpartition("_")
    return (stem, value * SCALES[unit]) if unit in SCALES else (words, value)


def number(text: str) -> float | None:
    """Return the value of an expression of numbers alone, such as `64 << 20`, in either language."""
    text = re.sub(r"(?<=\d)(?:u|ull)\b", "", text.replace("'", "").replace("kMillisecond", "1000000"))
    if re.fullmatch(r"[\dxa-fA-F.\s<*+()-]+", text) is None:
        return None
    try:
        value = eval(text, {"__builtins__": {}})
    except SyntaxError:
        return None
    return value if isinstance(value, int | float) else None


def in_python() -> Iterator[tuple[tuple[str, float], Path]]:
    """Yield the limits of modules: names in capitals with a number."""
    for path in (path for folder in PYTHON for path in folder.rglob("*.py")):
        if path in COMPARED or "_tritonserver" in path.parts:
            continue
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]
            elif isinstance(statement, ast.AnnAssign):
                target = statement.target
            else:
                continue
            value = None if statement.value is None else number(ast.unparse(statement.value))
            if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
                yield plain(target.id, value), path


def in_cpp() -> Iterator[tuple[Path, str]]:
    """Yield the C++ sources that somebody writes by hand."""
    for path in (*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")):
        text = path.read_text(encoding="utf-8")
        if path not in COMPARED and "tests" not in path.parts and not text.startswith(WRITTEN):
            yield path, text


def test_no_limit_has_a_twin() -> None:
    python = dict(in_python())
    assert ("MAX_SEGMENTS", 4096) in python
    twins = set()
    for path, text in in_cpp():
        for found in CONSTANT.finditer(text):
            value = number(found[2])
            limit = ("", 0.0) if value is None else plain(found[1], value)
            if limit in python and limit[0] not in SAME_NUMBER:
                twins.add(f"{limit[0]}: {python[limit].relative_to(ROOT)} and {path.relative_to(ROOT)}")
    advice = "put it into wire/limits.py, which `dev.py reference` writes for C++, or say what differs in SAME_NUMBER"
    assert not twins, "\n".join([advice, *sorted(twins)])


def test_no_name_of_a_file_or_variable_is_written_twice() -> None:
    sources = [path.read_text(encoding="utf-8") for folder in PYTHON for path in folder.rglob("*.py")]
    python = {text for source in sources for text in TEXT.findall(source)}
    assert "pytriton.conf" in python
    twins = {
        f"{text}: {path.relative_to(ROOT)}"
        for path, source in in_cpp()
        for text in TEXT.findall(source)
        if text in python and text not in SAME_TEXT
    }
    advice = "let tools/native_headers.py write it for C++, or say why not in SAME_TEXT"
    assert not twins, "\n".join([advice, *sorted(twins)])
