"""Servers for tests: on ports of the system's choice, with nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pytriton.triton import Triton, TritonConfig
from support.http import call
from support.processes import free_ports, while_running
from support.waiting import PATIENCE_S, eventually, wait_for_threads


def local_config(**settings: object) -> TritonConfig:
    """Return settings of a server that meets no other; without metrics, which its end would wait for."""
    values: dict[str, object] = {
        "http_address": "127.0.0.1",
        "grpc_address": "127.0.0.1",
        "http_port": 0,
        "grpc_port": 0,
        "allow_metrics": False,
    }
    return TritonConfig(**{**values, **settings})  # type: ignore[arg-type] # names and types are the caller's


def arena_mappings(pid: int | str = "self") -> list[str]:
    """Return the memfd segments of our arenas that a process has mapped."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:pytriton-arena" in line]


def open_sockets() -> int:
    """Return how many sockets this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return count


def server_pid(triton: Triton) -> int:
    """Return the process of tritonserver: the one child of this process whose command line has the server's HTTP
    port."""
    url = triton.http_url
    if url is None:
        raise AssertionError("the server is not running")
    port = url.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command[0].endswith("tritonserver") and any(re.fullmatch(rf"--http-port={port}", part) for part in command):
            return int(folder.name)
    raise AssertionError(f"no tritonserver on port {port}")


def queued(triton: Triton, model: str) -> int:
    """Return how many requests wait in the queue of a model; needs a server with metrics."""
    with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("nv_inference_pending_request_count{") and f'model="{model}"' in line:
                return int(float(line.rpartition(" ")[2]))
    return 0


@contextmanager
def short_home() -> Iterator[Path]:
    """Set a `PYTRITON_HOME` short enough for sockets; it must be empty in the end."""
    before = os.environ.get("PYTRITON_HOME")
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        os.environ["PYTRITON_HOME"] = folder
        try:
            yield Path(folder)
            left = os.listdir(folder)
            if left:
                raise AssertionError(f"the workspace was left behind: {left}")
        finally:
            if before is None:
                del os.environ["PYTRITON_HOME"]
            else:
                os.environ["PYTRITON_HOME"] = before


@contextmanager
def running(triton: Triton, *others: Triton) -> Iterator[Triton]:
    """Run servers with what was bound to them, and check that nothing of them stays."""
    shared_memory = set(os.listdir("/dev/shm"))
    try:
        with ExitStack() as started:
            for each in (triton, *others):
                each.run()
                started.callback(each.stop)
            yield triton
    finally:
        gc.collect()  # an error that a callable raised may hold its frames, and these the inputs, in a cycle
        wait_for_threads()
        # Regions of clients come and go in other processes meanwhile; the tests of clients look after them.
        left = {name for name in set(os.listdir("/dev/shm")) - shared_memory if not name.startswith("pytriton-client.")}
        problems = [*arena_mappings(), *(name for name in left if "pytriton" in name)]
        if problems:
            raise AssertionError(f"left behind by the server: {problems}")


class ServedFile:
    """`pytriton serve` in a process of its own, as a machine in production has it.

    Attributes:
        ports: Those of HTTP, gRPC and the metrics.
        url: The address of HTTP.
    """

    def __init__(self, file: Path, home: Path) -> None:
        self.ports = free_ports(3)
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self._environment = {**os.environ, "PYTRITON_HOME": str(home)}
        options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), self.ports, strict=True)]
        self._command = [sys.executable, "-m", "pytriton", "serve", file, "--address=127.0.0.1", *options]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Serve as long as the block."""
        with while_running(self._command, env=self._environment) as process:
            eventually(lambda: is_ready(self.url) or process.poll() is not None)
            assert process.poll() is None
            yield process


def is_ready(url: str) -> bool:
    """Return whether somebody answers at an address that the server is ready."""
    try:
        return call(url, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False
