"""A tritonserver with models that have no worker yet, for tests that bring workers of their own."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http

from pytriton.proxy_backend import (
    BACKEND_NAME,
    ModelSpec,
    ProxySettings,
    TensorSpec,
    Worker,
    endpoint_path,
    library_path,
)
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.backends import make_backends
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.command_line import ServerFolders, build_command
from pytriton.server.tritonserver.ports import reserve_ports
from pytriton.server.tritonserver.process import ServerProcess
from support.serving import local_config
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

F4 = np.dtype("float32")

CONFIG = """
backend: "pytriton"
max_batch_size: {max_batch_size}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] {x} }} {more_input} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} {more_output} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{extra}
"""


class BareServer:
    """A tritonserver that is not started yet; `add` its models before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, ModelSpec] = {}
        (folder / "models").mkdir()
        backends = folder / "backends"
        backends.mkdir()
        binary = find_tritonserver()
        make_backends(backends, binary, {BACKEND_NAME: library_path()})
        config = local_config()
        self.ports = reserve_ports(config)
        folders = ServerFolders(
            executable=binary.executable, models=folder / "models", backends=backends, caches=binary.caches_dir
        )
        command = build_command(config, TritonSecurityConfig(), folders, self.ports)
        self.process = ServerProcess(command, binary.environment())

    def add(
        self,
        name: str,
        *,
        batching: bool = True,
        decoupled: bool = False,
        extra: str = "",
        more_input: str = "",
        more_output: str = "",
        rows: int = 8,
        **settings: Any,
    ) -> None:
        """Add a model with an input `x` and an output `y`, float32 of one dimension; `settings` are the proxy's."""
        version = self.folder / "models" / name / "1"
        version.mkdir(parents=True)
        config = CONFIG.format(
            x="optional: true" if more_input else "",
            max_batch_size=rows if batching else 0,
            more_input=more_input,
            more_output=more_output,
            extra=extra,
        )
        (version.parent / "config.pbtxt").write_text(config)
        self.models[name] = ModelSpec(
            name=name,
            version=1,
            inputs=(TensorSpec(name="x", dtype=F4, shape=(-1,)),),
            outputs=(TensorSpec(name="y", dtype=F4, shape=(-1,)),),
            batching=batching,
            max_batch_size=rows if batching else 0,
            decoupled=decoupled,
        )
        settings.setdefault("tensors_digest", "" if more_input else self.models[name].tensors_digest)
        text = ProxySettings(endpoint=self.endpoint(name), batching=batching, decoupled=decoupled, **settings).to_text()
        (version / "pytriton.conf").write_text(text)

    def endpoint(self, name: str) -> Path:
        """Return the socket of a model."""
        return endpoint_path(self.folder, name, 1)

    def start(self) -> None:
        """Start it and wait until all models are loaded; a newer server is ready when they have workers, too."""
        self.process.start()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.is_running, self.process.log_tail
            assert time.monotonic() < deadline, self.process.log_tail
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.url}/v2/health/live", timeout=1):
                return
            time.sleep(0.05)

    @property
    def url(self) -> str:
        assert self.ports.http is not None
        return self.ports.http.authority

    @property
    def grpc_url(self) -> str:
        assert self.ports.grpc is not None
        return self.ports.grpc.authority

    def infer(self, name: str, x: Array) -> Array:
        """Make one request over HTTP and give its answer."""
        with tritonclient.http.InferenceServerClient(self.url, network_timeout=PATIENCE_S) as client:
            tensor = tritonclient.http.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            result: Array = client.infer(name, [tensor]).as_numpy("y")
            return result

    def worker(self, name: str, infer_func: Callable[..., Any]) -> contextlib.AbstractContextManager[Worker]:
        """Attach a worker to a model while a block runs."""
        return running_worker(infer_func, self.models[name], self.endpoint(name))

    def log(self) -> str:
        """Return the last lines that the server has written."""
        return "\n".join(self.process.log_tail)

    def wait_for_log(self, text: str) -> None:
        """Wait until the log has a text."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log():
            assert time.monotonic() < deadline, f"no {text!r} in the log:\n{self.log()}"
            time.sleep(0.02)

    def arena_mappings(self) -> int:
        """Return how many segments of arenas the server has mapped."""
        assert self.process.pid is not None
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("memfd:")

    def descriptors(self) -> int:
        """Return how many files the server has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def held(self) -> Counter[str]:
        """Return what the server has open, by kind; without connections over TCP, which are those of callers."""
        of_callers = {
            f"socket:[{line.split()[9]}]"
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.process.pid}/net/{name}").read_text().splitlines()[1:]
        }
        found = Counter[str]()
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                link = os.readlink(descriptor)
                if link not in of_callers:
                    found[link.partition(":[")[0] if link.startswith("socket") else link] += 1
        return found

    def wait_until_held(self, expected: Counter[str]) -> None:
        """Wait until the server has nothing open but this, as `held` returned it."""
        try:
            eventually(lambda: not self.held() - expected)
        except AssertionError:
            raise AssertionError(f"the server still has {dict(self.held() - expected)}") from None


@contextlib.contextmanager
def serving(server: BareServer) -> Iterator[BareServer]:
    """Run a server; in the end it must still run, and go."""
    try:
        server.start()
        yield server
        assert server.process.is_running, server.log()
    finally:
        server.ports.release()
        server.process.stop(10.0)


@contextlib.contextmanager
def running_worker(infer_func: Callable[..., Any], model: ModelSpec, endpoint: Path | str) -> Iterator[Worker]:
    """Attach a worker in this process while a block runs."""
    worker = Worker(infer_func, model, endpoint)
    worker.start()
    try:
        worker.wait_attached(PATIENCE_S)
        yield worker
    finally:
        assert worker.stop(PATIENCE_S)
