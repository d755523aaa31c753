"""Access to a running server: its handle, and the calls and requests that use it, which its stop waits for."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from pytriton.inprocess.capi.api import load_api
from pytriton.inprocess.capi.c_types import ServerHandle
from pytriton.inprocess.capi.errors import InvalidArgumentError, TritonError, UnavailableError
from pytriton.inprocess.requests.specs import ModelInterface


class InFlight(Protocol):
    """A request that Triton has and has not finished."""

    def cancel(self) -> None:
        """Ask Triton to cancel it. Called from any thread; must not raise."""


class _Call:
    """A call of the C API that is not over, as a context manager that gives the handle of the server.

    A generator would not do: if a signal interrupts it, an exception may keep it alive in a cycle.
    """

    __slots__ = ("__weakref__", "_access")

    def __init__(self, access: ServerAccess) -> None:
        self._access = access

    def __enter__(self) -> ServerHandle:
        access = self._access
        access._calls.add(self)
        # Checked after the call was noted, because `refuse_calls` sets the flag before it counts calls.
        if access._refusing:
            access._calls.discard(self)
            raise access.refusal()
        return access.handle

    def __exit__(self, *_: object) -> None:
        self._access._calls.discard(self)


class ServerAccess:
    """The handle of a server of the C API, which gives access to calls and requests until it is stopped.

    `model_specs` caches descriptions of models, which may be out of date.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.api = load_api()
        self.handle = ServerHandle()
        self.model_specs: dict[tuple[str, int], ModelInterface] = {}
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        # Weak references: a request whose creation fails disappears with the call, even if signals interrupt the
        # cleanup.
        self._in_flight: dict[int, weakref.ref[InFlight]] = {}
        self._refusing = False
        self._stopped = False
        self._forked_from: int | None = None

    @property
    def is_stoppable(self) -> bool:
        """Whether it runs, and in this process."""
        return not self._stopped and self._forked_from is None

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._forked_from is not None

    def use(self) -> _Call:
        """Return the handle for a call, in a `with` block, and keep the server from being deleted during it."""
        # The object ends with the call, even if a signal comes before or after the block.
        return _Call(self)

    def admit(self, request: InFlight) -> ServerHandle:
        """Note that Triton is about to get a request, and return the handle.

        The caller calls `finish` when Triton has released it.
        """
        self._in_flight[id(request)] = weakref.ref(request)
        # Checked after the request was noted, because `refuse_calls` sets the flag before it counts requests.
        if self._refusing:
            self.finish(request)
            raise self.refusal()
        return self.handle

    def finish(self, request: InFlight) -> None:
        """Note that Triton is done with a request. Does nothing for one that is not known."""
        self._in_flight.pop(id(request), None)

    @property
    def in_flight(self) -> list[InFlight]:
        """The requests that Triton has, or is about to get."""
        requests = [reference() for reference in list(self._in_flight.values())]
        return [request for request in requests if request is not None]

    def refuse_calls(self) -> None:
        """Admit no more calls and requests."""
        self._refusing = True

    def users(self) -> str:
        """Return in words who keeps the server from stopping; empty if nobody does."""
        # They are counted one by one, because a signal may leave dead entries in the set.
        calls, requests = sum(1 for _ in self._calls), len(self.in_flight)
        parts = [f"{requests} requests in flight"] if requests else []
        parts += [f"{calls} calls of other threads"] if calls else []
        return " and ".join(parts)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function that answers with a message, and return the message's JSON."""
        with self.use() as handle:
            return self.api.ask(function, handle, *arguments)

    def after_fork(self) -> None:
        """Make the copy in a forked child useless, because everything in it belongs to the parent."""
        self._refusing = True
        self._forked_from = os.getppid()

    def refusal(self) -> TritonError:
        """Make the error for a user of a server that takes no calls."""
        if self._forked_from is not None:
            return InvalidArgumentError(
                f"Server {self.name!r} runs in process {self._forked_from}, and this is process {os.getpid()}, which "
                "was forked from it without the threads of the server. Use the server in its own process, or start one "
                "in a process made with multiprocessing's 'spawn' or 'forkserver' or with subprocess.",
                expected=self._forked_from,
                received=os.getpid(),
                where=f"server {self.name!r}",
            )
        if self._stopped:
            return InvalidArgumentError(f"Server not started: server {self.name!r} was stopped.")
        return UnavailableError(f"Server {self.name!r} is being stopped and takes no more calls.")
