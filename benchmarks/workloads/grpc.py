"""Where the time of a request over gRPC and HTTP is, thread by thread, and what large messages cost a Python client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.generators import Run
from benchmarks.harness.processes import thread_s
from benchmarks.servers.models import Model
from benchmarks.workloads.base import Bench, ServedWorkload
from benchmarks.workloads.large import Large
from benchmarks.workloads.serving import Served

Threads = dict[tuple[int, int], tuple[str, float]]
_WIDTHS = {"4MiB": 1 << 20, "64MiB": 1 << 24}
# How gRPC's library calls its first threads; a front end starts after the models.
_OF_GRPC = ("default-executo", "resolver-execut", "grpc_global_tim", "event_engine", "timer_manager", "pytriton-grpc")


class Grpc(ServedWorkload):
    """The tiny request at 8 and 32 connections, and our client with 4 and 64 MiB in and out, over both protocols."""

    name = "grpc"
    title = "gRPC against HTTP: tiny at 8 and 32 connections by threads; our client with 4 and 64 MiB each way"
    generators = ("wrk", "h2load")
    memory_mib = 4000
    peers = ("ours", "limit", "python-backend")
    models: Sequence[Model] = (
        Model("add", 4),
        *(Model(name, width, ("a",), max_batch_size=4) for name, width in _WIDTHS.items()),
    )

    def cases(self) -> Sequence[str]:
        """Return a case for each protocol and number of connections, and for each client and size."""
        ways = [f"{protocol}/{count}" for protocol in ("grpc", "http") for count in (8, 32)]
        return [*ways, *(f"client-{protocol}/{name}" for name in _WIDTHS for protocol in ("grpc", "http"))]

    def protocols(self, cases: Sequence[str]) -> Sequence[str]:
        """Return both."""
        return ["http", "grpc"]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load, and see which threads have worked."""
        if case.startswith("client-"):
            way = Large()
            way.models = self.models
            return way.measure(bench, server, case)
        protocol, _, connections = case.partition("/")
        counted = _Counted(server)
        numbers, noise = counted.load(bench.generators, self.models[0], protocol, int(connections), bench.seconds)
        return {**numbers, **counted.parts}, noise


class _Counted(Served):
    """A server whose threads are counted while it is under load."""

    def __init__(self, server: Served) -> None:
        super().__init__(**vars(server))
        self.parts: dict[str, float] = {}

    def count(self, load: Callable[[], Run], model: Model) -> tuple[dict[str, float], float]:
        """Count threads, too."""

        def run() -> Run:
            before = thread_s(self.process.pids())
            done = load()
            after = thread_s(self.process.pids())
            used = {key: (name, seconds - before.get(key, ("", 0.0))[1]) for key, (name, seconds) in after.items()}
            server = next(pid for (pid, _), (name, _) in used.items() if name == "tritonserver")
            self.parts = {f"{part} us": 1e6 * each / done.requests for part, each in _by_part(server, used).items()}
            return done

        return super().count(run, model)


def _by_part(server: int, used: Threads) -> dict[str, float]:
    """Return seconds by what threads are for.

    Those of tritonserver are told by their order: models come before front ends, whose first threads have names; and
    the thread of an instance, the busiest beside its batcher, comes before that.
    """
    own = {thread: each for (pid, thread), each in sorted(used.items()) if pid == server}
    first = min((thread for thread, (name, _) in own.items() if name in _OF_GRPC), default=max(own))
    core = {thread: seconds for thread, (_, seconds) in own.items() if thread < first}
    instance, batcher = sorted(sorted(core, key=lambda thread: core[thread])[-2:])
    return {
        "front end": sum(seconds for thread, (_, seconds) in own.items() if thread >= first),
        "instance": core[instance],
        "batcher": core[batcher],
        "worker": sum(seconds for (pid, _), (_, seconds) in used.items() if pid != server),
    }
