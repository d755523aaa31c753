"""`tools/skips.py`: which skipped tests CI allows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, load_program

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
