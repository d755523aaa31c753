"""A parent that the worker processes of a model are forked from, and those workers."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ..errors import WorkerProcessError
from .child import Launch, StartedProcess, installed_in, installed_version, start_process, start_program
from .forkserver import ROOM, ForkRequests, ForkserverLostError
from .messages import WorkerJob
from .worker_process import RestartLimits, WorkerProcess

__all__ = ["ForkedWorkerProcess", "ParentProcess", "ParentProcesses"]

logger = logging.getLogger(__name__)

_MAIN = "pytriton.proxy_backend.parent_main"
_POLL_S = 0.2
# A parent that is lost while it forks is started again once. If the second one is lost as well, something kills them.
_TRIES = 2
# Exit handlers that the factory has registered in its process may take this long.
_STOP_S = 2.0
_ALONE = (
    "So each process that starts imports everything and calls the factory itself, as with "
    'sleep="process", which takes longer'
)


class ParentProcess(WorkerProcess):
    """Has imported what the factory of a model needs, has called it where that does no harm, and forks workers.

    It is started with the first worker, started again as a worker when it ends by itself, with its forks, and stopped
    with the last one. Where no parent can be kept, or it is given up, workers are started as programs.
    """

    _KIND = "parent process"

    def __init__(self, job: WorkerJob, model_name: str, number: int, *, launch: Launch, limits: RestartLimits) -> None:
        """Prepare it; nothing happens before `enter`."""
        super().__init__(job, model_name, number, launch=launch, limits=limits)
        self._start_process = self._spawn
        self._users = 0
        self._requests: ForkRequests | None = None
        self._is_up = False
        self._asleep_since = 0.0
        self._told = ""

    def enter(self, *, is_asleep: bool = False) -> None:
        """Note one more worker; with the first one the process starts, unless that begins asleep."""
        with self._changed:
            self._users += 1
            is_first = self._thread is None
        if is_first:
            self.is_asleep = self.is_asleep or is_asleep
            self.start()

    def leave(self) -> None:
        """Note that a worker is gone; with the last one the process ends."""
        with self._changed:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self.stop(_STOP_S)

    def stop(self, timeout_s: float, *, in_flight_s: float = math.inf) -> bool:
        """End it; returns whether nothing of it is left. It must have no forks any more."""
        with self._changed:
            requests = self._requests
        if requests is not None:
            requests.close()
        return super().stop(timeout_s, in_flight_s=in_flight_s)

    def sleep(self) -> None:
        """End it until a worker is woken; it must have no forks."""
        self._asleep_since = time.monotonic()
        super().sleep()
        self._ask_over(None)

    def start_fork(
        self, launch: Launch, channel: int, job: int, label: str, is_stopped: Callable[[], bool]
    ) -> StartedProcess:
        """Start a worker process, as `start_process` does: fork it when the parent is ready.

        Args:
            launch: How it is started where it cannot be forked.
            channel: The descriptor of its end of its channel.
            job: That of its job.
            label: What `ps` shows of it.
            is_stopped: Asked again and again; true ends the wait for the parent.

        Raises:
            OSError: It cannot be started, or is stopped.
        """
        for _ in range(_TRIES):
            requests = self._await_up(is_stopped)
            if requests is None:
                break
            try:
                return requests.fork(channel, job, label)
            except ForkserverLostError:
                with self._changed:
                    if self._requests is requests:
                        self._is_up = False
        return start_process(launch, channel, job, label)

    def _await_up(self, is_stopped: Callable[[], bool]) -> ForkRequests | None:
        """Wait until the parent can fork; `None` where there will be none, or not in time."""
        timeout_s = self._limits.start_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(lambda: self._can_fork or not self.is_alive, _POLL_S):
                if is_stopped():
                    raise OSError(errno.ECANCELED, "it is stopped")
                if time.monotonic() >= deadline:
                    self._tell(f"has a parent that was not ready within {timeout_s:g} s. {_ALONE}")
                    return None
            return self._requests if self._can_fork else None

    @property
    def _can_fork(self) -> bool:
        return self._is_up and self._child is not None and self.is_alive

    def _spawn(self, launch: Launch, channel: int, job: int, label: str) -> StartedProcess:
        requests = ForkRequests()
        try:
            descriptors = [channel, job, requests.theirs.fileno()]
            process = start_program(launch, _MAIN, descriptors, label, ROOM)
        except BaseException:
            requests.close()
            raise
        finally:
            requests.theirs.close()
        self._ask_over(requests)
        return process

    def _ask_over(self, requests: ForkRequests | None) -> None:
        """Ask for forks over this connection from now on, when the process is up; the one before ends."""
        with self._changed:
            before, self._requests, self._is_up = self._requests, requests, False
        if before is not None:
            before.close()

    def _supervise(self) -> None:
        super()._supervise()
        self._ask_over(None)

    def _overdue(self, started: float, is_ready: bool, done_since: float | None) -> str | None:
        if self._stop_deadline is not None and not is_ready:
            # No caller waits for what this process is doing.
            return "was stopped"
        if self._was_put_to_sleep:
            if not is_ready:
                return "was put to sleep"
            if time.monotonic() >= self._asleep_since + _STOP_S:
                logger.warning(
                    "%s did not end within %g s after it was put to sleep: something that its factory has asked for at "
                    "the end still runs; it is killed",
                    self._label,
                    _STOP_S,
                )
                return "did not end"
        return super()._overdue(started, is_ready, done_since)

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] != "parent":
            super()._take(message)
            return
        with self._changed:
            # A parent that was put to sleep meanwhile is about to end, so it does not count as up.
            self._is_up = self._requests is not None and not self._was_put_to_sleep
            self._changed.notify_all()
        reason = str(message.get("reason") or "")
        if reason:
            self._tell(
                f"keeps a parent with the imports of its factory alone. {_sentence(reason)}. So each process that "
                "starts calls the factory itself, which takes longer and has the weights for itself"
            )

    def _tell_given_up(self, error: WorkerProcessError) -> None:
        failure = self._failure
        reason = error.reason if failure is None else str(failure.get("text", ""))
        if not self._has_greeted:
            python, theirs, ours = self._launch.command()[0], installed_in(self._launch), installed_version()
            if theirs != ours:
                reason += f" ({python} has pytriton-proxy-backend {theirs or 'without a version'}, this process {ours})"
        self._tell(f"has no parent. {_sentence(reason)}. {_ALONE}")

    def _tell(self, text: str) -> None:
        """Warn, once for the same reason."""
        if text != self._told:
            logger.warning('Model %r: sleep="parent" %s.', self._model_name, text)
        self._told = text


class ForkedWorkerProcess(WorkerProcess):
    """A worker that is forked from a parent at each start of its process.

    Args:
        parent: The parent, which it starts and stops with others.
    """

    def __init__(self, *arguments: Any, parent: ParentProcess, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parent = parent
        self._start_process = self._fork

    def start(self) -> None:
        """Begin to start the process, in a thread that looks after it."""
        self._parent.enter(is_asleep=bool(self.is_asleep))
        try:
            super().start()
        except BaseException:
            self._parent.leave()
            raise

    def wake(self) -> None:
        """Start the process again after `sleep`, and first the parent, if that has ended for want of memory."""
        self._parent.wake()
        super().wake()

    def _supervise(self) -> None:
        try:
            super()._supervise()
        finally:
            self._parent.leave()

    def _fork(self, launch: Launch, channel: int, job: int, label: str) -> StartedProcess:
        return self._parent.start_fork(launch, channel, job, label, lambda: self._stop_deadline is not None)


class ParentProcesses:
    """The parents of the workers of one factory: one for each way to start them."""

    def __init__(self) -> None:
        self._parents: list[tuple[Launch, ParentProcess]] = []

    @property
    def pids(self) -> list[int]:
        """The processes of the parents, as far as there are some."""
        return [pid for _, parent in self._parents if (pid := parent.pid) is not None]

    def sleep(self) -> None:
        """End the parents until a worker of theirs is woken; none has forks."""
        for _, parent in self._parents:
            parent.sleep()

    def find(
        self, job: WorkerJob, model_name: str, number: int, *, launch: Launch, limits: RestartLimits
    ) -> ParentProcess:
        """Return the parent of a worker; it is made with the number of the first one."""
        for each, parent in self._parents:
            if each == launch:
                return parent
        parent = ParentProcess(job, model_name, number, launch=launch, limits=limits)
        self._parents.append((launch, parent))
        return parent


def _sentence(text: str) -> str:
    text = text.rstrip(". ")
    return text[:1].upper() + text[1:]
