"""What was measured: numbers of a server in a case of a workload, round by round; medians, spreads and ratios."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

NOISE_CORES = 0.25
"""From here on other work on the machine, in busy cores, makes a cell count only where there is none without it."""
RATE = "requests/s"
INSTANCE_MEMORY = "instance MiB"

Key = tuple[str, str, str]
"""A workload, a case of it, a server."""


@dataclass(frozen=True)
class Cell:
    """What one server did in one case of one round."""

    workload: str
    case: str
    peer: str
    round: int
    numbers: dict[str, float]
    """By their names, which say the unit; the first is the one that ratios are made of."""
    other_cores: float = 0.0
    """How many cores processes that are neither server nor load generator kept busy meanwhile."""


@dataclass(frozen=True)
class Failure:
    """A server that could not be measured."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of two servers in the same rounds, and the lowest and the highest of them."""

    median: float
    low: float
    high: float


@dataclass
class Results:
    """Everything that one run of the benchmark found."""

    options: dict[str, Any]
    titles: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)
    load_after: tuple[float, ...] = ()
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def of(self, workload: str, case: str, peer: str) -> dict[int, Cell]:
        """Return the cells that count, by round: those without noise by others if there are any, else all."""
        found = [cell for cell in self.cells if (cell.workload, cell.case, cell.peer) == (workload, case, peer)]
        return {cell.round: cell for cell in found if cell.other_cores <= NOISE_CORES} or {
            cell.round: cell for cell in found
        }

    def median(self, workload: str, case: str, peer: str, name: str) -> float | None:
        """Return the median over the rounds of a number; `None` where it was not measured."""
        found = [cell.numbers[name] for cell in self.of(workload, case, peer).values() if name in cell.numbers]
        return statistics.median(found) if found else None

    def spread(self, workload: str, case: str, peer: str) -> float | None:
        """Return half the range of the first number over the rounds as a part of its median; `None` for one round."""
        found = [next(iter(cell.numbers.values())) for cell in self.of(workload, case, peer).values()]
        return (max(found) - min(found)) / 2 / statistics.median(found) if len(found) > 1 else None

    def ratio(self, first: Key, second: Key, name: str) -> Ratio | None:
        """Compare a number of two cells round by round; `None` where they have no round in common."""
        mine, its = self.of(*first), self.of(*second)
        found = [
            mine[number].numbers[name] / its[number].numbers[name]
            for number in mine
            if number in its and its[number].numbers.get(name) and name in mine[number].numbers
        ]
        return Ratio(statistics.median(found), min(found), max(found)) if found else None

    def workloads(self) -> dict[str, list[str]]:
        """Return the workloads, each with its cases, in the order in which they ran first."""
        found: dict[str, list[str]] = {}
        for cell in self.cells:
            cases = found.setdefault(cell.workload, [])
            if cell.case not in cases:
                cases.append(cell.case)
        return found

    def peers(self, workload: str) -> list[str]:
        """Return who took part in a workload, in the order of the titles."""
        found = list(dict.fromkeys(cell.peer for cell in self.cells if cell.workload == workload))
        order = list(self.titles)
        return sorted(found, key=lambda peer: order.index(peer) if peer in order else len(order))

    def to_json(self) -> dict[str, Any]:
        """Return everything raw for `json.dump`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Results:
        """Read what `to_json` returned."""
        cells = [Cell(**cell) for cell in raw["cells"]]
        failures = [Failure(**failure) for failure in raw["failures"]]
        return cls(**{**raw, "cells": cells, "failures": failures})


def machine() -> dict[str, Any]:
    """Return what the machine is, as far as it matters for numbers."""
    return {
        "cores": os.cpu_count(),
        "cores_for_this_process": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
