"""Dynamo in tests: a front end for KServe v2, and servers that it finds by files in a folder, all on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from support.processes import free_ports, while_running
from support.waiting import eventually

__all__ = ["Cell", "front_end", "tensor"]


def tensor(name: str, array: npt.NDArray[np.generic]) -> grpcclient.InferInput:
    """Return an input of tritonclient."""
    made = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


class Cell:
    """A front end, and the environment in which workers join it.

    Attributes:
        url: Where the front end answers, HOST:PORT.
        environment: For programs that join.
    """

    def __init__(self, port: int, environment: dict[str, str]) -> None:
        self.url = f"127.0.0.1:{port}"
        self.environment = environment

    @contextmanager
    def serving(self, file: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Serve a file to Dynamo as long as the block; give the process and the server's home."""
        http, grpc, metrics = free_ports(3)
        command: list[object] = [sys.executable, "-m", "pytriton", "serve", file, "--dynamo", "--address=127.0.0.1"]
        command += [f"--http-port={http}", f"--metrics-port={metrics}", f"--grpc-port={grpc}"]
        # Sockets are in there, whose paths have to be short; a server that is killed leaves it as it is.
        with tempfile.TemporaryDirectory(prefix="pt") as home:
            environment = {**self.environment, "PYTRITON_HOME": home}
            with while_running(command, env=environment, **options) as process:
                yield process, Path(home)

    @contextmanager
    def client(self, *models: str) -> Iterator[grpcclient.InferenceServerClient]:
        """Return tritonclient when the front end has the models."""
        with grpcclient.InferenceServerClient(self.url) as client:
            eventually(lambda: all(self.has(client, model) for model in models))
            yield client

    @staticmethod
    def has(client: grpcclient.InferenceServerClient, model: str) -> bool:
        """Return whether the front end has a model."""
        try:
            return bool(client.is_model_ready(model))
        except InferenceServerException:
            return False  # it has not started yet


@contextmanager
def front_end(folder: Path, variables: Sequence[tuple[str, str]] = ()) -> Iterator[Cell]:
    """Run Dynamo's front end as long as the block."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "OTEL_"))},
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_FILE_KV": str(folder / "workers"),
        "DYN_LOG": "warn",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        **dict(variables),
    }
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "dynamo.frontend", "--kserve-grpc-server", "--http-port", port]
    command += ["--grpc-metrics-port", metrics]
    # It tells of each request, whatever its variables say.
    with (folder / "front_end.log").open("w") as log, while_running(command, env=environment, stdout=log, stderr=log):
        yield Cell(port, environment)
