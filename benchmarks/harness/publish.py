"""Writes what a run found into the pages: tables between markers, charts as PNG.

A page has `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; what stands between them is written anew. NAME is a
workload, or `aims` for what this project wants to reach, or `readme`. What was not measured stays as it is.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import base_interpreter, environment
from benchmarks.harness.report import OURS, conditions, footer, table, workload_tables
from benchmarks.harness.results import INSTANCE_MEMORY, RATE, Ratio, Results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
CHARTS = ROOT / "docs" / "performance"
_DRAW = Path(__file__).with_name("draw.py")
_DRAW_TIMEOUT_S = 300
_README_CASES = ("tiny", "http/1"), ("tiny", "http/8"), ("tiny", "http/32"), ("batching", "delay")
_README_PEERS = ("nvidia-pytriton", "python-backend", "fastapi")
_SERVERS = "server us/req"
_CHARTS = {
    "tiny-http": ("tiny", "http/", RATE, "requests/s over HTTP, by connections"),
    "tiny-http-p99": ("tiny", "http/", "p99 ms", "p99 over HTTP in ms, by connections (less is better)"),
    "tiny-http-cpu": ("tiny", "http/", _SERVERS, "processor time per request in us (less is better)"),
    "tiny-grpc": ("tiny", "grpc/", RATE, "requests/s over gRPC, by connections"),
    "batching": ("batching", "", RATE, "requests/s with callables that take time"),
    "large": ("large", "", "MB/s", "MB/s of tensors in and out, one caller"),
    "strings": ("strings", "", RATE, "requests/s with strings"),
    "stream": ("stream", "", "tokens/s", "tokens/s, by streams"),
    "instances": ("instances", "", RATE, "requests/s of 2 ms of pure Python, by workers"),
    "inprocess": ("inprocess", "tiny", RATE, "calls/s in process, by callers"),
    "start": ("start", "", "start s", "seconds to the first answer (less is better)"),
    "growth": ("growth", "connections/", _SERVERS, "processor time per request in us, by connections"),
}


@dataclass(frozen=True)
class Aim:
    """Something to reach."""

    what: str
    floor: float
    aim: float
    found: Callable[[Results], Ratio | None]
    form: str = "{:.2f}x"
    less_is_better: bool = False

    def row(self, results: Results) -> list[str]:
        """Return the line of the table."""
        found = self.found(results)
        words = [self.what, self.form.format(self.floor), self.form.format(self.aim)]
        if found is None:
            return [*words, "", "not measured"]
        sign = -1 if self.less_is_better else 1
        reached = next(
            (name for name, value in (("aim", self.aim), ("floor", self.floor)) if sign * found.median >= sign * value),
            "missed",
        )
        low, middle, high = (self.form.format(value) for value in (found.low, found.median, found.high))
        return [*words, middle if low == high else f"{middle} ({low} to {high})", reached]


def _against(
    workload: str, case: str, peer: str, name: str = RATE, mine: str = OURS
) -> Callable[[Results], Ratio | None]:
    return lambda results: results.ratio((workload, case, mine), (workload, case, peer), name)


def _same_model_py(workload: str, case: str, name: str = RATE) -> Callable[[Results], Ratio | None]:
    return _against(workload, case, "python-backend", name, mine="python-models")


def _ours(workload: str, case: str, name: str, mine: str = OURS) -> Callable[[Results], Ratio | None]:
    """Return the number itself, with its lowest and highest round."""

    def find(results: Results) -> Ratio | None:
        found = [cell.numbers[name] for cell in results.of(workload, case, mine).values() if name in cell.numbers]
        middle = results.median(workload, case, mine, name)
        return None if middle is None else Ratio(middle, min(found), max(found))

    return find


def _cases(workload: str, first: str, second: str, name: str) -> Callable[[Results], Ratio | None]:
    return lambda results: results.ratio((workload, first, OURS), (workload, second, OURS), name)


def _over_limit(results: Results) -> Ratio | None:
    mine, its = results.of("tiny", "http/32", OURS), results.of("tiny", "http/32", "limit")
    found = sorted(mine[number].numbers[_SERVERS] - its[number].numbers[_SERVERS] for number in mine if number in its)
    return Ratio(found[len(found) // 2], found[0], found[-1]) if found else None


_WORKER = "worker us/batch"
_ASLEEP = "ours-asleep"
AIMS = (
    *(
        Aim(f"share of the limit, HTTP, {count}", floor, aim, _against("tiny", f"http/{count}", "limit"), "{:.0%}")
        for count, floor, aim in ((1, 0.68, 0.75), (8, 0.70, 0.80), (32, 0.82, 0.90))
    ),
    *(
        Aim(
            f"against Triton's Python backend, {count}", floor, aim, _against("tiny", f"http/{count}", "python-backend")
        )
        for count, floor, aim in ((1, 1.4, 1.7), (8, 1.8, 2.2), (32, 2.0, 2.5))
    ),
    Aim("against FastAPI with raw bytes, 1", 0.8, 0.95, _against("tiny", "http/1", "fastapi")),
    *(
        Aim(
            f"p99, Triton's Python backend, {count}",
            1.0,
            0.5,
            _against("tiny", f"http/{count}", "python-backend", "p99 ms"),
            less_is_better=True,
        )
        for count in (8, 32)
    ),
    Aim("CPU per request over the limit's, 32, us", 20, 10, _over_limit, "{:.0f}", less_is_better=True),
    *(
        Aim(f"worker's CPU per batch, {count}, us", 40, 25, _ours("tiny", f"http/{count}", _WORKER), "{:.0f}", True)
        for count in (1, 8, 32)
    ),
    Aim(
        "worker's CPU per batch, 1, asleep between, us",
        40,
        25,
        _ours("tiny", "http/1", _WORKER, _ASLEEP),
        "{:.0f}",
        True,
    ),
    Aim("5 ms batching, 32, requests/s", 2900, 3100, _ours("batching", "delay", RATE), "{:,.0f}"),
    Aim(
        "64 MiB, shared memory against HTTP",
        5,
        15,
        _cases("large", "client-shm/64MiB", "client-http/64MiB", RATE),
        "{:.1f}x",
    ),
    *(
        Aim(f"{case} against the limit", 0.85, 0.95, _against("large", case, "limit"), "{:.0%}")
        for case in ("http/2x4MiB", "http/64MiB", "grpc/2x4MiB", "grpc/64MiB")
    ),
    *(
        Aim(f"strings {case} against PyTriton", 6, 10, _against("strings", case, "nvidia-pytriton"), "{:.1f}x")
        for case in ("http/1000x64", "http/10000x8")
    ),
    Aim("in process, one caller, us", 90, 70, _ours("inprocess", "tiny/1", "p50 us"), "{:.0f}", True),
    *(
        Aim(
            f"the same model.py against Triton's Python backend, {count}",
            floor,
            aim,
            _same_model_py("tiny", f"http/{count}"),
        )
        for count, floor, aim in ((1, 1.2, 1.5), (8, 1.5, 2.0), (32, 1.7, 2.3))
    ),
    Aim("the same, 1,000 strings of 64 bytes", 3, 3, _same_model_py("strings", "http/1000x64")),
    Aim("the same, 1 MiB", 3, 3, _same_model_py("large", "http/1MiB")),
    *(
        Aim(
            f"the same, memory of an instance of {count} that answer",
            1.0,
            1.0,
            _same_model_py("instances", f"workers/{count}", INSTANCE_MEMORY),
            less_is_better=True,
        )
        for count in (1, 4)
    ),
    Aim(
        "CPU per request, 1,024 connections against 32",
        1.3,
        1.1,
        _cases("growth", "connections/1024", "connections/32", _SERVERS),
        less_is_better=True,
    ),
)


def measured_aims(results: Results) -> str:
    """Return a table of the aims about which a run says something; empty if there are none."""
    aims = [aim for aim in AIMS if aim.found(results) is not None]
    return _aims_table(aims, results) if aims else ""


def _aims_table(aims: Sequence[Aim], results: Results) -> str:
    header = ["connections or case", "floor", "aim", "found (lowest to highest round)", "reached"]
    return table(header, [aim.row(results) for aim in aims])


def publish(runs: Sequence[Results]) -> list[str]:
    """Write tables and charts of one run or of several; what two of them have measured is taken from the later.

    Returns:
        What was written, and what was not and why.
    """
    run_of = {workload: results for results in runs for workload in results.workloads()}
    merged = replace(
        runs[-1],
        titles={name: title for results in runs for name, title in results.titles.items()},
        cells=[cell for results in runs for cell in results.cells if run_of[cell.workload] is results],
    )
    drawn = _draw(merged)
    blocks = {}
    for workload, results in run_of.items():
        pictures = [f"![{_CHARTS[name][3]}](performance/{name}.png)" for name in drawn if _CHARTS[name][0] == workload]
        parts = [*pictures, workload_tables(results, workload), f"Measured on {conditions(results)}."]
        blocks[workload] = "\n\n".join(parts)
    if measured_aims(merged):
        blocks["aims"] = _aims_table(AIMS, merged)
        versions = "\n".join(footer(results) for results in runs)
        blocks["versions"] = f'```text norun="what a run found"\n{versions}\n```'
    said = [f"{PAGE.relative_to(ROOT)}: {', '.join(_replace(PAGE, blocks)) or 'nothing'}"]
    if all(merged.of(*case, peer) for case in _README_CASES for peer in (OURS, "limit", *_README_PEERS)):
        _replace(README, {"readme": _readme_table(merged)})
        said.append(f"{README.name}: the table")
    else:
        said.append(f"{README.name}: left as it is; it needs tiny and batching with limit, {', '.join(_README_PEERS)}")
    return said


def _replace(page: Path, blocks: dict[str, str]) -> list[str]:
    text, written = page.read_text(encoding="utf-8"), []
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- bench:{re.escape(name)} -->\n).*?(<!-- /bench:{re.escape(name)} -->)", re.S)
        if marked.search(text):
            text = marked.sub(lambda found, block=block: f"{found[1]}\n{block}\n\n{found[2]}", text)  # type: ignore[misc]
            written.append(name)
    page.write_text(text, encoding="utf-8")
    return written


def _readme_table(results: Results) -> str:
    rows = []
    for peer in (OURS, "limit", *_README_PEERS):
        cells = []
        for workload, case in _README_CASES:
            rate = f"{results.median(workload, case, peer, RATE) or 0:,.0f}"
            found = results.ratio((workload, case, OURS), (workload, case, peer), RATE)
            cells.append(rate if peer == OURS or found is None else f"{rate} ({found.median:.2g}x)")
        rows.append([results.titles[peer], *cells])
    header = ["float32[1,4] x 2, sum", "1 connection", "8", "32", "5 ms per batch of 16, 32 connections"]
    return f"{table(header, rows)}\n\nMeasured on {conditions(results)}."


def _draw(results: Results) -> list[str]:
    """Draw what there is to draw, in an environment with matplotlib; return their names."""
    charts = [chart for name, how in _CHARTS.items() if (chart := _chart(results, name, *how)) is not None]
    draw(charts)
    return [chart["file"] for chart in charts]


def draw(charts: Sequence[dict[str, Any]]) -> None:
    """Draw charts of bars into the folder of the page's pictures, as `draw.py` takes them."""
    python = environment("charts", base_interpreter(), ["matplotlib"])
    CHARTS.mkdir(exist_ok=True)
    subprocess.run(
        [str(python), str(_DRAW), str(CHARTS)],
        input=json.dumps(charts),
        text=True,
        timeout=_DRAW_TIMEOUT_S,
        check=True,
    )


def _chart(results: Results, file: str, workload: str, prefix: str, name: str, title: str) -> dict[str, Any] | None:
    """Return what `draw.py` needs for a chart of bars: a group for each case, a bar for each server."""
    cases = [case for case in results.workloads().get(workload, []) if case.startswith(prefix)]
    series: list[dict[str, Any]] = []
    for peer in results.peers(workload):
        bars: list[Sequence[float] | None] = []
        for case in cases:
            found = [cell.numbers[name] for cell in results.of(workload, case, peer).values() if name in cell.numbers]
            middle = results.median(workload, case, peer, name)
            bars.append(None if middle is None else (middle, min(found), max(found)))
        if any(bars):
            # The same colour in all charts.
            colour = list(results.titles).index(peer) if peer in results.titles else len(series)
            series.append({"name": results.titles.get(peer, peer), "colour": colour, "bars": bars})
    if not series:
        return None
    return {"file": file, "title": title, "cases": [case.removeprefix(prefix) for case in cases], "series": series}
