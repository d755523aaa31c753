"""How many processors a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytriton.proxy_backend.system import processors
from pytriton.proxy_backend.system.processors import usable_processors


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of control groups, of which there is none yet; eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    for name in ("_QUOTA", "_OLD_QUOTA", "_OLD_PERIOD"):
        monkeypatch.setattr(processors, name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"_QUOTA": "max 100000\n"}, 8),
        ({"_QUOTA": "150000 100000\n"}, 1.5),
        ({"_QUOTA": "1600000 100000\n"}, 8),
        ({"_QUOTA": "\n"}, 8),
        ({"_OLD_QUOTA": "-1\n", "_OLD_PERIOD": "100000\n"}, 8),
        ({"_OLD_QUOTA": "50000\n", "_OLD_PERIOD": "100000\n"}, 0.5),
        ({"_OLD_QUOTA": "50000\n"}, 8),
    ],
)
def test_quotas_count(files: dict[str, str], expected: float, groups: Path) -> None:
    for name, text in files.items():
        (groups / name).write_text(text)
    assert usable_processors() == expected


def test_so_many_as_it_may_use() -> None:
    assert 0 < usable_processors() <= len(os.sched_getaffinity(0))
