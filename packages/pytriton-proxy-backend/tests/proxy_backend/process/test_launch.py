"""What is said of an interpreter that cannot run a worker."""

import venv
from pathlib import Path

import pytest

from pytriton.proxy_backend.process.child import Launch, missing_in


def test_nothing_is_missing_here() -> None:
    assert missing_in(Launch()) == ""


def test_an_environment_without_anything(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = str(tmp_path / "bin" / "python3")
    told = missing_in(Launch(python=python, environment={"PYTHONPATH": None}))
    assert told == f"{python}: expected numpy in its environment, received No module named 'numpy'"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.version_info = (3, 9, 18, 'final', 0)", "expected Python 3.10 or later, received Python 3.9"),
        (
            "sys.modules['pytriton.proxy_backend'] = None",
            "expected pytriton-proxy-backend in its environment, received ",
        ),
    ],
)
def test_other_interpreters(line: str, said: str, tmp_path: Path) -> None:
    # Stands for one that this machine may not have.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{line}\n")
    assert said in missing_in(Launch(environment={"PYTHONPATH": str(tmp_path)}))


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_what_is_no_interpreter(program: str) -> None:
    assert missing_in(Launch(python=program)).startswith(f"{program}: expected a Python interpreter, received ")
