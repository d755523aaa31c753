"""The tables, in Markdown that can be read as it is."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import NOISE_CORES, RATE, Results

OURS = "ours"


def render(results: Results) -> str:
    """Return the whole report: a table per case, then what was measured where."""
    blocks = [workload_tables(results, workload) for workload in results.workloads()]
    return "\n\n".join([*blocks, footer(results)])


def workload_tables(results: Results, workload: str) -> str:
    """Return the tables of a workload: one for each case, a row for each server."""
    if workload == "workers":
        return _workers_table(results, workload)
    blocks = []
    for case in results.workloads()[workload]:
        there = [peer for peer in results.peers(workload) if results.of(workload, case, peer)]
        names = list(dict.fromkeys(
            name
            for peer in there
            for cell in results.of(workload, case, peer).values()
            for name in cell.numbers
        ))  # fmt: skip
        rows = [
            [
                results.titles.get(peer, peer),
                *(_number(results.median(workload, case, peer, name)) for name in names[:1]),
                _part(results.spread(workload, case, peer)),
                *(_number(results.median(workload, case, peer, name)) for name in names[1:]),
                "" if peer == OURS else ratio(results, workload, case, peer, names[0]),
            ]
            for peer in there
        ]
        header = ["", names[0], "spread", *names[1:], "ours is"]
        blocks.append(f"**{workload}: {case}**\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def _workers_table(results: Results, workload: str) -> str:
    """Return one table: a row for each case, columns for numbers of workers."""
    counts = (1, 2, 4)
    mine, stubs = [[f"{peer} x {count}" for count in counts] for peer in ("ours-processes", "python-backend")]
    rows = [
        [
            case,
            *(_number(results.median(workload, case, peer, RATE)) for peer in mine),
            *(ratio(results, workload, case, mine[0], RATE, peer) for peer in mine[1:]),
            *(ratio(results, workload, case, stub, RATE, peer) for peer, stub in zip(mine, stubs, strict=True)),
            *(
                " / ".join(_number(results.median(workload, case, peer, "server us/req")) for peer in peers)
                for peers in (mine, stubs)
            ),
        ]
        for case in results.workloads()[workload]
    ]
    header = [
        "a batch takes/connections",
        *(f"{count} worker{'s' * (count > 1)}, requests/s" for count in counts),
        *(f"{count} against 1" for count in counts[1:]),
        *(f"{count} against {count} stub{'s' * (count > 1)}" for count in counts),
        "server us/req",
        "of the stubs",
    ]
    return table(header, rows)


def ratio(results: Results, workload: str, case: str, peer: str, name: str, mine: str = OURS) -> str:
    """Return how many times a number of a peer ours is: the median, the lowest and the highest of the rounds."""
    found = results.ratio((workload, case, mine), (workload, case, peer), name)
    if found is None:
        return ""
    spread = "" if found.low == found.high else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.median:.2f}x{spread}"


def footer(results: Results) -> str:
    """Return what is missing or failed, what was measured, and the machine."""
    lines = [f"missing: {name}: {reason}" for name, reason in results.missing.items()]
    lines += [f"failed: {failure.peer}, {failure.what}: {failure.reason}" for failure in results.failures]
    lines += [
        f"{name}: " + ", ".join(f"{each} {version}" for each, version in versions.items())
        for name, versions in results.versions.items()
    ]
    lines.append(conditions(results))
    noisy = [cell for cell in results.cells if cell.other_cores > NOISE_CORES]
    if noisy:
        lines.append(
            f"noise: in {len(noisy)} of {len(results.cells)} cells other processes kept up to "
            f"{max(cell.other_cores for cell in noisy):.1f} cores busy; such a cell counts where all rounds had one"
        )
    return "\n".join(lines)


def conditions(results: Results) -> str:
    """Return how and on what machine was measured, in one sentence."""
    facts, options = results.machine, results.options
    return (
        f"{results.started_at[:10]}: medians of {options['rounds']} interleaved rounds of {options['seconds']:g} s; "
        f"load generators with one thread on the same machine; {facts['cores_for_this_process']} of {facts['cores']} "
        f"cores, {facts['processor']}, {facts['system']}; load average before {_load(results.load_before)}, after "
        f"{_load(results.load_after)}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return "\n".join([line(header), rule, *map(line, rows)])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _part(value: float | None) -> str:
    return "" if value is None else f"±{value:.0%}"


def _load(load: Sequence[float]) -> str:
    return f"{load[0]:.1f}" if load else "?"
