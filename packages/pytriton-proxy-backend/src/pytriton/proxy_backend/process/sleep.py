"""`Sleep`: ends the worker processes of a model that nobody calls, and starts them again when a request waits."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from pathlib import Path

from ..errors import AttachError
from ..model import ModelSpec
from ..system.threads import keep_on
from ..transport.activity import ask_activity
from ..worker.placeholder import CannotSleepError, Placeholder
from .worker_process import WorkerProcess

__all__ = ["Sleep", "SleepState"]

logger = logging.getLogger(__name__)

# So often within the idle time the proxy backend is asked what it has done; a model sleeps a quarter later at most.
_LOOKS = 4
_LEAST_BETWEEN_LOOKS_S, _MOST_BETWEEN_LOOKS_S = 0.05, 60.0
_ASK_TIMEOUT_S = 2.0
_STEP_S = 0.25
_PAUSE_AFTER_FAILURE_S = 1.0


class SleepState(enum.Enum):
    """What the workers of a model do."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"


class Sleep:
    """Puts the worker processes of one model to sleep, all at once, and wakes them all.

    States: AWAKE --no request for `idle_timeout_s`--> ASLEEP --a request waits--> WAKING --one is attached--> AWAKE

    A placeholder is attached before the workers leave, and until one of them is attached again: so the proxy backend
    has somebody to wake whenever a request finds no worker.
    """

    def __init__(
        self,
        model: ModelSpec,
        endpoint: Path,
        idle_timeout_s: float,
        attach_timeout_s: float,
        *,
        instance: str | None = None,
    ) -> None:
        """Prepare it; nothing happens before `start`.

        Args:
            model: What the workers serve.
            endpoint: The socket of the proxy backend.
            idle_timeout_s: How long no request has come before they sleep, in seconds.
            attach_timeout_s: How long a request waits for them, in seconds.
            instance: The instance of a `model.py` that sleeps by itself; `None` where the model sleeps as a whole.
        """
        self._model = model
        self._endpoint = endpoint
        self._idle_timeout_s = idle_timeout_s
        self._attach_timeout_s = attach_timeout_s
        self._label = f"Model {model.name!r} (version {model.version})"
        self._attach_setting = "ModelConfig.attach_timeout_s"
        if instance is not None:
            self._label = f"Instance {instance!r} of model {model.name!r} (version {model.version})"
            self._attach_setting = "the parameter PYTRITON_ATTACH_TIMEOUT_S of its config.pbtxt"
        self._workers: list[WorkerProcess] = []
        self._placeholder: Placeholder | None = None
        # Guards the placeholder: one that is made is stopped, or is not used.
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._taken = 0
        self.state = SleepState.AWAKE
        """What the workers do."""
        self.wake_ups = 0
        """How often they were woken."""
        self._thread = threading.Thread(target=self._run, name=f"pytriton-{model.name}-sleep", daemon=True)

    def add(self, worker: WorkerProcess) -> None:
        """Put one more worker to sleep with the others, and wake it with them. Before `start`."""
        worker.is_asleep = False
        self._workers.append(worker)

    def start(self) -> None:
        """Begin to look whether anybody calls the model."""
        self._thread.start()

    def cut(self) -> None:
        """Look no more. Workers that sleep are not woken; they are to be stopped next. `stop` has to follow."""
        self._stopping.set()
        with self._lock:
            if self._placeholder is not None:
                self._placeholder.stop()

    def stop(self) -> None:
        """Look no more, and wait for the thread that does."""
        self.cut()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def holds_place(self) -> bool:
        """Whether a request finds somebody to wake: the workers sleep or wake, and the server knows it."""
        placeholder = self._placeholder
        return placeholder is not None and self.state is not SleepState.AWAKE and placeholder.is_attached

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not keep_on(self._sleep_once, f"{self._label}: its sleep failed"):
                self._stopping.wait(_PAUSE_AFTER_FAILURE_S)

    def _sleep_once(self) -> None:
        """Sleep when it is time, until somebody has to wake."""
        if not self._await_idle():
            return
        placeholder = Placeholder(self._model, self._endpoint)
        with self._lock:
            if self._stopping.is_set():
                return
            self._placeholder = placeholder
        can_sleep = True
        try:
            if placeholder.hold(self._put_to_sleep):
                self._wake(placeholder)
        except CannotSleepError as error:
            can_sleep = False
            logger.warning("%s stays awake: %s.", self._label, error)
        finally:
            if not self._stopping.is_set():
                # Whatever has happened, nobody else would wake them.
                for worker in self._workers:
                    worker.wake()
            placeholder.release()
            self.state = SleepState.AWAKE
            with self._lock:
                self._placeholder = None
        if not can_sleep:
            self._stopping.wait()

    def _await_idle(self) -> bool:
        """Wait until nobody has called the model for as long as it takes; return false at the end."""
        taken: int | None = None
        since = time.monotonic()
        pause_s = max(_LEAST_BETWEEN_LOOKS_S, min(self._idle_timeout_s / _LOOKS, _MOST_BETWEEN_LOOKS_S))
        while not self._stopping.wait(pause_s):
            activity = ask_activity(self._endpoint, _ASK_TIMEOUT_S) if self._is_served else None
            if activity is None or activity.in_flight or activity.taken != taken:
                taken = None if activity is None else activity.taken
                since = time.monotonic()
            elif time.monotonic() - since >= self._idle_timeout_s:
                self._taken = activity.taken
                return True
        return False

    @property
    def _is_served(self) -> bool:
        return all(worker.is_attached for worker in self._workers)

    def _put_to_sleep(self) -> bool:
        activity = ask_activity(self._endpoint, _ASK_TIMEOUT_S)
        if activity is None or activity.in_flight or activity.taken != self._taken:
            return False
        # With one that is not attached, somebody else is at work: it has just ended, say.
        if not self._is_served or self._stopping.is_set():
            return False
        self.state = SleepState.ASLEEP
        for worker in self._workers:
            worker.sleep()
        logger.info(
            "%s sleeps: no request came for %g s, so its worker processes (%d) end. The next request wakes it.",
            self._label,
            self._idle_timeout_s,
            len(self._workers),
        )
        return True

    def _count_ends(self) -> int:
        return sum(worker.ends for worker in self._workers)

    def _wake(self, placeholder: Placeholder) -> None:
        """Start the workers, and return when one is attached, or when they go on like any that cannot start."""
        began, ends = time.monotonic(), self._count_ends()
        self.state = SleepState.WAKING
        self.wake_ups += 1
        for worker in self._workers:
            worker.wake()
        while not self._stopping.is_set():
            waiting = [worker for worker in self._workers if worker.is_alive]
            if any(worker.is_attached for worker in waiting):
                took_s = time.monotonic() - began
                logger.info("%s is awake again, after %.3g s.", self._label, took_s)
                if took_s > self._attach_timeout_s:
                    logger.warning(
                        "%s: requests wait %g s for a worker, and those that came first have failed meanwhile. Set "
                        "%s higher than it takes to wake.",
                        self._label,
                        self._attach_timeout_s,
                        self._attach_setting,
                    )
                return
            if not waiting or self._count_ends() > ends:
                # All are given up, or one has ended, which was reported. The place says that somebody comes for sure.
                return
            placeholder.look()
            with contextlib.suppress(AttachError):
                waiting[0].wait_attached(_STEP_S)
