"""`tools/dev.py`: what it runs with which Python, server and releases."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT, load_program
from support.waiting import PATIENCE_S

VARIABLE = "PYTRITON_TEST_TRITONSERVERS"


class Recorder:
    """Takes the place of what runs commands: notes them, and fails the one with a server of this name."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.ran: list[tuple[tuple[str, ...], str]] = []
        self.alone: list[tuple[str, ...]] = []
        self.all: list[tuple[str, ...]] = []
        self.programs: list[tuple[tuple[str, ...], str]] = []

    def hatch(self, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        self.all.append(arguments)
        server = (extra or {}).get("PYTRITON_TRITONSERVER_DIR", "")
        if "pytest" in arguments or arguments[:2] == ("run", "test"):
            self.ran.append((arguments, server))
        if "alone:test" in arguments:
            self.alone.append(arguments)
        return -9 if self.failing and server.endswith(self.failing) else 0

    def run(self, *command: str) -> int:
        return self.hatch("run", "--", *command)

    @contextlib.contextmanager
    def beside(self, title: str, *arguments: str) -> Iterator[None]:
        yield
        self.hatch(*arguments)

    def step(self, title: str, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        return self.hatch(*arguments, extra=extra)

    def program(self, title: str, command: Sequence[str], extra: Mapping[str, str]) -> None:
        self.programs.append((tuple(command), extra["PATH"]))

    def finish(self) -> int:
        return 0


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    program = load_program(ROOT / "tools" / "dev.py")
    # Not those of the run that this test is a part of.
    monkeypatch.setattr(program, "REPORTS", tmp_path / "reports")
    return program


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
    assert dev.test(runner, ["tests", "-k", "y"]) == 0
    command = ("run", "--", "pytest", "tests", "-k", "y")
    assert runner.ran == [(command, ""), *((command, str(server)) for server in servers)]
    runner = Recorder()
    assert dev.test(runner, []) == 0
    assert [server for _, server in runner.ran] == ["", *map(str, servers)]
    # What needs no server is not run again.
    tests = (*dev.NO_SLOW_TESTS, "packages/pytriton-server/tests", "tests")
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
        assert ("not soak" if selected else "not slow and not ci and not soak") in ran
        assert len(runner.alone) == len(dev.LONE_DISTS)
        assert all((alone[3:5] == ("-m", "not soak")) is selected for alone in runner.alone)
        assert any("tools/skips.py" in each for each in runner.all) is selected
        assert ("`test --ci`" in capsys.readouterr().out) is not selected


def test_the_quick_ones_run_once_and_what_they_leave_out_is_told(
    dev: Any, servers: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Recorder()
    assert dev.test(runner, ["--quick", "-x"]) == 0
    count = str(min(os.cpu_count() or 1, 4))
    assert runner.ran == [(("run", "test", "-n", count, *dev.QUICK_TESTS, dev.REFERENCE_TESTS, "-x"), "")]
    assert ("run", "types") in runner.all
    assert "skipped" in capsys.readouterr().out
    for name in (*dev.QUICK_TESTS[2:], dev.REFERENCE_TESTS):
        assert (ROOT / name).exists(), f"there is no {name}"


def test_few_tests_run_in_one_process_and_an_explicit_number_wins(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    files = {"packages/p/tests/test_unit.py": 60, "tests/test_few.py": 5, "tests/a/test_many.py": 200}
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f"async def test_{i}(): ...\n" for i in range(count)))
    unit, few, many = files
    for asked, chosen in (
        ([unit], ["-n", "0"]),
        ([few, "-x"], ["-n", "0"]),
        ([many], ["-n", "4"]),
        ([unit, few], ["-n", "0"]),
        ([many, "-k", "test_1"], ["-n", "0"]),
        ([f"{many}::test_1", f"{many}::test_2"], ["-n", "0"]),
        (["tests"], []),
        ([unit, "tests/a"], []),
        (["-k", "test_1"], []),
        (["-m", "soak"], []),
        ([few, "-n", "3"], ["-n", "0"]),  # pytest obeys the last one
    ):
        runner = Recorder()
        assert dev.test(runner, asked) == 0
        assert [arguments[3:] for arguments, _ in runner.ran] == [(*chosen, *asked)]


@pytest.mark.usefixtures("servers")
def test_a_failure_with_one_server_is_one_of_all(dev: Any) -> None:
    for failing in ("one", "two"):
        assert dev.test(Recorder(failing), ["tests"]) == -9


def test_without_the_variable_they_run_once(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    runner = Recorder()
    assert dev.test(runner, ["tests"]) == 0
    assert [server for _, server in runner.ran] == [""]


FLICKERING = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("index", range({count}))
def test_each(index):
    mark = Path(__file__).with_name(f"{{index}}.mark")
    had, is_good = mark.exists(), {steady}
    mark.touch()
    assert is_good or (had and not {lasting})
"""


@pytest.mark.parametrize(
    ("count", "steady", "lasting", "code", "runs"),
    [
        (5, True, False, 0, 1),
        (5, "index != 3", False, 0, 2),
        (5, "index != 3", True, 1, 2),
        (5, False, False, 1, 1),
    ],
    ids=["none failed", "one failed once", "one failed twice", "many failed"],
)
def test_what_failed_in_ci_is_tried_once_more(
    count: int,
    steady: object,
    lasting: bool,
    code: int,
    runs: int,
    dev: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_each.py").write_text(FLICKERING.format(count=count, steady=steady, lasting=lasting))
    asked = []

    def run(_runner: object, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        asked.append(arguments)
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", *arguments[2:], "."]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run(command, cwd=tmp_path, env={**environment, **(extra or {})}, check=False).returncode

    monkeypatch.setattr(dev.Runner, "hatch", run)
    monkeypatch.setattr(dev, "home_of_python", lambda *, locked: tmp_path)
    monkeypatch.setattr(dev, "hatch_environment", lambda home: {})
    runner = dev.Runner()
    runner.step("These", "run", "test", *dev.report("these", wanted=True))
    assert runner.finish() == code
    assert len(asked) == runs
    assert ("unstable            These: test_each.test_each[3]" in capfd.readouterr().out) is (code == 0 and runs == 2)


def test_what_failed_is_not_tried_again_outside_of_ci(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(_runner: object, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        asked.append(arguments)
        return 1

    monkeypatch.setattr(dev.Runner, "hatch", run)
    monkeypatch.setattr(dev, "home_of_python", lambda *, locked: tmp_path)
    monkeypatch.setattr(dev, "hatch_environment", lambda home: {})
    runner = dev.Runner()
    runner.step("These", "run", "test", *dev.report("these", wanted=False))
    assert runner.finish() == 1
    assert len(asked) == 1


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


def test_the_oldest_and_the_newest_python_run_style_types_and_quick_tests(
    dev: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {version: Path(f"/opt/{version}/bin/python{version}") for version in ("3.10", "3.11", "3.13")}
    monkeypatch.setattr(dev, "matrix_pythons", lambda: (there, [], []))
    monkeypatch.setattr(dev, "numpy_missing", lambda interpreter, numpy: None)
    monkeypatch.delenv(VARIABLE, raising=False)
    runner = Recorder()
    assert dev.test(runner, ["--ci"]) == 0
    matrix = [it for it in runner.all if "+py=3.10" in it or "+py=3.13" in it]
    for python, numpy, types in (("3.10", "1", "types-shipped"), ("3.13", "2", "types")):
        selection = ("run", f"+py={python}", f"+numpy={numpy}")
        for script in ("style", "imports", types):
            assert (*selection, f"matrix:{script}") in matrix
        [tests] = [it for it in matrix if it[:3] == selection and it[3] == "matrix:test"]
        assert tests[4] == f"--junitxml={dev.REPORTS}/python{python}-numpy{numpy}.xml"
        assert tests[5 : 5 + len(dev.QUICK_TESTS)] == dev.QUICK_TESTS
    # Mypy takes a minute, so that a third Python has none of it in CI.
    assert ("run", "types") not in runner.all
    assert not any("+py=3.11" in it for it in runner.all)
    runner = Recorder()
    assert dev.test(runner, []) == 0
    assert ("run", "types") in runner.all
    assert not any("+py=3.10" in it or "+py=3.13" in it for it in runner.all)


def test_ci_runs_newer_pythons_in_a_root_of_their_own(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {version: Path(f"/opt/{version}/bin/python{version}") for version in ("3.10", "3.13")}
    monkeypatch.setattr(dev, "find_python", there.get)
    monkeypatch.setattr(dev, "numpy_missing", lambda interpreter, numpy: None)
    monkeypatch.setattr(dev.newer_pythons, "reason_against", lambda: None)
    made: list[Path] = []
    monkeypatch.setattr(dev.newer_pythons, "make", made.append)
    monkeypatch.delenv(VARIABLE, raising=False)
    runner = Recorder()
    assert dev.test(runner, ["--ci"]) == 0
    assert made == [dev.NEWER_PYTHONS]
    [(command, path)] = runner.programs
    inner = ("matrix", "--python=3.14", "--python=3.15", "--quick")
    assert command[-len(inner) :] == inner
    assert Path(command[-len(inner) - 2]) == dev.newer_pythons.interpreter("3.15")
    assert path.startswith(f"{dev.newer_pythons.interpreter('3.14').parent}{os.pathsep}")
    assert any("+py=3.10" in it for it in runner.all)
    assert not any("+py=3.13" in it for it in runner.all)
    assert ("run", "types") in runner.all


def test_a_matrix_of_chosen_pythons(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "find_python", lambda version: Path(f"/opt/bin/python{version}"))
    monkeypatch.setattr(dev, "numpy_missing", lambda interpreter, numpy: None)
    runner = Recorder()
    assert dev.matrix(runner, ["--python=3.14", "--python=3.15", "--quick", "-x"]) == 0
    tests = [it for it in runner.all if "matrix:test" in it]
    assert [it[1:3] for it in tests] == [("+py=3.14", "+numpy=2"), ("+py=3.15", "+numpy=2")]
    assert all(it[-1] == "-x" for it in tests)
    assert not any("types" in script for it in runner.all for script in it)
    runner = Recorder()
    assert dev.matrix(runner, ["--python=3.12", "tests/serving"]) == 0
    assert [it[1:] for it in runner.all] == [
        ("+py=3.12", f"+numpy={numpy}", "matrix:test", "tests/serving") for numpy in ("1", "2")
    ]


def test_why_there_is_no_newer_python(
    dev: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "find_python", lambda version: None)
    monkeypatch.setattr(dev.newer_pythons.shutil, "which", lambda name: None)
    monkeypatch.setattr(dev.newer_pythons.os, "geteuid", lambda: 0)
    there, newer, missing = dev.matrix_pythons(("3.12", "3.15"))
    assert (there, newer) == ({}, [])
    assert len(missing) == 2
    assert missing[0].endswith("~/.pyenv/versions")
    assert re.search(r"Python 3\.15: .*takes apt-get, debootstrap, .* which this machine lacks$", missing[1])
    monkeypatch.setattr(dev.newer_pythons, "reason_against", lambda: None)

    def fail(root: Path) -> None:
        raise dev.newer_pythons.RootError("debootstrap ended with exit code 1:\nno archive")

    monkeypatch.setattr(dev.newer_pythons, "make", fail)
    assert dev.matrix_pythons(("3.14",))[2][0].endswith("exit code 1:\nno archive")


def test_a_program_beside_hatch_is_a_step(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "home_of_python", lambda *, locked: tmp_path)
    monkeypatch.setattr(dev, "hatch_environment", lambda home: {})
    runner = dev.Runner()
    for code in ("0", "3"):
        runner.program(f"Ends with {code}", ["sh", "-c", "exit $CODE"], {"CODE": code})
    assert runner.finish() == 1
    assert re.search(r"FAILED \(3\) .* Ends with 3", capsys.readouterr().out)


def test_types_are_checked_beside_the_tests_and_told_of_after_them(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, done = threading.Event(), threading.Event()

    def run(_runner: object, *arguments: str, output: IO[str] | None = None, **_: object) -> int:
        if output is None:
            assert begun.wait(PATIENCE_S)
            print("tests passed")
            done.set()
            return 0
        begun.set()
        assert done.wait(PATIENCE_S)
        print("types are wrong", file=output)
        return 1

    monkeypatch.setattr(dev.Runner, "hatch", run)
    monkeypatch.setattr(dev, "home_of_python", lambda *, locked: tmp_path)
    monkeypatch.setattr(dev, "hatch_environment", lambda home: {})
    monkeypatch.setattr(dev, "TOOLS", tmp_path)
    runner = dev.Runner()
    with runner.beside("Types", "run", "types"):
        runner.step("Tests", "run", "test")
    assert runner.finish() == 1
    said = capsys.readouterr().out
    assert said.index("tests passed") < said.index("--- Types") < said.index("types are wrong") < said.index("Summary")
    assert [(title, code) for title, code, _ in runner.steps] == [("Tests", 0), ("Types", 1)]


def test_each_python_has_its_environments_until_the_locks_or_our_metadata_change(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []

    def install(command: list[str], **options: Any) -> SimpleNamespace:
        Path(command[command.index("--target") + 1]).mkdir(parents=True)
        installed.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(dev, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(dev.subprocess, "run", install)
    dev.LOCKS.mkdir()
    (dev.LOCKS / "hatch.txt").write_text("hatch==1.18.2\n")
    homes = []
    for version in ((3, 11), (3, 13)):
        python = SimpleNamespace(version_info=SimpleNamespace(major=3, minor=version[1]), abiflags="", executable="p")
        monkeypatch.setattr(dev, "sys", python)
        home = dev.home_of_python(locked=True)
        (home / "data").mkdir()
        assert dev.home_of_python(locked=True) == home
        homes.append(home)
    assert len(set(homes)) == len(installed) == 2
    assert all(command[-2:] == ["-r", str(dev.LOCKS / "hatch.txt")] for command in installed)

    # The newest releases are of the day, in a folder of their own.
    for _ in range(2):
        newest = dev.home_of_python(locked=False)
        assert installed[-1][-1] == dev.HATCH_REQUIREMENT
        assert not (newest / "data").exists()
        (newest / "data").mkdir()
    assert newest not in homes
    assert (homes[1] / "data").is_dir()

    metadata = tmp_path / "packages" / "pytriton-server" / "pyproject.toml"
    metadata.parent.mkdir(parents=True)
    for changed in (dev.LOCKS / "hatch.txt", metadata):
        changed.write_text("hatch==1.18.3\n")
        assert dev.home_of_python(locked=True) == homes[1]
        assert not (homes[1] / "data").exists()
        (homes[1] / "data").mkdir()
    assert sorted(path.name for path in dev.TOOLS.iterdir()) == ["newest-py3.13", "py3.11", "py3.13"]


def locked_in(dev: Any, name: str) -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (dev.LOCKS / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def test_everything_that_the_checks_install_is_locked(dev: Any) -> None:
    advice = "run python3 tools/dev.py lock"
    groups = tomli.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]

    def members(group: str) -> list[str]:
        return [
            name for it in groups[group] for name in (members(it["include-group"]) if isinstance(it, dict) else [it])
        ]

    ours = []
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomli.loads(path.read_text())
        ours += project["project"]["dependencies"] + project["build-system"]["requires"]
    for name, (group, with_ours, more) in dev.LOCKED_GROUPS.items():
        locked = locked_in(dev, name)
        wanted = [*(members(group) if group else []), *(ours if with_ours else []), *([more] if more else [])]
        for text in wanted:
            requirement = Requirement(text)
            releases = locked.get(canonicalize_name(requirement.name), [])
            if not requirement.name.startswith("pytriton-"):
                assert releases, f"{name}.txt lacks {text}: {advice}"
            for release in releases:
                [version] = [it.version for it in release.specifier]
                assert requirement.specifier.contains(version), f"{release} in {name}.txt is not {text}: {advice}"
        text = (dev.LOCKS / f"{name}.txt").read_text()
        assert "://" not in text, f"{name}.txt names a place"
        assert not [line for line in text.splitlines() if line.startswith("-")]


def test_each_environment_has_its_lock(dev: Any) -> None:
    for arguments, name in (
        (("run", "types"), "checks"),
        (("run", "+dist=client", "alone:test"), "checks"),
        (("run", "+py=3.10", "+numpy=1", "matrix:test"), "numpy1"),
        (("run", "+py=3.13", "+numpy=2", "matrix:test"), "checks"),
        (("run", "deploy:check"), "deploy"),
    ):
        settings = dev.lock_settings(arguments)
        assert (
            settings["UV_CONSTRAINT"]
            == settings["PIP_CONSTRAINT"]
            == (ROOT / "tools" / "locks" / f"{name}.txt").as_uri()
        )
    assert [it.specifier for it in locked_in(dev, "numpy1")["numpy"]] == ["==1.26.4"]


def test_what_is_tried_with_the_lowest_releases_is_there(dev: ModuleType) -> None:
    extras = tomli.loads((ROOT / "packages/pytriton-server/pyproject.toml").read_text())["project"]
    tried: set[str] = set()
    for case in dev.lowest_releases.CASES.values():
        for test in case.tests:
            assert (ROOT / test.removeprefix("--ignore=")).exists(), test
        tried |= set(case.extras.get("server", "").split(",")) - {""}
    # Those of dynamo and ray are 80 MB each.
    assert tried == extras["optional-dependencies"].keys() - {"dynamo", "ray"}
