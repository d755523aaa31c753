"""FastAPI under uvicorn with uvloop and httptools, raw bytes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.environments import base_interpreter, environment, installed_versions
from benchmarks.harness.processes import Launch
from benchmarks.harness.wires import RawWire, Wire
from benchmarks.peers.base import SERVERS, Peer, Ports
from benchmarks.servers.models import Model, dump

_REQUIREMENTS = ["fastapi", "uvicorn", "uvloop", "httptools", "numpy"]


class FastApiUvicorn(Peer):
    """A web framework without a protocol for tensors; one worker process, as the others have one worker."""

    name = "fastapi"
    title = "FastAPI + uvicorn, raw bytes"
    is_triton = False

    def prepare(self) -> dict[str, str]:
        """Install it."""
        self._python = environment("fastapi", base_interpreter(), _REQUIREMENTS)
        return installed_versions(self._python, _REQUIREMENTS)

    def wire(self, model: Model) -> Wire:
        """Return raw bytes."""
        return RawWire()

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Return how to start it."""
        argv = [str(self._python), "-u", str(SERVERS / "fastapi_app.py"), dump(models), str(ports.http)]
        return Launch(argv=argv, environment={})
