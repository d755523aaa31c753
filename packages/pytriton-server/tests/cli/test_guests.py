"""Guests of `pytriton`, found by entry points: those of other distributions, and those that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.guests import find_guests
from pytriton.guests.endpoints import EndpointError, bind_endpoint
from support.serving import short_home
from support.waiting import PATIENCE_S

DASHBOARD = """
from dataclasses import dataclass
from typing import Annotated

import typer

from pytriton.guests import Guest


def look() -> None:
    '''Look at something.'''
    print("looking")


@dataclass
class Dashboard(Guest):
    dashboard: Annotated[int, typer.Option(help="Show so many things.")] = 0

    commands = {"look": look}
    in_file = {"dashboard": range(10)}

    def check(self, given):
        if self.dashboard == 1:
            raise typer.BadParameter("--dashboard: a thing alone is not shown")

    def serve(self, target, load, options):
        if self.dashboard == 2:
            print("served elsewhere:", *load(), options["check"])
        return self.dashboard == 2

    def describe(self, triton):
        yield f"{self.dashboard} things of {triton.describe().models[0].name}"
"""
APP = """
from pytriton.decorators import model

@model
def shout(text: str) -> str:
    return text.upper()
"""


@pytest.fixture(autouse=True)
def home(clean_environment: None) -> Iterator[None]:
    with short_home():
        yield


def install(folder: Path, module: str, text: str, entry: str) -> None:
    """Put a distribution with one guest into a folder."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pytriton.guests]\n{module} = {entry}\n")


def pytriton(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytriton", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_those_of_this_distribution() -> None:
    assert [guest.__name__ for guest in find_guests()] == [
        "ConsoleGuest",
        "DynamoGuest",
        "McpGuest",
        "OpenAiGuest",
        "RayGuest",
    ]


def test_one_of_another_distribution(tmp_path: Path) -> None:
    install(tmp_path, "dashboard", DASHBOARD, "dashboard:Dashboard")
    (tmp_path / "app.py").write_text(APP)

    told = pytriton(tmp_path, "serve", "--help").stdout
    assert "Show so many things." in told
    assert "--console" in told
    assert pytriton(tmp_path, "look").stdout == "looking\n"

    done = pytriton(tmp_path, "serve", "app.py", "--check", "--dashboard=3")
    assert done.stdout.splitlines()[-2:] == ["3 things of shout", "app.py can be served."]
    done = pytriton(tmp_path, "serve", "app.py", "--dashboard=1")
    assert done.returncode == 2
    assert "a thing alone is not shown" in done.stderr
    done = pytriton(tmp_path, "serve", "app.py", "--check", "--dashboard=2")
    assert done.stdout == f"served elsewhere: {tmp_path / 'app.py'}:shout True\n"

    (tmp_path / "pytriton.toml").write_text("dashboard = 4\n")
    done = pytriton(tmp_path, "serve", "app.py", "--check", "--config=pytriton.toml")
    assert "4 things of shout" in done.stdout
    (tmp_path / "pytriton.toml").write_text("dashboard = 10\n")
    done = pytriton(tmp_path, "serve", "app.py", "--check", "--config=pytriton.toml")
    assert done.returncode == 1
    assert "dashboard: expected an integer from 0 to 9; got 10" in done.stderr


def test_one_whose_package_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_guests()
    install(tmp_path, "gone", "", "gone_package.guest:Guest")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_guests() == before


def test_one_that_lacks_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "lacking", "import something_that_is_not_there", "lacking:Guest")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        find_guests()


@pytest.mark.parametrize(
    ("address", "bound"),
    [("[::1]", "::1"), ("::1", "::1"), ("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")],
)
def test_an_endpoint_takes_addresses_as_the_server_does(address: str, bound: str) -> None:
    with bind_endpoint(address, 0, name="the endpoint", option="--endpoint") as listener:
        assert listener.getsockname()[0] == bound


def test_what_is_no_address_is_told() -> None:
    with pytest.raises(EndpointError, match=r"the endpoint cannot listen at nowhere\.invalid: .* such as 127\.0\.0\.1"):
        bind_endpoint("nowhere.invalid", 0, name="the endpoint", option="--endpoint")
