"""Which `Triton` objects of this process have a server, and which of them the program has lost.

A program may lose its `Triton` and keep the server: PyTriton stops servers at the end of the process, and scripts rely
on it. So whatever works for a server here (threads, the hook at exit) refers to a *keeper*, a second object of the same
class with the very same attributes, and to the object of the program only weakly:

    program ---> Triton --- attributes <--- keeper <--- threads, hook at exit
                   ^                          |
                   +-------- weakly ----------+

When the object of the program is gone, nobody but `running` can give one for the server again.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from pytriton.server.errors import PortInUseError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.ports import fixed_places

if TYPE_CHECKING:
    from pytriton.triton._triton import Triton

__all__ = ["make_keeper", "make_way", "note", "owned_here", "running"]

logger = logging.getLogger(__name__)

_Kept = TypeVar("_Kept")

# The keepers, oldest first, each with the object of the program. A keeper lives as long as that, or as its server.
_keepers: list[tuple[weakref.ref[Triton], weakref.ref[Triton]]] = []


def running() -> list[Triton]:
    """Return the `Triton` objects of this process whose servers run, the oldest first.

    Also those that the program has no variable for any more, such as that of a notebook's cell that was run again:
    `stop` ends their servers.
    """
    found = []
    for place, (keeper, handle) in enumerate(list(_keepers)):
        triton = keeper()
        if triton is None or not _has_server(triton):
            continue
        own = handle()
        if own is None:
            own = _twin(triton)
            _keepers[place] = keeper, weakref.ref(own)
        found.append(own)
    return found


def make_keeper(handle: _Kept) -> _Kept:
    """Make the object that our own threads refer to in the place of the program's; both have the same attributes."""
    # A dictionary that belongs to neither of them.
    handle.__dict__ = dict(handle.__dict__)
    return _twin(handle)


def note(handle: Triton, keeper: Triton) -> None:
    """Remember an object of the program and its keeper."""
    _keepers[:] = [entry for entry in _keepers if entry[0]() is not None]
    _keepers.append((weakref.ref(keeper), weakref.ref(handle)))


def make_way(config: TritonConfig) -> None:
    """Stop servers of this process on the ports of a new one, in a notebook, if the program has lost their objects.

    Args:
        config: The settings of the new one.
    """
    if not _is_notebook():
        return
    for keeper, handle in _on_ports(fixed_places(config)):
        if handle() is not None:
            # Cycles are only found by looking for them.
            gc.collect()
        if handle() is not None:
            continue
        logger.warning(
            "A Triton object of this notebook that nothing refers to any more has a server at %s, on a port of the new "
            "one, which takes its place: the old server is stopped. Call stop() before you make a new object, or keep "
            "the old one in a variable of its own and give the new one other ports.",
            " and ".join(keeper._urls()),
        )
        keeper.stop()


def owned_here(error: PortInUseError) -> PortInUseError:
    """Say in the error for a port that is taken whether a server of this very process has it."""
    for keeper, _ in _on_ports([(error.address or "", error.port or 0)]):
        return PortInUseError(
            f"TritonConfig.{error.setting}={error.port} cannot be bound on {error.address}: a server of this very "
            f"process, that of another Triton object, listens on it already "
            f"({error.holder or ' and '.join(keeper._urls())}). Call stop() on that object, which "
            f"pytriton.triton.running() gives if you have lost it, or set {error.setting} to another port, or to 0 for "
            f"any free one.",
            setting=error.setting,
            address=error.address,
            port=error.port,
            holder=error.holder,
            exit_code=error.exit_code,
            log_lines=error.log_lines,
        )
    return error


def _on_ports(places: Sequence[tuple[str, int]]) -> Iterator[tuple[Triton, weakref.ref[Triton]]]:
    """Go through the keepers, and objects, whose servers listen at one of these addresses and ports."""
    for keeper, handle in list(_keepers):
        triton = keeper()
        ports = triton._ports() if triton is not None and _has_server(triton) else None
        if triton is not None and ports is not None and any(ports.has(*place) for place in places):
            yield triton, handle


def _has_server(triton: Triton) -> bool:
    # In a fork, they are the parent's.
    return triton._owner == os.getpid() and triton.is_connected()


def _twin(triton: _Kept) -> _Kept:
    twin = object.__new__(type(triton))
    twin.__dict__ = triton.__dict__
    return twin


def _is_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook. IPython is there then, and is not imported otherwise."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    # In a terminal it has no kernel.
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None
