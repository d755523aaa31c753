"""`tools/dev.py test` runs the tests once more for each server that a variable names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.paths import ROOT, load_program

VARIABLE = "PYTRITON_TEST_TRITONSERVERS"


class Recorder:
    """Takes the place of what runs commands: notes them, and fails the one with a server of this name."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.ran: list[tuple[tuple[str, ...], str]] = []
        self.alone: list[tuple[str, ...]] = []

    def hatch(self, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        server = (extra or {}).get("PYTRITON_TRITONSERVER_DIR", "")
        if "pytest" in arguments or arguments[:2] == ("run", "test"):
            self.ran.append((arguments, server))
        if "alone:test" in arguments:
            self.alone.append(arguments)
        return -9 if self.failing and server.endswith(self.failing) else 0

    def run(self, *command: str) -> int:
        return self.hatch("run", "--", *command)

    def step(self, title: str, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        return self.hatch(*arguments, extra=extra)

    def finish(self) -> int:
        return 0


@pytest.fixture
def dev() -> ModuleType:
    return load_program(ROOT / "tools" / "dev.py")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "tritonserver").touch(0o755)
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, folders)))
    return folders


def test_the_tests_run_with_each_server(dev: Any, servers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "MATRIX_PYTHONS", ())  # to find them, and what there is for them, takes a minute
    runner = Recorder()
    assert dev.test(runner, ["tests/test_x.py", "-k", "y"]) == 0
    command = ("run", "--", "pytest", "tests/test_x.py", "-k", "y")
    assert runner.ran == [(command, ""), *((command, str(server)) for server in servers)]
    runner = Recorder()
    assert dev.test(runner, []) == 0
    assert [server for _, server in runner.ran] == ["", *map(str, servers)]
    # What needs no server is not run again.
    tests = ("packages/pytriton-server/tests", "tests")
    assert [arguments[2:] for arguments, server in runner.ran if server] == [tests] * 2


def test_the_long_ones_run_in_ci_and_are_told_of_elsewhere(
    dev: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "MATRIX_PYTHONS", ())
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (ROOT / ".ci" / "run").read_text().endswith("exec python3 tools/dev.py test --ci\n")
    for arguments, selected in (([], False), (["--ci"], True)):
        runner = Recorder()
        assert dev.test(runner, arguments) == 0
        [(ran, _)] = runner.ran
        assert (ran[2:4] == ("-m", "not soak")) is selected
        assert len(runner.alone) == len(dev.LONE_DISTS)
        assert all((alone[-2:] == ("-m", "not soak")) is selected for alone in runner.alone)
        assert ("`test --ci`" in capsys.readouterr().out) is not selected


def test_the_quick_ones_run_once_and_what_they_leave_out_is_told(
    dev: Any, servers: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Recorder()
    assert dev.test(runner, ["--quick", "-x"]) == 0
    assert runner.ran == [(("run", "test", *dev.QUICK_TESTS, "-x"), "")]
    assert "skipped" in capsys.readouterr().out
    for name in (*dev.QUICK_TESTS[2:], *dev.SHORT_TESTS[2:]):
        assert (ROOT / name).exists(), f"there is no {name}"


@pytest.mark.usefixtures("servers")
def test_a_failure_with_one_server_is_one_of_all(dev: Any) -> None:
    for failing in ("one", "two"):
        assert dev.test(Recorder(failing), ["tests"]) == -9


def test_without_the_variable_they_run_once(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    runner = Recorder()
    assert dev.test(runner, ["tests"]) == 0
    assert [server for _, server in runner.ran] == [""]


def test_byte_code_is_kept_of_what_does_not_change(dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting, temporary = tmp_path / "checkout", tmp_path / "tmp"
    for folder in (lasting, temporary):
        folder.mkdir()
        (folder / f"{folder.name}_module.py").touch()
    monkeypatch.setattr(dev, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(dev.tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    dev.TOOLS.mkdir()
    environment = dev.hatch_environment(tmp_path)
    for folder in (lasting, temporary):
        subprocess.run([sys.executable, "-c", f"import {folder.name}_module"], check=True, cwd=folder, env=environment)
    assert not list(tmp_path.rglob("__pycache__"))
    kept = [path.name.partition(".")[0] for path in dev.TOOLS.rglob("*_module.*.pyc")]
    assert kept == ["checkout_module"]


def test_a_folder_without_a_server_is_told(dev: Any, servers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (servers[1] / "bin" / "tritonserver").unlink()
    runner = Recorder()
    with pytest.raises(dev.DevError, match=rf"{VARIABLE}.*; {servers[1]} holds no bin/tritonserver"):
        dev.test(runner, [])
    assert runner.ran == []
