"""`Sleep`: ends the worker processes of a model that nobody calls, and starts them again when a request waits."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..errors import AttachError, WorkerProcessError
from ..model import ModelSpec
from ..system.threads import keep_on
from ..transport.activity import ask_activity
from ..worker.placeholder import CannotSleepError, Placeholder
from .budget import Account, MemoryBudget, NoRoomError, size_text
from .scaling import LOOK_S, Scaling
from .worker_process import WorkerProcess

__all__ = ["Sleep", "SleepState", "are_up"]

logger = logging.getLogger(__name__)

# How many times within the idle time the sleeper asks the proxy backend for its activity. So a model falls asleep at
# most a quarter of that time too late.
_LOOKS = 4
_LEAST_BETWEEN_LOOKS_S, _MOST_BETWEEN_LOOKS_S = 0.05, 60.0
_ASK_TIMEOUT_S = 2.0
_STEP_S = 0.25
# The interval of the checks while workers start for the first time.
_STARTING_S = 0.02
# How often the time of last use is noted, in seconds. A budget puts the models to sleep that were used least recently.
_USE_S = 0.5
# The part of the time that requests wait for a worker in which other models have to make room for it.
_SHARE_FOR_ROOM = 0.8
_PAUSE_AFTER_FAILURE_S = 1.0
# This is longer than any wait of the thread itself. It waits longer only for a lock that the caller of `stop` holds,
# where that runs in a signal handler.
_JOIN_S = 10.0


class SleepState(enum.Enum):
    """What the workers of a model do."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"


class Sleep:
    """Puts the worker processes of one model to sleep, all at once, and wakes them all, or as many as run at least.

    States: AWAKE --no request for `idle_timeout_s`, or another model needs their memory--> ASLEEP --a request waits-->
    WAKING --one is attached--> AWAKE; WAKING --the memory budget has no room--> ASLEEP

    A placeholder is attached before the workers leave, and until one of them is attached again: so the proxy backend
    has somebody to wake whenever a request finds no worker.
    """

    def __init__(
        self,
        model: ModelSpec,
        endpoint: Path,
        idle_timeout_s: float | None,
        attach_timeout_s: float,
        budget: MemoryBudget | None = None,
        account: Account | None = None,
        *,
        instance: str | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """Prepare it; nothing happens before `start`.

        Args:
            model: What the workers serve.
            endpoint: The socket of the proxy backend.
            idle_timeout_s: How long no request has come before they sleep, in seconds; `None` leaves that to `budget`.
            attach_timeout_s: How long a request waits for them, in seconds.
            budget: Where they get their memory; `None` is without a limit.
            account: They themselves, as the budget sees them; its `ask_to_sleep` is set here.
            instance: The instance of a `model.py` that sleeps by itself; `None` where the model sleeps as a whole.
            scaling: How many of them run while the model is awake; `None` is all.
        """
        self._model = model
        self._endpoint = endpoint
        self._idle_timeout_s = idle_timeout_s
        self._attach_timeout_s = attach_timeout_s
        self._budget = MemoryBudget() if budget is None else budget
        self._account = account or Account(model.name, lambda: _pids(self._workers), lambda: are_up(self._workers))
        self._account.ask_to_sleep = self._ask
        if scaling is not None:
            self._account.extra_share = lambda: scaling.extra_share(self._workers)
            self._account.give_back = self._ask_for_extra
        self._label = f"Model {model.name!r} (version {model.version})"
        self._attach_setting = "ModelConfig.attach_timeout_s"
        if instance is not None:
            self._label = f"Instance {instance!r} of model {model.name!r} (version {model.version})"
            self._attach_setting = "the parameter PYTRITON_ATTACH_TIMEOUT_S of its config.pbtxt"
        self._scaling = scaling
        self._workers: list[WorkerProcess] = []
        self._placeholder: Placeholder | None = None
        # Guards the placeholder, so that each one that is made is either stopped or never used.
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        # Set when there is something to do before the next look: to stop, or to sleep for another model.
        self._nudged = threading.Event()
        self._is_asked = self._is_asked_for_extra = False
        self._taken = 0
        # The log has the lack of memory once, until the model has woken again.
        self._has_told_refusal = False
        self.state = SleepState.AWAKE
        """What the workers do."""
        self._thread = threading.Thread(target=self._run, name=f"pytriton-{model.name}-sleep", daemon=True)

    def add(self, worker: WorkerProcess) -> None:
        """Put one more worker to sleep with the others, and wake it with them. Before `start`."""
        worker.is_asleep = bool(worker.is_asleep)
        self._workers.append(worker)
        self.state = SleepState.ASLEEP if all(each.is_asleep for each in self._workers) else SleepState.AWAKE

    def start(self) -> None:
        """Begin to look whether anybody calls the model."""
        self._thread.start()

    def cut(self) -> None:
        """Look no more. Workers that sleep are not woken; they are to be stopped next. `stop` has to follow."""
        self._stopping.set()
        self._nudged.set()
        with self._lock:
            if self._placeholder is not None:
                self._placeholder.stop()

    def stop(self) -> None:
        """Look no more, and wait for the thread that does, for a limited time."""
        self.cut()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @property
    def holds_place(self) -> bool:
        """Whether a request finds somebody to wake: the workers sleep or wake, and the server knows it."""
        placeholder = self._placeholder
        return placeholder is not None and self.state is not SleepState.AWAKE and placeholder.is_attached

    def _ask(self) -> None:
        """Sleep soon if there is nothing to do, because another model needs the memory. With the lock of the budget."""
        self._is_asked = True
        self._nudged.set()

    def _ask_for_extra(self) -> None:
        """End the workers beyond the fewest soon, for another model. With the lock of the budget."""
        self._is_asked_for_extra = True
        self._nudged.set()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.state is SleepState.AWAKE:
            while any(not worker.is_warm for worker in self._awake):
                if self._stopping.wait(_STARTING_S):
                    return
            self._arrive(woken=False)
        while not self._stopping.is_set():
            if not keep_on(self._sleep_once, f"{self._label}: its sleep failed"):
                self._stopping.wait(_PAUSE_AFTER_FAILURE_S)

    def _sleep_once(self) -> None:
        """Sleep when it is time, until the workers are awake again."""
        begin = self._await_time() if self.state is SleepState.AWAKE else _sleep_on
        while begin is not None:
            begin = self._hold_place(begin)

    def _hold_place(self, begin: Callable[[], bool]) -> Callable[[], bool] | None:
        """Sleep, and wake the workers when a request waits.

        Args:
            begin: Puts the workers to sleep when the place is held; returns whether it did.

        Returns:
            What takes the place of `begin` where they have to sleep on; `None` when they are awake.
        """
        placeholder = Placeholder(self._model, self._endpoint)
        with self._lock:
            if self._stopping.is_set():
                return None
            self._placeholder = placeholder
        can_sleep, sleeps_on = True, False
        try:
            if placeholder.hold(begin):
                sleeps_on = not self._wake(placeholder)
        except CannotSleepError as error:
            can_sleep = False
            logger.warning("%s stays awake: %s.", self._label, error)
        finally:
            if not self._stopping.is_set() and not sleeps_on:
                # No other code would wake the workers, so this happens after an error as well.
                self._rouse()
            placeholder.release()
            if not sleeps_on:
                self._arrive(woken=True)
                self.state = SleepState.AWAKE
            with self._lock:
                self._placeholder = None
        if not can_sleep:
            self._account.ask_to_sleep = self._idle_timeout_s = None
            if self._scaling is None:
                self._stopping.wait()
        return _sleep_on if sleeps_on else None

    def _arrive(self, *, woken: bool) -> None:
        # The thread that stops this one may hold the lock of the budget, so the budget is not called any more.
        if not self._stopping.is_set():
            # The budget asks nothing of a model before it has arrived, and what it asked before the sleep is done.
            self._is_asked = False
            self._budget.arrive(self._account, woken=woken)

    def _await_time(self) -> Callable[[], bool] | None:
        """Wait until it is time to sleep; return what puts the workers to sleep, or `None` at the end."""
        # Requests since the last sleep that came before the first check count as a use, too.
        taken: int | None = self._taken
        since = time.monotonic()
        idle_s = self._idle_timeout_s
        pause_s = _USE_S if idle_s is None else max(_LEAST_BETWEEN_LOOKS_S, min(idle_s / _LOOKS, _MOST_BETWEEN_LOOKS_S))
        if self._budget.limit_bytes is not None:
            # The budget needs the time of last use more precisely than that.
            pause_s = min(pause_s, _USE_S)
        if self._scaling is not None:
            pause_s = min(pause_s, LOOK_S)
        while not self._stopping.is_set():
            self._nudged.wait(pause_s)
            self._nudged.clear()
            is_asked, self._is_asked = self._is_asked, False
            if self._stopping.is_set():
                break
            if is_asked and self._is_before_service:
                # The server does not run yet. When it starts, the workers are asleep.
                self._end_workers()
                return _sleep_on
            activity = ask_activity(self._endpoint, _ASK_TIMEOUT_S) if self._is_served else None
            if self._is_asked_for_extra and self._scaling is not None:
                self._is_asked_for_extra = False
                self._scaling.give_back(self._workers)
            elif self._scaling is not None:
                self._scaling.look(self._workers, activity, self._start_one)
            if activity is None or activity.in_flight or activity.taken != taken:
                if activity is not None and taken is not None:
                    self._budget.use(self._account)
                taken = None if activity is None else activity.taken
                since = time.monotonic()
            elif idle_s is not None and time.monotonic() - since >= idle_s and self._budget.leave(self._account):
                self._taken = activity.taken
                return self._put_to_sleep
            if is_asked:
                if activity is not None and not activity.in_flight:
                    self._taken = activity.taken
                    return self._put_to_sleep
                self._budget.stay(self._account)
        return None

    def _start_one(self, worker: WorkerProcess, running: int) -> bool:
        """Wake one worker beside those that run, if there is memory for it; return whether it was woken."""
        return self._budget.grow(self._account, 1 / max(1, running), worker.wake)

    def _rouse(self) -> None:
        """Wake the workers, or as many as run at least."""
        for worker in self._workers:
            # A worker beyond the minimum may have failed before all fell asleep. Requests that wait now must not get
            # that error.
            worker.first_failure = None
        if self._scaling is not None:
            self._scaling.rouse(self._workers)
            return
        for worker in self._workers:
            worker.wake()

    @property
    def _awake(self) -> list[WorkerProcess]:
        return _awake_of(self._workers)

    @property
    def _is_served(self) -> bool:
        awake = self._awake
        return bool(awake) and all(worker.is_attached for worker in awake)

    @property
    def _is_before_service(self) -> bool:
        """Whether all are ready, and no server has met them yet: so nobody can have called the model."""
        awake = self._awake
        return bool(awake) and all(worker.is_warm and not worker.was_attached for worker in awake)

    def _put_to_sleep(self) -> bool:
        activity = ask_activity(self._endpoint, _ASK_TIMEOUT_S)
        # A worker that is not attached, for instance because its process has just ended, is handled by other code.
        if (
            activity is None
            or activity.in_flight
            or activity.taken != self._taken
            or not self._is_served
            or self._stopping.is_set()
        ):
            if not self._stopping.is_set():
                self._budget.stay(self._account)
            return False
        self._end_workers()
        return True

    def _end_workers(self) -> None:
        size, awake = self._budget.read(self._account), len(self._awake)
        is_for_others = self._account.is_asked or self._idle_timeout_s is None
        self.state = SleepState.ASLEEP
        self._budget.sleep(self._account)
        if self._scaling is not None and self._account.size is not None:
            self._account.size = self._scaling.limits.size_at_start(self._account.size, awake)
        for worker in self._workers:
            worker.sleep()
        logger.info(
            "%s sleeps: %s, so its worker processes (%d) end. They took %s. The next request wakes it.",
            self._label,
            "another model needs the memory" if is_for_others else f"no request came for {self._idle_timeout_s:g} s",
            awake,
            size_text(size),
        )

    def _count_ends(self) -> int:
        return sum(worker.ends for worker in self._workers)

    def _wake(self, placeholder: Placeholder) -> bool:
        """Start the workers, and return when one is attached, or when they go on like any that cannot start.

        Returns false where there is no room for them: the requests that wait have been told.
        """
        began, ends = time.monotonic(), self._count_ends()
        self.state = SleepState.WAKING
        try:
            timeout_s = _SHARE_FOR_ROOM * self._attach_timeout_s
            is_first = self._account.least_size is None
            if not self._budget.admit(self._account, timeout_s, self._stopping.is_set, after_starts=is_first):
                return True
        except NoRoomError as error:
            level = logging.DEBUG if self._has_told_refusal else logging.WARNING
            self._has_told_refusal = True
            logger.log(level, "%s cannot wake: %s.", self._label, error)
            self._account.wakes.refused += 1
            self.state = SleepState.ASLEEP
            placeholder.turn_away(f"{error}. Send the request again later, or give the server a larger budget")
            return False
        waited_s = time.monotonic() - began
        self._rouse()
        while not self._stopping.is_set():
            waiting = [each for each in self._workers if each.is_alive and (not each.is_asleep or each.first_failure)]
            if any(worker.is_attached for worker in waiting):
                self._tell_awake(time.monotonic() - began, waited_s)
                return True
            if failure := next((each.first_failure for each in waiting if each.first_failure is not None), None):
                self._sleep_again(placeholder, failure)
                return False
            # A worker that fails at its first start sleeps again, a moment after its end was counted.
            if not waiting or (self._count_ends() > ends and not any(each.is_unproven for each in waiting)):
                # All workers are given up, or the end of one was reported. The placeholder goes, because it would
                # announce a worker that surely comes.
                return True
            placeholder.look()
            with contextlib.suppress(AttachError):
                waiting[0].wait_attached(_STEP_S)
        return True

    def _sleep_again(self, placeholder: Placeholder, failure: WorkerProcessError) -> None:
        """Tell the requests that wait why a model that began asleep does not come up; the next ones try again."""
        self.state = SleepState.ASLEEP
        self._budget.sleep(self._account)
        for worker in self._workers:
            worker.sleep()
        placeholder.turn_away(f"{failure.reason}. The next request tries it again")

    def _tell_awake(self, took_s: float, waited_s: float) -> None:
        self._account.wakes.add(took_s)
        self._has_told_refusal = False
        waited = f", of which it waited {waited_s:.3g} s for memory" if waited_s >= _STEP_S else ""
        logger.info("%s is awake again, after %.3g s%s.", self._label, took_s, waited)
        if took_s > self._attach_timeout_s:
            logger.warning(
                "%s: requests wait %g s for a worker, and those that came first have failed meanwhile. Set %s higher "
                "than it takes to wake.",
                self._label,
                self._attach_timeout_s,
                self._attach_setting,
            )


def _pids(workers: Sequence[WorkerProcess]) -> list[int]:
    return [pid for worker in workers if (pid := worker.pid) is not None]


def _awake_of(workers: Iterable[WorkerProcess]) -> list[WorkerProcess]:
    return [worker for worker in workers if worker.is_alive and not worker.is_asleep]


def are_up(workers: Iterable[WorkerProcess]) -> bool:
    """Return whether there are workers that are not to sleep, and all of them have a process that is ready to serve."""
    awake = _awake_of(workers)
    return bool(awake) and all(worker.is_warm for worker in awake)


def _sleep_on() -> bool:
    """Do nothing more when the place is held: they sleep already."""
    return True
