"""`tools/rooms.py`: what it refuses, and what it lets pass."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import tomli

from support.paths import ROOT, load_program


@pytest.fixture
def rooms() -> Any:
    return load_program(ROOT / "tools" / "rooms.py")


def tree(text: str) -> ast.Module:
    return ast.parse(dedent(text))


def test_private_attributes_of_others_are_refused(rooms: Any) -> None:
    source = tree(
        """
        import os

        class Mine(Theirs):
            _kind = 1
            __slots__ = ("_slot",)

            def __init__(self):
                self._value = self._inherited = 0
                super()._set()

            def __eq__(self, other):
                return self._value == other._value and other._slot == other._kind

        def _start(triton):
            os._exit(triton._config)
            triton._start()
        """
    )
    assert list(rooms.private_attributes("pytriton.a", source)) == [
        "private-attribute pytriton.a triton._config",
        "private-attribute pytriton.a triton._start",
    ]


def test_private_names_of_another_house_are_refused(rooms: Any) -> None:
    source = tree(
        """
        from pytriton.client import ModelClient, _sync
        from pytriton.client._core.options import CallOptions
        from pytriton.exceptions._namespace import require_namespace_package
        from pytriton.server._inner import mine
        import pytriton.openai._models
        """
    )
    assert list(rooms.private_imports("pytriton.server.a", source)) == [
        "private-import pytriton.server.a pytriton.client._sync",
        "private-import pytriton.server.a pytriton.client._core.options.CallOptions",
        "private-import pytriton.server.a pytriton.openai._models",
    ]


def test_every_package_and_every_guest_stands_in_the_contracts() -> None:
    """Import-linter is silent about a package that no contract names."""
    packages = {path.name for path in ROOT.glob("packages/*/src/pytriton/*") if (path / "__init__.py").is_file()}
    linter = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    circles = contracts["No import circle between modules or sub-packages"]["ancestors"]
    layers = contracts["The distributions are layers"]["layers"]
    for listed in (linter["root_packages"], circles, [name for layer in layers for name in layer.split(" | ")]):
        assert {name.removeprefix("pytriton.") for name in listed} == packages
    server = tomli.loads((ROOT / "packages/pytriton-server/pyproject.toml").read_text())
    guests = sorted(server["project"]["entry-points"]["pytriton.guests"])
    [held] = [contract for name, contract in contracts.items() if name.startswith("Guests take public names")]
    assert sorted(held["source_modules"]) == [f"pytriton.{guest}" for guest in guests]
    tried = load_program(ROOT / "tests/project/test_guests.py")
    assert [*tried.OPTIONS] == guests
    assert sorted(tried.GUESTS) == sorted([*guests, "inprocess"])


def test_files_of_cpp_include_downwards(rooms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, included in (
        ("proxy/wire/record.cc", ["record.h", "../text/utf8.h", "../batch/cost.h"]),
        ("proxy/backend.cc", ["calls/calls.h", "../guard/hooks.h"]),
        ("guard/refuse/scan.cc", ["../answers/page.h", "../../grpc/loop.h", "../../proxy/text/utf8.h"]),
        ("grpc/loop.cc", ["../guard/hooks.h"]),
        ("tests/unit.cc", ["../guard/hooks.h"]),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f'#include "{file}"\n' for file in included))
    monkeypatch.setattr(rooms, "NATIVE", tmp_path)
    assert list(rooms.upward_includes()) == [
        "include proxy/backend.cc guard/hooks.h",
        "include proxy/wire/record.cc proxy/batch/cost.h",
    ]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "room.cc").write_text('#include "room.h"\n')
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    with pytest.raises(KeyError, match=r"Add the folder of new/room\.h to NATIVE_LAYERS"):
        list(rooms.upward_includes())


def test_the_baseline_holds_what_is_found_and_nothing_else(
    rooms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rooms.BASELINE.read_text(encoding="utf-8")
    monkeypatch.setattr(rooms, "BASELINE", tmp_path / "baseline.txt")
    rooms.BASELINE.write_text(text, encoding="utf-8")
    assert rooms.main() == 0
    rooms.BASELINE.write_text(text + "modules tests/gone 17\n", encoding="utf-8")
    assert rooms.main() == 1
    assert "nothing needs it any more: modules tests/gone 17\n" in capsys.readouterr().out
    monkeypatch.setattr(rooms, "MAX_MODULES", 1)
    assert rooms.main() == 1
    assert "Breaks a rule of tools/rooms.py: modules tests/serving " in capsys.readouterr().out


def test_large_classes_are_refused_by_steps(rooms: Any) -> None:
    for lines, found in (
        (400, []),
        (401, ["class-lines pytriton.a Large 425"]),
        (425, ["class-lines pytriton.a Large 425"]),
    ):
        source = tree("class Large:\n" + "    size = 1\n" * (lines - 1))
        assert list(rooms.large_classes("pytriton.a", source)) == found
