"""Sockets to a host, opened on an event loop."""

from __future__ import annotations

import asyncio
import socket

from .addresses import (
    ATTEMPT_DELAY_S,
    Address,
    Attempts,
    addresses_of,
    numeric_addresses,
    order_addresses,
    start_look_up,
)


async def open_socket(hostname: str, port: int, attempts: Attempts) -> socket.socket:
    """Connect to the first address of a host that answers."""
    connecting: dict[asyncio.Task[socket.socket], Address] = {}
    found = numeric_addresses(hostname, port)
    if not found:
        attempts.is_looking_up = True
        # This does not use a thread of the loop, because the loop would wait for that thread at its end.
        found = addresses_of(await asyncio.wrap_future(start_look_up(hostname, port)))
        attempts.is_looking_up = False
    left = order_addresses(found, hostname)
    try:
        while left or connecting:
            if left:
                address = left.pop(0)
                attempts.failures[address] = None
                connecting[asyncio.ensure_future(_connect_to(address))] = address
            done, _ = await asyncio.wait(
                connecting, timeout=ATTEMPT_DELAY_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    del connecting[task]
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                attempts.failures[connecting.pop(task)] = error
    finally:
        for task in connecting:
            task.cancel()
            task.add_done_callback(_close_unused)
    raise attempts.error()


def _close_unused(task: asyncio.Task[socket.socket]) -> None:
    """Close a socket that was connected although nobody waits for it any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _connect_to(address: Address) -> socket.socket:
    family, kind, protocol, _, place = address
    connecting = socket.socket(family, kind, protocol)
    try:
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, place)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connecting.close()
        raise
    return connecting
