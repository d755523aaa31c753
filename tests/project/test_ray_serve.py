"""Ray Serve: the example does what its page says, streams end, and no request is lost while a cluster is changed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from support.paths import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "ray_serve" / "two_nodes.py"
CHANGES = ROOT / "tests" / "project" / "ray_cluster.py"
STREAMS = ROOT / "tests" / "project" / "ray_streams.py"
# Ray starts a dozen Python processes, one after the other, on what may be a busy machine with two cores.
RUN_TIMEOUT_S = 900.0
TEST_TIMEOUT_S = 7200.0
END_TIMEOUT_S = 300.0
# Every process that descends from the example has this in its environment, whoever its parent is by then.
MARK = "PYTRITON_TEST_RAY_SERVE"


def ray_requirement() -> Requirement:
    """Read which ray the tests need, and with its marker where there is one."""
    groups = tomli.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    (found,) = (Requirement(each) for each in groups["frameworks"] if Requirement(each).name == "ray")
    return found


def has_wheel() -> bool:
    marker = ray_requirement().marker
    return marker is None or marker.evaluate()


needs_ray = pytest.mark.skipif(not has_wheel(), reason="ray has no wheel here, says its marker in pyproject.toml")


def environment_for(folder: Path, mark: str) -> dict[str, str]:
    """What a program of these tests runs in: nothing of Ray that is somebody else's."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # How long Ray waits for its own processes, which is 30 s and a minute otherwise.
    patience = {
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    }
    return {**settings, **patience, MARK: mark, "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}


def marked_processes(mark: str) -> dict[int, str]:
    """Give the command lines of all processes that have a mark, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def end_processes(mark: str) -> None:
    """End all processes that have a mark, those included that they start meanwhile."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for processes; those that still have it in the end are ended."""
    mark = uuid.uuid4().hex
    yield mark
    end_processes(mark)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short name: a unix socket's path has at most 107 bytes, and `tmp_path` takes most."""
    with tempfile.TemporaryDirectory(prefix="pt") as name:
        yield Path(name)


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLE.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def shared_memory_of_ray() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if re.search("plasma|ray", name)}


def lines_of(program: Path, folder: Path, mark: str) -> list[str]:
    """Return what a program that starts a cluster prints, after looking that it has left nothing."""
    shared = shared_memory_of_ray()
    environment = environment_for(folder, mark)
    # The raylet of a node ends where its agents, programs in Python, take over 15 s to start, and no setting changes
    # that: nothing should have to be compiled then, and on a machine that is too busy all the same it is tried again.
    modules = "ray.serve, ray.dashboard.agent, ray._private.runtime_env.agent.main"
    run(["-c", f"import {modules}"], environment)
    for attempt in itertools.count():
        own = folder / str(attempt)
        own.mkdir()
        done = run([str(program)], {**environment, "TMPDIR": str(own)})
        if "timed out during startup" not in done.stderr:
            break
        end_processes(mark)
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}
    assert list(own.iterdir()) == []
    assert shared_memory_of_ray() - shared == set()
    # Ray says there as well that a worker died.
    return [line for line in done.stdout.splitlines() if "(raylet)" not in line]


def counts_of(line: str) -> dict[str, int]:
    """Read what callers saw, such as `12 right`."""
    return {name: int(count) for count, name in re.findall(r"(\d+) (right|told|wrong)", line)}


@needs_ray
@pytest.mark.ci
@pytest.mark.slow(seconds=70)
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_two_replicas_on_two_nodes_lose_no_request_and_leave_nothing(folder: Path, mark: str) -> None:
    *answers, ready, killed = lines_of(EXAMPLE, folder, mark)[-4:]
    assert answers == ["[0.09, 0.245, 0.665]"] * 2
    assert ready == "ready: True"
    # Every request was answered, or told; each caller had its own question.
    found = counts_of(killed)
    assert found["right"] > 0
    assert "wrong" not in found


@needs_ray
@pytest.mark.ci
@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_a_cluster_that_is_changed_under_load_loses_no_request(folder: Path, mark: str) -> None:
    counts = {line.partition(":")[0]: counts_of(line) for line in lines_of(CHANGES, folder, mark)}
    for change in ("from one replica to two", "from one version to the next", "a node was killed, and replaced"):
        assert counts[change].keys() == {"right", "told", "wrong"}
        assert counts[change]["right"] > 0
        assert counts[change]["wrong"] == 0
        # Only what a node takes along with it may be told to its callers.
        assert counts[change]["told"] == 0 or "killed" in change


@needs_ray
@pytest.mark.ci
@pytest.mark.slow(seconds=60)
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_streams_over_grpc_are_answered_and_end_when_their_callers_leave(folder: Path, mark: str) -> None:
    assert lines_of(STREAMS, folder, mark) == [
        "one stream: [('three', [0, 1, 2]), ('two', [0, 1])]",
        "later: {'again': [0]}",
        "error: expected a number from 0 on, got -1",
        "beside each other: True",
        "left: 48 have ended",
        "left: 48 have ended",
    ]
