"""pytriton-server as it is installed in the environment of the runner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness.environments import PeerMissingError, installed_versions
from benchmarks.harness.processes import Launch
from benchmarks.peers.base import SERVERS, Peer, Ports
from benchmarks.servers.models import Model, dump

_IMPORT_TIMEOUT_S = 60


class Ours(Peer):
    """The system of this repository, with its defaults: the native proxy, the callable in the same process."""

    name = "ours"
    title = "pytriton-server"
    workers = "threads"
    environment: Mapping[str, str] = MappingProxyType({})

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

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Return how to start it."""
        launch = pytriton_launch(sys.executable, models, ports, scratch, copies, self.workers)
        return replace(launch, environment={**launch.environment, **self.environment})


class OursAsleep(Ours):
    """The same with workers that sleep between two batches, also where one caller asks without a pause."""

    name = "ours-asleep"
    title = "pytriton-server, PYTRITON_BUSY_POLL_US=0"
    environment: Mapping[str, str] = MappingProxyType({"PYTRITON_BUSY_POLL_US": "0"})


class OursInProcesses(Ours):
    """The same with callables in processes of their own."""

    name = "ours-processes"
    title = "pytriton-server, ProcessWorker"
    workers = "processes"


def pytriton_launch(
    python: str, models: Sequence[Model], ports: Ports, scratch: Path, copies: int, workers: str = "threads"
) -> Launch:
    """Return how to start the script that serves models through PyTriton's interface.

    Args:
        python: The interpreter of the environment that it runs in.
        models: What it serves.
        ports: Where.
        scratch: For its files.
        copies: How many workers each model has.
        workers: `threads` for a list of callables, `processes` for `ProcessWorker`, which ours alone has.
    """
    argv = [python, "-u", str(SERVERS / "pytriton_api.py"), dump(models), workers, str(copies)]
    return Launch(
        argv=[*argv, str(ports.http), str(ports.grpc), str(ports.metrics)],
        environment={"PYTRITON_HOME": str(scratch)},
    )
