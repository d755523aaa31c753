"""A running server of some models, and how it is checked, put under load and counted."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.generators import Run, load_grpc, load_http
from benchmarks.harness.processes import Server, StartUp, free_ports, machine_busy_s, scratch_folder, serve
from benchmarks.harness.results import RATE
from benchmarks.harness.wires import (
    GRPC_INFER,
    GRPC_STREAM,
    GrpcCaller,
    HttpCaller,
    HttpRequest,
    WrongAnswerError,
    answer_to,
    check_answers,
    decode_grpc_stream,
    encode_grpc,
    example,
)
from benchmarks.peers.base import Peer, Ports
from benchmarks.servers.models import Model

_CHECK_THREADS = 16
_CHECK_REQUESTS = 10
_WARM_UP_S = 1
_WARM_UP_REQUESTS = 100
_ANSWER_TIMEOUT_S = 120
_LARGE_BYTES = 1 << 12
"""From here on a model is checked with one request only."""


@dataclass
class Served:
    """A server that runs."""

    peer: Peer
    models: Sequence[Model]
    ports: Ports
    scratch: Path
    process: Server
    protocols: Sequence[str] = ("http",)
    copies: int = 1
    start_up: StartUp | None = None

    def wait(self) -> None:
        """Wait until it answers rightly."""
        self.start_up = self.process.wait_for_answer(self._ask_each)

    def check(self, threads: int = _CHECK_THREADS, requests: int = _CHECK_REQUESTS) -> None:
        """Compare the answers of every model with what they have to be, and see that the process lives."""
        try:
            for model in self.models:
                if model.responses:
                    self.measure_stream(model)
                elif model.width * model.item_bytes > _LARGE_BYTES:
                    check_answers(partial(self.caller, model, self.protocols[0]), model)
                else:
                    for protocol in self.protocols:
                        check_answers(partial(self.caller, model, protocol), model, threads=threads, requests=requests)
        except OSError:
            self.process.check_alive()  # its end, with its last words, says more
            raise
        self.process.check_alive()

    def measure_stream(self, model: Model) -> int:
        """Return how many bytes of gRPC frames a stream of a model has, after its responses were checked."""
        inputs = example(model)
        with closing(GrpcCaller(self.ports.grpc, _ANSWER_TIMEOUT_S)) as caller:
            messages = caller.stream(encode_grpc(model, inputs))
        found, expected = [decode_grpc_stream(model, message) for message in messages], answer_to(inputs)
        if len(found) != model.responses or not all(np.array_equal(each, expected) for each in found):
            raise WrongAnswerError(f"expected {model.responses} times {expected}, received {len(found)}: {found[:2]}")
        return sum(5 + len(message) for message in messages)

    def caller(self, model: Model, protocol: str, timeout_s: float) -> HttpCaller | GrpcCaller:
        """Return what asks it."""
        if protocol == "grpc":
            return GrpcCaller(self.ports.grpc, timeout_s)
        return HttpCaller(self.ports.http, self.peer.wire(model), timeout_s)

    def load(
        self,
        generators: dict[str, str],
        model: Model,
        protocol: str,
        connections: int,
        seconds: float,
        requests: Sequence[HttpRequest] = (),
    ) -> tuple[dict[str, float], float]:
        """Put it under load with one request over and over, or with these in turn, after a warm-up.

        Returns:
            The numbers of a cell, and how many cores others kept busy.
        """
        if protocol == "grpc":
            load = self._grpc_load(generators["h2load"], model, connections)
            rate = load(_WARM_UP_REQUESTS + 4 * connections).requests_per_s
            rate = load(max(connections, round(rate * _WARM_UP_S))).requests_per_s  # the first ones are slow
            return self.count(lambda: load(max(connections, round(rate * seconds))), model)
        requests = requests or [self.peer.wire(model).encode(model, example(model))]

        def load_for(duration_s: float) -> Run:
            return load_http(
                generators["wrk"],
                self.ports.http,
                requests,
                connections=connections,
                seconds=duration_s,
                scratch=self.scratch,
            )

        load_for(_WARM_UP_S)
        return self.count(lambda: load_for(seconds), model)

    def count(self, load: Callable[[], Run], model: Model) -> tuple[dict[str, float], float]:
        """Return the numbers of what happens in `load`, and how many cores others kept busy meanwhile."""
        batches, rows = self._batches(model)
        busy, cpu, worker = machine_busy_s(), self.process.cpu_s(), self.process.worker_cpu_s()
        run = load()
        cpu, worker = self.process.cpu_s() - cpu, self.process.worker_cpu_s() - worker
        busy = machine_busy_s() - busy
        numbers = {
            RATE: run.requests_per_s,
            "p50 ms": run.p50_ms,
            "p99 ms": run.p99_ms,
            "server us/req": cpu / run.requests * 1e6,
        }
        batches, rows = (after - before for after, before in zip(self._batches(model), (batches, rows), strict=True))
        if batches:
            numbers["rows/batch"] = rows / batches
            if worker:
                numbers["worker us/batch"] = worker / batches * 1e6
        return numbers, max(0.0, (busy - cpu - run.cpu_s) / run.wall_s)

    def _grpc_load(self, h2load: str, model: Model, connections: int) -> Callable[[int], Run]:
        message = encode_grpc(model, example(model))
        if model.responses:
            size, path = self.measure_stream(model), GRPC_STREAM
        else:
            with closing(GrpcCaller(self.ports.grpc, _ANSWER_TIMEOUT_S)) as caller:
                size, path = 5 + len(caller.send(message)), GRPC_INFER

        def load(requests: int) -> Run:
            return load_grpc(
                h2load,
                self.ports.grpc,
                message,
                size,
                connections=connections,
                requests=requests,
                scratch=self.scratch,
                path=path,
            )

        return load

    def _batches(self, model: Model) -> tuple[float, float]:
        """Return how many batches and rows tritonserver has counted; zeros for other servers."""
        if not self.peer.is_triton:
            return 0.0, 0.0
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.ports.metrics}/metrics", timeout=_ANSWER_TIMEOUT_S
        ) as response:
            text = response.read().decode()

        def value(name: str) -> float:
            found = re.search(rf'^{name}{{model="{model.name}",[^}}]*}} (\S+)$', text, re.M)
            return float(found.group(1)) if found else 0.0

        return value("nv_inference_exec_count"), value("nv_inference_count")

    def _ask_each(self) -> None:
        """Make a wrong answer of a server that still loads its model look like no answer; a later check is strict."""
        try:
            self.check(threads=1, requests=1)
        except WrongAnswerError as error:
            raise ConnectionError(str(error)) from None


@contextmanager
def start(
    peer: Peer, models: Sequence[Model], protocols: Sequence[str] = ("http",), copies: int = 1
) -> Iterator[Served]:
    """Start a server for the length of a `with` block, without waiting for it.

    Args:
        peer: Whose.
        models: What it serves.
        protocols: Over which it is going to be asked.
        copies: How many workers each model has.
    """
    ports = Ports(*free_ports(3))
    with scratch_folder() as scratch, serve(peer.launch(models, ports, scratch, copies), scratch) as process:
        yield Served(peer, models, ports, scratch, process, protocols, copies)
