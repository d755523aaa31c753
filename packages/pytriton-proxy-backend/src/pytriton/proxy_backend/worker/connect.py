"""How a worker connects: to the socket of a native proxy, or to the address of a Python proxy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from ..model import ModelSpec
from ..transport.connection import Connection
from ..transport.link import Link

if TYPE_CHECKING:
    from ..python_proxy.keys import CurveKeys

Connect = Callable[[str, int, int, Event], Link]
"""Connects and greets, with the worker's name, its most batches in flight, its capabilities, and what ends the wait."""


def make_connect(endpoint: Path | str, model: ModelSpec, keys: CurveKeys | None, *, insecure: bool) -> Connect:
    """Return a function that connects a worker to an endpoint."""
    address = str(endpoint)
    if "://" not in address:

        def connect(name: str, max_in_flight: int, capabilities: int, stopping: Event) -> Link:
            return Connection(
                Path(address),
                name,
                max_in_flight=max_in_flight,
                model=model,
                capabilities=capabilities,
                stopping=stopping,
            )

        return connect

    from ..python_proxy.keys import check_keys_given

    remedy = (
        "Give the worker keys (curve_keys=CurveKeys(...); --curve-secret-key and --curve-server-key), or say so "
        "where nobody else reaches the address (insecure=True; --insecure)"
    )
    check_keys_given(address, has_keys=keys is not None, insecure=insecure, remedy=remedy)

    def connect_over_zmq(name: str, max_in_flight: int, _capabilities: int, stopping: Event) -> Link:
        # Imported late, because most workers do not need ZeroMQ.
        from ..python_proxy.connection import ZmqConnection

        return ZmqConnection(address, name, max_in_flight=max_in_flight, model=model, keys=keys, stopping=stopping)

    return connect_over_zmq
