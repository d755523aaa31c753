"""The `pytriton` command as a person at a terminal meets it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli

from pytriton.cli import main
from pytriton.cli.checks.environment import describe_variables
from pytriton.server.tritonserver.binary import BUNDLED_FOLDER
from support.paths import ROOT
from support.processes import is_running
from support.serving import short_home
from support.waiting import PATIENCE_S, eventually

APP = """
from pytriton.decorators import model


@model
def f(x: int) -> int:
    return x
"""


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with short_home() as folder:
        yield folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytriton", *arguments]


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in `folder`, with temporary files there, too."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert list(temporary.iterdir()) == []
    return done


def names_in(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as opened:
        return sorted(opened.namelist())


def test_without_a_command_it_shows_the_commands_by_use(tmp_path: Path) -> None:
    done = run(tmp_path, COLUMNS="60")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = done.stdout.partition("Commands:\n")[2]
    named = [line.split()[0] for line in commands.splitlines() if line.startswith("  ") and line[2] != " "]
    assert named[:5] == ["init", "serve", "infer", "models", "bench"]
    assert max(map(len, done.stdout.splitlines())) <= 60
    # Nothing is cut.
    assert "..." not in commands
    assert "<bool>" not in done.stdout


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("app.p", "Did you mean app.py?"),
        ("ap.py", "Did you mean app.py?"),
        ("sub/ap.py", "Did you mean sub/app.py?"),
        (".", "'.' is a folder: name a file or a module. Its files: app.py."),
        ("sub", "'sub' is a folder: name a file or a module. Its files: sub/app.py."),
        ("nothing", "there is no module 'nothing'"),
    ],
)
def test_what_is_no_file_is_told_with_what_was_meant(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "app.py").write_text(APP)
    done = run(tmp_path, "serve", place, "--check")
    assert done.returncode == 1
    assert said in done.stderr
    assert run(tmp_path, "serve", "app", "--check").returncode == 0


def test_settings_of_the_server_at_the_top_of_the_file_are_told_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("http_port = 9000\n")
    done = run(tmp_path, "serve", "app.py", "--config", "serve.toml")
    assert done.returncode == 1
    assert "serve.toml: http_port: expected it in the table [server], as server.http_port" in done.stderr


def test_a_port_that_is_taken_is_told_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(
            tmp_path,
            "serve",
            "app.py",
            "--address=127.0.0.1",
            f"--http-port={port}",
            "--grpc-port=0",
            "--metrics-port=0",
        )
    assert done.returncode == 1
    assert f"Error: --http-port {port} cannot be bound" in done.stderr
    assert "set --http-port to another port, or to 0" in done.stderr


def test_a_call_without_an_address_goes_to_this_machine(tmp_path: Path) -> None:
    done = run(tmp_path, "infer", "shout", "text=hi", "--timeout=0.5")
    assert "The server comes first: taken as `pytriton infer localhost:8000 shout text=hi ...`" in done.stderr


def test_vulnerabilities_are_counted_and_named_on_request(tmp_path: Path) -> None:
    short, long = (run(tmp_path, "env", *options).stdout for options in ((), ("--verbose",)))
    assert "`pytriton check --verbose` names them" in short
    assert "CVE-" not in short
    assert "CVE-" in long


def test_a_check_with_a_zip_of_what_it_has_written(tmp_path: Path) -> None:
    done = run(tmp_path, "check", "--zip")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("start tritonserver", "load a model", "call it over HTTP", "call it over gRPC", "end it with SIGTERM"):
        assert f"  {line}\n" in done.stdout
    assert "FAILED" not in done.stdout
    (archive,) = tmp_path.glob("pytriton-check-*.zip")
    assert names_in(archive) == ["add_sub.log", "add_sub.py", "check.log", "environment.txt", "steps.txt"]
    assert f"Logs and files are in {archive}." in done.stdout


def test_check_tells_what_fails_and_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "check", PYTRITON_TRITONSERVER_DIR="/no/such/folder")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "TritonServerNotFoundError: Expected a tritonserver in /no/such/folder" in done.stdout
    # The script failed on its own, with its log.
    assert "The script ended with exit code 1. Its last lines:" in done.stdout
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("*.zip")) == []


def test_a_wrong_setting_in_the_environment_fails_the_check(tmp_path: Path) -> None:
    done = run(tmp_path, "example-add-sub", PYTRITON_TRITON_CONFIG_ALLOW_GRPC="perhaps")
    assert done.returncode == 1
    assert "environment variable PYTRITON_TRITON_CONFIG_ALLOW_GRPC must be a boolean" in done.stdout


def test_a_protocol_that_is_off_fails_the_check(tmp_path: Path) -> None:
    done = run(tmp_path, "example-add-sub", PYTRITON_TRITON_CONFIG_ALLOW_GRPC="false")
    assert done.returncode == 1
    assert "The server does not serve gRPC: is it switched off in the environment?" in done.stdout


def test_a_workspace_is_made_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    done = run(tmp_path, "env", "--workspace", str(folder))
    assert done.returncode == 0, done.stderr
    assert sorted(entry.name for entry in folder.iterdir()) == ["env.log", "environment.txt", "steps.txt"]
    assert f"Logs and files are in {folder}." in done.stdout
    assert list(tmp_path.glob("*.zip")) == []
    again = run(tmp_path, "env", "-w", str(folder))
    assert again.returncode == 1
    assert f"Error: The workspace {folder} exists already." in again.stderr


def test_a_folder_that_cannot_hold_the_zip(tmp_path: Path) -> None:
    # Not by its mode, which does not keep root out.
    done = subprocess.run(
        command("env", "--zip"), cwd="/proc", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "leave --zip out" in done.stderr


def test_env_leaves_secrets_out(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "env",
        "--verbose",
        "-w",
        str(tmp_path / "report"),
        MY_TOKEN="hidden-1",
        HARMLESS="password=hidden-2",
        PROXY="http://me:hidden-3@host:80/path",
        SEEN="seen",
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report" / "environment.txt").read_text()
    assert text.strip() in done.stdout
    for output in (text, done.stdout, done.stderr):
        assert "hidden-" not in output
    assert "  MY_TOKEN=(hidden)\n" in text
    assert "  PROXY=http://(hidden)@host:80/path\n" in text
    assert "  SEEN=seen\n" in text
    for part in ("pytriton-server 0.1.0", f"at {sys.executable}", "bin/tritonserver (", "8000 (HTTP): "):
        assert part in text
    assert "cannot be told:" not in text
    assert done.stdout.count("read it before you hand it on") == 2


def test_env_tells_the_vulnerabilities_of_the_server_in_use(tmp_path: Path) -> None:
    done = run(tmp_path, "env", "--verbose", PYTRITON_TRITONSERVER_DIR=str(BUNDLED_FOLDER))
    assert done.returncode == 0, done.stderr
    assert " are published for tritonserver 2.51.0, known as of " in done.stdout
    assert "CVE-2025-23310 (9.8, fixed in 25.07), HTTP front end: " in done.stdout
    # Another server has others: this one calls itself newer than any that the list knows.
    executable = tmp_path / "other" / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\necho '| server_version | 3.0.0 |'\n")
    executable.chmod(0o755)
    done = run(tmp_path, "env", PYTRITON_TRITONSERVER_DIR=str(tmp_path / "other"))
    assert "  0 are published for tritonserver 3.0.0, known as of " in done.stdout
    assert "see NVIDIA's bulletins, too" in done.stdout


def test_variables() -> None:
    variables = {"B": "1", "A_SECRET_B": "2", "a": "my Key", "URL": "https://u:p@h/?q=@"}
    # What such a header has to say is a secret, whatever it is called.
    variables["PYTRITON_TRITON_CONFIG_HTTP_RESTRICTED_API"] = "health:x-auth=hunter2"
    assert list(describe_variables(variables)) == [
        "A_SECRET_B=(hidden)",
        "B=1",
        "PYTRITON_TRITON_CONFIG_HTTP_RESTRICTED_API=(hidden)",
        "URL=https://(hidden)@h/?q=@",
        "a=(hidden)",
    ]


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, "pytriton 0.1.0\n")


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for name in ("init", "serve", "check", "env", "examples"):
        assert f" {name} " in done.stdout


def test_an_unknown_command(tmp_path: Path) -> None:
    done = run(tmp_path, "sell")
    assert done.returncode == 2
    assert "No such command 'sell'" in done.stderr


def test_the_script_of_the_distribution() -> None:
    project = tomli.loads((ROOT / "packages" / "pytriton-server" / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"pytriton": f"{main.__module__}:{main.__name__}"}


def test_the_command_brings_nothing_into_servers() -> None:
    code = "import sys, pytriton.triton, pytriton.cli; print({'typer', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# ---- Ctrl+C --------------------------------------------------------------------------------------------------------


@contextmanager
def starting_for_ever(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, waiting for a tritonserver that never answers; and the process of that one."""
    (folder / "bin").mkdir()
    (folder / "tmp").mkdir()
    server = folder / "bin" / "tritonserver"
    server.write_text(
        f'#!/bin/sh\necho $$ > "{folder}/pid.new"\nmv "{folder}/pid.new" "{folder}/pid"\nexec sleep 600\n'
    )
    server.chmod(0o755)
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env={**os.environ, "PYTRITON_TRITONSERVER_DIR": str(folder), "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually((folder / "pid").exists)
        yield process, int((folder / "pid").read_text())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with starting_for_ever(tmp_path, "check") as (process, server):
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
        assert "Traceback" not in err
    # Where the signal came before the command knew of the process, the kernel ends that after the command.
    eventually(lambda: not is_running(server))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(tmp_path.glob("*.zip")) == []
