"""`tools/skips.py`: which skipped tests CI allows. `tools/mutants.py`: its tests and its score."""

from __future__ import annotations

import json
import os
import re
import shutil
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


# What mutmut keeps: noticed, by time, not tried, lives, without tests.
CODES = {"one": 1, "two": 36, "three": None, "four": 0, "five": 33}


def stand_in(mutants: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace mutmut by what leaves `CODES`; return the commands that it gets."""
    ran = []

    def run(command: list[str], cwd: Path, **_: Any) -> Any:
        ran.append(command[3:])
        kept = cwd / "mutants" / CHANGED.relative_to(PACKAGE).with_suffix(".py.meta")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"exit_code_by_key": CODES}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(mutants.subprocess, "run", run)
    return ran


def test_the_score(mutants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran = stand_in(mutants, monkeypatch)
    asked = [str(CHANGED), "--children", "1", "--floor"]
    assert mutants.main([*asked, "50"]) == 0
    assert ran == [["run", "--max-children", "1"]]
    said = capsys.readouterr().out
    assert "four: lives\n" in said
    assert "five: these tests do not call it\n" in said
    assert "pytriton/decorators/_casts.py: 50.0 % of 4\n" in said
    assert "50.0 % of 4 mutants were noticed" in said
    assert mutants.main([*asked, "51"]) == 1
    settings = tomli.loads((mutants.FOLDER / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert settings["only_mutate"] == ["src/pytriton/decorators/_casts.py"]
    assert settings["pytest_add_cli_args_test_selection"] == ["packages/pytriton-decorators/tests/decorators"]
    assert (mutants.FOLDER / "src/pytriton/decorators/_casts.py").is_file()
    assert (mutants.FOLDER / "conftest.py").is_file()
    assert "conftest.py" in settings["also_copy"]


@pytest.mark.parametrize("mutant", ["", "fail", "module.x_function__mutmut_1"])
def test_a_mutant_is_noticed_as_soon_as_a_test_fails(tmp_path: Path, mutant: str) -> None:
    """What a failed test has not let go may keep its fixtures waiting for long."""
    shutil.copy(ROOT / "tools" / "first_failure.py", tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest\n"
        "@pytest.fixture\n"
        "def held():\n"
        "    yield\n"
        "    pathlib.Path('ended').touch()\n"
        "def test_first(): pass\n"
        "def test_second(held): assert False\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull],
        cwd=tmp_path,
        env={**os.environ, "MUTANT_UNDER_TEST": mutant},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1
    assert (tmp_path / "ended").exists() is ("mutmut" not in mutant)


def test_a_sample_is_the_same_for_a_seed(mutants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = stand_in(mutants, monkeypatch)
    chosen = []
    for seed in ("1", "1", "2"):
        assert mutants.main([str(CHANGED), "--children", "1", "--sample", "2", "--seed", seed]) == 0
        assert ran[-2:-1] == [["run", "none"]]
        chosen.append(ran[-1][3:])
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(names)) == 2 and set(names) <= set(CODES) for names in chosen)


def test_the_nightly_run_fails_for_one_room_below_the_floor(
    mutants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {list(mutants.HELD)[1]: 1}
    tried = []

    def try_out(path: Path, tests: list[Path], _asked: Any, floor: float) -> int:
        tried.append((path, tests, floor))
        return scores.get(path, 0)

    monkeypatch.setattr(mutants, "try_out", try_out)
    assert mutants.main(["--nightly"]) == 1
    assert tried == [(path, tests, 90.0) for path, tests in mutants.HELD.items()]
    assert all((ROOT / path).is_dir() for each, tests in mutants.HELD.items() for path in (each, *tests))
    scores.clear()
    assert mutants.main(["--nightly"]) == 0
    for wrong in ([], ["--nightly", str(CHANGED)]):
        with pytest.raises(SystemExit, match="2"):
            mutants.main(wrong)
        assert "Name a module or folder, or say --nightly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "is_changed"),
    [
        ("    raise ProtocolError(f'{count} requests')", False),
        ("    raise", False),
        ("    logger.warning('a worker is lost')", False),
        ("    self._log.debug('x')", False),
        ("    warnings.warn('old', stacklevel=2)", False),
        ("    def __repr__(self) -> str:", False),
        ("    if count == 0:", True),
        ("    raised = 1", True),
        ("    return log(2)", True),
        ("    def __len__(self) -> int:", True),
    ],
)
def test_what_no_test_should_hold_is_not_changed(mutants: Any, line: str, is_changed: bool) -> None:
    assert any(re.search(pattern, line) for pattern in mutants.UNCHANGED) is not is_changed
