"""A `model.py` in Triton's own Python backend: the same tritonserver binary, without anyone's proxy."""

from __future__ import annotations

import os
import shutil
import textwrap
from pathlib import Path

from benchmarks.environments import PeerMissingError
from benchmarks.peers.base import SERVERS, Peer, Ports, delay_s
from benchmarks.peers.nvidia_pytriton import NvidiaPyTritonEnvironment
from benchmarks.processes import Launch
from benchmarks.workload import MAX_BATCH_SIZE, WIDTH, KServeWire, Model

_STUB = "triton_python_backend_stub"


class TritonPythonBackend(Peer):
    """What a Triton user writes who has no PyTriton; server, stub and numpy come from PyTriton's environment."""

    name = "python-backend"
    title = "model.py in Triton's Python backend"
    wire = KServeWire()

    def __init__(self, shared: NvidiaPyTritonEnvironment) -> None:
        """Take the environment that holds the server."""
        self._shared = shared

    def prepare(self) -> dict[str, str]:
        """Install the server; raises `PeerMissingError` when its wheel has no stub for the interpreter."""
        versions = self._shared.prepare()
        if not self._stub().is_file():
            raise PeerMissingError(f"expected the Python backend's stub at {self._stub()}, there is none")
        return versions

    def launch(self, model: Model, ports: Ports, scratch: Path) -> Launch:
        """Write the model repository and return how to start the server on it."""
        repository, backends = scratch / "models", scratch / "backends"
        folder = repository / model.name
        (folder / "1").mkdir(parents=True)
        shutil.copy(SERVERS / "triton_model.py", folder / "1" / "model.py")
        (folder / "config.pbtxt").write_text(_configuration(model))
        # The stub has to lie beside the backend's library; the wheel keeps one per Python version elsewhere.
        shutil.copytree(self._tritonserver() / "backends" / "python", backends / "python")
        shutil.copy(self._stub(), backends / "python" / _STUB)
        bin_folder = self._shared.python.parent
        libraries = os.pathsep.join([str(self._shared.interpreter.libpython_folder), str(self._libraries())])
        return Launch(
            argv=[
                str(self._tritonserver() / "bin" / "tritonserver"),
                f"--model-repository={repository}",
                f"--backend-directory={backends}",
                "--http-address=127.0.0.1",
                f"--http-port={ports.http}",
                "--grpc-address=127.0.0.1",
                f"--grpc-port={ports.grpc}",
                "--metrics-address=127.0.0.1",
                f"--metrics-port={ports.metrics}",
                "--allow-gpu-metrics=false",
                f"--backend-config=python,shm-region-prefix-name={scratch.name}",
            ],
            environment={
                "LD_LIBRARY_PATH": libraries,
                # The embedded interpreter finds its prefix through PATH and numpy through PYTHONPATH.
                "PATH": os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)]),
                "PYTHONPATH": str(self._site_packages()),
            },
        )

    def _site_packages(self) -> Path:
        major, minor = self._shared.interpreter.version
        return self._shared.python.parents[1] / "lib" / f"python{major}.{minor}" / "site-packages"

    def _tritonserver(self) -> Path:
        return self._site_packages() / "pytriton" / "tritonserver"

    def _libraries(self) -> Path:
        return self._site_packages() / "nvidia_pytriton.libs"

    def _stub(self) -> Path:
        major, minor = self._shared.interpreter.version
        return self._tritonserver() / "python_backend_stubs" / f"{major}.{minor}" / _STUB


def _configuration(model: Model) -> str:
    tensor = f"data_type: TYPE_FP32, dims: [ {WIDTH} ]"
    return textwrap.dedent(f"""\
        name: "{model.name}"
        backend: "python"
        max_batch_size: {MAX_BATCH_SIZE}
        dynamic_batching {{ }}
        input [ {{ name: "a", {tensor} }}, {{ name: "b", {tensor} }} ]
        output [ {{ name: "total", {tensor} }} ]
        instance_group [ {{ count: 1, kind: KIND_CPU }} ]
        parameters {{ key: "delay_s", value: {{ string_value: "{delay_s(model)}" }} }}
        """)
