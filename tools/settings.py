"""Writes what C++ and `docs/` take from Python: settings here, limits, codes and names in `native_headers.py`.

`python3 tools/dev.py reference` runs it; with `--check` it only compares.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from pytriton.proxy_backend.settings import FORMAT, ProxySettings, PythonProxySettings, parameter_fields
from pytriton.proxy_backend.wire.settings import SettingField, setting_fields
from pytriton.server.tritonserver import advisories

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.native_headers import NATIVE, headers  # noqa: E402 - found by the line above

HEADER = f"{NATIVE}/proxy/wire/settings_table.h"
MAX_U64 = (1 << 64) - 1
# Kinds of text: what a value must be, in words, and the C++ function that says whether it is.
TEXTS = {Path: ("an absolute path", "IsAbsolutePath"), str: ("hexadecimal digits", "IsHexadecimal")}


def number_limits(field: SettingField) -> tuple[int, int]:
    """Return the smallest and the largest number in `pytriton.conf`; 0 stands for `None`."""
    scale = 1000 if field.type is float else 1
    smallest = 0 if field.optional else round(field.about.minimum * scale)
    return smallest, min(round(field.about.maximum * scale), MAX_U64)


def expected(field: SettingField) -> str:
    """Return what a value in `pytriton.conf` must be, in words."""
    if field.type is bool:
        return "true or false"
    if field.type in TEXTS:
        return TEXTS[field.type][0]
    smallest, largest = number_limits(field)
    if largest < MAX_U64:
        return f"a whole number from {smallest} to {largest}" if smallest else f"a whole number up to {largest}"
    return f"a whole number above {smallest - 1}" if smallest else "a whole number"


def file_meaning(field: SettingField) -> str:
    """Return what a value in `pytriton.conf` means."""
    meaning = field.about.meaning.replace(", in seconds", ", in milliseconds")
    return f"{meaning}; 0: {field.about.unset}" if field.optional else meaning


def header() -> str:
    """Return the table of the native proxy."""
    fields = setting_fields(ProxySettings)
    members, rows = [], {"Number": [""], "Switch": [""], "Text": [""]}
    for field in fields:
        default = field.default if field.default is not MISSING else ""
        members.append(f"  // {file_meaning(field)}")
        if field.type is bool:
            members.append(f"  bool {field.key} = {field.to_conf(default)};")
            rows["Switch"].append(f'    {{"{field.key}", &Settings::{field.key}}},')
        elif field.type in TEXTS:
            members.append(f"  std::string {field.key};")
            text, function = TEXTS[field.type]
            rows["Text"].append(f'    {{"{field.key}", &Settings::{field.key}, {function}, "{text}"}},')
        else:
            smallest, largest = number_limits(field)
            members.append(f"  uint64_t {field.key} = {field.to_conf(default)}u;")
            rows["Number"].append(
                f'    {{"{field.key}", &Settings::{field.key}, {smallest}u, {largest}u, "{expected(field)}"}},'
            )
    tables = "\n\n".join(
        f"constexpr {kind}Setting k{kind}Settings[] = {{" + "\n".join(lines) + "\n};" for kind, lines in rows.items()
    )
    return f"""\
// Written by `python3 tools/dev.py reference` from the Python settings. Change that, not this file.
#pragma once

#include <cstdint>
#include <string>

namespace pytriton {{

constexpr char kSettingsFormat[] = "{FORMAT}";

// What is not set is 0 or empty.
struct Settings {{
{chr(10).join(members)}
}};

struct NumberSetting {{
  const char* key;
  uint64_t Settings::*value;
  uint64_t minimum;
  uint64_t maximum;
  const char* expected;
}};

struct SwitchSetting {{
  const char* key;
  bool Settings::*value;
}};

struct TextSetting {{
  const char* key;
  std::string Settings::*value;
  bool (*is_valid)(const std::string& text);
  const char* expected;
}};

bool IsAbsolutePath(const std::string& text);
bool IsHexadecimal(const std::string& text);

{tables}

}}  // namespace pytriton
"""


def conf_rows() -> Iterator[str]:
    """Yield the table of `pytriton.conf`."""
    yield "| key | value | default |"
    yield "|---|---|---|"
    yield f"| `format` | `{FORMAT}` | required |"
    for field in setting_fields(ProxySettings):
        default = "required" if field.default is MISSING else field.to_conf(field.default) or "none"
        yield f"| `{field.key}` | {file_meaning(field)} ({expected(field)}) | {default} |"


def option_rows() -> Iterator[str]:
    """Yield the table of the options of `add` that set something of the proxy."""
    yield "| option | default | |"
    yield "|---|---|---|"
    native, python = (
        {field.name: field for field in setting_fields(kind)} for kind in (ProxySettings, PythonProxySettings)
    )
    for field in {**native, **python}.values():
        if field.about.option:
            default = field.about.unset if field.optional else "no" if field.type is bool else f"{field.default}"
            only = "Python proxy: " if field.name not in native else "" if field.name in python else "native proxy: "
            yield f"| `{field.about.option}` | {default.removesuffix('.0')} | {only}{field.about.meaning} |"


def parameter_rows() -> Iterator[str]:
    """Yield the table of the parameters that set something for a `model.py` on workers."""
    yield "| parameter | default | |"
    yield "|---|---|---|"
    for field in parameter_fields():
        default = (
            field.about.unset
            if field.optional
            else field.to_conf(field.default)
            if field.type is bool
            else f"{field.default}"
        )
        yield f"| `{field.parameter}` | {default.removesuffix('.0')} | {field.about.meaning} |"


def error_rows() -> Iterator[str]:
    """Yield the trees of errors, which are drawn at the top of their modules."""
    for name, module in ERRORS.items():
        docstring = ast.get_docstring(ast.parse((ROOT / "packages" / module).read_text(encoding="utf-8"))) or ""
        lines = [line for line in docstring.splitlines() if re.search(r"^\s*[A-Z]\w+Error$|[├└│]|\+-- ", line)]
        yield f"{name}:"
        yield ""
        yield '```text norun="a tree of classes"'
        yield textwrap.dedent("\n".join(lines))
        yield "```"
        yield ""


def advisory_rows() -> Iterator[str]:
    """Yield the published vulnerabilities of tritonserver, after what is known of them as of when."""
    newest = advisories.NEWEST_KNOWN_VERSION
    yield (
        f"The list is that of NVIDIA's bulletins as of {advisories.KNOWN_AS_OF}, and the newest version that it knows "
        f"is {newest}, of release {advisories.RELEASES[newest]}."
    )
    yield ""
    yield "| number | CVSS | fixed in | where | what | guard | what else helps |"
    yield "|---|---|---|---|---|---|---|"
    for each in advisories.ADVISORIES:
        yield (
            f"| {each.id} | {each.severity} | {each.release} ({each.fixed_in}) | {each.component} | {each.summary} | "
            f"{each.guard.value} | {each.also} |"
        )


ERRORS = {
    "Clients": "pytriton-client/src/pytriton/client/exceptions.py",
    "Inference callables and descriptions of models": "pytriton-decorators/src/pytriton/exceptions/__init__.py",
    "The server": "pytriton-server/src/pytriton/server/errors.py",
    "Triton in process": "pytriton-server/src/pytriton/inprocess/capi/errors.py",
    "Workers and proxies": "pytriton-proxy-backend/src/pytriton/proxy_backend/errors.py",
}
"""The modules with a tree of errors, by what raises them."""

TABLES = {
    "docs/protocol.md": ("pytriton.conf", conf_rows),
    "docs/dropin.md": ("add", option_rows),
    "docs/errors.md": ("errors", error_rows),
    "docs/python_models.md": ("config.pbtxt", parameter_rows),
    "docs/security.md": ("advisories", advisory_rows),
}
"""The name of the table between the markers of each page."""


def files() -> dict[str, str]:
    """Return the text of each file that is written, or has a table that is."""
    written = {HEADER: header(), **headers()}
    for path, (name, rows) in TABLES.items():
        begin, end = f"<!-- settings of {name}: `python3 tools/dev.py reference` -->", "<!-- end of settings -->"
        text = (ROOT / path).read_text(encoding="utf-8")
        table = "\n".join([begin, "", *rows(), "", end])
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        written[path], count = re.subn(pattern, lambda _, table=table: table, text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{path} has {count} tables between {begin} and {end}, expected one")
    return written


def stale() -> dict[str, str]:
    """Return those that differ from what is on disk."""
    return {
        path: text
        for path, text in files().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    }


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` say which are stale."""
    parser = argparse.ArgumentParser(description="Write what C++ and docs/ take from Python.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a file is stale")
    is_check = parser.parse_args(arguments).check
    found = stale()
    for path, text in found.items():
        if is_check:
            print(f"{path} is stale: run `python3 tools/dev.py reference`")
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if is_check and found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
