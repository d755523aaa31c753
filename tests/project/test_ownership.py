"""The table of who owns what Triton's C API gives, held against what is declared and called."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

from pytriton.inprocess.capi import functions
from pytriton.inprocess.capi.c_types import ADDRESS, STRING, ParameterHandle, out
from support.paths import ROOT

NATIVE = ROOT / "packages/pytriton-proxy-backend/native"
HEADER = NATIVE / "proxy/triton/triton_api.h"
# Arrays that are read, and numbers that are written.
NOT_GIVEN = {out(ParameterHandle)} | {
    out(kind)
    for kind in (ctypes.c_bool, ctypes.c_double, ctypes.c_int64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint64)
}


def table() -> dict[str, str]:
    """The rows: the function, without the begin of its name, and whose it is."""
    rows = {}
    for line in HEADER.read_text().splitlines():
        cells = [cell.strip() for cell in line.removeprefix("//").split("|")]
        if line.startswith("// |") and re.fullmatch(r"(SERVER|BACKEND)_\w+", cells[1]):
            assert cells[1] not in rows, f"{cells[1]} stands in the table twice"
            rows[cells[1]] = cells[3]
    return rows


def declared() -> dict[str, str]:
    """What the header declares, by name: result and arguments."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    return {
        name: f"{result}({arguments})"
        for result, name, arguments in re.findall(
            r"([\w ]+\*?) TRITON((?:SERVER|BACKEND)_\w+)\(([^;]*)\);", text.replace("\n", " ")
        )
    }


def giving_native() -> Iterator[str]:
    """The functions that give something, by their declarations in C++: a pointer, other than an error."""
    for name, declaration in declared().items():
        result, _, arguments = declaration.partition("(")
        pointers = re.findall(r"(\w+)\s*\*\*", arguments)
        if "TRITONSERVER_Parameter" in pointers:
            pointers.remove("TRITONSERVER_Parameter")  # an array of labels or parameters
        if pointers or (result.strip().endswith("*") and "Error*" not in result) or name == "SERVER_ErrorNew":
            yield name


def giving_through_ctypes() -> Iterator[str]:
    pointer_type = type(out(STRING))
    for name, arguments in [*functions.CALLS.items(), *functions.SHORT_CALLS.items()]:
        if any(isinstance(kind, pointer_type) and kind not in NOT_GIVEN for kind in arguments):
            yield name.removeprefix("TRITON")
    for name, (result, *_) in functions.VALUES.items():
        if result is STRING or (isinstance(result, type) and issubclass(result, ADDRESS)):
            yield name.removeprefix("TRITON")


def test_every_function_that_gives_something_is_in_the_table() -> None:
    giving = {*giving_native(), *giving_through_ctypes(), "SERVER_InferenceResponseError"}
    assert len(giving) > 40
    assert giving == table().keys()


def test_what_is_ours_is_deleted_by_whoever_may_get_it() -> None:
    native = "".join(path.read_text() for folder in ("proxy", "inprocess") for path in (NATIVE / folder).rglob("*.cc"))
    native += "".join(
        path.read_text() for path in (NATIVE / "proxy/triton/triton_util.h", *NATIVE.glob("proxy/calls/*.h"))
    )
    python = "".join(
        path.read_text() for path in (ROOT / "packages/pytriton-server/src/pytriton/inprocess").rglob("*.py")
    )
    for name, whose in table().items():
        for deleter in re.findall(r"^ours: (\w+)", whose):
            calls = re.compile(rf"TRITON{deleter}\b")
            for code in (native, python):
                if re.search(rf"TRITON{name}\(", code):
                    assert calls.search(code), f"{name} gives what {deleter} deletes, which is not called"
