"""Recipes of the pages, tried in the console with a real Chromium: what the form takes, and what comes back.

`python3 tools/dev.py pictures` has the pictures of docs/recipes taken anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.chromium import browsing, pictures_folder
from support.paths import ROOT
from support.processes import free_ports
from support.serving import is_ready, short_home
from support.waiting import PATIENCE_S, eventually

if importlib.util.find_spec("nicegui") is None:
    pytest.skip("nicegui is not installed: pytriton-server[console]", allow_module_level=True)

PROGRAM = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^.*Console: (http://[^\s\"]+)", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """How somebody tries a recipe in the console."""

    page: str  # the name of its page
    needs: tuple[str, ...]  # packages that not every environment has
    model: str  # the model that is tried
    given: str  # the name of a file that the client has left, or the text for the first input
    answer: str  # what the answer has in it


RECIPES = [
    Recipe(
        "sentence_embeddings", ("sentence_transformers", "all_minilm_l6_v2"), "embed", "I forgot my login", "output: ["
    ),
    Recipe("speech", (), "transcribe", "dialled.wav", "text: #"),
    Recipe("jpeg", ("PIL", "sklearn"), "read_digit", "nine.jpg", 'labels: ["9"'),
    Recipe("rag", ("sklearn",), "search", "How can an invoice be paid?", "bank transfer"),
]


@contextlib.contextmanager
def served(folder: Path, program: str, ports: list[int]) -> Iterator[None]:
    """Serve a program of a page."""
    named = dict(zip(("http", "grpc", "metrics"), ports, strict=True))
    if program == "app.py":
        options = [f"--{name}-port={port}" for name, port in named.items()]
        command = [sys.executable, "-m", "pytriton", "serve", program, "--address=127.0.0.1", *options]
    else:
        command = [sys.executable, program]
    variables = {f"PYTRITON_TRITON_CONFIG_{name.upper()}_PORT": str(port) for name, port in named.items()}
    with ended(command, folder, {**variables, "PYTRITON_TRITON_CONFIG_HTTP_ADDRESS": "127.0.0.1"}) as process:
        eventually(lambda: is_ready(f"http://127.0.0.1:{ports[0]}") or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield


@contextlib.contextmanager
def ended(command: list[str], folder: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, which ends in order at the end of the block."""
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE_S)
        assert code == 0, (folder / "log").read_text()


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.page)
def test_a_recipe_in_the_console(recipe: Recipe, tmp_path: Path) -> None:
    for package in recipe.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"not installed here: {package}")
    text = (ROOT / "docs" / "recipes" / f"{recipe.page}.md").read_text(encoding="utf-8")
    assert f"({recipe.page}.webp)" in text
    programs = dict(PROGRAM.findall(text))
    # Those who take pictures want them of the ports that the page names.
    ports = [8000, 8001, 8002] if pictures_folder() else free_ports(3)
    programs["client.py"] = programs["client.py"].replace("localhost:8000", f"localhost:{ports[0]}")
    programs["client.py"] = programs["client.py"].replace("localhost:8001", f"localhost:{ports[1]}")
    for name, program in programs.items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    looking = [sys.executable, "-m", "pytriton", "console", f"localhost:{ports[0]}", "--port", "0"]
    looking += ["--metrics-url", f"http://localhost:{ports[2]}/metrics", "--grpc-url", f"grpc://localhost:{ports[1]}"]
    with (
        short_home(),
        served(tmp_path, next(name for name in programs if name != "client.py"), ports),
        ended(looking, tmp_path, {}),
        browsing() as browser,
    ):
        subprocess.run([sys.executable, "client.py"], cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE_S)
        if (tmp_path / recipe.given).exists():
            # The line that the server has shown at its start.
            line = re.findall(r"Try: (pytriton infer .*@FILE.*)", (tmp_path / "log").read_text())[0]
            command = [sys.executable, "-m", *shlex.split(line.replace("@FILE", f"@{recipe.given}"))]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
            assert recipe.answer in done.stdout
        console = eventually(lambda: CONSOLE.search((tmp_path / "log").read_text()))[1]
        browser.open(f"{console}/model?name={recipe.model}")
        if (tmp_path / recipe.given).exists():
            browser.find("input[type=file]").send_keys(str(tmp_path / recipe.given))
            browser.wait_text(".c-field .q-chip", lambda shown: recipe.given in shown)
        else:
            browser.write(".c-field textarea", recipe.given)
            browser.wait_text(".c-curl", lambda shown: recipe.given in shown)
        browser.click(".c-call")
        browser.wait_text(".c-answer", lambda shown: recipe.answer in shown)
        browser.wait_text(".c-status", lambda shown: shown.endswith(" ms"))
        assert browser.text(".c-error") == ""
        browser.picture(f"recipes/{recipe.page}", ".c-two")
