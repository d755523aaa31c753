"""The first hour: from an empty folder to a model that is served, looked at, changed and called, at real terminals.

`python3 tools/dev.py pictures` has the pictures of docs/first_hour.md taken anew, from what is shown here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chromium import browsing, pictures_folder
from support.chromium.terminals import draw_terminal
from support.paths import ROOT
from support.processes import CTRL_C, Terminal, at_terminal
from support.serving import short_home

pytest.importorskip("watchfiles")
if importlib.util.find_spec("nicegui") is None:
    pytest.skip("nicegui is not installed: pytriton-server[console]", allow_module_level=True)

PAGE = ROOT / "docs" / "first_hour.md"
COLUMNS = 100
PROMPT = "$ "
FREE_PORTS = " --address 127.0.0.1 --http-port 0 --grpc-port 0 --metrics-port 0 --console-port 0"
READ_AGAIN = "was read again after a change"


class Sitting:
    """What somebody types and waits for, and how much of either."""

    def __init__(self) -> None:
        self.keys = 0
        self.clicks = 0
        self.waited: dict[str, float] = {}
        self.url = "localhost:8000"

    def type(self, terminal: Terminal, command: str, more: str = "") -> None:
        """Type a command of the page; more of it is for this machine alone, and not counted."""
        assert f"\n$ {command}\n" in PAGE.read_text(encoding="utf-8")
        self.keys += len(command) + 1
        terminal.press((command.replace("localhost:8000", self.url) + more + "\r").encode())

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Take the time of the block."""
        began = time.monotonic()
        yield
        self.waited[what] = time.monotonic() - began


@contextlib.contextmanager
def shell(folder: Path, scratch: Path) -> Iterator[Terminal]:
    """Yield a shell at a terminal of a width that fits on a page."""
    (scratch / "inputrc").write_text("set enable-bracketed-paste off\nset bell-style none\n")
    (scratch / "bashrc").write_text(f"stty cols {COLUMNS} rows 40\nPS1='{PROMPT}'\nunset HISTFILE\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"INPUTRC": str(scratch / "inputrc"), "PATH": path, "COLUMNS": str(COLUMNS)}
    with at_terminal(["bash", "--rcfile", str(scratch / "bashrc"), "-i"], folder, environment) as terminal:
        terminal.wait_for(PROMPT)
        yield terminal
        terminal.press(b"exit\r")
        terminal.wait_ended()


def wait_prompt(terminal: Terminal) -> str:
    """Wait until the shell takes the next command; returns what the last one has shown."""
    before = terminal.shown.count(f"\n{PROMPT}")
    terminal.wait_until(lambda shown: shown.count(f"\n{PROMPT}") > before, "the prompt")
    return terminal.shown.rsplit(f"\n{PROMPT}", 2)[-2]


@pytest.mark.slow(seconds=60)
def test_the_first_hour(tmp_path: Path) -> None:
    folder, scratch = tmp_path / "shout", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    taken = pictures_folder()
    sitting = Sitting()
    with (
        browsing() as browser,
        short_home(),
        shell(folder, scratch) as first,
        shell(folder, scratch) as second,
    ):
        sitting.type(first, "pytriton init")
        with sitting.waiting("init"):
            wait_prompt(first)
        assert "pytriton serve app.py" in first.shown
        draw_terminal("first_hour/init", "an empty folder", first.shown.removesuffix(PROMPT))

        began_at = len(first.shown) - len(PROMPT)
        # Those who take pictures want them of the ports that the page names.
        sitting.type(first, "pytriton serve app.py --reload --console", "" if taken else FREE_PORTS)
        with sitting.waiting("serve"):
            first.wait_for("Serving. Press Ctrl+C")
        with sitting.waiting("console"):
            console = first.wait_found(r"Console: (http://\S+) ")[1]
        if not taken:
            sitting.url = first.wait_found(r"HTTP +http://(\S+)\n")[1]
        draw_terminal("first_hour/serve", "the first terminal", first.shown[began_at:])

        with sitting.waiting("page"):
            browser.open(console)
            browser.wait_text(".c-state", lambda text: text == "READY")
            browser.wait_text(".c-models", lambda text: "shout" in text)
        sitting.clicks += 1
        browser.click(".c-models a.c-link")
        browser.wait_text(".c-name", lambda text: text == "shout")
        browser.click(".c-call")
        browser.wait_text(".c-answer", lambda text: text == "output: HELLO")
        sitting.clicks += 2
        browser.picture("first_hour/console")
        browser.darken(is_dark=True)
        browser.find("body.body--dark")
        browser.picture("first_hour/console-dark")

        sitting.type(second, "sed -i s/upper/title/ app.py")
        with sitting.waiting("change"):
            wait_prompt(second)
            first.wait_found(rf"\n\d\d:\d\d:\d\d INFO \S+: app.py {READ_AGAIN}")
        sitting.type(second, "pytriton infer localhost:8000 shout text='the first hour'")
        with sitting.waiting("infer"):
            assert "output: The First Hour" in wait_prompt(second)
        browser.click(".c-call")
        browser.wait_text(".c-answer", lambda text: text == "output: Hello")
        sitting.clicks += 1
        sitting.type(second, "pytriton models localhost:8000 shout")
        with sitting.waiting("models"):
            assert "READY" in wait_prompt(second)
        draw_terminal("first_hour/change", "the second terminal", second.shown.removesuffix(PROMPT))

        browser.open(console)
        browser.wait_text(".c-log", lambda text: READ_AGAIN in text)
        browser.open("about:blank")
        first.press(CTRL_C)
        sitting.keys += 1
        with sitting.waiting("stop"):
            wait_prompt(first)
        assert "Traceback" not in first.shown
        draw_terminal("first_hour/stop", "the first terminal", first.shown[began_at:].removesuffix(PROMPT))
    waited = ", ".join(f"{what} {seconds:.1f}" for what, seconds in sitting.waited.items())
    print(f"{sitting.keys} keys, {sitting.clicks} clicks, {sum(sitting.waited.values()):.1f} s: {waited}")
    assert f"{sitting.keys} keystrokes and {sitting.clicks} clicks" in PAGE.read_text(encoding="utf-8")
