"""State that all servers of the process share, and what happens to them at a fork, at exit and at an interrupt.

* A fork takes none of Triton's threads along. In the child every use of a server of the parent is an error, nothing is
  stopped or removed on its behalf, and no server can be started: the library is in the state that it had at the moment
  of the fork, locks included. A process that was forked before the first start is as good as any other.
* At exit of the interpreter the servers that still run are stopped: Triton's threads must not call into an interpreter
  that is gone.
* An interrupt (Ctrl-C) ends the wait of the main thread for Triton. What Triton does goes on, and is undone when it is
  done.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from pytriton.inprocess.capi.errors import UnsupportedError
from pytriton.proxy_backend.system.forks import call_in_child

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class StartedServer(Protocol):
    """A server that runs, or is being started or stopped."""

    name: str

    def stop(self) -> None:
        """Stop it, at exit."""

    def after_fork(self) -> None:
        """Make the copy in a forked child useless, because everything in it belongs to the parent. Takes no lock."""


class _State:
    """The state that is shared if this package is imported a second time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: set[StartedServer] = set()
        self.stopped: list[Callable[[], object]] = []
        """The functions that delete stopped servers that still exist."""
        self.is_watched = False
        self.at_exit: list[Callable[[], object]] = []
        """The functions to call when the servers are stopped at exit."""
        self.forked_from: int | None = None
        self.skip_destructors_at_exit: Callable[[], object] = bool
        self.shared: dict[str, Any] = {}
        """Other objects of which the process has one, by name."""


def _shared_state() -> _State:
    # A process has one Triton library and one exit, so packages that are imported twice share this.
    state: _State = sys.__dict__.setdefault("_pytriton_inprocess", _State())
    return state


_state = _shared_state()


def shared(name: str, make: Callable[[], _Result]) -> _Result:
    """Return the object of this name in the process, shared with a second import of this package; `make` makes it."""
    with _state.lock:
        if name not in _state.shared:
            _state.shared[name] = make()
        made: _Result = _state.shared[name]
        return made


def shared_if_made(name: str, kind: type[_Result]) -> _Result | None:
    """Return the object of this name and kind, if it was made."""
    made = _state.shared.get(name)
    return made if isinstance(made, kind) else None


def check_may_start() -> None:
    """Check that a server can be started in this process, and watch the process from now on."""
    if _state.forked_from is not None:
        raise UnsupportedError(
            f"Expected to start a server in a process of its own, but process {os.getpid()} was forked from "
            f"{_state.forked_from} after the start of a server there, without the threads of Triton's library. Fork "
            "before the first start, or make the process with multiprocessing's 'spawn' or 'forkserver' or with "
            "subprocess.",
            expected="a process that was not forked from one with servers",
            received=_state.forked_from,
        )
    with _state.lock:
        if not _state.is_watched:
            _state.is_watched = True
            _state.skip_destructors_at_exit = _exit_without_destructors()
            call_in_child(_state, _after_fork)
            atexit.register(_exit)


def call_at_exit(function: Callable[[], object]) -> None:
    """Have a function called at the exit of a process with servers, when they are stopped."""
    # Without the lock, which is held while shared objects are made.
    _state.at_exit.append(function)


def register(server: StartedServer) -> None:
    """Remember a server that is about to be started, which also keeps it alive, until `delete_when_alone`."""
    with _state.lock:
        _state.servers.add(server)


def is_alone(server: StartedServer) -> bool:
    """Return whether no other server exists, running or stopped."""
    with _state.lock:
        return _state.servers == {server} and not _state.stopped


def delete_when_alone(server: StartedServer, delete: Callable[[], object] | None) -> None:
    """Delete a stopped server once no other server runs.

    All servers share Triton's pinned memory, and deleting one of them would free it under the others.
    """
    with _state.lock:
        _state.servers.discard(server)
        if delete is not None:
            _state.stopped.append(delete)
        while not _state.servers and _state.stopped:
            _state.stopped.pop()()


def interruptible(work: Callable[[], _Result], undo: Callable[[_Result], object], what: str) -> _Result:
    """Run work that blocks in Triton, so that an interrupt of the main thread gets through at once.

    In the main thread, another thread does it; `undo` gets the result if the interrupt came first.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def clean_up(done: Future[_Result]) -> None:
        # A failure needs no undo, and the interrupt says more.
        if done.exception() is None:
            undo(done.result())

    # Not a daemon thread, because Triton may call the interpreter until it has ended.
    threading.Thread(target=run, name=f"pytriton-inprocess-{what}").start()
    try:
        return future.result()
    except BaseException:
        if not future.done() or future.exception() is None:
            future.add_done_callback(clean_up)
        raise


def _after_fork(state: _State) -> None:
    # A thread of the parent may have held the lock.
    state.lock = threading.Lock()
    state.forked_from = os.getppid()
    state.skip_destructors_at_exit()
    for server in state.servers:
        server.after_fork()


def _exit_without_destructors() -> Callable[[], None]:
    """Return a function that makes the exit of this process skip the destructors of loaded libraries.

    At exit, Triton's library waits for the thread that reads device metrics; a forked child lacks that thread, so the
    wait would crash or hang. Python's own exit has run by then, and buffered output is written.
    """
    c = ctypes.CDLL(None)
    # Looked up before the fork: afterwards the loader's lock may be held for ever.
    on_exit, leave = getattr(c, "on_exit", None), getattr(c, "_exit", None)
    at_exit, flush = getattr(c, "__cxa_atexit", None), getattr(c, "fflush", None)

    def register_in_child() -> None:
        # Exit calls them in reverse order: fflush(NULL), then _exit(status).
        if on_exit is not None:
            on_exit(leave, None)
        if at_exit is not None:
            at_exit(flush, None, None)

    return register_in_child


def _exit() -> None:
    if _state.forked_from is not None:
        # The threads that this concerns are in the parent.
        return
    for server in list(_state.servers):
        logger.debug("Stopping the server %r, which still runs at exit.", server.name)
        try:
            server.stop()
        except Exception:
            # Nobody could catch an exception here.
            logger.exception("The server %r could not be stopped at exit.", server.name)
    for function in _state.at_exit:
        function()
