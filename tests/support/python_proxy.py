"""The Python proxy without tritonserver: callers that keep what they get, workers in other processes, links to cut."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker, write_description
from pytriton.proxy_backend.protocol.proxy import EndpointSettings
from pytriton.proxy_backend.python_proxy.endpoint import ProxyEndpoint
from pytriton.proxy_backend.python_proxy.model import listen
from pytriton.proxy_backend.python_proxy.workers import AttachedWorker
from pytriton.proxy_backend.settings import PythonProxySettings
from pytriton.proxy_backend.wire.batch import RequestData
from pytriton.proxy_backend.wire.response import ResponseData
from pytriton.proxy_backend.wire.settings import serving_settings
from pytriton.proxy_backend.zmq_keys import CurveKeys
from support.waiting import PATIENCE_S, eventually

BUDGET_BYTES = 64 << 20


def spec(**fields: Any) -> ModelSpec:
    """Return a model that takes x and gives y, float32 of any length."""
    tensor = {"dtype": np.dtype("float32"), "shape": (-1,)}
    values: dict[str, Any] = {
        "name": "model",
        "version": 1,
        "inputs": (TensorSpec(name="x", **tensor),),  # type: ignore[arg-type]
        "outputs": (TensorSpec(name="y", **tensor),),  # type: ignore[arg-type]
        "batching": True,
        "max_batch_size": 8,
    }
    return ModelSpec(**{**values, **fields})


class Caller:
    """A request that keeps its answers."""

    def __init__(self) -> None:
        self.responses: list[ResponseData] = []
        self.failures: list[tuple[int, str]] = []
        self.cancelled = False
        self.ended = threading.Event()
        self.ended_at = 0.0
        self.changed = threading.Event()

    def respond(self, response: ResponseData) -> None:
        if response.error is not None:
            self.fail(response.code, response.error)
            return
        # As Triton: what is given is copied before this returns.
        response.outputs = {name: array.copy() for name, array in response.outputs.items()}
        self.responses.append(response)
        self.changed.set()
        if response.final:
            self._end()

    def fail(self, code: int, text: str) -> None:
        self.failures.append((code, text))
        self._end()

    def _end(self) -> None:
        if self.ended.is_set():
            raise AssertionError("a request was answered twice")
        self.ended_at = time.monotonic()
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> Any:
        """Return the one answer: outputs, or the code and the text of the error."""
        if not self.ended.wait(PATIENCE_S):
            raise AssertionError("no answer came")
        return self.failures[0] if self.failures else self.responses[0].outputs


class Proxy:
    """An endpoint that plays the model."""

    def __init__(self, endpoint: ProxyEndpoint) -> None:
        self.endpoint = endpoint

    @property
    def address(self) -> str:
        return self.endpoint.address

    def send(self, *rows: Any, **fields: Any) -> list[Caller]:
        """Send one batch, one request for each argument; returns when the endpoint takes another one."""
        callers = [Caller() for _ in rows]
        data = [RequestData({"x": np.array([row], np.float32)}, outputs=["y"], **fields) for row in rows]
        self.endpoint.execute(data, callers)
        return callers

    def start(self, *rows: Sequence[float]) -> tuple[list[Caller], threading.Thread]:
        """Send a batch from a thread of its own, as Triton does."""
        callers = [Caller() for _ in rows]
        data = [RequestData({"x": np.array([row], np.float32)}, outputs=["y"]) for row in rows]
        thread = threading.Thread(target=self.endpoint.execute, args=(data, callers))
        thread.start()
        return callers, thread

    def only_worker(self) -> AttachedWorker:
        """Return the one that is attached."""
        self.wait_workers(1)
        return next(iter(self.endpoint._pool.workers))

    def wait_workers(self, count: int) -> None:
        eventually(lambda: len(self.endpoint._pool.workers) == count)


def _keys(keys: tuple[Path, Path] | None) -> dict[str, Path]:
    return {} if keys is None else {"secret_key_file": keys[0], "workers_keys_dir": keys[1]}


@contextmanager
def proxy(
    address: str,
    *,
    keys: tuple[Path, Path] | None = None,
    attach_timeout_s: float = PATIENCE_S,
    decoupled: bool = False,
    **more: Any,
) -> Iterator[Proxy]:
    """Listen at an address; `more` are settings, see `PythonProxySettings`."""
    settings = PythonProxySettings(
        address=address, attach_timeout_s=attach_timeout_s, arena_budget_bytes=BUDGET_BYTES, **{**_keys(keys), **more}
    )
    endpoint = ProxyEndpoint(
        EndpointSettings(
            model_name="model",
            model_version=1,
            batching=True,
            decoupled=decoupled,
            tensors_digest=spec().tensors_digest,
            **serving_settings(settings),
        ),
        lambda: listen(settings),
    )
    endpoint.start()
    try:
        yield Proxy(endpoint)
    finally:
        endpoint.stop()


@contextmanager
def worker(
    infer: Any, address: str, model: ModelSpec | None = None, keys: CurveKeys | None = None, *, insecure: bool = False
) -> Iterator[Worker]:
    """Attach a worker of this process."""
    made = Worker(infer, model or spec(), address, curve_keys=keys, insecure=insecure)
    made.start()
    try:
        made.wait_attached(PATIENCE_S)
        yield made
    finally:
        if not made.stop(PATIENCE_S):
            raise AssertionError("the worker did not end")


_PROCESS = """
import json, sys, time
from pathlib import Path
from pytriton.proxy_backend import Worker, read_description
from pytriton.proxy_backend.wire.batch import RequestData
from pytriton.proxy_backend.wire.response import ResponseData
from pytriton.proxy_backend.zmq_keys import CurveKeys
description, address, keys = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def infer(requests):
    if requests[0]["x"][0, 0] < 0:
        print("busy", flush=True)
        time.sleep(3600)
    return [{"y": request["x"] * 2} for request in requests]
keys = CurveKeys(secret_key_file=Path(keys[0]), server_key_file=Path(keys[1])) if keys else None
worker = Worker(infer, read_description(Path(description)), address, curve_keys=keys)
worker.start()
worker.wait_attached(600)
print("attached", flush=True)
sys.stdin.read()
worker.stop(20)
"""


@contextmanager
def worker_process(
    folder: Path, address: str, *, keys: CurveKeys | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Attach a worker of another process, which doubles, and never answers a batch that begins with less than 0.

    Args:
        folder: For the description of its model.
        address: Where it attaches.
        keys: Its keys.
        prefix: A command to run it with.
    """
    description = folder / "model.json"
    write_description(description, spec())
    names = json.dumps([str(keys.secret_key_file), str(keys.server_key_file)] if keys else None)
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", _PROCESS, str(description), address, names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_line(process, "attached")
        yield process
    finally:
        # A process may be stopped, or have a link that was cut.
        process.send_signal(signal.SIGCONT)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_line(process: subprocess.Popen[str], expected: str) -> None:
    """Wait until a process has printed a line."""
    if process.stdout is None:
        raise TypeError("its output is not read")
    deadline = time.monotonic() + PATIENCE_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stdout.readline()
        if line.strip() == expected:
            return
        if not line:
            raise AssertionError(f"the process ended ({process.wait(PATIENCE_S)})")
    raise AssertionError(f"waited in vain for {expected!r}")


class Link:
    """A TCP link that can be cut as a cable is: nothing comes through, and neither side gets an error."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.02)
        self.port = int(self._listening.getsockname()[1])
        self.cut = threading.Event()
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="link")]
        self._threads[0].start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listening.close()

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                client, _ = self._listening.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name="link-connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target, PATIENCE_S) as server:
            ends = {client: server, server: client}
            while not self._ending.is_set():
                if self.cut.is_set():
                    time.sleep(0.01)
                    continue
                for source in select.select(list(ends), [], [], 0.02)[0]:
                    try:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        ends[source].sendall(data)
                    except OSError:
                        return


@contextmanager
def network_namespace() -> Iterator[tuple[str, str, list[str]]]:
    """Another network namespace, with a link to this one.

    Yields:
        The address of this side, the name of this side's device, and the command that runs another one over there.

    Raises:
        PermissionError: This user or machine does not allow it.
    """
    name = f"pt{os.getpid()}"
    inside, outside = f"{name}a"[-15:], f"{name}b"[-15:]
    subnet = f"198.18.{os.getpid() // 64 % 256}.{os.getpid() % 64 * 4}"
    base, _, last = subnet.rpartition(".")
    here, there = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {outside} type veth peer name {inside} netns {name}",
        f"ip addr add {here}/30 dev {outside}",
        f"ip link set {outside} up",
        f"ip -n {name} addr add {there}/30 dev {inside}",
        f"ip -n {name} link set {inside} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            try:
                done = subprocess.run(command.split(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            except FileNotFoundError as error:
                raise PermissionError(f"there is no {command.split()[0]}") from error
            if done.returncode != 0:
                raise PermissionError(f"{command}: {done.stderr.strip()}")
        yield here, outside, ["ip", "netns", "exec", name]
    finally:
        with contextlib.suppress(FileNotFoundError):
            for command in (f"ip link del {outside}", f"ip netns del {name}"):
                subprocess.run(command.split(), capture_output=True, timeout=PATIENCE_S, check=False)
