"""The table."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.peers import Peer
from benchmarks.results import NOISE_CORES, Results, machine
from benchmarks.workload import Case


def render(results: Results, peers: Sequence[Peer]) -> str:
    """Return the report as plain text: one block per case, one for the start-up, then what was measured where."""
    blocks = [_case(results, peers, case) for case in results.cases()]
    if results.starts:
        blocks.append(_starts(results, peers))
    blocks.append(_footer(results, peers))
    return "\n\n".join(blocks)


def _case(results: Results, peers: Sequence[Peer], case: Case) -> str:
    ours = results.median("ours", case, lambda timing: timing.sample.requests_per_s)
    rows = []
    for peer in peers:
        rate = results.median(peer.name, case, lambda timing: timing.sample.requests_per_s)
        if rate is None:
            rows.append([peer.title, _absence(results, peer), "", "", "", "", ""])
            continue
        rows.append(
            [
                peer.title,
                f"{rate:,.0f}",
                _number(results.spread(peer.name, case), "±{:.0%}"),
                _number(results.median(peer.name, case, lambda timing: timing.sample.p50_ms), "{:.2f}"),
                _number(results.median(peer.name, case, lambda timing: timing.sample.p99_ms), "{:.2f}"),
                _number(results.median(peer.name, case, lambda timing: timing.server_us_per_request), "{:,.0f}"),
                "" if ours is None or peer.name == "ours" else f"{ours / rate:.2f}x",
            ]
        )
    ceiling = "" if case.model.ceiling is None else f" (ceiling {case.model.ceiling:,.0f} requests/s)"
    header = ["", "requests/s", "spread", "p50 ms", "p99 ms", "server us/req", "ours is"]
    return _table(case.title + ceiling, header, rows)


def _starts(results: Results, peers: Sequence[Peer]) -> str:
    rows = [
        [
            peer.title,
            _number(results.start_median(peer.name, lambda start: start.run_to_answer_s), "{:.2f}"),
            _number(results.start_median(peer.name, lambda start: start.command_to_answer_s), "{:.2f}")
            or _absence(results, peer),
            _number(results.start_median(peer.name, lambda start: start.processes), "{:.0f}"),
        ]
        for peer in peers
    ]
    header = ["", "run() s", "command s", "processes"]
    return _table("start-up to the first answer, and processes, with one model", header, rows)


def _footer(results: Results, peers: Sequence[Peer]) -> str:
    facts = machine()
    lines = [f"missing: {name}: {reason}" for name, reason in results.missing.items()]
    lines += [f"failed: {failure.peer}, {failure.what}: {failure.reason}" for failure in results.failures]
    for peer in (peer for peer in peers if peer.name in results.versions):
        versions = ", ".join(f"{name} {version}" for name, version in results.versions[peer.name].items())
        lines.append(f"{peer.name}: {versions}")
    lines.append(
        f"load generator: wrk {results.wrk}, 1 thread, on the same machine; medians of {results.options['rounds']} "
        f"interleaved rounds of {results.options['seconds']:g} s; every server checked before and after"
    )
    lines.append(
        f"machine: {facts['cores_for_this_process']} of {facts['cores']} cores, {facts['processor']}, {facts['system']}"
    )
    lines.append(f"load average before and after: {_load(results.load_before)} and {_load(os.getloadavg())}")
    noisy = [timing for timing in results.timings if timing.other_cores > NOISE_CORES]
    if noisy:
        lines.append(
            f"noise: in {len(noisy)} of {len(results.timings)} timings other processes kept up to "
            f"{max(timing.other_cores for timing in noisy):.1f} cores busy; such a timing counts only "
            "where every round had one"
        )
    return "\n".join(lines)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([title, *lines])


def _absence(results: Results, peer: Peer) -> str:
    return "missing" if peer.name in results.missing else "failed"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _load(load: tuple[float, float, float]) -> str:
    return " ".join(f"{value:.2f}" for value in load)
