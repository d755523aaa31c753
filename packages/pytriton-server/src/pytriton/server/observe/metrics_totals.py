"""Monotonic totals of what the callables of a model have done, over all workers that served it."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytriton.proxy_backend import Histogram, Worker, WorkerStatistics
from pytriton.proxy_backend.hosting.supervisor import ServingHost
from pytriton.proxy_backend.process.budget import WakeCounts
from pytriton.proxy_backend.process.scaling import ScalingCounts
from pytriton.proxy_backend.process.worker_process import WorkerProcess
from pytriton.proxy_backend.runtime.statistics import add_statistics
from pytriton.proxy_backend.system.processes import resident_bytes


@dataclass(frozen=True, kw_only=True)
class CallableTotals:
    """The counts of all workers that have served at one place of a model's list of callables."""

    place: int
    """The place in the list, from 0 on."""
    attached: bool | None
    """Whether a worker is attached right now; None while it sleeps, and before the model was served the first time."""
    statistics: WorkerStatistics
    pid: int | None
    """The process of the worker that runs; None while there is none."""
    ends: int
    """How many processes of workers ended by themselves here."""
    golden_failures: int | None = None
    """How many processes did not give the known answer to their warm-up; None if that is not compared."""
    asleep: bool | None = None
    """Whether the worker sleeps until a request comes; None of one that never does."""

    @property
    def memory(self) -> int | None:
        """The resident memory of that process, in bytes; None for this process, or if unknown."""
        return None if self.pid is None or self.pid == os.getpid() else resident_bytes(self.pid)


@dataclass(frozen=True, kw_only=True)
class ScalingFacts:
    """What is known of a model whose worker processes come and go with its load."""

    running: int
    """How many are attached."""
    wanted: int
    """How many are to run now."""
    fewest: int
    """How many run at least."""
    most: int
    """How many run at most."""
    counts: ScalingCounts
    """How often their number has changed, or was to and could not."""


@dataclass(frozen=True, kw_only=True)
class SleepFacts:
    """What is known of a model that may sleep, or whose processes have a memory budget, or come and go."""

    state: str
    """`awake`, `asleep` or `waking`."""
    memory: int
    """What its processes take now, as far as it is theirs (PSS), in bytes."""
    last_used: int
    """When somebody called it last, or it came awake, as seconds of the Unix epoch."""
    wakes: Histogram
    """How long its wake-ups took, in seconds."""
    wake_quantiles_s: tuple[float, float] | None
    """The time within which half of them were over, and 95 of 100, in seconds; None without any."""
    wakes_refused: int
    """How often it was to wake, and the memory budget had no room."""
    scaling: ScalingFacts | None = None
    """How many of its processes run; None where their number stays."""


@dataclass
class HostedModel:
    """A model of the Python backend that workers serve, as the metrics page sees it."""

    name: str
    version: int
    decoupled: bool
    hosts: Sequence[ServingHost]
    """The processes of its instances."""
    has_cost: bool = False

    def read_sleep(self) -> SleepFacts | None:
        """Return what is known of processes that may sleep, or have a memory budget; None of others."""
        accounts = [each.account for each in self.hosts]
        budget = self.hosts[0].budget
        if budget.limit_bytes is None and not any(each.ask_to_sleep for each in accounts):
            return None
        wakes = accounts[0].wakes
        is_asleep = all(each.host.is_asleep for each in self.hosts)
        is_awake = any(each.host.is_attached for each in self.hosts)
        return SleepFacts(
            state="asleep" if is_asleep else "awake" if is_awake else "waking",
            memory=sum(map(budget.read, accounts)),
            last_used=wall_time(max(each.last_used for each in accounts)),
            wakes=wakes.seconds,
            wake_quantiles_s=wakes.quantiles_s,
            wakes_refused=wakes.refused,
        )

    def read_totals(self) -> list[CallableTotals]:
        """Return the counts of its instances since they were loaded."""
        return [
            CallableTotals(
                place=each.number,
                # A worker that sleeps, or starts for a request, is not reported as missing.
                attached=None if each.host.is_asleep or each.host.is_waking else each.host.is_attached,
                statistics=each.host.statistics,
                pid=each.host.pid,
                ends=each.host.ends,
                asleep=each.host.is_asleep,
            )
            for each in self.hosts
        ]


def hosted_models(hosts: Iterable[ServingHost]) -> list[HostedModel]:
    """Return the models that some processes serve."""
    found: dict[tuple[str, int, bool], list[ServingHost]] = {}
    for each in sorted(hosts, key=lambda each: each.number):
        found.setdefault((each.model_name, each.model_version, each.decoupled), []).append(each)
    return [HostedModel(*key, hosts) for key, hosts in found.items()]


def wall_time(at: float) -> int:
    """Return when something was by `time.monotonic`, as seconds of the Unix epoch."""
    return round(time.time() - time.monotonic() + at)


class StatisticsTotals:
    """Adds up the counts of workers, including ended ones. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[tuple[int, Worker | WorkerProcess]] = []
        self._ended: dict[int, WorkerStatistics] = {}
        self._ends: dict[int, int] = {}
        self._golden_failures: dict[int, int] = {}
        self.wakes = WakeCounts()
        """How often the model was woken."""
        self.scalings = ScalingCounts()
        """How often the number of its processes has changed."""
        self.was_served = False
        """Whether the model has had all its workers once: before, it is only being bound."""

    def add(self, place: int, worker: Worker | WorkerProcess) -> None:
        """Count a worker that was started. One that replaces another at its place continues the totals."""
        with self._lock:
            self._fold()
            self._workers.append((place, worker))

    def read(self) -> list[CallableTotals]:
        """Return the totals for each place in the list of callables, in order."""
        with self._lock:
            self._fold()
            totals, ends, golden = dict(self._ended), dict(self._ends), dict(self._golden_failures)
            attached: set[int] = set()
            asleep: dict[int, bool | None] = {}
            waking: set[int] = set()
            pids: dict[int, int | None] = {}
            for place, worker in self._workers:
                totals[place] = _added(totals.get(place), worker.statistics)
                ends[place] = ends.get(place, 0) + _ends(worker)
                _add_golden(golden, place, worker)
                pids[place] = worker.pid if isinstance(worker, WorkerProcess) else os.getpid()
                asleep[place] = worker.is_asleep if isinstance(worker, WorkerProcess) else None
                if worker.is_attached:
                    attached.add(place)
                if isinstance(worker, WorkerProcess) and worker.is_waking:
                    waking.add(place)
        return [
            CallableTotals(
                place=place,
                # A worker that sleeps, or starts for a request, is not reported as missing.
                attached=place in attached
                if self.was_served and not asleep.get(place) and place not in waking
                else None,
                statistics=totals[place],
                pid=pids.get(place),
                ends=ends.get(place, 0),
                asleep=asleep.get(place),
                golden_failures=golden.get(place),
            )
            for place in sorted(totals)
        ]

    def _fold(self) -> None:
        """Keep of workers that have ended nothing but their numbers, which are final then."""
        running = []
        for place, worker in self._workers:
            if worker.is_alive:
                running.append((place, worker))
            else:
                self._ended[place] = _added(self._ended.get(place), worker.statistics)
                self._ends[place] = self._ends.get(place, 0) + _ends(worker)
                _add_golden(self._golden_failures, place, worker)
        self._workers = running


def _added(one: WorkerStatistics | None, other: WorkerStatistics) -> WorkerStatistics:
    return other if one is None else add_statistics(one, other)


def _ends(worker: Worker | WorkerProcess) -> int:
    return worker.ends if isinstance(worker, WorkerProcess) else 0


def _add_golden(counts: dict[int, int], place: int, worker: Worker | WorkerProcess) -> None:
    failures = worker.golden_failures if isinstance(worker, WorkerProcess) else None
    if failures is not None:
        counts[place] = counts.get(place, 0) + failures
