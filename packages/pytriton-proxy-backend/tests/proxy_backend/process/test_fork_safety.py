"""What a process has that forks of it would lack or share."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytriton.proxy_backend.process import fork_safety
from pytriton.proxy_backend.process.fork_safety import Belongings, reopen_files


@pytest.fixture
def before() -> Belongings:
    """What this process has; the parts that a test makes are looked for alone."""
    return Belongings()


@contextlib.contextmanager
def a_loop() -> Iterator[None]:
    loop = asyncio.new_event_loop()
    yield
    loop.close()


KINDS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: open(folder / "read", encoding="ascii"), ""),  # noqa: SIM115
    (lambda folder: open(folder / "log", "a", encoding="ascii"), ""),  # noqa: SIM115
    (lambda folder: open(folder / "written", "w", encoding="ascii"), "it has opened "),  # noqa: SIM115
    (lambda folder: open(folder / "read", "r+b"), "it has opened "),  # noqa: SIM115
    (lambda folder: open("/dev/urandom", "rb"), ""),  # noqa: SIM115
    (lambda folder: socket.socket(), "it holds a connection (socket:["),
    (lambda folder: a_loop(), "which forks would share"),
    (lambda folder: mmap.mmap(-1, 4096), "it maps memory that processes share and write (/dev/zero"),
    (lambda folder: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE), ""),
]


@pytest.mark.parametrize(("make", "reason"), KINDS)
def test_what_a_process_has_opened(
    before: Belongings, tmp_path: Path, make: Callable[[Path], Any], reason: str
) -> None:
    (tmp_path / "read").write_text("1\n")
    assert before.find_shared() == ""
    with make(tmp_path):
        assert bool(before.find_shared()) == bool(reason)
        assert reason in before.find_shared()
    assert before.find_shared() == ""


@pytest.mark.parametrize("with_library", [False, True])
def test_a_gpu(before: Belongings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_library: bool) -> None:
    """A device is a file here, and CUDA's library another one, which is mapped."""
    monkeypatch.setattr(fork_safety, "_DEVICES", (f"{tmp_path}/nvidia",))
    for name in ("nvidia0", "libcuda.so.1"):
        (tmp_path / name).write_bytes(bytes(4096))
    with contextlib.ExitStack() as opened:
        if with_library:
            library = opened.enter_context(open(tmp_path / "libcuda.so.1", "rb"))
            opened.enter_context(contextlib.closing(mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)))
            # The library alone does no harm: it is loaded with many a package.
            assert before.find_shared() == ""
        opened.enter_context(open(tmp_path / "nvidia0", "rb"))
        told = "it uses a GPU with CUDA (" if with_library else "it uses a GPU ("
        assert before.find_shared() == f"{told}{tmp_path}/nvidia0), which a fork cannot"
    assert before.find_shared() == ""


def test_a_gpu_whose_memory_is_mapped(before: Belongings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safety, "_DEVICES", (f"{tmp_path}/nvidia",))
    (tmp_path / "nvidia-uvm").write_bytes(bytes(4096))
    with open(tmp_path / "nvidia-uvm", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with contextlib.closing(mapped):
        assert before.find_shared() == f"it uses a GPU ({tmp_path}/nvidia-uvm), which a fork cannot"


PROGRAM = """
import os, sys, threading
from pytriton.proxy_backend.process.fork_safety import Belongings, why_not_forked

def thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="mine").start()

def numpy():
    import numpy
    values = numpy.ones((600, 600))
    values @ values
    assert len(os.listdir("/proc/self/task")) > 1 or os.cpu_count() == 1

def child():
    os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)

def handler():
    os.register_at_fork(after_in_child=lambda: os._exit(3))

def nothing():
    pass

before = Belongings()
globals()[sys.argv[1]]()
print(why_not_forked(before))
"""


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("nothing", ""),
        ("numpy", ""),
        ("thread", "it has started 1 thread, which a fork lacks (mine)"),
        ("child", "it has started another process"),
        ("handler", "what a library does in forked processes fails or does not end"),
    ],
)
def test_a_process(does: str, reason: str) -> None:
    """In a program of its own, because a process of tests has threads."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, does], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (reason, "")


def test_a_fork_reads_a_file_from_where_it_was(before: Belongings, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("123456")
    with open(tmp_path / "lines", "rb", buffering=0) as file:
        assert file.read(1) == b"1"
        other = os.dup(file.fileno())
        try:
            assert set(before.files()) == {file.fileno(), other}
            reopen_files([file.fileno()])
            # It was moved by nobody, and moves nobody.
            assert file.read(2) == b"23"
            assert os.read(other, 2) == b"23"
        finally:
            os.close(other)


def test_threads_of_this_process_are_named() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="the name of a thread")
    thread.start()
    try:
        assert "the name of a thread" in fork_safety._thread_names(Path("/proc/self/task"), os.getpid())
    finally:
        over.set()
        thread.join()
