"""What grows with the number of workers, models and connections."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.harness.results import INSTANCE_MEMORY
from benchmarks.peers import Peer
from benchmarks.servers.models import Model, spin
from benchmarks.workloads.base import Bench, ServedWorkload, Setup
from benchmarks.workloads.payloads import TRITONS
from benchmarks.workloads.serving import Served

_CALL_S = 0.002
_CONNECTIONS = 32


class Instances(ServedWorkload):
    """A callable of pure Python that needs the processor, with several workers."""

    name = "instances"
    title = "2 ms of pure Python per request; 1, 2, 4 workers as threads and as processes, 8 connections"
    generators = ("wrk",)
    peers = ("ours", "ours-processes", "python-backend", "python-models", "nvidia-pytriton")

    def cases(self) -> Sequence[str]:
        """Return a case for each number of workers."""
        return ["workers/1", "workers/2", "workers/4"]

    def setups(self, cases: Sequence[str]) -> Sequence[Setup]:
        """Return servers with so many workers."""
        if not self.models:  # calibrated once, so that all rounds do the same work
            self.models = (Model("spin", 4, ("a",), max_batch_size=1, spin=calibrate()),)
        return [Setup([case], self.models, [int(case.rpartition("/")[2])]) for case in cases]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load, and see what its instances have come to need."""
        numbers, noise = server.load(bench.generators, self.models[0], "http", 8, bench.seconds)
        memory = server.process.instance_mib()
        return numbers if memory is None else {**numbers, INSTANCE_MEMORY: memory}, noise


class Workers(ServedWorkload):
    """A callable that waits as for an accelerator, with several workers in processes, all side by side."""

    name = "workers"
    title = "callables of 0, 1 and 5 ms per batch; 1, 2, 4 process workers against as many stubs; 8 to 128 connections"
    generators = ("wrk",)
    memory_mib = 5000
    peers = ("ours-processes", "python-backend")
    models = tuple(Model(f"{ms}ms", 4, batch_us=1000 * ms) for ms in (0, 1, 5))

    def cases(self) -> Sequence[str]:
        """Return a case for each callable and number of connections."""
        return [f"{model.name}/{count}" for model in self.models for count in (8, 32, 128)]

    def setups(self, cases: Sequence[str]) -> Sequence[Setup]:
        """Return a server for each number of workers; all of them take turns."""
        return [Setup(cases, self.models, (1, 2, 4))]

    def shown(self, peer: Peer, copies: int) -> str:
        """Return its name with the number of workers."""
        return f"{peer.name} x {copies}"

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put one model under load."""
        name, _, connections = case.partition("/")
        model = next(model for model in self.models if model.name == name)
        return server.load(bench.generators, model, "http", int(connections), bench.seconds)


class Growth(ServedWorkload):
    """The tiny request, at servers that have more and more to look after."""

    name = "growth"
    title = "tiny with 1 to 64 models, 1 to 64 workers of one model, 1 to 1,024 connections"
    generators = ("wrk",)
    memory_mib = 8000
    peers = TRITONS

    def cases(self) -> Sequence[str]:
        """Return a case for each number of models, workers and connections."""
        counts = {"models": (1, 8, 64), "workers": (1, 8, 64), "connections": (1, 32, 256, 1024)}
        return [f"{what}/{count}" for what, numbers in counts.items() for count in numbers]

    def setups(self, cases: Sequence[str]) -> Sequence[Setup]:
        """Return servers with so many models or workers, and one for all numbers of connections."""
        one = [Model("add0", 4)]
        found = [Setup([case for case in cases if case.startswith("connections/")], one)]
        for case in cases:
            what, _, count = case.partition("/")
            if what == "models":
                found.append(Setup([case], [Model(f"add{number}", 4) for number in range(int(count))]))
            if what == "workers":
                found.append(Setup([case], one, [int(count)]))
        return [setup for setup in found if setup.cases]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put one model under load."""
        what, _, count = case.partition("/")
        connections = int(count) if what == "connections" else _CONNECTIONS
        numbers, noise = server.load(bench.generators, server.models[0], "http", connections, bench.seconds)
        if what != "connections" and server.start_up is not None:
            numbers |= {
                "start s": server.start_up.command_to_answer_s,
                "processes": server.start_up.processes,
                "PSS MiB": server.process.pss_mib(),
            }
        return numbers, noise


def calibrate() -> int:
    """Find how many rounds of the loop take 2 ms here; the best of many, since others only make it slower."""
    rounds = 20_000

    def timed() -> float:
        began = time.perf_counter()
        spin(rounds)
        return time.perf_counter() - began

    return max(1, round(rounds * _CALL_S / min(timed() for _ in range(50))))
