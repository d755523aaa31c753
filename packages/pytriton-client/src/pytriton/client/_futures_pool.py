"""Threads that carry out calls, as many as are needed, behind a queue that is not longer than it may be."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ._core.deadline import Deadline

__all__ = ["CallPool", "PoolClosedError", "PoolFullError"]

Result = TypeVar("Result")


class PoolClosedError(Exception):
    """The pool has been closed."""


class PoolFullError(Exception):
    """The queue has no room."""


class CallPool:
    """Carries out calls in threads.

    A thread is started when a call comes and no thread is idle, until there are ``max_workers``. After that, calls
    queue. The threads end when the pool is closed and the queue is empty. An interpreter that ends does not wait for
    them: calls that have not begun are cancelled then.

    Args:
        max_workers: The most threads; ``None`` for no limit.
        max_queue_size: The most calls that wait for a thread; ``None`` for no limit.
        release: Called once, when the pool is closed and its last call is over.

    Attributes:
        max_workers: The most threads.
        max_queue_size: The most calls that wait for a thread.
        is_closed: Whether ``close`` has been called.
    """

    def __init__(self, max_workers: int | None, max_queue_size: int | None, release: Callable[[], None]) -> None:
        self.max_workers = max_workers
        self.max_queue_size = max_queue_size
        self._release = release
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._queue: deque[_Item] = deque()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        # Those that wait for a call, or are about to.
        self._idle = 0
        self._is_released = False
        self.is_closed = False
        _remember(self)

    def submit(self, call: Callable[[], Result], room: Deadline | None) -> Future[Result]:
        """Return queue a call.

        Args:
            call: What is done in a thread.
            room: How long to wait for room in the queue; ``None`` is not at all.

        Raises:
            PoolClosedError: The pool has been closed.
            PoolFullError: There was no room in time.
        """
        item = _Item(call)
        with self._lock:
            while not self._make_room():
                if room is None or room.is_over:
                    raise PoolFullError
                self._has_room.wait(room.remaining_s())
            self._queue.append(item)
            self._has_work.notify()
        return item.future

    def close(self, *, wait: bool) -> None:
        """Take no more calls. Those that were taken are carried out. A second call may wait where the first did not.

        Args:
            wait: Whether to wait for them; not for the thread that calls this.
        """
        with self._lock:
            self.is_closed = True
            threads = self._threads - {threading.current_thread()}
            self._has_work.notify_all()
            self._has_room.notify_all()
        self._release_if_over()
        if wait:
            for thread in threads:
                thread.join()

    def abandon(self) -> None:
        """Take no more calls, cancel those that have not begun, and wait for none."""
        with self._lock:
            left = list(self._queue)
            self._queue.clear()
        for item in left:
            item.future.cancel()
        self.close(wait=False)

    def _make_room(self) -> bool:
        """Return whether a call can be queued now. Starts a thread for it if need be."""
        if self.is_closed:
            raise PoolClosedError
        # A call that an idle thread is about to take does not wait.
        if len(self._queue) < self._idle:
            return True
        if self.max_workers is None or len(self._threads) < self.max_workers:
            self._start_thread()
            return True
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
        while (item := self._take()) is not None:
            item.run()
            # Else the last result would live as long as the thread waits for another call.
            del item
            with self._lock:
                self._idle += 1
        self._release_if_over()

    def _take(self) -> _Item | None:
        """Wait for the next call; ``None`` where there will be none."""
        with self._lock:
            while not self._queue:
                if self.is_closed:
                    self._idle -= 1
                    self._threads.discard(threading.current_thread())
                    return None
                self._has_work.wait()
            self._idle -= 1
            self._has_room.notify()
            return self._queue.popleft()

    def _release_if_over(self) -> None:
        with self._lock:
            is_over = self.is_closed and not self._threads and not self._is_released
            self._is_released = self._is_released or is_over
        if is_over:
            self._release()


class _Item:
    """A call and the future that tells of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        """Carry the call out, unless it has been cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self.future.set_exception(error)
            # The error holds this frame, and the frame would hold the future and with it the error.
            del self
        else:
            self.future.set_result(result)


_pools: weakref.WeakSet[CallPool] = weakref.WeakSet()


def _remember(pool: CallPool) -> None:
    if not _pools:
        # No harm where it is registered more than once.
        atexit.register(_abandon_all)
    _pools.add(pool)


def _abandon_all() -> None:
    for pool in list(_pools):
        pool.abandon()
