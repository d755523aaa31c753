import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.server.tritonserver.argument_memory import wipe_arguments

SLEEPER = "import sys; print(sys.argv[1:], flush=True); sys.stdin.read(); print(sys.argv[1:])"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    arguments = ["--a=key=secret", "--b=secretly", "--c=key=other", "secret"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.communicate(timeout=300)


def shown(process: "subprocess.Popen[str]") -> list[str]:
    return Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")[-4:]


def test_what_ends_an_argument_is_wiped(child: "subprocess.Popen[str]") -> None:
    assert wipe_arguments(child.pid, ["secret", "other"])
    assert shown(child) == ["--a=key=******", "--b=secretly", "--c=key=*****", "secret"]
    # What the process has read stays.
    out, _ = child.communicate(timeout=300)
    assert "secretly" in out
    assert "key=secret" in out


def test_nothing_to_wipe(child: "subprocess.Popen[str]") -> None:
    before = shown(child)
    assert wipe_arguments(child.pid, ["absent"])
    assert wipe_arguments(child.pid, [])
    assert shown(child) == before


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=300)
    assert not wipe_arguments(process.pid, ["secret"])
