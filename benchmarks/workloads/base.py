"""What a workload is: cases that are measured in rounds."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.harness.generators import LoadGeneratorError
from benchmarks.harness.processes import ServerError
from benchmarks.harness.results import Cell, Failure, Results
from benchmarks.harness.wires import WrongAnswerError
from benchmarks.peers import Peer
from benchmarks.servers.models import Model
from benchmarks.workloads.serving import Served, start

FAILURES = (ServerError, WrongAnswerError, LoadGeneratorError, OSError)


@dataclass
class Bench:
    """One run: what was asked for, what there is, what was found."""

    peers: Sequence[Peer]
    """Those that can be measured here."""
    seconds: float
    patterns: Sequence[str]
    generators: dict[str, str]
    results: Results
    round: int = 0

    def cases(self, workload: Workload) -> list[str]:
        """Return those cases of a workload that were asked for and have their load generator."""
        wanted = [
            case
            for case in workload.cases()
            if not self.patterns or any(fnmatch.fnmatch(case, pattern) for pattern in self.patterns)
        ]
        if not workload.generators:
            return wanted
        return [case for case in wanted if ("h2load" if case.startswith("grpc/") else "wrk") in self.generators]

    def record(self, workload: str, case: str, peer: str, numbers: dict[str, float], other_cores: float = 0.0) -> None:
        """Keep the numbers of a cell."""
        self.results.cells.append(Cell(workload, case, peer, self.round, numbers, other_cores))
        name, value = next(iter(numbers.items()))
        say(f"    {case}, {peer}: {value:,.6g} {name}")

    @contextmanager
    def failing(self, peer: str, what: str) -> Iterator[None]:
        """Turn an error of a server into a line of the report."""
        try:
            yield
        except FAILURES as error:
            where = f"{what}, round {self.round}"
            self.results.failures.append(Failure(peer, where, f"{type(error).__name__}: {error}"))
            say(f"    {peer} failed: {error}")


@dataclass(frozen=True)
class Setup:
    """What the servers of some cases have to be started with."""

    cases: Sequence[str]
    models: Sequence[Model]
    copies: Sequence[int] = (1,)
    """Each server is started with each of these numbers of workers."""


class Workload(ABC):
    """A kind of work."""

    name: str
    title: str
    """One line for the list of `--help`."""
    memory_mib = 1000
    """What client and servers of one round may take; the workload is left out where there is less."""
    generators: Sequence[str] = ()
    peers: Sequence[str] = ()
    """The servers that it needs."""

    @abstractmethod
    def cases(self) -> Sequence[str]:
        """Return the names of its cases."""

    @abstractmethod
    def run_round(self, bench: Bench, cases: Sequence[str]) -> None:
        """Measure cases once, with all servers in turn."""


class ServedWorkload(Workload):
    """A workload with servers that are up at the same time and put under load in turn.

    Each round starts every server afresh. Those of one round start together, and take turns case by case, so that a
    machine that is busy for a while is busy for all of them; who begins differs from round to round. A server that is
    restless when idle runs alone, after the others.
    """

    models: Sequence[Model] = ()

    def setups(self, cases: Sequence[str]) -> Sequence[Setup]:
        """Return which servers are needed for some cases; those of one setup run at the same time."""
        return [Setup(cases, self.models)]

    @abstractmethod
    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Return the numbers of a cell and the noise; `None` where the server has no such case."""

    def protocols(self, cases: Sequence[str]) -> Sequence[str]:
        """Return the protocols of some cases, over which answers are checked before and after."""
        return sorted({case.partition("/")[0] for case in cases} & {"http", "grpc"}) or ["http"]

    def run_round(self, bench: Bench, cases: Sequence[str]) -> None:
        """Measure the calm servers side by side, then each of the restless ones."""
        peers = [peer for peer in bench.peers if peer.name in self.peers]
        groups = [[peer for peer in peers if not peer.restless], *([peer] for peer in peers if peer.restless)]
        for setup in self.setups(cases):
            for group in groups:
                self._run_group(bench, setup, group)

    def shown(self, peer: Peer, copies: int) -> str:
        """Return what a server with so many workers is called in the tables."""
        return peer.name

    def _run_group(self, bench: Bench, setup: Setup, peers: Sequence[Peer]) -> None:
        with ExitStack() as stack:
            servers = []
            for peer, copies in itertools.product(peers, setup.copies):
                protocols = [name for name in self.protocols(setup.cases) if peer.is_triton or name == "http"]
                with bench.failing(peer.name, self.name):
                    servers.append(stack.enter_context(start(peer, setup.models, protocols, copies)))
            ready = []
            for server in servers:
                with bench.failing(server.peer.name, self.name):
                    server.wait()
                    server.check()
                    ready.append(server)
            for number, case in enumerate(setup.cases):
                shift = (bench.round + number) % max(1, len(ready))
                for server in [*ready[shift:], *ready[:shift]]:
                    with bench.failing(server.peer.name, f"{self.name}, {case}"):
                        found = self.measure(bench, server, case)
                        if found is not None:
                            bench.record(self.name, case, self.shown(server.peer, server.copies), *found)
            for server in ready:
                with bench.failing(server.peer.name, f"{self.name}, the check afterwards"):
                    server.check()


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)
