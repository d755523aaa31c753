"""`import tritonserver` for programs written for NVIDIA's package, which get `pytriton.inprocess` under that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import numpy as np
import tritonserver
from tritonserver import Server, TritonError

print(sys.argv)
with_model = Server(model_repository=sys.argv[1])
with_model.start(wait_until_ready=True)
try:
    for response in with_model.model("linear").infer(inputs={"x": np.ones((1, 2), np.float32)}):
        print(np.from_dlpack(response.outputs["y"]).tolist())
except tritonserver.NotFoundError as error:
    print(isinstance(error, TritonError), tritonserver.__version__ != "UNKNOWN")
with_model.stop()
try:
    import tritonserver.server
except ModuleNotFoundError as error:
    print(error)
"""


def run(*arguments: object, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytriton.inprocess", *map(str, arguments)]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["program.py"], ["-m", "program"]])
def test_an_unchanged_program_runs(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "models").mkdir()

    done = run(*arguments, "models", path=tmp_path)

    assert done.returncode == 0, done.stderr
    argv, found, no_package = done.stdout.splitlines()
    assert argv.endswith("program.py', 'models']")
    assert found == "True True"
    assert "No module named 'tritonserver.server'" in no_package


def test_the_real_package_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").mkdir()
    (tmp_path / "tritonserver" / "__init__.py").touch()
    (tmp_path / "program.py").write_text("import tritonserver")

    done = run("-m", "program", path=tmp_path)

    assert done.returncode == 1
    assert "found" in done.stderr
    assert str(tmp_path / "tritonserver") in done.stderr
    assert "Uninstall it" in done.stderr


def test_in_a_program_of_ones_own(tmp_path: Path) -> None:
    code = (
        "from pytriton.inprocess import as_tritonserver, Server; first = as_tritonserver(); import tritonserver; "
        "assert tritonserver is first is as_tritonserver() and tritonserver.Server is Server"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=True)


def test_usage_without_a_program(tmp_path: Path) -> None:
    for arguments in ([], ["-m"], ["--help"]):
        done = run(*arguments, path=tmp_path)
        assert done.returncode == 1
        assert "usage: python -m pytriton.inprocess" in done.stderr
