"""Files of control groups as containers, services and machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytriton.proxy_backend.system import control_groups
from pytriton.proxy_backend.system.control_groups import MemoryKills, read_own_group
from pytriton.proxy_backend.system.processes import describe_exit


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_MACHINE", tmp_path / "vmstat")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/system.slice/a:b.service\n", "system.slice/a:b.service/pids.max"),
        ("0::/outside\n", "pids.max"),
        ("7:cpu,pids:/group\n0::/\n", "pids/group/old.max"),
        ("7:pids:/outside\n", "pids/old.max"),
        (None, "pids.max"),
        (None, "pids/old.max"),
    ],
)
def test_the_own_group_is_found(groups: Path, own: str | None, file: str) -> None:
    if own is not None:
        write(groups / "own", own)
    assert read_own_group("pids", "pids.max", "old.max") is None
    write(groups / "groups" / file, "12\n")
    assert read_own_group("pids", "pids.max", "old.max") == "12\n"


def test_who_has_killed(groups: Path) -> None:
    def killed(kills: MemoryKills) -> str:
        return describe_exit(-9, kills)

    assert killed(MemoryKills()) == (
        "was killed by signal 9 (SIGKILL, from another program, or from the system, as memory was used up)"
    )
    write(groups / "vmstat", "pgfault 1\noom_kill 3\n")
    write(groups / "groups" / "memory.events", "low 0\noom 5\noom_kill 2\noom_group_kill 0\n")
    kills = MemoryKills()
    assert killed(kills) == (
        "was killed by signal 9 (SIGKILL, from another program: the system has killed no process for want of memory)"
    )
    write(groups / "vmstat", "pgfault 1\noom_kill 4\n")
    assert killed(kills) == (
        "was killed by signal 9 (SIGKILL, most likely from the system, which has killed processes since then, as "
        "memory was used up)"
    )
    write(groups / "groups" / "memory.events", "low 0\noom 6\noom_kill 3\noom_group_kill 0\n")
    assert killed(kills) == (
        "was killed by signal 9 (SIGKILL, from the system, as the memory that its container (control group) may have "
        "was used up)"
    )
    assert describe_exit(-15, kills) == "was killed by signal 15 (SIGTERM)"
