"""What a forked child does with the clients of its parent, whose threads it has not, and whose locks may be taken."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Owner = TypeVar("_Owner")

_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def call_in_child(owner: _Owner, function: Callable[[_Owner], object]) -> None:
    """Call a function in forked children while ``owner``, its argument, exists.

    An owner has at most one function, which must not take a lock that a thread of the parent may hold.
    """
    _watch_forks()
    _calls[owner] = function


class Lock:
    """A lock that is free in a forked child, even if a thread of the parent holds it."""

    def __init__(self) -> None:
        self._begin()
        call_in_child(self, Lock._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release, self.locked = self._lock.acquire, self._lock.release, self._lock.locked

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for owner, function in list(_calls.items()):
        function(owner)
