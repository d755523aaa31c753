"""Payloads where bytes or elements are what counts: strings, streams."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import RATE
from benchmarks.servers.models import Model
from benchmarks.workloads.base import Bench, ServedWorkload
from benchmarks.workloads.serving import Served

TRITONS = ("ours", "limit", "python-backend", "python-models", "nvidia-pytriton")
WEB = ("fastapi", "litserve", "mlserver", "bentoml", "ray")
_STRING_CONNECTIONS = 4
_TOKENS = 100


class Strings(ServedWorkload):
    """Strings in, the same strings back."""

    name = "strings"
    title = f"1,000 strings of 64 bytes and 10,000 of 8, each way, {_STRING_CONNECTIONS} connections"
    generators = ("wrk", "h2load")
    peers = TRITONS
    models = tuple(
        Model(f"{count}x{size}", count, ("a",), "BYTES", item_bytes=size) for count, size in ((1000, 64), (10_000, 8))
    )

    def cases(self) -> Sequence[str]:
        """Return a case for each protocol and model."""
        return [f"{protocol}/{model.name}" for protocol in ("http", "grpc") for model in self.models]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load."""
        protocol, _, name = case.partition("/")
        model = next(model for model in self.models if model.name == name)
        return server.load(bench.generators, model, protocol, _STRING_CONNECTIONS, bench.seconds)


class Stream(ServedWorkload):
    """A coroutine generator that answers each request many times; over gRPC, since wrk cannot count streams."""

    name = "stream"
    title = f"streams of {_TOKENS} tokens from an async generator, 1 and 64 at a time"
    generators = ("h2load",)
    peers = TRITONS
    models = (Model("tokens", 4, ("a",), responses=_TOKENS),)

    def cases(self) -> Sequence[str]:
        """Return a case for each number of streams."""
        return ["grpc/1", "grpc/64"]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load; a request of the load generator is a stream."""
        protocol, _, count = case.partition("/")
        numbers, noise = server.load(bench.generators, self.models[0], protocol, int(count), bench.seconds)
        return {
            "tokens/s": numbers[RATE] * _TOKENS,
            "gap p50 us": numbers["p50 ms"] * 1e3 / _TOKENS,
            "gap p99 us": numbers["p99 ms"] * 1e3 / _TOKENS,
            "server us/token": numbers["server us/req"] / _TOKENS,
        }, noise
