"""Compare `pytriton.ray` with a plain deployment of Ray Serve: `python benchmarks/ray_serve.py`.

One cluster of one node serves the same models in both ways, one replica each, behind the same proxy; both are asked in
turns by wrk, over HTTP with JSON and with bytes (KServe v2's binary tensors, and nothing but the numbers). It needs
pytriton-server[ray] and wrk. benchmarks/README.md says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environments import installed_versions
from benchmarks.harness.generators import find_generator, load_http, version
from benchmarks.harness.processes import (
    Launch,
    Server,
    adopt_orphans,
    command_of,
    cpu_s,
    free_ports,
    machine_busy_s,
    scratch_folder,
    serve,
)
from benchmarks.harness.report import render
from benchmarks.harness.results import RATE, Cell, Results
from benchmarks.harness.wires import (
    HttpCaller,
    JsonWire,
    KServeJsonWire,
    KServeWire,
    RawWire,
    WrongAnswerError,
    check_answers,
    example,
)
from benchmarks.peers.base import SERVERS
from benchmarks.servers.models import Model, dump

# A row of the second is an image of 28 x 28; a batch of the third takes 5 ms.
MODELS = (Model("add", 4), Model("image", 784), Model("wait", 4, batch_us=5000))
WIRES = {"json": {"ours": KServeJsonWire(), "plain": JsonWire()}, "bytes": {"ours": KServeWire(), "plain": RawWire()}}
TITLES = {"ours": "pytriton.ray", "plain": "Ray Serve, @serve.batch"}
# How long Ray waits for its own processes, which is 30 s and a minute otherwise.
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Parts of Ray's command lines, and what the time of such a process is called.
ROLES = {"ProxyActor": "proxy us/req", "ServeReplica": "replica us/req", "tritonserver": "tritonserver us/req"}
_WARM_UP_S = 1
_CHECK_THREADS = 16
_CHECK_REQUESTS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says, and print the tables."""
    options = _parse(arguments)
    adopt_orphans()
    wrk = find_generator("wrk")
    results = Results(options={**vars(options), "models": [model.name for model in options.models]}, titles=TITLES)
    results.versions["environment"] = installed_versions(sys.executable, ["pytriton-server", "ray", "numpy"])
    results.versions["wrk"] = {"version": version(wrk)}
    with scratch_folder() as scratch:
        (port,) = free_ports(1)
        words = [str(SERVERS / "ray_serve_app.py"), dump(options.models), str(port), str(scratch / "ray")]
        settings = {
            **PATIENCE,
            # Else its files lie in one place for everybody. A socket's path may have 97 characters, 57 of them Ray's.
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "ha" / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "ha" / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "ha" / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch / "ha"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "ha" / "server-state"),
            **dict(setting.split("=", 1) for setting in options.ray),
        }
        with serve(Launch([sys.executable, "-u", *words], settings), scratch) as server:
            server.wait_for_answer(partial(_has_answered, port, options.models))
            _check(port, options.models, _CHECK_THREADS, _CHECK_REQUESTS)
            for number in range(1, options.rounds + 1):
                _run_round(options, results, number, wrk, port, server, scratch)
            _check(port, options.models, _CHECK_THREADS, _CHECK_REQUESTS)
    results.load_after = os.getloadavg()
    print(render(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1, default=str) + "\n")
    return 0


def _run_round(
    options: argparse.Namespace, results: Results, number: int, wrk: str, port: int, server: Server, scratch: Path
) -> None:
    for model, kind, callers in product(options.models, options.wires, options.callers):
        for name in sorted(TITLES, reverse=number % 2 == 0):
            request = WIRES[kind][name].encode(model, example(model))
            load = partial(load_http, wrk, port, [request], connections=callers, scratch=scratch)
            load(seconds=_WARM_UP_S)
            busy, before = machine_busy_s(), _by_role(server)
            run = load(seconds=options.seconds)
            busy, after = machine_busy_s() - busy, _by_role(server)
            spent = {role: after[role] - before.get(role, 0.0) for role in after}
            cpu = sum(spent.values())
            numbers = {
                RATE: run.requests_per_s,
                "p50 ms": run.p50_ms,
                "p99 ms": run.p99_ms,
                "cluster us/req": cpu / run.requests * 1e6,
                **{role: spent.get(role, 0.0) / run.requests * 1e6 for role in ROLES.values()},
            }
            others = max(0.0, (busy - cpu - run.cpu_s) / run.wall_s)
            results.cells.append(Cell("ray", f"{model.name}, {kind}, {callers}", name, number, numbers, others))
            print(
                f"round {number}: {model.name}, {kind}, {callers}, {name}: {run.requests_per_s:,.0f}", file=sys.stderr
            )


def _by_role(server: Server) -> dict[str, float]:
    """Return the processor time of the cluster's processes in seconds, by what they do."""
    spent: dict[str, float] = {}
    for pid in server.pids():
        command = command_of(pid)
        role = next((role for part, role in ROLES.items() if part in command), "others us/req")
        spent[role] = spent.get(role, 0.0) + cpu_s(pid)
    return spent


def _check(port: int, models: Sequence[Model], threads: int = 1, requests: int = 1) -> None:
    """Compare answers of both, in every form, with what they have to be."""
    for model, wires in product(models, WIRES.values()):
        for wire in wires.values():
            check_answers(partial(HttpCaller, port, wire), model, threads=threads, requests=requests)


def _has_answered(port: int, models: Sequence[Model]) -> None:
    """Make a wrong answer of a cluster that still deploys look like no answer; a later check is strict."""
    try:
        _check(port, models)
    except WrongAnswerError as error:
        raise ConnectionError(str(error)) from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default: 5)")
    parser.add_argument("--seconds", type=float, default=3, help="length of a timed cell (default: 3)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--wires", nargs="+", choices=list(WIRES), default=list(WIRES), help="default: all")
    parser.add_argument("--ray", metavar="NAME=VALUE", nargs="+", default=[], help="settings that Ray is started with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw results there")
    options = parser.parse_args(arguments)
    options.models = [model for model in MODELS if model.name in options.models]
    return options


if __name__ == "__main__":
    sys.exit(main())
