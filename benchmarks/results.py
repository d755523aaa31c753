"""What was measured, and the medians over the rounds."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.loadgen import Sample
from benchmarks.processes import StartUp
from benchmarks.workload import Case

NOISE_CORES = 0.25
"""From here on other work on the machine, in busy cores, makes a timing count only where there is none without it."""


@dataclass(frozen=True)
class Timing:
    """One timed cell of one round."""

    peer: str
    case: Case
    round: int
    sample: Sample
    server_us_per_request: float
    """Processor time of the server and all its processes, in microseconds."""
    other_cores: float
    """How many cores processes that are neither server nor load generator kept busy meanwhile."""


@dataclass(frozen=True)
class Start:
    """One start of a server."""

    peer: str
    model: str
    round: int
    start_up: StartUp


@dataclass(frozen=True)
class Failure:
    """A server that could not be measured."""

    peer: str
    what: str
    reason: str


@dataclass
class Results:
    """Everything that one run of the benchmark found."""

    options: dict[str, Any]
    wrk: str
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def cells(self, peer: str, case: Case) -> list[Timing]:
        """Return the timings of a cell that count: those without noise by others if there are any, else all."""
        found = [timing for timing in self.timings if (timing.peer, timing.case) == (peer, case)]
        return [timing for timing in found if timing.other_cores <= NOISE_CORES] or found

    def median(self, peer: str, case: Case, value: Callable[[Timing], float]) -> float | None:
        """Return the median over the rounds of a number of a cell; `None` where it was not measured."""
        found = [value(timing) for timing in self.cells(peer, case)]
        return statistics.median(found) if found else None

    def spread(self, peer: str, case: Case) -> float | None:
        """Return half the range of requests/s over the rounds as a part of their median; `None` for a single round."""
        found = [timing.sample.requests_per_s for timing in self.cells(peer, case)]
        return (max(found) - min(found)) / 2 / statistics.median(found) if len(found) > 1 else None

    def start_median(self, peer: str, value: Callable[[StartUp], float | None]) -> float | None:
        """Return the median over all starts of a number of a start-up; `None` where no start of `peer` has it."""
        found = [
            number for start in self.starts if start.peer == peer and (number := value(start.start_up)) is not None
        ]
        return statistics.median(found) if found else None

    def cases(self) -> list[Case]:
        """Return the timed cases in the order in which they ran first."""
        return list(dict.fromkeys(timing.case for timing in self.timings))

    def to_json(self) -> dict[str, Any]:
        """Return everything raw, and where it was measured, for `json.dump`."""
        return {"machine": machine(), **asdict(self), "load_after": os.getloadavg()}


def machine() -> dict[str, Any]:
    """Return what the machine is, as far as it matters for numbers."""
    return {
        "cores": os.cpu_count(),
        "cores_for_this_process": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
