"""Mixed traffic while workers are killed: nothing is lost, wrong or growing. The long form is run by `dev.py soak`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

# For the start, the last requests, and the end.
MARGIN_S = 900.0


def soak(tmp_path: Path, seconds: float) -> dict[str, Any]:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/soak/run.py", "--seconds", str(seconds), "--json", str(report)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=seconds + MARGIN_S)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def check(found: dict[str, Any], killed: int) -> None:
    assert found["lost"] == 0
    assert found["sent"] == sum(found["outcomes"].values())
    # Every caller got answers, and every way to fail was among what happened.
    assert all(counts.get("answered", 0) > 0 for counts in found["by_caller"].values()), found["by_caller"]
    assert {"refused", "cancelled", "timed out", "went away"} <= found["outcomes"].keys()
    assert found["killed"] >= killed
    assert found["rebound"] >= 1


@pytest.mark.ci
@pytest.mark.slow(seconds=70)
@pytest.mark.timeout(2400)
def test_a_minute_of_everything(tmp_path: Path) -> None:
    check(soak(tmp_path, 60), killed=5)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_ten_minutes_of_everything(tmp_path: Path) -> None:
    check(soak(tmp_path, 600), killed=50)


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the benchmark, which is a program and not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.soak import growth

    return growth


@pytest.mark.parametrize(
    ("per_sample", "grown"),
    [
        ({}, []),
        ({"descriptors": 1}, ["descriptors grew from 50 to 110"]),
        ({"rss_mib": 1.0}, ["rss grew from 144 to 204 MiB"]),
    ],
)
def test_growth_is_found(growth: Any, per_sample: dict[str, float], grown: list[str]) -> None:
    flat = {"rss_mib": 100.0, "descriptors": 20, "memfds": 5, "arenas": 5, "threads": 9, "children": 2}
    samples = [
        growth.Sample(moment_s=step, **{name: value + step * per_sample.get(name, 0) for name, value in flat.items()})
        for step in range(120)
    ]
    _, problems = growth.compare(samples, warm_up_s=30)
    assert problems == grown
