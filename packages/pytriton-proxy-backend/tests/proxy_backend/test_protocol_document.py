"""The tables of docs/protocol.md against the numbers in Python and in C++."""

import enum
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.system.native import BACKEND_NAME
from pytriton.proxy_backend.wire import dtypes, layout

DOCUMENT = Path(__file__).parents[4] / "docs" / "protocol.md"
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8, "f64": 8, "string": 8}
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "f64": "d", "string": "II"}
STRUCTS = {
    "Message": layout.MESSAGE,
    "Greeting": layout.GREETING,
    "CallBody": layout.CALL,
    "RecordHeader": layout.RECORD,
    "StringRef": layout.STRING_REF,
    "RequestEntry": layout.REQUEST,
    "TensorEntry": layout.TENSOR,
    "ParameterEntry": layout.PARAMETER,
    "ResponseEntry": layout.RESPONSE,
}

pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="the document is in the repository, not in the sdist")


def tables() -> dict[str, list[list[str]]]:
    """The rows of the first table under each heading of the third level."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^### ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        found[title] = rows[2:]
    return found


def byte_table(name: str) -> tuple[int, list[list[str]]]:
    for title, rows in tables().items():
        match = re.fullmatch(rf"`{name}`, (\d+) bytes", title)
        if match:
            return int(match[1]), rows
    raise AssertionError(f"no byte table of {name} in the document")


def numbers(title: str, column: int = 1) -> dict[str, int]:
    return {row[column]: int(row[0]) for row in tables()[title]}


@pytest.fixture(scope="module")
def header(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> dict[str, str]:
    """Every number of protocol.h that is written by hand."""
    printed = run_program(compile_native("layout.cc", []))
    return dict(line.split(" ", 1) for line in printed.splitlines())


def size_of(kind: str) -> int:
    match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", kind)
    assert match is not None, kind
    return SIZES[match[1]] * int(match[2] or 1)


@pytest.mark.parametrize("name", STRUCTS)
def test_byte_tables_have_no_gap(name: str) -> None:
    size, rows = byte_table(name)
    at = 0
    for offset, kind, field, *_ in rows:
        assert int(offset) == at, field
        assert (
            at % min(size_of(kind) if "[" not in kind else SIZES[kind.partition("[")[0]], 4 if kind == "string" else 8)
            == 0
        )
        at += size_of(kind)
    assert at == size


@pytest.mark.parametrize("name", STRUCTS)
def test_byte_tables_in_python(name: str) -> None:
    size, rows = byte_table(name)
    code = "<"
    for _, kind, field, *_ in rows:
        base, _, count = kind.rstrip("]").partition("[")
        if field.startswith("reserved"):
            code += f"{size_of(kind)}x"
        else:
            code += f"{count}s" if base == "u8" and count else CODES[base] * int(count or 1)
    ours = STRUCTS[name]
    assert ours.size == size == struct.calcsize(code)
    # The same fields at the same places: values that differ come back the same through both.
    raw = bytes(i % 251 for i in range(size))
    assert ours.unpack(raw) == struct.unpack(code, raw)


@pytest.mark.parametrize("name", STRUCTS)
def test_byte_tables_in_cpp(name: str, header: dict[str, str]) -> None:
    size, rows = byte_table(name)
    assert {f"{name}.{field}": offset for offset, _, field, *_ in rows} == {
        key: value for key, value in header.items() if key.startswith(f"{name}.")
    }
    assert int(header[f"sizeof.{name}"]) == size


def test_offsets_of_single_fields_in_python() -> None:
    offsets = {field: int(offset) for offset, _, field, *_ in byte_table("RequestEntry")[1]}
    assert offsets["cancelled"] == layout.REQUEST_CANCELLED_OFFSET
    assert {field: int(offset) for offset, _, field, *_ in byte_table("RecordHeader")[1]}["batch"] == (
        layout.RECORD_BATCH_OFFSET
    )
    raw = bytes(range(80))
    brief = layout.REQUEST_BRIEF.unpack(raw)
    assert brief == tuple(
        struct.unpack_from("<I", raw, offsets[name])[0] for name in ("rows", "outputs_offset", "outputs_count")
    )
    assert {field: int(offset) for offset, _, field, *_ in byte_table("Greeting")[1]}["pid"] == (
        layout.GREETING_VERSION.size
    )


@pytest.mark.parametrize(
    ("title", "ours"),
    [
        ("Message types", layout.MessageType),
        ("Message flags", layout.MessageFlag),
        ("Capabilities", layout.Capability),
        ("Model flags", layout.ModelFlag),
        ("Request flags", layout.RequestFlag),
        ("Response flags", layout.ResponseFlag),
        ("Operations", layout.Operation),
        ("Error codes", layout.ErrorCode),
        ("Parameter types", layout.ParameterType),
    ],
)
def test_names_and_their_numbers(title: str, ours: Any) -> None:
    """Those in C++ are written from the ones in Python."""
    stated = {
        name: 1 << number if issubclass(ours, enum.IntFlag) else number for name, number in numbers(title).items()
    }
    assert stated == {member.name: member.value for member in ours}


def test_data_types(header: dict[str, str]) -> None:
    rows = tables()["Data types"]
    assert [int(row[0]) for row in rows] == list(range(1, 15))
    for number, _, size, name in rows:
        assert header[f"element.{number}"] == size
        if name == "bfloat16":
            assert int(number) == dtypes.BF16_CODE
            continue
        dtype = np.dtype(name)
        assert dtypes.code_of(dtype) == int(number)
        assert dtype.kind == "O" or dtype.itemsize == int(size)
    assert header["element.0"] == header["element.15"] == "0"


def test_constants(header: dict[str, str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"# Protocol {layout.MAJOR}.{layout.MINOR}\n" in text
    assert (int(header["kMajor"]), int(header["kMinor"])) == (layout.MAJOR, layout.MINOR)
    assert header["kMagic"].encode() == layout.MAGIC
    stated = dict(re.findall(r"^\| ([a-z][^|]+) \| (\d+) \|$", text.partition("## Constants")[2], flags=re.MULTILINE))
    for name, ours, theirs in (
        ("packet, at most", layout.MAX_PACKET, "kMaxPacket"),
        ("text of a greeting, at most", layout.MAX_TEXT, "kMaxText"),
        ("alignment", layout.ALIGNMENT, "kAlignment"),
        ("metadata of a record, at most", layout.MAX_METADATA, "kMaxMetadata"),
        ("owner of whole-batch tensors", layout.WHOLE_BATCH, "kWholeBatch"),
    ):
        assert int(stated[name]) == ours == int(header[theirs])
    assert (int(header["kBatchMagic"]), int(header["kResponseMagic"])) == (layout.BATCH_MAGIC, layout.RESPONSE_MAGIC)
    assert BACKEND_NAME == "pytriton"
