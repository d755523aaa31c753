"""A worker in a process of its own: started again when it ends by itself, given up when that happens too often."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AttachError, ProtocolError, WorkerProcessError
from ..runtime.statistics import Counters, WorkerStatistics, add_statistics
from ..system.control_groups import MemoryKills
from ..system.processes import describe_exit, quote_lines
from ..system.shortage import explain
from ..system.threads import call_safely
from ..worker.loading import is_loading
from .child import (
    ChildProcess,
    Launch,
    StartProcess,
    installed_in,
    installed_version,
    missing_in,
    start_process,
)
from .log import WORKER_LOGGER
from .messages import FORMAT, Job, JobRefusedError, WorkerJob
from .metrics import GATHERED, ReceivedMetrics

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_FIRST_DELAY_S = 0.1
_LAST_DELAY_S = 5.0
# Seconds between the limit for requests in flight and SIGKILL.
_KILL_MARGIN_S = 0.5
# Seconds that requests in flight get before a sleep, which are those that came at the last moment. The next process
# starts after they are done.
_SLEEP_S = 1e6
# Seconds that an interpreter may take to end after its worker.
_END_S = 5.0
_FAILED = {"warm-up": "its warm-up failed", "golden": "it does not give the known answer to its warm-up"}


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """When a worker process is started again, and when it is given up."""

    max_crashes: int | None = 5  # with so many ends within `crash_window_s` it is given up; `None` never
    crash_window_s: float = 60.0  # the time in which they count, in seconds
    start_timeout_s: float = 300.0  # how long factory and warm-up may take, in seconds
    # A process that says nothing for so long, in seconds, is replaced, and so is one whose connection the proxy
    # backend has closed while its callable is busy; `None` lets them be.
    silence_timeout_s: float | None = None

    def exceeded(self, age_s: float, silence_s: float, *, is_ready: bool) -> str | None:
        """Return why a process of this age, and silent for so long, has to be killed; None if it has not."""
        if not is_ready:
            limit_s = self.start_timeout_s
            return None if age_s < limit_s else f"was not ready within {limit_s:g} s: it was killed"
        limit = self.silence_timeout_s
        return None if limit is None or silence_s < limit else f"gave no sign of life for {limit:g} s: it was killed"


class WorkerProcess:
    """Serves one model version with one callable, in a process of its own. Used as a `Worker` is.

    A process that ends by itself is started again after 0.1 s, then after twice the time, and so on up to 5 s. One that
    does not come up the first time, raises an unrecoverable error, or is refused, as one of another version, is not.

    States: new --start()--> starting --> attached --crash--> waiting --> starting ... --stop(), or given up--> ended;
    attached --sleep()--> asleep --wake()--> starting; new --begin_asleep(), start()--> asleep
    """

    _KIND = "worker process"
    _LOAD_FAILED = "its factory failed"
    _start_process: StartProcess = staticmethod(start_process)

    def __init__(
        self,
        job: Job,
        model_name: str,
        number: int,
        *,
        launch: Launch | None = None,
        limits: RestartLimits | None = None,
        on_unrecoverable: Callable[[str], None] | None = None,
        on_given_up: Callable[[WorkerProcessError], None] | None = None,
    ) -> None:
        """Prepare a worker; nothing happens before `start`."""
        self._job = job
        self._model_name = model_name
        self._number = number
        self._launch = launch or Launch()
        self._limits = limits or RestartLimits()
        self._on_unrecoverable = on_unrecoverable
        self._on_given_up = on_given_up
        self._output_logger = logging.getLogger(f"{WORKER_LOGGER}{model_name}.{number}")
        self._thread: threading.Thread | None = None
        # Guards all that follows, and signals each change.
        self._changed = threading.Condition()
        self._child: ChildProcess | None = None
        self._ready = self.is_warm = False  # the latter of the present process, which is not to end
        self._attached = self._was_attached = False
        self._detached_since = 0.0
        self._ended = False
        self._error: WorkerProcessError | None = None
        self._stop_deadline: float | None = None
        self._in_flight_s = math.inf
        self.is_asleep: bool | None = None
        """Whether it was put to sleep, and not woken; `None` of one that never sleeps."""
        self._was_put_to_sleep = self._began_asleep = False
        self.first_failure: WorkerProcessError | None = None
        """Why it sleeps again, of one that began asleep and has never come up."""
        self.is_waking = False
        """Whether it was woken, and neither attached nor ended since."""
        self._past: WorkerStatistics = Counters().snapshot()
        # Only the thread of this worker process uses the following attributes.
        self._was_ready = self._has_greeted = False
        self._crashes: collections.deque[float] = collections.deque()
        self.ends = 0
        """How many of its processes ended by themselves, or could not be started."""
        self._failure: dict[str, Any] | None = None
        self._memory_kills = MemoryKills()
        self._heard = 0.0
        self._metrics = ReceivedMetrics()
        self._golden: list[Any] = []
        self.golden_failures = 0 if isinstance(job, WorkerJob) and job.golden is not None else None
        """How many of its processes did not give the known answer to their warm-up; `None` where it has none."""

    # ---- as a Worker ------------------------------------------------------------------------------------------------

    def begin_asleep(self) -> None:
        """Start no process before `wake`; where the first one does not come up, sleep again. Before `start`."""
        self.is_asleep = self._began_asleep = True

    def start(self) -> None:
        """Begin to start the process, in a thread that looks after it."""
        if self._thread is not None:
            raise RuntimeError(f"{self._label} was started before")
        if is_loading():
            raise RuntimeError(
                "a worker process imports this script to find its factory, and must not start servers itself: put what "
                'the script does under `if __name__ == "__main__":`'
            )
        self._detached_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._supervise, name=f"pytriton-{self._model_name}-process-{self._number}", daemon=True
        )
        self._thread.start()

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until the factory has returned and the warm-up is over, in the present process or an earlier one."""
        if not self._wait(lambda: self._ready, timeout_s):
            raise AttachError(f"{self._label} was not ready after {timeout_s:g} s: its factory or its warm-up goes on")

    def wait_attached(self, timeout_s: float) -> None:
        """Wait until the worker is attached."""
        if not self._wait(lambda: self._attached, timeout_s):
            # A caller that waits for several workers in turn has already waited longer than this.
            waited_s = max(timeout_s, time.monotonic() - self._detached_since)
            raise AttachError(f"{self._label} was not attached after {waited_s:.3g} s to {self._job.endpoint}")

    def stop(self, timeout_s: float, *, in_flight_s: float = math.inf) -> bool:
        """Detach: take no more batches, and finish those in flight. Returns whether nothing of it is left."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            # A second call may shorten the time, but not extend it.
            if self._stop_deadline is None or deadline < self._stop_deadline:
                self._stop_deadline = deadline
            self._in_flight_s, self.is_warm = min(in_flight_s, self._in_flight_s), False
            if self._child is not None:
                self._child.stop(min(timeout_s, self._in_flight_s))
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(timeout_s + _KILL_MARGIN_S + _END_S + _POLL_S + 10.0)
        return not thread.is_alive()

    def sleep(self) -> None:
        """End the process when it has finished the requests in flight, and start no other one before `wake`."""
        with self._changed:
            self.is_asleep = self._was_put_to_sleep = True
            # From here on the process detaches, and it does not report that.
            self._attached = self.is_warm = False
            if self._child is not None:
                self._child.stop(_SLEEP_S)

    def wake(self) -> None:
        """Start the process again after `sleep`; at once, or when the one that was put to sleep has ended."""
        with self._changed:
            self.is_asleep, self.is_waking, self.first_failure = False, bool(self.is_asleep), None
            self._changed.notify_all()

    @property
    def is_alive(self) -> bool:
        """Whether it is looked after: it runs, sleeps, or is about to be started again."""
        return self._thread is not None and self._thread.is_alive() and not self._ended

    @property
    def is_attached(self) -> bool:
        """Whether the worker is attached right now."""
        return self._attached

    @property
    def was_attached(self) -> bool:
        """Whether it was ever attached."""
        return self._was_attached

    @property
    def error(self) -> WorkerProcessError | None:
        """Why it is not started again."""
        return self._error

    @property
    def statistics(self) -> WorkerStatistics:
        """The counts of all its processes so far."""
        with self._changed:
            return self._past if self._child is None else add_statistics(self._past, self._child.statistics)

    @property
    def pid(self) -> int | None:
        """The present process; `None` while there is none."""
        child = self._child
        return None if child is None else child.pid

    # ---- the thread -------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self._KIND} {self._number} of model '{self._model_name}'"

    def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_there() or not self.is_alive, timeout_s)
            if is_there():
                return True
            if self._error is not None:
                raise AttachError(str(self._error)) from self._error
            if not self.is_alive:
                raise AttachError(f"{self._label} was stopped")
        return False

    def _supervise(self) -> None:
        error: WorkerProcessError | None = None
        while error is None and self._stop_deadline is None:
            try:
                if not self._await_wake():
                    break
                error = self._run_once()
                if error is not None and self.is_unproven:
                    # `bind` did not wait for this worker, so the cause may be repaired while the server runs.
                    call_safely(_log_failure, error, self._failure)
                    with self._changed:
                        self.is_asleep, self.first_failure, error = True, error, None
                        self._changed.notify_all()
            except Exception as failure:
                # Even the report of the end has failed.
                call_safely(logger.exception, "%s cannot be looked after", self._label)
                error = self._after_failure(failure)
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()
        if error is not None:
            call_safely(self._tell_given_up, error)

    def _await_wake(self) -> bool:
        """Wait as long as it sleeps; return whether a process shall run then."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_asleep or self._stop_deadline is not None)
            self._was_put_to_sleep = False
            return self._stop_deadline is None

    def _after_failure(self, failure: Exception) -> WorkerProcessError | None:
        """Wait until the next process may start; returns why there shall be none."""
        if not self._was_ready or self._limits.max_crashes is not None:
            return self._refusal(f"cannot be looked after: {type(failure).__name__}: {failure}")
        with self._changed:
            self._changed.wait_for(lambda: self._stop_deadline is not None, _LAST_DELAY_S)
        return None

    def _tell_given_up(self, error: WorkerProcessError) -> None:
        if self._failure is not None and self._failure.get("stage") == "unrecoverable":
            if self._on_unrecoverable is not None:
                self._on_unrecoverable(str(self._failure.get("text", "")))
            return
        call_safely(_log_failure, error, self._failure)
        if self._on_given_up is not None:
            self._on_given_up(error)

    def _run_once(self) -> WorkerProcessError | None:
        """Run one process to its end; returns why there shall be no other one."""
        self._failure = None
        self._has_greeted = False
        self._metrics, self._golden = ReceivedMetrics(), []
        child: ChildProcess | None = None
        reason: str | None = None
        try:
            self._memory_kills = MemoryKills()
            child = ChildProcess(self._launch, self._job, self._label, self._output_logger, self._start_process)
            with self._changed:
                self._child = child
                self._was_put_to_sleep = bool(self.is_asleep)  # it may have been woken before it had a process
                if self.is_asleep:
                    child.stop(_SLEEP_S)
                if self._stop_deadline is not None:
                    child.stop(min(max(0.0, self._stop_deadline - time.monotonic()), self._in_flight_s))
            reason = self._look_after(child)
        except Exception as error:
            if child is None and isinstance(error, OSError):
                reason = f"cannot be started: {': '.join(filter(None, [error.filename, explain(error)]))}".rstrip(".")
            else:
                # The process is killed below, because an unwatched one must not stay; another one replaces it.
                reason = f"could not be looked after: {type(error).__name__}: {error}"
                if not isinstance(error, ProtocolError):
                    logger.exception("%s could not be looked after: its process is killed", self._label)
        finally:
            if child is not None:
                child.end()
            GATHERED.end(self)
            with self._changed:
                self._child = None
                self._attached = self.is_warm = False
                self._detached_since = time.monotonic()
                if child is not None:
                    self._past = add_statistics(self._past, child.statistics)
                    child.close()
                self._changed.notify_all()
        # A failure that the code of the process has reported counts even if the process was being put to sleep.
        if self._stop_deadline is not None or (self._was_put_to_sleep and self._failure is None):
            return None
        return self._after_end(child, reason)

    def _look_after(self, child: ChildProcess) -> str | None:
        """Follow a process to its end; returns why it had to be killed, if it had."""
        started = self._heard = time.monotonic()
        is_ready = False
        done_since: float | None = None
        reason = None
        while True:
            for message in self._messages(child):
                kind = message["kind"]
                is_ready = is_ready or kind == "ready"
                if kind in ("done", "failed"):
                    done_since = time.monotonic()
                if kind == "cut" and self._limits.silence_timeout_s is not None:
                    reason = "is still busy with a batch that the proxy backend has given up"
                self._take(message)
            if child.has_ended:
                return reason
            reason = reason or self._overdue(started, is_ready, done_since)
            if reason is not None:
                child.kill()

    def _messages(self, child: ChildProcess) -> list[dict[str, Any]]:
        try:
            messages = child.poll(_POLL_S)
        except ProtocolError as error:
            # Something else in that process wrote to our socket, or the process has another version.
            logger.error("%s sent what cannot be read: %s", self._label, error)
            child.kill()
            return []
        if messages:
            self._heard = time.monotonic()
        return messages

    def _overdue(self, started: float, is_ready: bool, done_since: float | None) -> str | None:
        """Return why a process has to be killed now; None if it does not."""
        now = time.monotonic()
        stop_deadline = self._stop_deadline
        if done_since is not None:
            if now < done_since + _END_S:
                return None
            if stop_deadline is not None:
                logger.warning(
                    "%s did not end within %g s after its worker had: something that its code has started still runs, "
                    "such as a thread that is no daemon; it is killed",
                    self._label,
                    _END_S,
                )
            return f"did not end within {_END_S:g} s after its worker had"
        if stop_deadline is not None:
            if now < stop_deadline + _KILL_MARGIN_S:
                return None
            logger.warning("%s is still busy after the time to stop: it is killed", self._label)
            return "was still busy"
        return self._limits.exceeded(now - started, now - self._heard, is_ready=is_ready)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            self._has_greeted = True
            if message.get("format") != FORMAT:
                text = f"expected messages of format {FORMAT} from it, received {message.get('format')!r}"
                self._failure = {"stage": "refused", "text": text}
                raise JobRefusedError(text)
            logger.debug("%s: pid %s, Python %s", self._label, message.get("pid"), message.get("python"))
        elif kind == "golden":
            self._golden.append(message.get("answer"))
        elif kind == "failed":
            self._failure = message
            if self.golden_failures is not None:
                self.golden_failures += message.get("stage") == "golden"
        elif kind == "metrics":
            if (families := self._metrics.take(message)) is not None:
                labels = {"pytriton_worker": f"{self._model_name}.{self._number}", "pid": str(self.pid)}
                GATHERED.update(self, labels, families)
        elif kind in ("ready", "attached"):
            with self._changed:
                self.is_warm = not self._was_put_to_sleep and self._stop_deadline is None
                if kind == "ready":
                    self._was_ready = self._ready = True
                    self._job = _with_golden(self._job, self._golden)
                else:
                    self._attached = bool(message.get("value")) and not self._was_put_to_sleep
                    self._detached_since = time.monotonic()
                    self._was_attached, self.is_waking = True, False
                self._changed.notify_all()

    def _after_end(self, child: ChildProcess | None, reason: str | None) -> WorkerProcessError | None:
        """Wait until the next process may start; returns why there shall be none."""
        self.ends, self.is_waking = self.ends + 1, False
        exit_code = None if child is None else child.exit_code
        ended = reason or ("could not be started" if child is None else describe_exit(exit_code, self._memory_kills))
        failure = self._failure
        if failure is not None:
            what = {"load": self._LOAD_FAILED, **_FAILED}.get(failure.get("stage", ""), "")
            ended = f"{what or 'it ended'}: {failure.get('text')}"
            if failure.get("stage") == "unrecoverable":
                return self._refusal(ended, child)
            if failure.get("stage") == "refused" and self._is_final:
                return self._refusal(f"was refused: {failure.get('text')}{_versions(self._launch)}", child)
        if not self._was_ready:
            if child is not None and (child.exit_code or 0) > 0 and not self._has_greeted:
                missing = missing_in(self._launch)
                ended += f": {missing}" if missing else ""
            return self._refusal(f"did not come up: {ended}", child, quoted=failure is None)
        count = _count_end(self._crashes, self._limits.crash_window_s)
        most = self._limits.max_crashes
        if most is not None and count >= most:
            text = f"is given up after {count} ends within {self._limits.crash_window_s:g} s; the last time {ended}"
            return self._refusal(text, child, quoted=failure is None)
        delay_s = min(_FIRST_DELAY_S * 2 ** (count - 1), _LAST_DELAY_S)
        pid = "" if child is None else f" (pid {child.pid})"
        _tell_restart(f"{self._label}{pid} {ended}", delay_s, count, self._limits)
        with self._changed:
            self._changed.wait_for(lambda: self._stop_deadline is not None, delay_s)
        return None

    @property
    def is_unproven(self) -> bool:
        """Whether it began asleep, and no process of it has come up so far."""
        return self._began_asleep and not self._was_ready

    @property
    def _is_final(self) -> bool:
        """Whether a refusal ends it: one that served before, and is never given up, waits for somebody to mend it."""
        return not self._was_attached or self._limits.max_crashes is not None

    def _refusal(self, text: str, child: ChildProcess | None = None, *, quoted: bool = False) -> WorkerProcessError:
        facts = {"model_name": self._model_name, "number": self._number, "crashes": len(self._crashes)}
        return _make_error(f"{self._label} {text.rstrip('.')}", child, facts, quoted=quoted)


def _make_error(
    reason: str, child: ChildProcess | None, facts: Mapping[str, Any], *, quoted: bool
) -> WorkerProcessError:
    lines, exit_code = ((), None) if child is None else (child.log_tail, child.exit_code)
    text = f"{reason}.{quote_lines(lines)}" if quoted else reason
    return WorkerProcessError(text, reason=reason, exit_code=exit_code, log_lines=lines, **facts)


def _log_failure(error: WorkerProcessError, failure: Mapping[str, Any] | None) -> None:
    # The text of a refusal says everything; its traceback would add nothing.
    trace = "" if failure is None or failure.get("stage") == "refused" else str(failure.get("traceback", "")).rstrip()
    logger.error("%s%s", error, trace and f"\n{trace}")


def _tell_restart(what: str, delay_s: float, count: int, limits: RestartLimits) -> None:
    logger.warning(
        "%s; it is started again in %g s (end %d%s within %g s)",
        what,
        delay_s,
        count,
        "" if limits.max_crashes is None else f" of at most {limits.max_crashes}",
        limits.crash_window_s,
    )


def _count_end(ends: collections.deque[float], window_s: float) -> int:
    """Add the end of a process to those before it; return how many there are within the time in which they count."""
    now = time.monotonic()
    ends.append(now)
    while ends[0] < now - window_s:
        ends.popleft()
    return len(ends)


def _with_golden(job: Job, answers: list[Any]) -> Job:
    """Return the job of the processes that follow: they give the answers to their warm-up that the first one gave."""
    if not isinstance(job, WorkerJob) or job.golden is None or job.golden["known"]:
        return job
    return dataclasses.replace(job, golden={**job.golden, "known": answers})


def _versions(launch: Launch) -> str:
    """Return which version is here and which one its interpreter has, as a sentence; empty if they are the same."""
    ours, theirs = installed_version(), installed_in(launch)
    if ours == theirs:
        return ""
    python = launch.command()[0]
    return f". {python} has pytriton-proxy-backend {theirs or 'without a version'}, its parent {ours or 'none'}"
