"""Frameworks in Python with a web server of their own, each as its documentation recommends for speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.environments import PeerMissingError, base_interpreter, environment, installed_versions
from benchmarks.harness.processes import Launch, available_mib
from benchmarks.harness.wires import JsonWire, KServeJsonWire, RawWire, Wire
from benchmarks.peers.base import SERVERS, Peer, Ports
from benchmarks.servers.models import Model, dump


class WebPeer(Peer):
    """One worker behind one web server, in an environment of its own."""

    is_triton = False

    def __init__(
        self,
        name: str,
        title: str,
        requirements: Sequence[str],
        wire: Callable[[Model], Wire] = lambda model: RawWire(),
        *,
        restless: bool = False,
        memory_mib: int = 500,
    ) -> None:
        """Describe it.

        Args:
            name: What `--peers` calls it; the file in `servers` is called after it.
            title: Its name in tables.
            requirements: What is installed for it.
            wire: The form of requests for a model.
            restless: As `Peer.restless`.
            memory_mib: What it needs.
        """
        self.name, self.title, self.restless = name, title, restless
        self._requirements, self._wire, self._memory_mib = requirements, wire, memory_mib

    def wire(self, model: Model) -> Wire:
        """Return the form in which it takes requests for a model."""
        return self._wire(model)

    def prepare(self) -> dict[str, str]:
        """Install it; raises `PeerMissingError` where that fails, or where it would not have the memory to run."""
        if (free := available_mib()) < self._memory_mib:
            raise PeerMissingError(f"it needs {self._memory_mib} MiB of memory, {free:.0f} are available")
        self._python = environment(self.name, base_interpreter(), self._requirements)
        names = [requirement.partition("[")[0].partition("==")[0] for requirement in self._requirements]
        return installed_versions(self._python, names)

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Return how to start it."""
        folder = scratch / "files"
        folder.mkdir()
        script = str(SERVERS / f"{self.name}_app.py")
        words = [dump(models), str(ports.http), str(folder), str(ports.grpc), str(ports.metrics)]
        return Launch(argv=[str(self._python), "-u", script, *words], environment={})


def web_peers() -> list[Peer]:
    """Return all of them."""
    return [
        WebPeer("fastapi", "FastAPI + uvicorn, raw bytes", ["fastapi", "uvicorn", "uvloop", "httptools", "numpy"]),
        WebPeer(
            "litserve",
            "LitServe, fast queue, raw bytes",
            ["litserve", "numpy", "uvloop", "httptools", "pyzmq"],
            restless=True,
        ),
        WebPeer(
            "mlserver",
            "MLServer, JSON",
            ["mlserver", "uvloop==0.21.0", "numpy"],  # with a later uvloop its workers do not start
            lambda model: KServeJsonWire(),
            restless=True,
        ),
        WebPeer(
            "bentoml",
            "BentoML, raw bytes (JSON where it batches)",
            ["bentoml", "numpy"],
            lambda model: JsonWire() if model.batch_us or model.row_us else RawWire(),
            restless=True,
            memory_mib=1000,
        ),
        WebPeer("ray", "Ray Serve, raw bytes", ["ray[serve]", "numpy"], restless=True, memory_mib=3000),
    ]
