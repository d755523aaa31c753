"""The addresses that a name stands for: how they are found and tried in which order, and how errors tell of them.

An address that drops what it is sent would take all the time that there is. So the next one is tried a little later, or
as soon as one fails, and the first that answers is taken (RFC 8305).
"""

from __future__ import annotations

import copy
import itertools
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

ATTEMPT_DELAY_S = 0.25
"""How many seconds an attempt to connect is alone before the next one begins."""

Address = tuple[int, int, int, str, Any]
"""An address as ``socket.getaddrinfo`` returns it."""


# The questions to the resolver, by the process that asks: a forked child does not have its parent's threads.
_look_ups: dict[tuple[int, str, int], Future[list[Address] | Exception]] = {}


class ConnectTimeoutError(TimeoutError):
    """The time was over before there was a connection; the text names the addresses."""


def numeric_addresses(hostname: str, port: int) -> list[Address]:
    """Return the address that a host is given by; none if it is given by a name."""
    try:
        return list(socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return []


def start_look_up(hostname: str, port: int) -> Future[list[Address] | Exception]:
    """Ask for the addresses of a name in a thread, because the resolver keeps no deadline.

    While a question is open, nobody else asks it, so that a resolver that is stuck holds one thread for each name.
    """
    from concurrent.futures import Future  # it costs time, and most addresses are numeric

    key = (os.getpid(), hostname, port)
    own: Future[list[Address] | Exception] = Future()
    own.set_running_or_notify_cancel()  # who leaves must not cancel it for the others
    shared = _look_ups.setdefault(key, own)
    if shared is own:
        try:
            threading.Thread(target=_look_up, args=(key, own), name="pytriton-client-look-up", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            _look_up(key, own)
    return shared


def _look_up(key: tuple[int, str, int], answer: Future[list[Address] | Exception]) -> None:
    _, hostname, port = key
    found: list[Address] = []
    failure: Exception | None = None
    try:
        found = list(socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM))
    except UnicodeError as error:
        # The resolver raises this for a name with an empty label, or with a label of more than 63 characters.
        failure = OSError(f"{hostname!r} cannot be a host name: {error}")
    except Exception as error:
        failure = error
    finally:
        del _look_ups[key]
    answer.set_result(found if failure is None else failure)


def addresses_of(answer: list[Address] | Exception) -> list[Address]:
    """Return what a look-up has found, or raise an error of the caller's own: others may share the look-up."""
    if isinstance(answer, Exception):
        raise copy.copy(answer)
    return answer


def order_addresses(found: Sequence[Address], hostname: str = "") -> list[Address]:
    """Return addresses so that IPv6 and IPv4 take turns, because one of them may not work at all.

    `localhost` has both (RFC 6761), whatever the system says.
    """
    if hostname.lower() == "localhost" and found:
        _, kind, protocol, name, (_, port, *_) = found[0]
        both: list[Address] = [
            (socket.AF_INET, kind, protocol, name, ("127.0.0.1", port)),
            (socket.AF_INET6, kind, protocol, name, ("::1", port, 0, 0)),
        ]
        families_found = {address[0] for address in found}
        found = [*found, *(address for address in both if address[0] not in families_found)]
    if len(found) < 2:
        return list(found)
    families: dict[int, list[Address]] = {}
    for address in dict.fromkeys(found):
        families.setdefault(address[0], []).append(address)
    turns = itertools.zip_longest(*families.values())
    return [address for turn in turns for address in turn if address is not None]


class Attempts:
    """What has been tried to connect to a host."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        # Whether the resolver is asked for the addresses.
        self.is_looking_up = False
        # The error of each address that was tried; ``None`` while it is not known.
        self.failures: dict[Address, OSError | None] = {}

    def error(self) -> OSError:
        """Return the error of a host none of whose addresses can be reached."""
        failures = list(self.failures.values())
        if len(failures) == 1 and failures[0] is not None:
            return failures[0]
        if not failures:
            return OSError(f"the host name {self._hostname!r} has no address")
        return OSError(f"no address of {self._hostname} can be reached: {self._describe()}")

    def timeout_error(self) -> TimeoutError:
        """Return the error of a host that was not reached in time."""
        if self.is_looking_up:
            return ConnectTimeoutError(f"The name {self._hostname} was not looked up.")
        if not self.failures:
            return TimeoutError("the deadline is over")
        return ConnectTimeoutError(f"No address of {self._hostname} was reached: {self._describe()}.")

    def _describe(self) -> str:
        return ", ".join(f"{address[4][0]} ({_reason(error)})" for address, error in self.failures.items())


def _reason(error: OSError | None) -> str:
    if error is None:
        return "no answer"
    # asyncio's own text says less.
    return os.strerror(error.errno) if error.errno else str(error)
