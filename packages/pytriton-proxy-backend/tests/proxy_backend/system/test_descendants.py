"""The processes that a process has started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pytriton.proxy_backend.system.processes import with_descendants


def test_a_thread_that_has_just_ended_hides_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def list_with_one_more(path: Any) -> list[str]:
        return ["999999999", *listed(path)]

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr(os, "listdir", list_with_one_more)
        assert with_descendants(os.getpid())[0] == os.getpid()
        assert child.pid in with_descendants(os.getpid())
        assert child.stdin is not None
        child.stdin.close()
