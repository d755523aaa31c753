"""`WorkerPool`: the workers that are attached, and the batches that are on their way to one, or wait for one."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence

from ..protocol.proxy import EndpointSettings
from ..protocol.segments import State
from ..wire.layout import Capability
from ..wire.limits import COLLECT_S, DRAIN_S, READY_GRACE_S
from .workers import AttachedWorker, BatchInFlight

_TICK_S = 0.5


class PoolClosedError(Exception):
    """No worker takes a batch any more."""


class WorkerPool:
    """Gives each batch to a worker. Thread-safe."""

    def __init__(self, settings: EndpointSettings, wake: Callable[[], None]) -> None:
        self._settings = settings
        self._wake = wake
        self._changed = threading.Condition()
        self._workers: dict[bytes, AttachedWorker] = {}
        self.outgoing: collections.deque[tuple[AttachedWorker, BatchInFlight]] = collections.deque()
        """Batches to be sent, with their workers; one thread takes them out."""
        # Batches whose worker was lost, or that never reached one.
        self._waiting: collections.deque[BatchInFlight] = collections.deque()
        self._drain_until = 0.0  # until then, batches are set aside at once
        self._last_end = 0.0  # when the last worker left, or the first could have come
        self._next_number = 1
        self._place = 0
        self.is_closed = False
        """Whether no worker takes a batch any more."""

    @property
    def workers(self) -> list[AttachedWorker]:
        """The workers that are attached."""
        return list(self._workers.values())

    def get(self, peer: bytes) -> AttachedWorker | None:
        """Return the worker of a peer; `None` if none is attached."""
        return self._workers.get(peer)

    def open(self) -> None:
        """Note that workers may come now."""
        self._last_end = time.monotonic()

    def is_ready(self) -> bool:
        """Return whether a worker takes batches, or did so a moment ago."""
        with self._changed:
            return self._has_worker(standing_in=False) or time.monotonic() - self._last_end < READY_GRACE_S

    def is_busy(self) -> bool:
        """Return whether batches wait for a worker, or for its answer."""
        return bool(self._waiting) or any(worker.protocol.in_flight for worker in self.workers)

    # ---- for the thread of Triton ----------------------------------------------------------------------------------

    def reserve(self, batch: BatchInFlight) -> AttachedWorker | None:
        """Return a worker for a batch; set the batch aside if none is attached.

        Each request may wait for its own time. Nobody reports when it came to Triton's queue, so requests without a
        worker are taken out of the queue, and wait here.
        """
        drains = batch.waiting_since < self._drain_until
        deadline = batch.waiting_since + (0.0 if drains else min(COLLECT_S, self._settings.attach_timeout_s))
        with self._changed:
            while not self.is_closed:
                worker = self._idle_worker()
                if worker is not None:
                    worker.load += 1
                    return worker
                # An attached worker answers, or is lost, so only its absence has a limit.
                if self._has_worker():
                    self._changed.wait(_TICK_S)
                elif (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._waiting.append(batch)
                    self._wake()
                    if not drains:
                        self._drain_until = time.monotonic() + DRAIN_S
                    return None
        raise PoolClosedError

    def send(self, worker: AttachedWorker, batch: BatchInFlight) -> None:
        """Have a batch sent to a worker; return as soon as another one is idle, or none has anything to do."""
        with self._changed:
            if self.is_closed:
                raise PoolClosedError
            self.outgoing.append((worker, batch))
            self._wake()
            self._changed.wait_for(
                lambda: (
                    self.is_closed
                    or any(other.is_idle for other in self._workers.values())
                    or not any(other.load for other in self._workers.values())
                )
            )

    def next_number(self) -> int:
        """Return a number that no batch has had."""
        with self._changed:
            number = self._next_number
            self._next_number += 1
        return number

    def free(self, worker: AttachedWorker, back: Sequence[BatchInFlight] = ()) -> bool:
        """Note that a worker has finished a batch.

        Batches in `back` return to the front of the queue. Returns whether they wait there: False if the pool is
        closed.
        """
        with self._changed:
            is_open = not self.is_closed
            if is_open:
                self._waiting.extendleft(reversed(back))
            worker.load -= 1
            self._hand_out()
            self._changed.notify_all()
        return is_open

    def close(self) -> None:
        """Give out no more batches, and wake whoever waits for that."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    # ---- for the thread of the endpoint ----------------------------------------------------------------------------

    def add(self, worker: AttachedWorker) -> None:
        """Add a worker that has attached."""
        with self._changed:
            self._workers[worker.peer] = worker
            self._hand_out()
            self._changed.notify_all()

    def remove(self, worker: AttachedWorker) -> list[BatchInFlight]:
        """Remove a worker; returns the batches that it had."""
        with self._changed:
            batches = worker.protocol.close()
            worker.load -= len(batches)
            self._workers.pop(worker.peer, None)
            self._last_end = time.monotonic()
            self._changed.notify_all()
        return batches

    def wait_for_another(self, batch: BatchInFlight) -> None:
        """Let a batch wait for another worker."""
        batch.block = None
        batch.cancelled.clear()
        batch.waiting_since = time.monotonic()
        with self._changed:
            # Before batches that no worker has had, because those came later.
            place = next((at for at, other in enumerate(self._waiting) if not other.number), None)
            self._waiting.insert(len(self._waiting) if place is None else place, batch)
            self._hand_out()

    def take_late(self, now: float) -> list[BatchInFlight]:
        """Take out the requests whose time to wait for a worker is over."""
        with self._changed:
            if not self._waiting or self._has_worker():
                return []
            oldest = now - self._settings.attach_timeout_s
            late = [batch for batch in self._waiting if batch.waiting_since <= oldest]
            if late:
                self._waiting = collections.deque(batch for batch in self._waiting if batch.waiting_since > oldest)
        return late

    def take_all(self) -> list[BatchInFlight]:
        """Take out all batches that wait, or are to be sent, when the pool closes."""
        with self._changed:
            batches = [*(batch for _, batch in self.outgoing), *self._waiting]
            self.outgoing.clear()
            self._waiting.clear()
        return batches

    def _idle_worker(self) -> AttachedWorker | None:
        workers = self.workers
        for index in range(len(workers)):
            place = (self._place + index) % len(workers)
            if workers[place].is_idle:
                self._place = place + 1
                return workers[place]
        return None

    def _has_worker(self, *, standing_in: bool = True) -> bool:
        return any(
            worker.protocol.state is State.ATTACHED
            and (standing_in or not worker.protocol.hello.capabilities & Capability.STANDS_IN)
            for worker in self._workers.values()
        )

    def _hand_out(self) -> None:
        """Give waiting batches to idle workers before any new batch."""
        while self._waiting and (worker := self._idle_worker()) is not None:
            worker.load += 1
            batch = self._waiting.popleft()
            batch.block = None
            self.outgoing.append((worker, batch))
            self._wake()
