"""A thread pool with a bounded queue, for the futures client."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ._core.deadline import Deadline
from ._core.forks import call_in_child

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class PoolClosedError(Exception):
    """The pool has been closed."""


class PoolFullError(Exception):
    """The queue has no room."""


class CallPool:
    """A thread pool with a bounded queue.

    It starts a thread when a call comes and no thread is idle, up to ``max_workers``; further calls queue. The
    interpreter does not wait for the threads: it cancels calls that have not begun. ``release`` is called once, when
    the pool is closed and its last call is over.
    """

    def __init__(self, max_workers: int | None, max_queue_size: int | None, release: Callable[[], None]) -> None:
        self.max_workers = max_workers
        self.max_queue_size = max_queue_size
        self._release = release
        self._started = 0
        self._is_released = False
        self.is_closed = False
        self._begin()
        call_in_child(self, CallPool._begin)
        _abandon_at_exit(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._queue_has_room = threading.Condition(self._lock)
        # A forked child drops the calls that its parent has queued: it has none of the parent's threads.
        self._queue: deque[_WorkItem] = deque()
        self._threads: set[threading.Thread] = set()
        # How many threads wait for a call, or are about to.
        self._idle = 0

    def submit(self, call: Callable[[], Result], deadline: Deadline | None) -> Future[Result]:
        """Queue a call and return its future. Raises ``RuntimeError`` if there is no thread for it and none starts."""
        item = _WorkItem(call)
        with self._lock:
            while not self._try_reserve():
                if deadline is None or deadline.is_over:
                    raise PoolFullError
                self._queue_has_room.wait(deadline.remaining_s())
            self._queue.append(item)
            self._has_work.notify()
        return item.future

    def close(self, *, wait: bool) -> None:
        """Take no more calls; those that were taken are carried out.

        Only a thread that runs no call may wait for them.
        """
        with self._lock:
            self.is_closed = True
            threads = self._threads - {threading.current_thread()}
            self._has_work.notify_all()
            self._queue_has_room.notify_all()
        self._release_if_over()
        if wait:
            for thread in threads:
                thread.join()

    def close_soon(self) -> None:
        """Close in another thread: the garbage collector, which calls this, may run in a thread that holds the lock."""
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and abandons the calls
            threading.Thread(
                target=self.close, name="pytriton-client-futures-end", kwargs={"wait": False}, daemon=True
            ).start()

    def abandon(self) -> None:
        """Take no more calls, cancel those that have not begun, and do not wait."""
        with self._lock:
            left = list(self._queue)
            self._queue.clear()
        for item in left:
            item.future.cancel()
        self.close(wait=False)

    def _try_reserve(self) -> bool:
        """Return whether a call can be queued now, and start a thread for it if one is needed and allowed."""
        if self.is_closed:
            raise PoolClosedError
        # An idle thread is about to take this call, so it does not count as queued.
        if len(self._queue) < self._idle:
            return True
        if self.max_workers is None or len(self._threads) < self.max_workers:
            try:
                self._start_thread()
                return True
            except RuntimeError:  # the system has no thread left
                if not self._threads:
                    raise
        if self.max_queue_size is None or len(self._queue) - self._idle < self.max_queue_size:
            return True
        self._queue = deque(item for item in self._queue if not item.future.cancelled())
        return len(self._queue) - self._idle < self.max_queue_size

    def _start_thread(self) -> None:
        # A daemon, so that the interpreter does not wait for it.
        name = f"pytriton-client-futures-{self._started}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)
        self._started += 1
        self._idle += 1

    def _work(self) -> None:
        while (item := self._get()) is not None:
            try:
                item.run()
            except BaseException:
                # The future holds what the call raised. If setting it fails, the thread still takes the next call.
                logger.exception("The result of a call could not be handed over.")
            # Otherwise the result would live on while the thread waits for another call.
            del item
            with self._lock:
                self._idle += 1
        self._release_if_over()

    def _get(self) -> _WorkItem | None:
        """Wait for the next call; ``None`` if the pool is closed."""
        with self._lock:
            while not self._queue:
                if self.is_closed:
                    self._idle -= 1
                    self._threads.discard(threading.current_thread())
                    return None
                self._has_work.wait()
            self._idle -= 1
            self._queue_has_room.notify()
            return self._queue.popleft()

    def _release_if_over(self) -> None:
        with self._lock:
            is_over = self.is_closed and not self._threads and not self._is_released
            self._is_released = self._is_released or is_over
        if is_over:
            self._release()


class _WorkItem:
    """A call and its future."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        """Make the call, unless its future has been cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self.future.set_exception(error)
            # Breaks a reference cycle: the error refers to this frame, which refers to the future and so to the error.
            del self
        else:
            self.future.set_result(result)


_pools: weakref.WeakSet[CallPool] = weakref.WeakSet()


def _abandon_at_exit(pool: CallPool) -> None:
    if not _pools:
        # The function may be registered more than once.
        atexit.register(_abandon_all)
    _pools.add(pool)


def _abandon_all() -> None:
    for pool in list(_pools):
        pool.abandon()
