"""The demo runs to its end, and Ctrl+C ends it early; nothing is left either way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.paths import ROOT
from support.waiting import PATIENCE_S

MARK = "PYTRITON_TEST_DEMO"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short name: a unix socket's path has at most 107 bytes, and `tmp_path` takes most."""
    with tempfile.TemporaryDirectory(prefix="pt-") as name:
        yield Path(name)


@contextmanager
def running_demo(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the demo with every folder that it may write to under `folder` and a mark that its descendants inherit."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTRITON_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        environment.pop(name, None)
    (folder / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "demo.py")],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def marked(mark: str) -> list[str]:
    """Return the command lines of the living processes that inherited a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir() or path.is_socket()]


@pytest.mark.slow
def test_it_runs_to_its_end_and_leaves_nothing(folder: Path) -> None:
    with running_demo(folder) as (process, mark):
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output + errors
        assert marked(mark) == []
    assert "\x1b" not in output
    assert "Traceback" not in errors
    right, total = map(int, re.search(r"Accuracy: [\d.]+% \((\d+) of (\d+) held-out images\)", output).groups())  # type: ignore[union-attr]
    assert 0.95 * total < right <= total == 899
    assert "All 3,596 answers are those of the model called directly." in output
    for protocol in ("HTTP", "gRPC"):
        assert re.search(rf"{protocol} +│ +1,798 │ +[\d,]+ │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │", output)
    bars = re.findall(r"│ +(\d+) │ +([\d,]+) │ █", output)
    batches = {int(size): int(count.replace(",", "")) for size, count in bars}
    assert sum(size * count for size, count in batches.items()) == 2 * 1798
    assert max(batches) > 1
    assert "seven (en), sieben (de), siedem (pl), επτά (el), 七 (ja)" in output
    assert "██" in output
    assert output.count("read as") == 4
    assert files(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Trained", "Serving"])
def test_ctrl_c_ends_it(folder: Path, moment: str) -> None:
    with running_demo(folder) as (process, mark):
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if moment in line:
                break
        assert moment in seen, f"the demo ended before it printed {moment!r}: {seen}"
        time.sleep(0.1)  # into the start of the server, or the first requests
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + signal.SIGINT, seen + output + errors
        assert "Interrupted" in output
        assert "Traceback" not in errors
        assert marked(mark) == []
    assert files(folder) == []
