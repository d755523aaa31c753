"""Clients of all kinds that give up, and die, over gRPC: the server answers everybody else, to the end."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.faults.grpc_callers import KINDS
from support.paths import ROOT
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

SOAK_S = float(os.environ.get("PYTRITON_SOAK_S", "600"))
# What a server grows by in its first minute, with its caches and arenas, and what may come on top of that.
WARM_S = 60
MOST_GROWTH_KIB = 64 * 1024


@batch
def double(x: Any) -> Any:
    return {"y": 2 * x}


def count(requests: Any) -> Iterator[Any]:
    for i in range(20):
        yield [{"i": np.array([i], np.int32)} for _ in requests]


calls: Counter[str] = Counter()


async def wait(requests: Any) -> Any:
    calls["begun"] += 1
    try:
        await asyncio.Event().wait()
    finally:
        calls["told"] += 1


@contextmanager
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    x, y = Tensor((-1,), np.float32, "x"), Tensor((-1,), np.float32, "y")
    triton.bind("double", double, [x], [y], config=ModelConfig(max_batch_size=64))
    streaming = ModelConfig(batching=False, decoupled=True)
    triton.bind("count", count, [Tensor((1,), np.int32, "n")], [Tensor((1,), np.int32, "i")], config=streaming)
    config = ModelConfig(batching=False)
    triton.bind("wait", wait, [Tensor((1,), np.int32, "n")], [Tensor((1,), np.int32, "i")], config=config)
    with short_home(), running(triton):
        yield triton


class Callers:
    """One process of each kind."""

    def __init__(self, triton: Triton) -> None:
        self._address = str(triton.grpc_url).partition("//")[2]
        self._seed = 0
        self.running = {kind: self._start(kind) for kind in KINDS}

    def _start(self, kind: str) -> subprocess.Popen[str]:
        self._seed += 1
        command = [sys.executable, "-m", "support.faults.grpc_callers", kind, self._address, str(self._seed)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT / "tests", stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def kill(self, kind: str) -> None:
        """Kill a caller in the middle of its calls; it must not have ended by itself."""
        process = self.running[kind]
        ended = process.poll()
        process.kill()
        output, _ = process.communicate()
        assert ended is None, f"{kind} ended with {ended}: {output}"

    def replace(self, kind: str) -> None:
        self.kill(kind)
        self.running[kind] = self._start(kind)


def resident_kib(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def check(seconds: float) -> None:
    rng = random.Random(1)
    with served() as triton, ModelClient(str(triton.grpc_url), "double", inference_timeout_s=PATIENCE_S) as client:
        process = server_pid(triton)
        callers = Callers(triton)
        try:
            begun = time.monotonic()
            warm_kib = answered = 0
            while (spent := time.monotonic() - begun) < seconds or (not calls["begun"] and spent < PATIENCE_S):
                for _ in range(50):
                    assert (client.infer_sample(np.ones(4, np.float32))["y"] == 2).all()
                    answered += 1
                assert triton.is_alive()
                if spent > 5 and calls["begun"]:
                    callers.replace(rng.choice(list(KINDS)))
                if spent > WARM_S and not warm_kib:
                    warm_kib = resident_kib(process)
                time.sleep(0.5)
        finally:
            for kind in KINDS:
                callers.kill(kind)
        assert server_pid(triton) == process
        assert calls["begun"] > 0
        eventually(lambda: calls["told"] == calls["begun"])
        print(f"{answered} calls answered beside them; {calls['told']} of {calls['begun']} callables told of a cancel")
        if warm_kib:
            grown = resident_kib(process) - warm_kib
            print(f"{warm_kib} KiB after {WARM_S} s, {grown} more in the end")
            assert grown < MOST_GROWTH_KIB, f"{grown} KiB more than the {warm_kib} after {WARM_S} s"


@pytest.mark.slow
def test_callers_for_some_seconds() -> None:
    check(15)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_callers_for_ten_minutes() -> None:
    check(SOAK_S)
