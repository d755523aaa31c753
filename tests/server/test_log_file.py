"""`TritonConfig(log_file=...)`: the log of a server that runs, whose file is moved or removed, as logrotate does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.triton import Triton
from support.callables import X, Y, identity
from support.http import infer
from support.serving import local_config, running
from support.waiting import eventually


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


@pytest.fixture
def triton(log: Path) -> Iterator[Triton]:
    log.parent.mkdir()
    triton = Triton(config=local_config(log_file=log, log_verbose=1))
    triton.bind("m", identity, X, Y)
    with running(triton):
        yield triton


def text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def is_written(triton: Triton, log: Path) -> bool:
    """Have something logged; return whether it is in the file."""
    size = len(text_of(log))
    infer(triton.http_url, "m", 1.0)
    return "infer" in text_of(log)[size:]


def test_a_log_that_was_moved_is_begun_anew(triton: Triton, log: Path) -> None:
    eventually(lambda: is_written(triton, log))
    for number in range(2):
        moved = log.with_name(f"server.log.{number}")
        log.rename(moved)
        eventually(lambda: is_written(triton, log))
        size = moved.stat().st_size
        assert is_written(triton, log)
        assert moved.stat().st_size == size
    log.unlink()
    eventually(lambda: is_written(triton, log))


def test_a_log_whose_name_is_that_of_another_file(triton: Triton, log: Path) -> None:
    # As `create` of logrotate does, which sets its owner and mode.
    log.rename(log.with_name("server.log.1"))
    log.write_text("first\n")
    eventually(lambda: is_written(triton, log))
    assert text_of(log).startswith("first\n")


def test_without_its_folder_the_log_goes_on_in_the_old_file(triton: Triton, log: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    log.parent.rename(moved)
    eventually(lambda: is_written(triton, moved / log.name))
    log.parent.mkdir()
    eventually(lambda: is_written(triton, log))
