"""`tools/skips.py`: which skipped tests CI allows. `tools/mutants.py`: its tests and its score."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from support.paths import ROOT, load_program

PACKAGE = Path("packages/pytriton-decorators")
CHANGED = PACKAGE / "src/pytriton/decorators/_casts.py"
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="tritonserver 9.99 and later do this")
def test_marked(): ...

def test_program():
    pytest.skip("haproxy is not installed (apt install haproxy)")

@pytest.mark.xfail
def test_expected():
    raise ValueError

def test_runs(): ...
"""
MODULE = """
import pytest

pytest.importorskip("no_such_package")

def test_never(): ...
"""


@pytest.fixture
def skips() -> Any:
    return load_program(ROOT / "tools" / "skips.py")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """What pytest writes of tests that were skipped in several ways, in processes as in CI."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    subprocess.run([*command, f"--junitxml={tmp_path / 'python3.11.xml'}", str(tmp_path)], check=True, cwd=tmp_path)
    return tmp_path


def test_a_missing_package_is_refused_and_a_missing_program_where_there_can_be_one(
    skips: Any, reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "Not allowed by tools/skips.toml, in the step python3.11: "
    monkeypatch.delenv(skips.PROGRAMS_VARIABLE, raising=False)
    assert skips.main(str(reports)) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("skipped: ")[2] for line in said if "skipped: " in line] == [
        "for tritonservers of other versions, or without another one",
        "WITHOUT A PROGRAM that this machine lacks and `.ci/run` could not install",
    ]
    package = "test_module: could not import 'no_such_package': No module named 'no_such_package"
    assert [line.removeprefix(refused) for line in said[2:]] == [package]

    monkeypatch.setenv(skips.PROGRAMS_VARIABLE, "1")
    assert skips.main(str(reports)) == 1
    assert f"{refused}test_some.test_program: haproxy is not installed" in capsys.readouterr().out


def test_what_a_lone_distribution_lacks_is_allowed_there_alone(skips: Any) -> None:
    entries = skips.tomli.loads(skips.LIST.read_text())["skip"]
    for step, is_allowed in (("alone-client", True), ("python3.11", False)):
        skip = skips.Skip(step, "test", "could not import 'ml_dtypes': No module named 'ml_dtypes'")
        assert (skips.why_allowed(skip, entries, has_programs=True) is not None) is is_allowed


@pytest.fixture
def mutants(tmp_path: Path) -> Any:
    program: Any = load_program(ROOT / "tools" / "mutants.py")
    program.FOLDER = tmp_path / "mutants"
    return program


def test_the_tests_of_the_nearest_folder(mutants: Any) -> None:
    assert mutants.mirrored(CHANGED) == PACKAGE / "tests/decorators"
    # Rooms have an underscore, and the folders of their tests have none.
    assert mutants.mirrored(PACKAGE / "src/pytriton/decorators/_calls") == PACKAGE / "tests/decorators/calls"
    for path, problem in (("docs", "below packages"), (str(PACKAGE / "src/nothing.py"), "below packages")):
        with pytest.raises(mutants.MutantsError, match=problem):
            mutants.mirrored(Path(path))


def test_the_score(mutants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def run(command: list[str], cwd: Path, **_: Any) -> Any:
        ran.append(command[3:])
        if "export-cicd-stats" in command:
            counts = {"killed": 5, "timeout": 1, "segfault": 0, "suspicious": 0, "survived": 2, "no_tests": 2}
            (cwd / "mutants").mkdir()
            (cwd / "mutants" / "mutmut-cicd-stats.json").write_text(json.dumps({**counts, "skipped": 0, "total": 10}))
        return subprocess.CompletedProcess(command, 0, stdout="one: survived")

    monkeypatch.setattr(mutants.subprocess, "run", run)
    asked = [str(CHANGED), "--children", "1", "--floor"]
    assert mutants.main([*asked, "60"]) == 0
    assert ran == [["run", "--max-children", "1"], ["export-cicd-stats"], ["results"]]
    assert "one: survived\n" in (said := capsys.readouterr().out)
    assert "60.0 % of 10 mutants were noticed; 2 live, and 2 are in functions that these tests do not call" in said
    assert mutants.main([*asked, "61"]) == 1
    settings = tomli.loads((mutants.FOLDER / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert settings["only_mutate"] == ["src/pytriton/decorators/_casts.py"]
    assert settings["pytest_add_cli_args_test_selection"] == ["packages/pytriton-decorators/tests/decorators"]
    assert (mutants.FOLDER / "src/pytriton/decorators/_casts.py").is_file()
