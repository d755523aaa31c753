"""`pytriton init`: what it writes is tested, served and called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.serving import serve_command
from support.waiting import PATIENCE_S

FILES = ["app.py", "test_app.py", "requirements.txt", "Dockerfile", ".dockerignore", "README.md"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_project_is_tested_served_and_called(tmp_path: Path) -> None:
    made = run(tmp_path, "pytriton", "init", "my project")
    assert (made.returncode, made.stderr) == (0, "")
    assert "  cd 'my project'\n  pytriton serve app.py\n" in made.stdout
    folder = tmp_path / "my project"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    tested = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder))
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout
    with serve_command(folder, "app.py") as server:
        called = run(folder, "pytriton", "infer", server.url, "shout", "text=hello")
    assert (called.returncode, called.stdout) == (0, "output: HELLO\n"), called.stderr


@pytest.mark.parametrize("there", ["app.py", "README.md"])
def test_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    done = run(tmp_path, "pytriton", "init")
    assert done.returncode == 1
    assert done.stderr == f"Error: . has {there} already: name another folder, or move them away.\n"
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, "pytriton", "init", "file/project")
    assert done.returncode == 1
    assert done.stderr == "Error: file/project cannot be written: Not a directory.\n"
