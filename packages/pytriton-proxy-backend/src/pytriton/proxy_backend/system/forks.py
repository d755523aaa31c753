"""What a forked child closes of its parent's.

A child that Python forks, by `os.fork` or `multiprocessing`, has copies of all descriptors of its parent, and what they
stand for lasts as long as the child: a worker whose parent was killed would count as attached, a port as taken, a lock
as held. So in the child each of our descriptors is made one of `/dev/null`. The numbers stay taken: what still knows
them there may use them, in vain, and close them, once, without harm to what the child has opened since.

A library that forks by itself does not come by here: the proxy backends watch the process of each worker for that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

_Owner = TypeVar("_Owner")

# Functions to call in a forked child, by the object that they are about.
_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


class HasDescriptor(Protocol):
    """As a socket."""

    def fileno(self) -> int:
        """Return the descriptor; negative if it is closed."""


def close_in_child(owner: HasDescriptor) -> None:
    """Close the descriptor of an object in forked children, while the object exists."""
    call_in_child(owner, _replace_descriptor)


def call_in_child(owner: _Owner, function: Callable[[_Owner], object]) -> None:
    """Call a function in forked children, with `owner`, while that exists.

    An owner has at most one function; a bound method would keep it alive. The function must take no lock, because a
    thread that the child lacks may hold it.
    """
    _watch_forks()
    _calls[owner] = function


def replace_descriptors(descriptors: Iterable[int | None]) -> None:
    """Replace descriptors of this process by `/dev/null`; skip those that are `None` or negative."""
    wanted = [descriptor for descriptor in descriptors if descriptor is not None and descriptor >= 0]
    if not wanted:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # No descriptor is free; closing the old files matters more than keeping their numbers.
        for descriptor in wanted:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return
    for descriptor in wanted:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _replace_descriptor(owner: HasDescriptor) -> None:
    # A closed file has no descriptor.
    with contextlib.suppress(ValueError):
        replace_descriptors([owner.fileno()])


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for owner, function in list(_calls.items()):
        function(owner)
