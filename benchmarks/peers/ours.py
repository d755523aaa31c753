"""pytriton-server as it is installed in the environment of the runner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.environments import PeerMissingError, installed_versions
from benchmarks.peers.base import SERVERS, Peer, Ports, delay_s
from benchmarks.processes import Launch
from benchmarks.workload import MAX_BATCH_SIZE, WIDTH, KServeWire, Model

_IMPORT_TIMEOUT_S = 60


class Ours(Peer):
    """The system of this repository, with its defaults: the native proxy, the callable in the same process."""

    name = "ours"
    title = "pytriton-server"
    wire = KServeWire()

    def prepare(self) -> dict[str, str]:
        """Return the versions; raises `PeerMissingError` when this environment cannot import it."""
        command = [sys.executable, "-c", "import pytriton.triton"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
        if found.returncode != 0:
            reason = (found.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerMissingError(f"{sys.executable} cannot import pytriton.triton: {reason}")
        versions = installed_versions(sys.executable, ["pytriton-server", "numpy"])
        if "pytriton-server" not in versions:
            raise PeerMissingError(f"the pytriton that {sys.executable} imports is not pytriton-server")
        return versions

    def launch(self, model: Model, ports: Ports, scratch: Path) -> Launch:
        """Return how to start it."""
        return pytriton_launch(sys.executable, model, ports, scratch)


def pytriton_launch(python: str, model: Model, ports: Ports, scratch: Path) -> Launch:
    """Return how to start the script that serves a model through PyTriton's interface."""
    argv = [
        python,
        "-u",
        str(SERVERS / "pytriton_api.py"),
        model.name,
        str(WIDTH),
        str(MAX_BATCH_SIZE),
        str(delay_s(model)),
    ]
    return Launch(
        argv=[*argv, str(ports.http), str(ports.grpc), str(ports.metrics)],
        environment={"PYTRITON_HOME": str(scratch)},
    )
