"""Writes the headers by which C++ takes limits, codes and names from Python; `tools/settings.py` runs it."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from pytriton.inprocess.callables.backend import Instance
from pytriton.inprocess.requests import native_calls
from pytriton.proxy_backend import description, settings
from pytriton.proxy_backend.hosting import control
from pytriton.proxy_backend.system import native
from pytriton.proxy_backend.wire import dtypes, layout, limits
from pytriton.server.tritonserver import exec_shim, guard, handover, outcomes

__all__ = ["headers"]

NATIVE = "packages/pytriton-proxy-backend/native"
HEAD = "// Written by `python3 tools/dev.py reference` from\n// {made_of}. Change that.\n#pragma once\n\n"
NANOSECONDS = 1_000_000_000
WIDTH = 116


def headers() -> dict[str, str]:
    """Return the text of each header, by its path."""
    return {
        f"{NATIVE}/proxy/wire/shared_layout.h": layout_header(),
        f"{NATIVE}/proxy/wire/shared_limits.h": limits_header(),
        f"{NATIVE}/guard/shared.h": guard_header(),
        f"{NATIVE}/inprocess/instance_fields.h": instance_header(),
    }


def camel(name: str) -> str:
    """Return a name of Python as C++ has it: `kWorkerLost` for `WORKER_LOST`."""
    return "k" + "".join(word.capitalize() for word in name.strip("_").split("_"))


def constant(name: str, value: float | str, meaning: str) -> str:
    """Return the definition of one constant: times in nanoseconds, texts as arrays that end with a zero."""
    called = camel(name)
    if isinstance(value, str):
        definition = f'constexpr char {called}[] = "{value}";'
    elif name.endswith("_S"):
        definition = f"constexpr uint64_t {called[:-1]}Ns = {round(value * NANOSECONDS)};"
    else:
        definition = f"constexpr {'uint64_t' if name.endswith('_BYTES') else 'int'} {called} = {value};"
    return with_comment(definition, meaning)


def with_comment(code: str, text: str) -> str:
    """Return a line of C++ with a comment: beside it if there is room, else above."""
    if not text:
        return code
    if len(line := f"{code}  // {text}") <= WIDTH:
        return line
    begin = code[: len(code) - len(code.lstrip())] + "// "
    return "\n".join([*textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=begin), code])


def enumeration(name: str, kind: str, members: Iterable[tuple[str, object, str]], *, last: str = "") -> str:
    """Return an enumeration: each member with its value, if there is one, and its meaning; and a last member."""
    lines = []
    for member, value, meaning in members:
        is_set = "" if value is None else f" = {value}"
        lines.append(with_comment(f"  {camel(member)}{is_set},", meaning))
    return f"enum {name} : {kind} {{\n" + "\n".join([*lines, *([f"  {last}"] if last else [])]) + "\n};"


def meanings_of(kind: type | object) -> dict[str, str]:
    """Return what the docstrings below the names of a class or a module say, name by name."""
    tree = ast.parse(inspect.getsource(kind))  # type: ignore[arg-type]
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else tree.body
    found = {}
    for statement, below in pairwise(body):
        if isinstance(statement, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if isinstance(target, ast.Name) and isinstance(below.value, ast.Constant):
                found[target.id] = inspect.cleandoc(str(below.value.value))
    return found


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, in one line."""
    return re.split(r"(?<=[.:]) (?=[A-Z0-9])", " ".join(text.split()))[0]


def limits_header() -> str:
    """Return the limits and codes that C++ shares with Python."""
    path = Path(limits.__file__)
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'^(\w+): Final = .*\n"""(.*)"""$', text, re.MULTILINE)
    if len(found) != len(re.findall(r"^[A-Z_]+\b", text, re.MULTILINE)):
        raise SystemExit(f"{path} has a limit that is not of the form `NAME: Final = value` with its meaning below")
    constants = [constant(name, getattr(limits, name), meaning) for name, meaning in found]
    names = {
        "SIDE_FILE_NAME": settings,
        "HOSTS_FILE_NAME": settings,
        "HOSTS_VARIABLE": settings,
        "DESCRIPTION_NAME": description,
    }
    constants += [constant(name, getattr(module, name), meanings_of(module)[name]) for name, module in names.items()]
    types = range(dtypes.BF16_CODE + 1)
    meanings = meanings_of(control.FrameKind)
    frames = enumeration(
        "class FrameKind",
        "uint16_t",
        ((kind.name, kind.value, meanings.get(kind.name, "")) for kind in control.FrameKind),
    )
    return (
        HEAD.format(made_of="wire/limits.py, wire/dtypes.py, wire/layout.py, settings.py and hosting/control.py")
        + f"""\
#include <cstdint>

namespace pytriton {{

{chr(10).join(constants)}
// Triton's numbers of some types.
constexpr uint32_t kBytesType = {description.TRITON_CODES["BYTES"]};
constexpr uint32_t kFp64Type = {description.TRITON_CODES["FP64"]};
// The names of the types, by Triton's number.
constexpr const char* kTypeNames[] = {{
    {", ".join(f'"{type_name(code)}"' for code in types)}}};
// Bytes of one element by Triton's number of its type; 0 where strings have a length each, and for no type.
constexpr uint8_t kElementSizes[] = {{{", ".join(str(element_size(code)) for code in types)}}};
// The largest number of a type of parameters.
constexpr uint32_t kLastParameterType = {max(layout.ParameterType)};

// The kinds of frames between the library and the supervisor of hosts.
{frames}

}}  // namespace pytriton
"""
    )


def layout_header() -> str:
    """Return the names of protocol 1 that C++ shares with Python."""

    def comments_of(kind: type[enum.IntEnum | enum.IntFlag]) -> dict[str, str]:
        return dict(re.findall(r"^ {4}(\w+) = .*  # (.*)$", inspect.getsource(kind), re.MULTILINE))

    def bits(kind: type[enum.IntFlag], prefix: str, size: int) -> str:
        comments = comments_of(kind)
        lines = [f"// {kind.__doc__}"]
        for flag in kind:
            code = f"constexpr uint{size}_t {camel(f'{prefix}_{flag.name}')} = 1u << {flag.bit_length() - 1};"
            lines.append(with_comment(code, comments.get(flag.name or "", "")))
        return "\n".join(lines)

    def numbers(kind: type[enum.IntEnum], size: int) -> str:
        comments = comments_of(kind)
        members = ((member.name, member.value, comments.get(member.name, "")) for member in kind)
        return f"// {kind.__doc__}\n" + enumeration(f"class {kind.__name__}", f"uint{size}_t", members)

    return (
        HEAD.format(made_of="wire/layout.py")
        + f"""\
#include <cstdint>

namespace pytriton {{

{bits(layout.Capability, "CAP", 64)}
// Those of the native proxy: all.
constexpr uint64_t kCapabilities = {sum(layout.Capability)};

{numbers(layout.MessageType, 16)}

{bits(layout.MessageFlag, "FLAG", 16)}

{numbers(layout.Operation, 32)}

{bits(layout.ModelFlag, "MODEL", 32)}

{bits(layout.RequestFlag, "REQUEST", 32)}

{bits(layout.ResponseFlag, "RESPONSE", 32)}

}}  // namespace pytriton
"""
    )


def type_name(code: int) -> str:
    """Return Triton's name of a type."""
    names = {number: name for name, number in description.TRITON_CODES.items()}
    return names.get(code, "no type")


def element_size(code: int) -> int:
    """Return the bytes of one element of a type; 0 for strings and for no type."""
    if code == dtypes.BF16_CODE:
        return dtypes.BF16_BITS.itemsize
    try:
        dtype = dtypes.dtype_of(code)
    except TypeError:
        return 0
    return 0 if dtype.hasobject else dtype.itemsize


def guard_header() -> str:
    """Return what the guard shares with whoever starts it: names of variables, settings, what lies where in memory."""
    names = {
        "GUARD_VARIABLE": guard,
        "CORS_VARIABLE": guard,
        "HANDOVER_VARIABLE": handover,
        "OUTCOMES_VARIABLE": outcomes,
        "GUARD_SECRETS_VARIABLE": exec_shim,
        "GUARD_LIBRARY_NAME": native,
    }
    names_of_places = ("ROLE", "TRIED", "COMPLETE", "ENDING", "REQUESTS", "REACHED")
    places = {f"{name}_PLACE": handover for name in names_of_places}
    sizes = {
        "COUNTED_MODELS": outcomes,
        "COUNTED_NAME": outcomes,
        "COUNTED_OUTCOMES": outcomes,
        "ENTRY_READY": outcomes,
    }
    constants = [
        constant(name, getattr(module, name), first_sentence(meanings_of(module)[name]))
        for name, module in {**names, **places, **sizes}.items()
    ]
    fields = [field for field in dataclasses.fields(guard.GuardConfig) if field.name != "enabled"]
    meanings = meanings_of(guard.GuardConfig)
    members, rows = [], []
    for field in fields:
        # None of Python is 0 here: each of these limits is one of another kind then.
        default = int(getattr(guard.GuardConfig(), field.name) or 0)
        members.append(with_comment(f"  uint64_t {field.name} = {default}u;", first_sentence(meanings[field.name])))
        rows.append(f'    {{"{field.name}", &Limits::{field.name}, {guard.least_of(field) if default > 1 else 0}}},')
    roles = meanings_of(handover.Role)
    enumerations = [
        "// The protocols by which requests come.",
        enumeration("class Protocol", "uint8_t", ((name, None, "") for name in outcomes.PROTOCOLS)),
        "// How a request may end.",
        enumeration(
            "class Outcome",
            "uint8_t",
            ((name, None, meaning) for name, meaning in outcomes.MEANINGS.items()),
            last="kUnknown = 0xff,  // not yet known",
        ),
        "// What one of two servers at the same sockets does.",
        enumeration("Role", "uint8_t", ((role.name, role.value, roles[role.name]) for role in handover.Role)),
        "// What the guard does.",
        enumeration(
            "class Protection",
            "size_t",
            ((each.name, None, each.value) for each in handover.Protection),
            last="kCount",
        ),
    ]
    return (
        HEAD.format(made_of="guard.py, handover.py, outcomes.py and exec_shim.py in server/tritonserver")
        + f"""\
#include <cstddef>
#include <cstdint>

namespace pytriton::guard {{

{chr(10).join(constants)}

// The settings of the guard: what a request may ask of the server, and which parts are switched on.
struct Limits {{
{chr(10).join(members)}
}};

struct LimitField {{
  const char* name;
  uint64_t Limits::*value;
  uint64_t least;
}};

constexpr LimitField kLimitFields[] = {{
{chr(10).join(rows)}
}};

{chr(10).join(enumerations)}

}}  // namespace pytriton::guard
"""
    )


def instance_header() -> str:
    """Return the fields of an instance in process that Python reads and writes, and flags that it gets."""
    types: dict[object, str] = {
        ctypes.c_void_p: "void*",
        ctypes.c_uint64: "uint64_t",
        ctypes.c_uint32: "uint32_t",
        ctypes.py_object: "PyObject*",
    }
    meanings = dict(re.findall(r"^ {4}(\w+): (.*)$", inspect.cleandoc(Instance.__doc__ or ""), re.MULTILINE))
    members, checks = [], []
    for field in Instance._fields_:
        name, kind = field[:2]
        # Python has no use for more of it than the address.
        declared = "Lane*" if name == "lane" else types[kind]
        members.append(with_comment(f"  {declared} {name};", meanings[name]))
        checks.append(f"static_assert(offsetof(InstanceFields, {name}) == {getattr(Instance, name).offset});")
    lines = "\n".join(members)
    return (
        HEAD.format(made_of="`Instance` of inprocess/callables/backend.py and inprocess/requests/native_calls.py")
        + f"""\
#include <cstddef>
#include <cstdint>

#include "../python/python_abi.h"

namespace pytriton {{

struct Lane;

struct InstanceFields {{
{lines}
}};
{chr(10).join(checks)}
static_assert(sizeof(InstanceFields) == {ctypes.sizeof(Instance)});

// What happens to a request. Python is told in the thread in which it happens.
{flags(native_calls.Event)}

// Flags of a response as Python gets it.
{flags(native_calls.ResponseFlag)}

}}  // namespace pytriton
"""
    )


def flags(kind: type[enum.IntFlag]) -> str:
    """Return the flags of one kind."""
    meanings: Mapping[str, str] = meanings_of(kind)
    return enumeration(
        kind.__name__, "uint32_t", ((flag.name or "", int(flag), meanings[flag.name or ""]) for flag in kind)
    )
