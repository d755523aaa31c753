"""Compare ours with other ways to serve the same function: `python benchmarks/run.py` or `python3 tools/dev.py bench`.

Needs Linux, wrk, and for the peers a package index; the runner itself needs only the standard library. A round starts
every server afresh, one at a time, on free ports of 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environments import PeerMissingError
from benchmarks.loadgen import LoadGeneratorError, find_wrk, measure, wrk_version
from benchmarks.peers import Peer, all_peers
from benchmarks.peers.base import Ports
from benchmarks.processes import Server, ServerError, adopt_orphans, free_ports, machine_busy_s, scratch_folder, serve
from benchmarks.report import render
from benchmarks.results import Failure, Results, Start, Timing
from benchmarks.workload import ADD, DELAY_CONNECTIONS, MODELS, Case, Model, WrongAnswerError, check_answers

_WARM_UP_S = 1
_CHECK_THREADS = 16
_CHECK_REQUESTS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print its table.

    Returns:
        0; 1 when ours is missing or failed, or a server failed; 2 when there is no load generator.
    """
    # Without this a `kill` of the runner would leave a server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _parse(arguments)
    adopt_orphans()
    try:
        wrk = find_wrk()
    except LoadGeneratorError as error:
        print(f"missing: {error}", file=sys.stderr)
        return 2
    peers = [peer for peer in all_peers(options.peer_python) if peer.name in options.only]
    results = Results(
        options={name: str(value) if name == "json" else value for name, value in vars(options).items()},
        wrk=wrk_version(wrk),
    )
    interrupted = False
    try:
        ready = [peer for peer in peers if _prepare(peer, results)]
        for number in range(1, options.rounds + 1):
            for model in (MODELS[name] for name in options.work):
                for peer in ready:
                    _say(f"round {number} of {options.rounds}: {peer.name}, {model.title}")
                    _measure_server(wrk, peer, model, number, options, results)
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted: what follows is incomplete")
    print(render(results, peers))
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1) + "\n")
    if interrupted:
        return 128 + signal.SIGINT
    return 1 if results.failures or "ours" in results.missing else 0


def _prepare(peer: Peer, results: Results) -> bool:
    try:
        results.versions[peer.name] = peer.prepare()
    except PeerMissingError as error:
        results.missing[peer.name] = str(error)
        _say(f"missing: {peer.name}: {error}")
        return False
    return True


def _measure_server(
    wrk: str, peer: Peer, model: Model, number: int, options: argparse.Namespace, results: Results
) -> None:
    """Start a server, check it, time every case of its model, check it again, stop it."""
    ports = Ports(*free_ports(3))

    def check(threads: int = 1, requests: int = 1) -> None:
        check_answers(ports.http, peer.wire, model.name, threads=threads, requests=requests)

    try:
        with scratch_folder() as scratch, serve(peer.launch(model, ports, scratch), scratch) as server:
            results.starts.append(Start(peer.name, model.name, number, server.wait_for_answer(_unless_starting(check))))
            check(_CHECK_THREADS, _CHECK_REQUESTS)
            for connections in options.connections if model == ADD else [DELAY_CONNECTIONS]:
                results.timings.append(
                    _time(wrk, peer, Case(model, connections), ports, number, options.seconds, server, scratch)
                )
                _say(f"    {connections} connections: {results.timings[-1].sample.requests_per_s:,.0f} requests/s")
            check(_CHECK_THREADS, _CHECK_REQUESTS)
            server.check_alive()
    except (ServerError, WrongAnswerError, LoadGeneratorError, OSError) as error:
        results.failures.append(Failure(peer.name, f"{model.name}, round {number}", f"{type(error).__name__}: {error}"))
        _say(f"    failed: {error}")


def _unless_starting(check: Callable[[], None]) -> Callable[[], None]:
    """Make a wrong answer of a server that still loads its model look like no answer; a later check is strict."""

    def ask() -> None:
        try:
            check()
        except WrongAnswerError as error:
            raise ConnectionError(str(error)) from None

    return ask


def _time(
    wrk: str, peer: Peer, case: Case, ports: Ports, number: int, seconds: float, server: Server, scratch: Path
) -> Timing:
    headers, body = peer.wire.encode((1.0, 2.0, 3.0, 4.0), (0.5, 0.5, 0.5, 0.5))
    url = f"http://127.0.0.1:{ports.http}{peer.wire.path(case.model.name)}"
    measure(wrk, url, headers, body, connections=case.connections, seconds=_WARM_UP_S, scratch=scratch)
    busy, cpu = machine_busy_s(), server.cpu_s()
    run = measure(wrk, url, headers, body, connections=case.connections, seconds=seconds, scratch=scratch)
    cpu = server.cpu_s() - cpu
    busy = machine_busy_s() - busy
    return Timing(
        peer=peer.name,
        case=case,
        round=number,
        sample=run.sample,
        server_us_per_request=cpu / run.sample.requests * 1e6,
        other_cores=max(0.0, (busy - cpu - run.cpu_s) / run.wall_s),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [peer.name for peer in all_peers()]

    def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            unknown = set(found := text.split(",")) - set(allowed)
            if unknown:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(allowed)}, received {', '.join(sorted(unknown))}"
                )
            return found

        return parse

    def numbers(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise argparse.ArgumentTypeError(f"expected numbers of connections from 1 on, received {text}")
        return found

    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("--only", type=words(names), default=names, metavar="NAMES", help=f"some of {','.join(names)}")
    parser.add_argument(
        "--work", type=words(list(MODELS)), default=list(MODELS), metavar="MODELS", help=f"some of {','.join(MODELS)}"
    )
    parser.add_argument(
        "--connections", type=numbers, default=[1, 8, 32], metavar="N,N", help="for the model add (default: 1,8,32)"
    )
    parser.add_argument("--seconds", type=float, default=4, help="length of a timed cell (default: 4)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often everything is measured; medians are shown (default: 3)"
    )
    parser.add_argument(
        "--peer-python", metavar="PATH", help="interpreter (3.10 to 3.12, shared libpython) for nvidia-pytriton"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw results there")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds < 1:
        parser.error("--rounds and --seconds are at least 1")
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
