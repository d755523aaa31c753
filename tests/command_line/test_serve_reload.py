"""`pytriton serve --reload`: files are saved while many call."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.cli import reloading as reloading_module
from pytriton.cli.reloading import Reloader
from support.serving import ServeCommand, serve_command
from support.waiting import PATIENCE_S, eventually

APP = """
from helper import mark
from pytriton.decorators import model


@model(max_batch_size=8)
def answer(text: str) -> str:
    return f"{{mark}} {number} {{text}}"
"""
MORE = """

@model
def second(text: str) -> str:
    return "second"
"""
FAILING = """
from pytriton.decorators import model


@model(name="answer", max_batch_size=8)
class Answer:
    def __init__(self) -> None:
        raise OSError("no weights")

    def __call__(self, text: str) -> str:
        return text
"""

READ_AGAIN = "was read again after a change"


def save(path: Path, text: str) -> None:
    """Save a file as editors do, so that nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@contextlib.contextmanager
def reloading(folder: Path, *arguments: str) -> Iterator[ServeCommand]:
    (folder / "helper.py").write_text("mark = 'first'\n")
    (folder / "app.py").write_text(APP.format(number=0))
    with serve_command(folder, "app.py", "--reload", *arguments) as server:
        yield server


@pytest.mark.parametrize("workers", [0, 2])
def test_no_request_is_lost_while_files_are_saved(tmp_path: Path, workers: int) -> None:
    app = tmp_path / "app.py"
    with reloading(tmp_path, f"--workers={workers}") as server:
        answers: list[list[str]] = [[] for _ in range(4)]
        failures: list[BaseException] = []
        enough = threading.Event()

        def call(got: list[str]) -> None:
            try:
                while not enough.is_set():
                    got.append(server.ask("answer", "x"))
            except BaseException as error:
                failures.append(error)

        callers = [threading.Thread(target=call, args=(got,)) for got in answers]
        for caller in callers:
            caller.start()
        for number in range(1, 4):
            told = server.written.count(READ_AGAIN)
            save(app, APP.format(number=number))
            expected = f"first {number} x"
            eventually(lambda: failures or expected in answers[0])  # noqa: B023 - called at once
            # The first answers come while other workers still read the file, which is not to be broken under them.
            eventually(lambda: failures or server.written.count(READ_AGAIN) > told)  # noqa: B023 - likewise
        # A file that cannot be imported: what was served before goes on, and the traceback is told.
        save(app, APP.format(number=4) + "\n\ndef broken(:\n")
        eventually(lambda: failures or "SyntaxError: " in server.written)
        assert server.ask("answer", "x") == "first 3 x"
        save(app, APP.format(number=5) + MORE)
        eventually(lambda: failures or server.has("second"))
        # A file that it imports.
        save(tmp_path / "helper.py", "mark = 'other'\n")
        eventually(lambda: failures or "other 5 x" in answers[0])
        save(app, APP.format(number=6))
        eventually(lambda: failures or not server.has("second"))
        eventually(lambda: failures or "other 6 x" in answers[0])
        enough.set()
        for caller in callers:
            caller.join(PATIENCE_S)
        assert failures == [], server.written
        for got in answers:
            # Old or new, in the order in which they were saved, and nothing else.
            order = ["first 0 x", "first 1 x", "first 2 x", "first 3 x", "first 5 x", "other 5 x", "other 6 x"]
            assert set(got) <= set(order)
        eventually(lambda: "second is gone" in server.written)
    assert "second is new" in server.written
    assert "app.py has changed and cannot be served; what was served before goes on" in server.written


def test_a_model_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    with reloading(tmp_path) as server:
        save(tmp_path / "app.py", FAILING)
        eventually(lambda: "no weights" in server.written)
        assert server.ask("answer", "x") == "first 0 x"
        save(tmp_path / "app.py", "")
        eventually(lambda: "defines no model" in server.written)
        assert server.ask("answer", "x") == "first 0 x"
        save(tmp_path / "app.py", APP.format(number=2))
        eventually(lambda: server.ask("answer", "x") == "first 2 x")


def test_changes_are_seen_without_watchfiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polled: files that come, change and go, in folders below as well, and nothing that is installed or hidden."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(reloading_module, "folder_of", lambda target: tmp_path)
    monkeypatch.setattr(reloading_module, "_LOOK_PAUSE_S", 0.01)
    monkeypatch.setattr(reloading_module, "_LEAST_REST", 0)
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", os.environ.get("PYTHONDONTWRITEBYTECODE", ""))
    for folder in ("below", ".venv", "site-packages"):
        (tmp_path / folder).mkdir()
    (tmp_path / "app.py").write_text("x = 1\n")
    seen: list[list[str]] = []

    def reload() -> str:
        seen.append(sorted(path.name for path in tmp_path.rglob("*.py")))
        return ""

    with Reloader("app.py").watching(reload):
        (tmp_path / ".venv" / "hidden.py").write_text("")
        (tmp_path / "site-packages" / "installed.py").write_text("")
        (tmp_path / "app.py").write_text("x = 22\n")
        eventually(lambda: len(seen) == 1)
        (tmp_path / "below" / "helper.py").write_text("")
        eventually(lambda: seen[-1] == ["app.py", "helper.py", "hidden.py", "installed.py"] and len(seen) == 2)
        (tmp_path / "below" / "helper.py").unlink()
        eventually(lambda: len(seen) == 3)
    assert "helper.py" not in seen[-1]
