"""Monotonic totals of what the callables of a model have done, over all workers that served it."""

import os
import threading
from dataclasses import dataclass

from pytriton.proxy_backend import Worker, WorkerStatistics
from pytriton.proxy_backend.process.worker_process import WorkerProcess
from pytriton.proxy_backend.runtime.statistics import add_statistics

__all__ = ["CallableTotals", "StatisticsTotals"]


@dataclass(frozen=True, kw_only=True)
class CallableTotals:
    """What the workers in one place of a model's list of callables have done, one after the other."""

    place: int
    """The place in the list, from 0 on."""
    attached: bool
    """Whether a worker is attached right now."""
    statistics: WorkerStatistics
    pid: int | None
    """The process of the worker that runs; None while there is none."""
    ends: int
    """How many processes of workers ended by themselves here."""


class StatisticsTotals:
    """Adds up what workers count, those included that have ended since. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[tuple[int, Worker | WorkerProcess]] = []
        self._ended: dict[int, WorkerStatistics] = {}
        self._ends: dict[int, int] = {}

    def add(self, place: int, worker: Worker | WorkerProcess) -> None:
        """Take a worker in; to be called when it was started.

        Args:
            place: The place of its callable in the model's list, from 0 on. A worker that takes the place of another
                goes on with its totals.
            worker: The worker.
        """
        with self._lock:
            self._fold()
            self._workers.append((place, worker))

    def read(self) -> list[CallableTotals]:
        """Return the totals for each place in the list of callables, in order."""
        with self._lock:
            self._fold()
            totals, ends = dict(self._ended), dict(self._ends)
            attached: set[int] = set()
            pids: dict[int, int | None] = {}
            for place, worker in self._workers:
                totals[place] = _added(totals.get(place), worker.statistics)
                ends[place] = ends.get(place, 0) + _ends(worker)
                pids[place] = worker.pid if isinstance(worker, WorkerProcess) else os.getpid()
                if worker.is_attached:
                    attached.add(place)
        return [
            CallableTotals(
                place=place,
                attached=place in attached,
                statistics=totals[place],
                pid=pids.get(place),
                ends=ends.get(place, 0),
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
        self._workers = running


def _added(one: WorkerStatistics | None, other: WorkerStatistics) -> WorkerStatistics:
    return other if one is None else add_statistics(one, other)


def _ends(worker: Worker | WorkerProcess) -> int:
    return worker.ends if isinstance(worker, WorkerProcess) else 0
