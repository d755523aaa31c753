"""Workloads whose callers are programs of their own: calls in process, clients, starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.harness.processes import ServerError, machine_busy_s, scratch_folder
from benchmarks.peers.base import SERVERS
from benchmarks.peers.tritonserver import python_model_repository
from benchmarks.servers.client_calls import KINDS
from benchmarks.servers.models import Model
from benchmarks.workloads.base import Bench, Workload
from benchmarks.workloads.payloads import TRITONS, WEB
from benchmarks.workloads.serving import start

_PROGRAM_TIMEOUT_S = 600
_WIDTHS = {"tiny": 4, "1MiB": 1 << 18, "64MiB": 1 << 24}


class InProcess(Workload):
    """Calls of a model in the process of the caller: a bound callable, and a `model.py` behind Triton's stub."""

    name = "inprocess"
    title = "calls in process: a bound callable against a model.py; one caller and eight; 4, 1 MiB, 64 MiB of float32"
    memory_mib = 6000
    peers = ("ours",)

    def cases(self) -> Sequence[str]:
        """Return a case for each size and number of callers."""
        return [f"{size}/{callers}" for size in _WIDTHS for callers in (1, 8)]

    def run_round(self, bench: Bench, cases: Sequence[str]) -> None:
        """Let both ways take turns, each in a fresh process."""
        for case in cases:
            size, _, callers = case.partition("/")
            for kind, peer in (("bound", "ours"), ("stub", "python-backend"))[:: 1 if bench.round % 2 else -1]:
                width = _WIDTHS[size]
                with bench.failing(peer, f"{self.name}, {case}"), scratch_folder() as scratch:
                    python_model_repository([Model("same", width, ("a",))], scratch)
                    words = [kind, str(scratch / "models"), str(bench.seconds), str(width), callers]
                    bench.record(self.name, case, peer, *_run("inprocess_calls.py", words))


class Client(Workload):
    """What a call costs the caller; the server is the limit, which answers at once."""

    name = "client"
    peers = ("limit",)
    title = "processor time per call of each client class, of tritonclient, urllib3 and aiohttp"

    def cases(self) -> Sequence[str]:
        """Return a case for each client."""
        return list(KINDS)

    def run_round(self, bench: Bench, cases: Sequence[str]) -> None:
        """Let the clients take turns at one server."""
        server_of = next((peer for peer in bench.peers if peer.name == "limit"), None)
        if server_of is None:
            bench.results.missing[self.name] = "its server is the limit"
            return
        models = [Model("add", 4), Model("add_once", 4, responses=1)]
        with bench.failing("limit", self.name), start(server_of, models) as server:
            server.wait()
            for case in cases[:: 1 if bench.round % 2 else -1]:
                protocol, _, client = case.partition("/")
                words = [case, str(server.ports.http), str(server.ports.grpc), str(bench.seconds)]
                with bench.failing(client, f"{self.name}, {case}"):
                    found = _run("client_calls.py", words, server.process.cpu_s)
                    bench.record(self.name, protocol, client, *found)


class Start(Workload):
    """From nothing to the first answer, one server after the other."""

    name = "start"
    title = "from the start of the process to the first answer; processes, memory"
    peers = (*TRITONS, *WEB)

    def cases(self) -> Sequence[str]:
        """Return the one case."""
        return ["one model"]

    def run_round(self, bench: Bench, cases: Sequence[str]) -> None:
        """Start each server alone."""
        for peer in (peer for peer in bench.peers if peer.name in self.peers and cases):
            with bench.failing(peer.name, self.name), start(peer, [Model("add", 4)]) as server:
                busy = machine_busy_s()
                server.wait()
                if server.start_up is None:
                    raise ServerError("it has no time of its start")
                wall_s, cpu_s = server.start_up.command_to_answer_s, server.process.cpu_s()
                numbers = {"start s": wall_s, "CPU s": cpu_s, "processes": server.start_up.processes}
                if server.start_up.run_to_answer_s is not None:
                    numbers["run() s"] = server.start_up.run_to_answer_s
                numbers["PSS MiB"] = server.process.pss_mib()
                noise = max(0.0, (machine_busy_s() - busy - cpu_s) / wall_s)
                bench.record(self.name, "one model", peer.name, numbers, noise)


def _run(
    program: str, words: Sequence[str], server_cpu_s: Callable[[], float] = lambda: 0.0
) -> tuple[dict[str, float], float]:
    """Return what a program of `servers` printed, and how many cores others than it and its server kept busy."""
    command = [sys.executable, str(SERVERS / program), *words]

    def ours_s() -> float:
        used = os.times()
        return used.children_user + used.children_system + server_cpu_s()

    began, busy, ours = time.monotonic(), machine_busy_s(), ours_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False)
    noise = machine_busy_s() - busy - (ours_s() - ours)
    if done.returncode != 0:
        raise ServerError(f"{program} {' '.join(words)} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found, max(0.0, noise / (time.monotonic() - began))
