"""Small requests, where the way to the callable and back is all that counts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.wires import example
from benchmarks.servers.models import Model
from benchmarks.workloads.base import Bench, ServedWorkload
from benchmarks.workloads.payloads import TRITONS, WEB
from benchmarks.workloads.serving import Served

CONNECTIONS = (1, 8, 32, 128, 512)
_VARIED_REQUESTS = 211


class Tiny(ServedWorkload):
    """Two rows of four floats in, their sum back."""

    name = "tiny"
    title = "float32[1,4] x 2 -> sum, over HTTP and gRPC, 1 to 512 connections"
    generators = ("wrk", "h2load")
    models = (Model("add", 4),)
    peers = (*TRITONS, "ours-asleep", *WEB)

    def cases(self) -> Sequence[str]:
        """Return a case for each protocol and number of connections."""
        return [f"{protocol}/{count}" for protocol in ("http", "grpc") for count in CONNECTIONS]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load."""
        protocol, _, connections = case.partition("/")
        if protocol not in server.protocols:
            return None
        return server.load(bench.generators, self.models[0], protocol, int(connections), bench.seconds)


class Varied(ServedWorkload):
    """As callers are: each request has other rows, and an id of its own."""

    name = "varied"
    title = "float32[1 to 4, 4] x 2 -> sum, ids of 4 to 40 characters, over HTTP, 1 to 32 connections"
    generators = ("wrk",)
    models = (Model("add", 4, max_batch_size=64),)
    peers = TRITONS

    def cases(self) -> Sequence[str]:
        """Return a case for each number of connections."""
        return [f"http/{count}" for count in CONNECTIONS[:3]]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load."""
        [model] = self.models
        rng = random.Random(1)
        requests = []
        for number in range(_VARIED_REQUESTS):
            rows = [example(model, number)] * rng.randint(1, 4)
            inputs = [np.stack(column) for column in zip(*rows, strict=True)]
            request = server.peer.wire(model).encode_many(model, inputs, "i" * rng.randint(4, 40))
            if request is None:
                return None
            requests.append(request)
        return server.load(bench.generators, model, "http", int(case.partition("/")[2]), bench.seconds, requests)


class Batching(ServedWorkload):
    """Callables that take time, so that requests wait for each other: how well are batches formed?"""

    name = "batching"
    title = "5 ms per batch whatever its size, and 1 ms + 0.25 ms per row; at most 16 rows, 32 connections"
    generators = ("wrk",)
    models = (Model("delay", 4, batch_us=5000), Model("growing", 4, batch_us=1000, row_us=250))
    peers = (*TRITONS, *WEB)

    def cases(self) -> Sequence[str]:
        """Return a case for each model."""
        return [model.name for model in self.models]

    def measure(self, bench: Bench, server: Served, case: str) -> tuple[dict[str, float], float] | None:
        """Put the server under load."""
        model = next(model for model in self.models if model.name == case)
        return server.load(bench.generators, model, "http", 32, bench.seconds)
