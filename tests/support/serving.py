"""Servers for tests: on ports of the system's choice, with nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
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
    """`pytriton serve` in a process of its own, as a machine in production has it."""

    def __init__(self, file: Path, home: Path, *more: str) -> None:
        self.ports = free_ports(3)  # those of HTTP, gRPC and the metrics
        self.url = f"http://127.0.0.1:{self.ports[0]}"  # the address of HTTP
        self._environment = {**os.environ, "PYTRITON_HOME": str(home)}
        options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), self.ports, strict=True)]
        self._command = [sys.executable, "-m", "pytriton", "serve", file, "--address=127.0.0.1", *options, *more]

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


class ServeCommand:
    """The command while it serves, and what it has written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.written = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        eventually(lambda: "Serving. Press Ctrl+C" in self.written or not self._reader.is_alive())
        found = re.search(r"HTTP +(http://[^\s\"\\]+)", self.written)
        assert found, self.written
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.written += line

    def ask(self, model: str, text: str) -> str:
        body = json.dumps({"text": text}).encode()
        with urllib.request.urlopen(f"{self.url}/v2/models/{model}/generate", body, timeout=PATIENCE_S) as answer:
            return str(json.load(answer)["output"])

    def has(self, model: str) -> bool:
        try:
            return bool(self.ask(model, "x"))
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


FREE_PORTS = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0")


@contextmanager
def serve_command(
    folder: Path, *arguments: str, ports: Sequence[str] = FREE_PORTS, python: Sequence[str] = (sys.executable,)
) -> Iterator[ServeCommand]:
    """Run the command in a folder; in the end SIGTERM ends it in order, if nothing has before."""
    with (
        short_home(),
        subprocess.Popen(
            [*python, "-m", "pytriton", "serve", *arguments, *ports],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        server = ServeCommand(process)
        try:
            yield server
        finally:
            assert server.end() == 0, server.written
