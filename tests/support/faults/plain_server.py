"""A tritonserver as its own operator would start it: the bare binary with a command line, and nothing of ours."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytriton.server.tritonserver.binary import find_tritonserver
from support.waiting import PATIENCE_S

# What a container has of its own: no network, which a test asks the server over.
_CONTAINER = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && mount -t tmpfs none /dev/shm && exec "$@"'


def reading_container(folder: Path) -> list[str]:
    """Return a command that runs another one as in a container that may only read a folder; skip where none can."""
    container = [*_CONTAINER, _READ_ONLY, str(folder)]
    tried = subprocess.run([*container, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"containers cannot be imitated here: {tried.stderr.strip()}")
    return container


class PlainServer:
    """A server of somebody else: its address, its log, and questions to it."""

    def __init__(self, port: int, grpc_port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.grpc_url = f"grpc://127.0.0.1:{grpc_port}"
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.process = process

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request; gives the status and the JSON or the text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def infer(self, model: str, **inputs: tuple[str, list[int], list[Any]]) -> tuple[int, Any]:
        """Infer with inputs of (Triton's data type, shape, values); gives the outputs' values, or the error."""
        tensors = [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, (datatype, shape, data) in inputs.items()
        ]
        status, answer = self.call("POST", f"/v2/models/{model}/infer", {"inputs": tensors})
        if status != 200:
            return status, answer["error"]
        return status, {output["name"]: output["data"] for output in answer["outputs"]}

    def load(self, model: str) -> tuple[int, Any]:
        return self.call("POST", f"/v2/repository/models/{model}/load", {})

    def unload(self, model: str) -> tuple[int, Any]:
        return self.call("POST", f"/v2/repository/models/{model}/unload", {})

    def wait_unloaded(self, model: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.call("GET", f"/v2/models/{model}/ready")[0] == 200:
            if time.monotonic() > deadline:
                raise AssertionError(f"{model} is still loaded")
            time.sleep(0.02)


@contextmanager
def plain_server(
    folder: Path,
    repository: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[PlainServer]:
    """Run the binary on a repository.

    Args:
        folder: Where it runs, with its log in it.
        repository: Its model repository.
        options: More options.
        environment: More variables.
        prefix: A command that runs it as a child, such as `unshare`.
    """
    binary = find_tritonserver()
    # Held until the end: nobody who asks for any free port gets them, and the server may bind them all the same.
    holders = [socket.socket(), socket.socket()]
    for holder in holders:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in holders]
    log = folder / "tritonserver.log"
    command: Sequence[str] = [
        *prefix,
        str(binary.executable),
        f"--model-repository={repository}",
        f"--backend-directory={binary.backends_dir}",
        "--http-address=127.0.0.1",
        f"--http-port={ports[0]}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={ports[1]}",
        "--allow-metrics=false",
        "--exit-timeout-secs=5",
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**binary.environment({"PATH": os.defpath, "HOME": str(folder)}), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = PlainServer(ports[0], ports[1], log, process)
    try:
        _wait_live(server)
        yield server
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-8000:])
        raise
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if prefix else ()
        for pid in [int(child) for child in children] or [process.pid]:
            os.kill(pid, signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for holder in holders:
            holder.close()


def _wait_live(server: PlainServer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if server.call("GET", "/v2/health/live")[0] == 200:
                return
        except OSError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"tritonserver did not start (exit code {server.process.poll()})")
        time.sleep(0.05)
