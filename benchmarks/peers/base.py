"""What a peer of the comparison has to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.processes import Launch
from benchmarks.harness.wires import KServeWire, Wire
from benchmarks.servers.models import Model

SERVERS = Path(__file__).resolve().parents[1] / "servers"


@dataclass(frozen=True)
class Ports:
    """Free ports on 127.0.0.1; a server without gRPC or metrics leaves them unused."""

    http: int
    grpc: int
    metrics: int


class Peer(ABC):
    """One way to serve models."""

    name: str
    """What `--peers` and the JSON file call it."""
    title: str
    is_triton = True
    """Whether it speaks all of KServe v2: binary tensors, gRPC, streams, statistics."""
    restless = False
    """Whether it uses the processor while nobody asks, so that it must not run beside those that are timed."""

    def wire(self, model: Model) -> Wire:
        """Return the form in which it takes requests for a model over HTTP."""
        return KServeWire()

    @abstractmethod
    def prepare(self) -> dict[str, str]:
        """Install what it needs, once before the rounds, and return the versions of what runs.

        Raises:
            PeerMissingError: it cannot run here.
        """

    @abstractmethod
    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Return how to start a server of some models.

        Args:
            models: What it serves.
            ports: Where.
            scratch: An empty folder for its files.
            copies: How many workers each model has; for peers that know workers.
        """
