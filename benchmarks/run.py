"""Compare ours with other ways to serve the same function: `python benchmarks/run.py` or `python3 tools/dev.py bench`.

Without the name of a workload it measures what matters most, in eight minutes. Needs Linux, wrk, and for the peers a
package index. benchmarks/README.md says how it measures.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environments import PeerMissingError
from benchmarks.harness.generators import LoadGeneratorError, find_generator, version
from benchmarks.harness.processes import adopt_orphans, available_mib
from benchmarks.harness.publish import measured_aims, publish
from benchmarks.harness.report import render
from benchmarks.harness.results import Results
from benchmarks.peers import Peer, all_peers
from benchmarks.workloads import WORKLOADS, Bench, Workload
from benchmarks.workloads.base import say

QUICK_WORKLOADS = ("tiny", "batching")
QUICK_CASES = ("http/1", "http/8", "http/32", "delay", "growing")
QUICK_PEERS = ("ours", "limit", "python-backend", "fastapi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says and print the tables.

    Returns:
        0; 1 when ours is missing, a server failed, or nothing could be measured.
    """
    # A `kill` shows what was found so far, too, and leaves no server behind; scripts start jobs that ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = _parse(arguments)
    if options.files:
        return _show(options)
    adopt_orphans()
    results = Results(options={"rounds": options.rounds, "seconds": options.seconds, "workloads": options.workloads})
    workloads = [WORKLOADS[name] for name in options.workloads]
    generators = _generators(workloads, results)
    takes_part = {name for workload in workloads for name in workload.peers}
    wanted = [peer for peer in all_peers(options.peer_python) if peer.name in options.peers and peer.name in takes_part]
    results.titles = {peer.name: peer.title for peer in all_peers()}
    interrupted = False
    try:
        peers = [peer for peer in wanted if _prepare(peer, results)]
        bench = Bench(peers, options.seconds, options.cases, generators, results)
        able = [workload for workload in workloads if _is_able(workload, generators, results)]
        for bench.round in range(1, options.rounds + 1):
            for workload in able:
                say(f"round {bench.round} of {options.rounds}: {workload.name}")
                workload.run_round(bench, bench.cases(workload))
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: what follows is incomplete")
    results.load_after = os.getloadavg()
    print(_report(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1) + "\n")
    if options.docs and not interrupted:
        say("\n".join(publish([results])))
    if interrupted:
        return 128 + signal.SIGINT
    return 1 if results.failures or "ours" in results.missing or not results.cells else 0


def _report(results: Results) -> str:
    return "\n\n".join(part for part in (render(results), measured_aims(results)) if part)


def _show(options: argparse.Namespace) -> int:
    """Print and publish what earlier runs found."""
    runs = [Results.from_json(json.loads(file.read_text())) for file in options.files]
    print("\n\n".join(map(_report, runs)))
    if options.docs:
        say("\n".join(publish(runs)))
    return 0


def _generators(workloads: Sequence[Workload], results: Results) -> dict[str, str]:
    """Find the load generators; one that is not there is named as missing."""
    found = {}
    for name in sorted({name for workload in workloads for name in workload.generators}):
        try:
            path = find_generator(name)
            results.versions[name] = {"version": version(path)}
            found[name] = path
        except LoadGeneratorError as error:
            results.missing[name] = str(error)
            say(f"missing: {error}")
    return found


def _is_able(workload: Workload, generators: dict[str, str], results: Results) -> bool:
    """Tell whether a workload can run here; where not, the report says why."""
    lacking = [name for name in workload.generators if name not in generators]
    if lacking and len(lacking) == len(workload.generators):
        results.missing[workload.name] = f"it needs {' or '.join(lacking)}"
    elif (free := available_mib()) < workload.memory_mib:
        results.missing[workload.name] = f"it needs {workload.memory_mib} MiB of memory, {free:.0f} are available"
    return workload.name not in results.missing


def _prepare(peer: Peer, results: Results) -> bool:
    try:
        results.versions[peer.name] = peer.prepare()
    except PeerMissingError as error:
        results.missing[peer.name] = str(error)
        say(f"missing: {peer.name}: {error}")
    return peer.name not in results.missing


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

    listed = "\n".join(f"  {name:<12} {workload.title}" for name, workload in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split(":", 1)[0] + ".",
        epilog=f"workloads:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help="without one: tiny over HTTP and batching, with four servers"
    )
    parser.add_argument("--all", action="store_true", help="all workloads with all cases and peers")
    parser.add_argument("--peers", type=words(names), metavar="NAMES", help=f"some of {','.join(names)}")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), metavar="NAMES", help="such as http/8; * stands for anything"
    )
    parser.add_argument("--seconds", type=float, default=3, help="length of a timed cell (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often everything is measured; medians are shown (default: 5)"
    )
    parser.add_argument(
        "--peer-python", metavar="PATH", help="interpreter (3.10 to 3.12, shared libpython) for nvidia-pytriton"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw results there")
    parser.add_argument("--docs", action="store_true", help="write tables and charts into docs/ and README.md")
    parser.add_argument(
        "--from", type=Path, nargs="+", metavar="FILE", dest="files", help="measure nothing, take what --json wrote"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds < 1:
        parser.error("--rounds and --seconds are at least 1")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"expected some of {', '.join(WORKLOADS)}, received {', '.join(sorted(unknown))}")
    quick = not options.workloads and not options.all
    options.workloads = options.workloads or list(QUICK_WORKLOADS if quick else WORKLOADS)
    options.peers = options.peers or list(QUICK_PEERS if quick else names)
    options.cases = options.cases or list(QUICK_CASES if quick else ())
    known = [case for name in options.workloads for case in WORKLOADS[name].cases()]
    if idle := [pattern for pattern in options.cases if not fnmatch.filter(known, pattern)]:
        parser.error(f"expected cases among {', '.join(known)}, received {', '.join(idle)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
