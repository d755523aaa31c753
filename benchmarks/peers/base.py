"""What a peer of the comparison has to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Launch
from benchmarks.workload import DELAY, DELAY_S, Model, Wire

SERVERS = Path(__file__).resolve().parents[1] / "servers"


@dataclass(frozen=True)
class Ports:
    """Free ports on 127.0.0.1; a server without gRPC or metrics leaves them unused."""

    http: int
    grpc: int
    metrics: int


class Peer(ABC):
    """One way to serve the models of `benchmarks.workload`."""

    name: str
    """What `--only` and the JSON file call it."""
    title: str
    wire: Wire

    @abstractmethod
    def prepare(self) -> dict[str, str]:
        """Install what it needs, once before the rounds, and return the versions of what runs.

        Raises:
            PeerMissingError: it cannot run here.
        """

    @abstractmethod
    def launch(self, model: Model, ports: Ports, scratch: Path) -> Launch:
        """Return how to start a server of one model, which may put files into `scratch`."""


def delay_s(model: Model) -> float:
    """Return how long a batch of `model` sleeps, in seconds."""
    return DELAY_S if model == DELAY else 0.0
