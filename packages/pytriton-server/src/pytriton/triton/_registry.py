"""Which `Triton` objects of this process have a server, and which of them the program has lost.

A program may lose its `Triton` and keep the server: PyTriton stops servers at the end of the process, and scripts rely
on it. So whatever works for a server here (threads, the hook at exit) refers to an *alias*, a second object of the same
class with the very same attributes, and to the object of the program only weakly:

    program ---> Triton --- attributes <--- alias <--- threads, hook at exit
                   ^                          |
                   +-------- weakly ----------+

When the object of the program is gone, nobody but `Registry.running` can give one for the server again.
"""

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from pytriton.server.errors import PortInUseError
from pytriton.server.models.notebooks import forget_shown, in_notebook
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.ports import ReservedPorts, fixed_addresses
from pytriton.triton._life import ServerLife

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class _ServerOwner(Protocol):
    _life: ServerLife

    def is_connected(self) -> bool: ...

    def stop(self) -> bool: ...

    def _ports(self) -> ReservedPorts | None: ...

    def _urls(self) -> Sequence[str]: ...


_Owner = TypeVar("_Owner", bound=_ServerOwner)


def make_alias(handle: _T) -> _T:
    """Make an object for our threads to refer to, so that they do not keep the program's object alive.

    Both share their attributes.
    """
    # A dictionary that belongs to neither of them.
    handle.__dict__ = dict(handle.__dict__)
    return _alias_of(handle)


class Registry(Generic[_Owner]):
    """The aliases of `Triton` objects, oldest first, each beside the object that the program holds.

    An alias lives as long as that object, or as the server that was started with it.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[_Owner], weakref.ref[_Owner]]] = []

    def add(self, handle: _Owner, alias: _Owner) -> None:
        """Add an object of the program and its alias."""
        self._entries[:] = [entry for entry in self._entries if entry[0]() is not None]
        self._entries.append((weakref.ref(alias), weakref.ref(handle)))

    def running(self) -> list[_Owner]:
        """Return an object for each server of this process that runs, the oldest first."""
        found = []
        for place, (alias_ref, handle_ref) in enumerate(list(self._entries)):
            alias = alias_ref()
            if alias is None or not _has_server(alias):
                continue
            handle = handle_ref()
            if handle is None:
                handle = _alias_of(alias)
                self._entries[place] = alias_ref, weakref.ref(handle)
            found.append(handle)
        return found

    def stop_lost_servers(self, config: TritonConfig) -> None:
        """In a notebook, stop servers on the ports of a new one if the program has lost their objects."""
        if not in_notebook():
            return
        for alias, handle in self._on_ports(fixed_addresses(config)):
            if handle() is not None:
                # A reference in the shown output of a cell does not count as one of the program.
                forget_shown(handle())
                # Only the garbage collector finds cycles.
                gc.collect()
            if handle() is not None:
                continue
            logger.warning(
                "A Triton object of this notebook that nothing refers to any more has a server at %s, on a port of the "
                "new one, which takes its place: the old server is stopped. Call stop() before you make a new object, "
                "or keep the old one in a variable of its own and give the new one other ports.",
                " and ".join(alias._urls()),
            )
            alias.stop()

    def explain(self, error: PortInUseError) -> PortInUseError:
        """Return a better error if a server of this process has the port; otherwise the same one."""
        for alias, _ in self._on_ports([(error.address or "", error.port or 0)]):
            return PortInUseError(
                f"TritonConfig.{error.setting}={error.port} cannot be bound on {error.address}: a server of this very "
                f"process, that of another Triton object, listens on it already "
                f"({error.holder or ' and '.join(alias._urls())}). Call stop() on that object, which "
                f"pytriton.triton.running() gives if you have lost it, or set {error.setting} to another port, or to 0 "
                f"for any free one.",
                setting=error.setting,
                address=error.address,
                port=error.port,
                holder=error.holder,
                exit_code=error.exit_code,
                log_lines=error.log_lines,
            )
        return error

    def _on_ports(self, places: Sequence[tuple[str, int]]) -> Iterator[tuple[_Owner, weakref.ref[_Owner]]]:
        """Yield the aliases and objects whose servers listen at one of these addresses and ports."""
        for alias_ref, handle in list(self._entries):
            alias = alias_ref()
            ports = alias._ports() if alias is not None and _has_server(alias) else None
            if alias is not None and ports is not None and any(ports.has(*place) for place in places):
                yield alias, handle


def _has_server(owner: _ServerOwner) -> bool:
    # In a forked process they belong to the parent.
    return owner._life.is_own and owner.is_connected()


def _alias_of(handle: _T) -> _T:
    alias = object.__new__(type(handle))
    alias.__dict__ = handle.__dict__
    return alias
