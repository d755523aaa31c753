"""`Scaling`: how many worker processes of a model run, by how long its requests wait in Triton's queue."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..model import ModelSpec
from ..transport.activity import EndpointActivity
from .worker_process import WorkerProcess

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often it is looked whether there are too few workers, or too many, in seconds."""

QueueTime = tuple[int, float]
"""How many requests of a model have left Triton's queue since it was loaded, and how long they waited, in seconds."""


class Queue(Protocol):
    """Triton's queue of one model. Every method asks the server, and returns `None` where it does not answer."""

    def times(self) -> QueueTime | None:
        """Return how many requests have left it, and how long they waited."""
        ...

    def pending(self) -> int | None:
        """Return how many requests are in it now."""
        ...


# One more worker starts after requests have waited too long without a break for this time.
_PATIENCE_S = 1.0
# The load that the remaining workers may get when one ends. A higher load would make requests wait again.
_FULL = 0.7
# The mean load forgets older values within this share of the calm time.
_MEMORY_SHARE = 0.25
# Where one worker fewer was too few before, the calm time has to be longer than configured, by up to this factor.
_MOST_CAUTION = 16.0
# After a process that failed to start, no other one is started for at least this time.
_AFTER_FAILURE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ScalingLimits:
    """When there is one worker more, and when one fewer.

    Attributes:
        fewest: So many run at least.
        grow_queue_s: When requests wait longer than that in the mean, in seconds, one more is started.
        shrink_calm_s: When one fewer would have done for so long, in seconds, one ends.
    """

    fewest: int
    grow_queue_s: float
    shrink_calm_s: float

    def size_at_start(self, size: int, running: int) -> int:
        """Return what those take that start, if `running` workers take `size`."""
        return size * min(running, self.fewest) // running if running else size


@dataclass
class ScalingCounts:
    """How often the number of workers has changed, and why it has not. Threads may share it."""

    up: int = 0
    down: int = 0
    refused: int = 0
    """There was to be one more, and the memory budget had no room."""
    failed: int = 0
    """The process that was started did not come up."""

    def copy(self) -> ScalingCounts:
        """Return the numbers of now."""
        return dataclasses.replace(self)


class ScalingRule:
    """Decides by what was seen at each look, without a clock or processes of its own.

    There shall be one more when requests wait too long, look after look; one fewer when the others would have been
    busy for less than 70 % of the calm time, and nobody waited. Where that turns out to be too few soon, the calm has
    to last twice as long the next time, and so on: so load that comes and goes makes no process come and go with it.
    """

    def __init__(self, limits: ScalingLimits, now: float) -> None:
        """Begin with the fewest workers.

        Args:
            limits: When.
            now: The time, in seconds, as in all calls.
        """
        self._limits = limits
        self._caution = 1.0
        self._shrunk_at: float | None = None
        self._late_since: float | None = None
        self._looked = self._calm_since = now
        self.busy = float(limits.fewest)
        """How many workers have been busy lately in the mean."""

    @property
    def calm_s(self) -> float:
        """How long it has to be calm now before there is one fewer, in seconds."""
        return self._limits.shrink_calm_s * self._caution

    def look(self, now: float, running: int, busy: int, wait_s: float | None) -> int:
        """Return 1 where there shall be one more worker, -1 for one fewer, and 0.

        Args:
            now: The time, in seconds.
            running: How many workers there are.
            busy: How many of them are busy.
            wait_s: How long those requests waited in the mean that were answered since the last look, in seconds;
                `None` where none was.
        """
        limits = self._limits
        share = 1 - math.exp((self._looked - now) / (_MEMORY_SHARE * limits.shrink_calm_s))
        self._looked = now
        self.busy += share * (busy - self.busy)
        if wait_s is not None and wait_s > limits.grow_queue_s:
            self._late_since = now if self._late_since is None else self._late_since
        elif wait_s is not None or not busy:
            self._late_since = None
        if (wait_s or 0.0) > limits.grow_queue_s / 2 or self.busy > _FULL * (running - 1):
            self._calm_since = now
        if self._late_since is not None and now - self._late_since >= _PATIENCE_S:
            return 1
        return -1 if running > limits.fewest and now - self._calm_since >= self.calm_s else 0

    def change(self, now: float, running: int, *, by_one: int) -> None:
        """Note that the number of workers has changed, or was to and could not (0): what was seen before is over.

        Args:
            now: The time, in seconds.
            running: How many there are now.
            by_one: 1, -1 or 0.
        """
        if by_one > 0:
            was_too_early = self._shrunk_at is not None and now - self._shrunk_at < 2 * self.calm_s
            self._caution = min(self._caution * 2, _MOST_CAUTION) if was_too_early else max(1.0, self._caution / 2)
        elif by_one < 0:
            self._shrunk_at = now
        self._late_since, self._calm_since, self.busy = None, now, float(running)


class Scaling:
    """Starts and ends the worker processes of one model one by one. The thread of its `Sleep` uses it alone.

    A worker that is not to run sleeps, as it does in a model that sleeps as a whole: it finishes its requests before
    its process ends, and no request is given to it any more.
    """

    def __init__(self, model: ModelSpec, limits: ScalingLimits, queue: Queue, counts: ScalingCounts) -> None:
        """Prepare it.

        Args:
            model: What the workers serve.
            limits: When there is one worker more, and when one fewer.
            queue: Where requests wait.
            counts: What is counted.
        """
        self.limits = limits
        """When there is one worker more, and when one fewer."""
        self._label = f"Model {model.name!r} (version {model.version})"
        self._queue = queue
        self._counts = counts
        self._rule = ScalingRule(limits, time.monotonic())
        self._times: QueueTime | None = None
        # Since when nobody has left the queue while requests were in it.
        self._stuck_since: float | None = None
        self._seen: EndpointActivity | None = None
        # The worker that was started last, until it is attached, and how many of its processes had ended before.
        self._grown: tuple[WorkerProcess, int] | None = None
        self._not_before = 0.0
        self._failures: collections.Counter[WorkerProcess] = collections.Counter()
        self._has_told_refusal = False

    def rouse(self, workers: Sequence[WorkerProcess]) -> None:
        """Wake so many workers of a model that sleeps as a whole that the fewest run."""
        running, spare = _shared_out(workers)
        for worker in spare[: max(0, self.limits.fewest - len(running))]:
            worker.wake()
        self._grown = None
        self._begin_anew(self.limits.fewest)

    def extra_share(self, workers: Sequence[WorkerProcess]) -> float:
        """Return how large a part of the workers that run is beyond the fewest. From any thread."""
        count = len(_shared_out(workers)[0])
        return max(0, count - self.limits.fewest) / max(1, count)

    def give_back(self, workers: Sequence[WorkerProcess]) -> None:
        """End the workers beyond the fewest, as another model needs their memory."""
        running = _shared_out(workers)[0]
        extra = running[self.limits.fewest :]
        for worker in extra:
            worker.sleep()
        self._grown = None
        self._counts.down += len(extra)
        self._rule.change(time.monotonic(), self.limits.fewest, by_one=0)
        if extra:
            logger.info("%s shrinks from %d to %d of %d worker processes: another model needs the memory.", self._label,
                        len(running), len(running) - len(extra), len(workers))  # fmt: skip

    def look(
        self,
        workers: Sequence[WorkerProcess],
        activity: EndpointActivity | None,
        start: Callable[[WorkerProcess, int], bool],
    ) -> None:
        """Look whether one more is needed, or one fewer.

        Args:
            workers: All workers, those included that are not to run now.
            activity: What the proxy backend does; `None` while not all that are to run are attached.
            start: Wakes a worker where there is memory for one more beside so many; returns whether it did.
        """
        running, spare = _shared_out(workers)
        # A process that still finishes its requests may take long to end, so its worker is not started again yet.
        spare = sorted((each for each in spare if each.pid is None), key=lambda each: self._failures[each])
        if self._grown is not None:
            self._await_grown(*self._grown, len(running))
        elif len(running) < self.limits.fewest and spare:
            # Each worker gets one try at once, and another one after a pause.
            if time.monotonic() < self._not_before and self._failures[spare[0]]:
                return
            self._grow(spare[0], len(running), len(workers), start, "another one is given up")
        elif activity is None:
            self._begin_anew(len(running))
        else:
            now = time.monotonic()
            wait_s = self._wait_s(activity, now)
            change = self._rule.look(now, len(running), min(activity.in_flight, len(running)), wait_s)
            if change < 0:
                self._shrink(running, len(workers))
            elif change > 0 and spare and now >= self._not_before:
                why = f"requests wait longer in Triton's queue than {self.limits.grow_queue_s:g} s"
                if wait_s is not None:
                    why += f", {wait_s:.3g} s in the mean" if self._stuck_since is None else f", {wait_s:.3g} s so far"
                self._grow(spare[0], len(running), len(workers), start, why)

    def _begin_anew(self, running: int) -> None:
        """Forget what was seen before all workers were attached: it is no calm, and who waited has waited for them."""
        self._times = self._stuck_since = None
        self._rule.change(time.monotonic(), running, by_one=0)

    def _wait_s(self, activity: EndpointActivity, now: float) -> float | None:
        """Return how long those requests waited in the mean that left the queue since the last look.

        Calls may take minutes. Where no request has left it, those that are in it have waited since then at least.
        """
        stuck_since, self._stuck_since = self._stuck_since, None
        if activity == self._seen and not activity.in_flight:
            return None
        old, self._times = self._times, self._queue.times()
        self._seen = None if self._times is None else activity
        if old is None or self._times is None:
            return None
        if self._times[0] > old[0]:
            return (self._times[1] - old[1]) / (self._times[0] - old[0])
        if not activity.in_flight or not self._queue.pending():
            return None
        self._stuck_since = now if stuck_since is None else stuck_since
        waited_s = now - self._stuck_since
        # They have waited that long at least, so a short time says nothing.
        return waited_s if waited_s > self.limits.grow_queue_s else None

    def _grow(
        self, worker: WorkerProcess, running: int, most: int, start: Callable[[WorkerProcess, int], bool], why: str
    ) -> None:
        ends = worker.ends
        if not start(worker, running):
            self._rule.change(time.monotonic(), running, by_one=0)
            self._counts.refused += 1
            level = logging.DEBUG if self._has_told_refusal else logging.WARNING
            self._has_told_refusal = True
            logger.log(level, "%s stays with %d of %d worker processes, as the memory budget has no room for one more: "
                       "%s.", self._label, running, most, why)  # fmt: skip
            return
        self._has_told_refusal = False
        self._grown = (worker, ends)
        self._rule.change(time.monotonic(), running + 1, by_one=1)
        logger.info("%s grows from %d to %d of %d worker processes: %s.", self._label, running, running + 1, most, why)

    def _await_grown(self, worker: WorkerProcess, ends: int, running: int) -> None:
        """Wait until the worker that was started last is attached; end it where it does not come up."""
        if worker.is_attached:
            self._counts.up += 1
            self._grown = None
            del self._failures[worker]
            self._begin_anew(running)
        elif worker.first_failure is not None or not worker.is_alive or (worker.ends > ends and not worker.is_unproven):
            worker.sleep()
            # This failure was reported, and the next start must not report it again.
            worker.first_failure = None
            self._grown = None
            self._counts.failed += 1
            self._failures[worker] += 1
            now = time.monotonic()
            self._not_before = now + max(_AFTER_FAILURE_S, self.limits.shrink_calm_s)
            self._rule.change(now, running - 1, by_one=0)
            logger.warning("%s does not grow: the process did not come up, see above.", self._label)

    def _shrink(self, running: Sequence[WorkerProcess], most: int) -> None:
        calm_s, busy, left = self._rule.calm_s, self._rule.busy, len(running) - 1
        running[-1].sleep()
        self._counts.down += 1
        self._rule.change(time.monotonic(), left, by_one=-1)
        logger.info(
            "%s shrinks from %d to %d of %d worker processes: nobody waited for %.3g s, and %.2g of them were busy in "
            "the mean.",
            self._label,
            left + 1,
            left,
            most,
            calm_s,
            busy,
        )


def _shared_out(workers: Sequence[WorkerProcess]) -> tuple[list[WorkerProcess], list[WorkerProcess]]:
    """Return the workers that are to run, and those that are not, in the order in which they are woken."""
    alive = [worker for worker in workers if worker.is_alive]
    spare = [worker for worker in alive if worker.is_asleep]
    # A worker whose old process still finishes its requests would start later than the others, so it comes last.
    return [worker for worker in alive if not worker.is_asleep], sorted(spare, key=lambda each: each.pid is not None)
