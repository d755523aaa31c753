"""Factories for workers that are forked from a parent: what they make says who made it, and what forks share of it."""

from __future__ import annotations

import asyncio
import atexit
import io
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.decorators import batch

MAKER, OWN, PYTHON_RANDOM, NUMPY_RANDOM, LINE, FOLDER, COLOUR, DIE, ENDS = (float(-number) for number in range(1, 10))
COLOURS = {"red": 1.0, "blue": 2.0}
# What factories make and nobody frees.
kept: list[Any] = []


def start_thread(_path: str) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True, name="of-the-factory").start()


def start_process(_path: str) -> None:
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "grandchild-of-a-parent"]))


def connect(_path: str) -> None:
    kept.append(socket.socketpair())


def make_loop(_path: str) -> None:
    kept.append(asyncio.new_event_loop())


def open_to_write(path: str) -> None:
    kept.append(open(f"{path}/written", "w", encoding="utf-8"))  # noqa: SIM115


def map_memory(_path: str) -> None:
    kept.append(mmap.mmap(-1, 4096))


def fail_once(path: str) -> None:
    try:
        Path(path, "failed").touch(exist_ok=False)
    except FileExistsError:
        return
    raise RuntimeError("the weights are not there yet")


def die_once(path: str) -> None:
    if not Path(path, "died").exists():
        Path(path, "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def use_pool(_path: str) -> None:
    """Have a pool of threads, and one for the event loop, which have ended."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.time).result()


def replace_streams(_path: str) -> None:
    sys.stdout = io.StringIO()
    sys.stderr = None


def log_to_file(path: str) -> None:
    sys.stdout = sys.stderr = open(f"{path}/log", "a", encoding="ascii")  # noqa: SIM115
    print("by the factory")


def hang_at_the_end(_path: str) -> None:
    atexit.register(threading.Event().wait)


def wait_at_a_gate(path: str) -> None:
    while Path(path, "closed").exists():
        time.sleep(0.01)


def ask_for_an_end() -> float:
    """Have all that ends with a process: threads that wait for work, and functions that are called."""
    pool = ThreadPoolExecutor(1)
    kept.append(pool)
    kept.append(weakref.finalize(pool, print, "a finalizer of a fork"))
    atexit.register(print, "a function of a fork")

    async def use() -> float:
        return await asyncio.to_thread(float, 1)

    loop = asyncio.new_event_loop()
    kept.append(loop)
    return loop.run_until_complete(use()) + pool.submit(float, 1).result()


def die() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody outlives this")


def multiply(_path: str) -> None:
    """Have numpy start its threads, which it ends before a fork."""
    values = np.ones((600, 600))
    kept.append(values @ values)


def make(does: str = "", path: str = "") -> Callable[..., Any]:
    """Make a callable that doubles, or tells what a fork has.

    Args:
        does: The function of this module that the factory calls.
        path: A folder; a file `lines` in it is read.
    """
    print("made in", os.getpid())
    if does:
        globals()[does](path)
    maker = os.getpid()
    lines = open(f"{path}/lines", encoding="ascii") if path and os.path.exists(f"{path}/lines") else None  # noqa: SIM115
    folder = tempfile.TemporaryDirectory(prefix="made", dir=path) if path else None
    weights = np.full(1_000_000, 2, np.float32)
    atexit.register(print, "the end of", maker)

    told: dict[float, Callable[[], float]] = {
        MAKER: lambda: maker,
        OWN: os.getpid,
        PYTHON_RANDOM: random.random,
        NUMPY_RANDOM: lambda: float(np.random.rand()),
        LINE: lambda: float("nan" if lines is None else lines.readline()),
        FOLDER: lambda: folder is not None and os.path.isdir(folder.name),
        COLOUR: lambda: COLOURS[os.environ["COLOUR"]],
        DIE: die,
        ENDS: ask_for_an_end,
    }

    @batch
    def infer(x: Any) -> dict[str, Any]:
        values = [told[value]() if value in told else value * weights[0] for value in x.ravel().tolist()]
        return {"y": np.reshape(np.array(values, np.float32), x.shape)}

    return infer
