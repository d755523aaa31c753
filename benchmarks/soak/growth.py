"""What processes hold over time, and whether it grows."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 0.5
_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")

# How much more of each the last window may show than the first one after the warm-up. Descriptors and the like are
# compared by the least of each window: traffic comes and goes, a leak stays. Allocators and pools settle slowly.
ALLOWED = {"descriptors": 8, "memfds": 4, "arenas": 8, "threads": 6, "children": 2}
ALLOWED_MIB = 32.0
ALLOWED_SHARE = 0.10


@dataclass(frozen=True)
class Sample:
    """What one process holds at a moment."""

    moment_s: float  # since the watch began
    rss_mib: float  # resident memory, with what it shares
    descriptors: int  # open files and sockets
    memfds: int  # those of them that are shared memory
    arenas: int  # pieces of such memory that are mapped; their descriptors may be closed
    threads: int
    children: int  # its processes


def children_of(parent: int) -> dict[int, str]:
    """Return the living child processes of a process, with their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            head, _, rest = (folder / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent and rest.split()[0] not in "ZX":
                found[int(folder.name)] = head.partition("(")[2]
    return found


def take(pid: int, moment_s: float) -> Sample | None:
    """Look at a process; `None` when it has ended."""
    folder = Path(f"/proc/{pid}")
    descriptors = memfds = 0
    try:
        for entry in os.listdir(folder / "fd"):
            with suppress(FileNotFoundError):
                descriptors += 1
                memfds += "memfd:" in os.readlink(folder / "fd" / entry)
        rss = int((folder / "statm").read_text().split()[1]) * _PAGE / _MIB
        arenas = (folder / "maps").read_text().count("memfd:pytriton")
        threads = len(os.listdir(folder / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Sample(moment_s, rss, descriptors, memfds, arenas, threads, len(children_of(pid)))


class Watch:
    """A thread that looks at processes until it is told to stop.

    Args:
        pids: The processes by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch")
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(PERIOD_S):
            for name, pid in self._pids.items():
                sample = take(pid, time.monotonic() - began)
                if sample is not None:
                    self.samples[name].append(sample)


def compare(samples: Sequence[Sample], warm_up_s: float) -> tuple[dict[str, list[float]], list[str]]:
    """Compare the first third of what follows the warm-up with the last one.

    Returns:
        Both values of everything, and what has grown.
    """
    counted = [sample for sample in samples if sample.moment_s >= warm_up_s]
    third = len(counted) // 3
    if third == 0:
        return {}, ["there are too few samples: let it run for longer"]
    first, last = counted[:third], counted[-third:]
    table: dict[str, list[float]] = {}
    problems = []
    before, after = (statistics.median(sample.rss_mib for sample in part) for part in (first, last))
    table["rss_mib"] = [round(before, 1), round(after, 1)]
    if after - before > max(ALLOWED_MIB, ALLOWED_SHARE * before):
        problems.append(f"rss grew from {before:.0f} to {after:.0f} MiB")
    for name, allowed in ALLOWED.items():
        low, high = (min(getattr(sample, name) for sample in part) for part in (first, last))
        table[name] = [low, high]
        if high - low > allowed:
            problems.append(f"{name} grew from {low} to {high}")
    return table, problems
