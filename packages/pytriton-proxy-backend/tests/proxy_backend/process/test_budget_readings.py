"""What a budget reads of processes that share memory with their forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pytriton.proxy_backend.process.budget import Account, MemoryBudget

MIB = 1 << 20
# Forks when a line comes, and ends the fork when the next one comes.
PARENT = """
import os, signal, sys
kept = bytes(range(256)) * (96 << 12)
print(0, flush=True)
for _ in range(2):
    sys.stdin.readline()
    pid = os.fork()
    if not pid:
        print(os.getpid(), flush=True)
        signal.pause()
    sys.stdin.readline()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print(0, flush=True)
sys.stdin.read()
"""


def test_a_fork_shares_what_its_parent_has() -> None:
    """Its begin and its end change how much of that counts for the parent, whose memory stays as large."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        forks: list[int] = []
        account = Account("m", pids=lambda: forks, kept=lambda: [parent.pid], is_up=lambda: True)
        budget = MemoryBudget()
        budget.open(account)
        try:
            assert parent.stdout.readline() == "0\n"
            alone = budget.read(account)
            assert alone > 96 * MIB
            for _ in range(2):
                for is_forked in (True, False):
                    parent.stdin.write("\n")
                    parent.stdin.flush()
                    pid = int(parent.stdout.readline())
                    forks[:] = [pid] if is_forked else []
                    assert budget.read(account) == pytest.approx(alone, abs=24 * MIB)
                    assert budget.used_bytes == pytest.approx(alone, abs=24 * MIB)
        finally:
            for pid in (*forks, parent.pid):
                os.kill(pid, signal.SIGKILL)
