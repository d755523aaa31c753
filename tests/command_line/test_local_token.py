"""The commands find the token of a server that the same user serves on the same host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.processes import while_running
from support.serving import FREE_PORTS, serve_command
from support.waiting import PATIENCE_S, eventually

APP = """
from pytriton.decorators import model


@model
def shout(text: str) -> str:
    return text.upper()
"""


def run(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytriton", *arguments],
        env={**os.environ, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_commands_find_it(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py") as server:
        code, said = run("models", server.url)
        assert (code, "shout(" in said or "shout " in said) == (0, True), said
        assert "Its models: shout." in run("infer", server.url, "other", "text=a")[1]
        assert run("models", server.url.replace("127.0.0.1", "localhost"))[0] == 0
        # A proxy that the environment names is not sent it.
        assert run("models", server.url, http_proxy="http://127.0.0.1:9")[0] == 0
        # Another user of this host has another folder.
        code, said = run("models", server.url, PYTRITON_HOME=str(tmp_path / "other"))
        assert (code, "asks for its access token" in said) == (1, True), said
        assert "asks for its access token" in run("models", server.url, "--access-token=wrong")[1]
        file = re.search(r"The access token is in (\S+), where", server.written)
        assert file is not None
        assert Path(file[1]).stat().st_mode & 0o777 == 0o600
    assert not Path(file[1]).parent.exists()


@pytest.mark.parametrize("options", [["--unprotected"], ["--access-token=mine"]])
def test_servers_with_a_token_of_their_own_or_none(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", *options) as server:
        assert run("models", server.url)[0] == 0
        assert ("The access token is in" in server.written) == (options != ["--unprotected"])


def test_a_server_that_was_killed(tmp_path: Path) -> None:
    """Whoever listens at its port next is not sent the token."""
    (tmp_path / "app.py").write_text(APP)
    with tempfile.TemporaryDirectory(prefix="pt", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        command = [sys.executable, "-m", "pytriton", "serve", str(tmp_path / "app.py"), *FREE_PORTS]
        with while_running(command, env={**os.environ, "PYTRITON_HOME": folder}) as process:
            eventually(lambda: any((home / "tokens").glob("[!.]*")) or process.poll() is not None)
            (left,) = (home / "tokens").iterdir()
            process.kill()
            process.wait(PATIENCE_S)
            assert run("models", "127.0.0.1:1", PYTRITON_HOME=folder)[0] == 1
            eventually(lambda: not left.exists())
