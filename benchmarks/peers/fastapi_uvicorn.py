"""FastAPI under uvicorn with uvloop and httptools, raw bytes in and out."""

from __future__ import annotations

from pathlib import Path

from benchmarks.environments import base_interpreter, environment, installed_versions
from benchmarks.peers.base import SERVERS, Peer, Ports, delay_s
from benchmarks.processes import Launch
from benchmarks.workload import MAX_BATCH_SIZE, WIDTH, Model, RawWire

_REQUIREMENTS = ["fastapi", "uvicorn", "uvloop", "httptools", "numpy"]


class FastApiUvicorn(Peer):
    """A web framework without a protocol for tensors; one worker process, as the others have one worker."""

    name = "fastapi"
    title = "FastAPI + uvicorn, raw bytes"
    wire = RawWire()

    def prepare(self) -> dict[str, str]:
        """Install it."""
        self._python = environment("fastapi", base_interpreter(), _REQUIREMENTS)
        return installed_versions(self._python, _REQUIREMENTS)

    def launch(self, model: Model, ports: Ports, scratch: Path) -> Launch:
        """Return how to start it."""
        argv = [
            str(self._python),
            "-u",
            str(SERVERS / "fastapi_app.py"),
            str(WIDTH),
            str(MAX_BATCH_SIZE),
            str(delay_s(model)),
        ]
        return Launch(argv=[*argv, str(ports.http)], environment={})
