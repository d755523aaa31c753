"""Peers that serve a model repository: the limit, Triton's Python backend, and our workers in its place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.environments import PeerMissingError, base_interpreter, cache_folder, environment
from benchmarks.harness.processes import Launch
from benchmarks.peers.base import SERVERS, Peer, Ports
from benchmarks.peers.nvidia_pytriton import NvidiaPyTritonEnvironment
from benchmarks.peers.ours import Ours
from benchmarks.servers.models import ACCESS_TOKEN, Model, dump

_STUB = "triton_python_backend_stub"
_LIMIT_SOURCE = SERVERS / "limit_backend.c"
_LIMIT_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-z,now")
_COMPILERS = ("cc", "gcc", "clang")
_ZIG_REQUIREMENT = "ziglang>=0.13,<0.16"
_COMPILE_TIMEOUT_S = 600


class Limit(Peer):
    """What tritonserver itself can do: a backend in C that computes the same, in the server that ours starts, too."""

    name = "limit"
    title = "the limit: a backend in C"

    def prepare(self) -> dict[str, str]:
        """Compile the backend; raises `PeerMissingError` without a compiler or a server."""
        try:
            from pytriton.server.tritonserver.binary import TritonServerNotFoundError, find_tritonserver
        except ImportError as error:
            raise PeerMissingError(f"its tritonserver is the one of pytriton-server: {error}") from None
        try:
            self._executable = find_tritonserver().executable
        except TritonServerNotFoundError as error:
            raise PeerMissingError(str(error)) from None
        self._library, compiler = _compile_limit()
        return {"compiler": compiler}

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Write the model repository and return how to start the server on it."""
        backend = scratch / "backends" / "limit"
        backend.mkdir(parents=True)
        shutil.copy(self._library, backend / "libtriton_limit.so")
        _write_models(models, "limit", copies, scratch, {})
        # As ours starts it where there is no GPU.
        options = ["--metrics-interval-ms=60000", "--pinned-memory-pool-byte-size=0"]
        return Launch(argv=[*_command(self._executable, ports, scratch), *options], environment={})


class TritonPythonBackend(Peer):
    """What a Triton user writes who has no PyTriton; server, stub and numpy come from PyTriton's environment."""

    name = "python-backend"
    title = "model.py in Triton's Python backend"

    def __init__(self, shared: NvidiaPyTritonEnvironment) -> None:
        """Take the environment that holds the server."""
        self._shared = shared

    def prepare(self) -> dict[str, str]:
        """Install the server; raises `PeerMissingError` when its wheel has no stub for the interpreter."""
        versions = self._shared.prepare()
        if not self._stub().is_file():
            raise PeerMissingError(f"expected the Python backend's stub at {self._stub()}, there is none")
        return versions

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Write the model repository and return how to start the server on it."""
        python_model_repository(models, scratch, copies)
        return self.launch_repository(ports, scratch)

    def launch_repository(self, ports: Ports, scratch: Path) -> Launch:
        """Return how to start the server on the folder `models` of `scratch`."""
        # The stub has to lie beside the backend's library; the wheel keeps one per Python version elsewhere.
        backend = scratch / "backends" / "python"
        shutil.copytree(self._tritonserver() / "backends" / "python", backend)
        shutil.copy(self._stub(), backend / _STUB)
        bin_folder = self._shared.python.parent
        libraries = os.pathsep.join([str(self._shared.interpreter.libpython_folder), str(self._libraries())])
        command = _command(self._tritonserver() / "bin" / "tritonserver", ports, scratch)
        return Launch(
            argv=[*command, f"--backend-config=python,shm-region-prefix-name={scratch.name}"],
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


class OursForPythonModels(Ours):
    """The repository that Triton's Python backend gets, unchanged, with its models on our workers."""

    name = "python-models"
    title = "the same model.py on our workers"

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Write the model repository and return how to serve it."""
        python_model_repository(models, scratch, copies)
        command = [sys.executable, "-m", "pytriton", "serve-repository", str(scratch / "models")]
        options = {
            "address": "127.0.0.1",
            "http-port": ports.http,
            "grpc-port": ports.grpc,
            "metrics-port": ports.metrics,
        }
        return Launch(
            argv=[*command, *(f"--{name}={value}" for name, value in options.items())],
            environment={"PYTRITON_HOME": str(scratch / "home"), "PYTRITON_ACCESS_TOKEN": ACCESS_TOKEN},
        )


def python_model_repository(models: Sequence[Model], scratch: Path, copies: int = 1) -> None:
    """Write models for Triton's Python backend into the folder `models` of `scratch`."""
    files = {"model.py": SERVERS / "triton_model.py", "models.py": SERVERS / "models.py"}
    _write_models(models, "python", copies, scratch, files)


def _command(executable: Path, ports: Ports, scratch: Path) -> list[str]:
    return [
        str(executable),
        f"--model-repository={scratch / 'models'}",
        f"--backend-directory={scratch / 'backends'}",
        "--http-address=127.0.0.1",
        f"--http-port={ports.http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={ports.grpc}",
        "--metrics-address=127.0.0.1",
        f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false",
    ]


def _write_models(models: Sequence[Model], backend: str, copies: int, scratch: Path, files: Mapping[str, Path]) -> None:
    for model in models:
        folder = scratch / "models" / model.name
        (folder / "1").mkdir(parents=True)
        for name, source in files.items():
            shutil.copy(source, folder / "1" / name)
        (folder / "config.pbtxt").write_text(_configuration(model, backend, copies))


def _configuration(model: Model, backend: str, copies: int) -> str:
    kind = "TYPE_STRING" if model.datatype == "BYTES" else f"TYPE_{model.datatype}"
    tensor = f"data_type: {kind}, dims: [ {model.width} ]"
    inputs = ", ".join(f'{{ name: "{name}", {tensor} }}' for name in model.inputs)
    policy = "model_transaction_policy { decoupled: true }\n" if model.responses else ""
    return policy + textwrap.dedent(f"""\
        name: "{model.name}"
        backend: "{backend}"
        max_batch_size: {model.max_batch_size}
        dynamic_batching {{ }}
        input [ {inputs} ]
        output [ {{ name: "y", {tensor} }} ]
        instance_group [ {{ count: {copies}, kind: KIND_CPU }} ]
        parameters {{ key: "bench", value: {{ string_value: {json.dumps(dump([model]))} }} }}
        """)


def _compile_limit() -> tuple[Path, str]:
    """Return the library of the limit, compiled now unless an earlier run did, and the compiler."""
    given = os.environ.get("CC")
    found = given or next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    # Without a compiler, the one that also compiles the native parts of our packages on such a machine.
    zig = [] if found else [str(environment("zig", base_interpreter(), [_ZIG_REQUIREMENT])), "-m", "ziglang", "cc"]
    command = found.split() if found else zig
    key = hashlib.sha256("\n".join([*command, *_LIMIT_FLAGS]).encode() + _LIMIT_SOURCE.read_bytes()).hexdigest()[:12]
    library = cache_folder() / f"limit-{key}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        try:
            done = subprocess.run(
                [*command, *_LIMIT_FLAGS, str(_LIMIT_SOURCE), "-o", str(fresh)],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerMissingError(f"the backend in C cannot be compiled: {error}; set CC to a C compiler") from None
        if done.returncode != 0:
            raise PeerMissingError(f"`{' '.join(command)}` cannot compile {_LIMIT_SOURCE}: {done.stderr.strip()}")
        fresh.replace(library)  # in one step: another run may do the same
    return library, " ".join(command)
