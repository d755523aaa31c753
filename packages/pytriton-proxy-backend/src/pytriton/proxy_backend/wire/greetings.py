"""Greetings as the Python proxy sends and reads them, and as its workers send theirs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import layout
from .layout import MessageType


class GreetingError(Exception):
    """A worker cannot be let in; the text is the reason, for both."""


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself; of the model that it is for, what is empty or 0 is not compared."""

    name: str
    model_name: str
    model_version: int
    tensors_digest: str
    pid: int
    max_in_flight: int
    capabilities: int
    version: tuple[int, int]
    memory_token: bytes = b""


def pack_greeting(
    kind: MessageType,
    text: str | bytes,
    *,
    max_in_flight: int = 0,
    capabilities: int = 0,
    model_flags: int = 0,
    model_version: int = 0,
    arena_budget: int = 0,
    arena_idle_ms: int = 0,
    execution_timeout_ms: int = 0,
) -> bytes:
    """Return a HELLO, WELCOME or REFUSE, header included."""
    raw = (text if isinstance(text, bytes) else text.encode("utf-8", "replace"))[: layout.MAX_TEXT]
    greeting = layout.GREETING.pack(
        layout.MAGIC, layout.MAJOR, layout.MINOR, os.getpid(), os.geteuid(), max_in_flight, capabilities, model_flags,
        len(raw), model_version, arena_budget, arena_idle_ms, execution_timeout_ms,
    )  # fmt: skip
    size = layout.MESSAGE.size + len(greeting) + len(raw)
    return layout.MESSAGE.pack(kind, 0, size, 0, 0, 0, 0, 0, 0) + greeting + raw


def parse_hello(packet: bytes, *, decoupled: bool) -> Hello:
    """Read what a worker greets with.

    Raises:
        GreetingError: If it is no HELLO, of another major version, or lacks what the model needs.
    """
    start = layout.MESSAGE.size
    if len(packet) < start + layout.GREETING_VERSION.size:
        raise GreetingError(f"expected a greeting, got a packet of {len(packet)} bytes")
    kind, _, size, *_ = layout.MESSAGE.unpack_from(packet)
    magic, major, minor = layout.GREETING_VERSION.unpack_from(packet, start)
    if kind != MessageType.HELLO or size != len(packet) or magic != layout.MAGIC:
        raise GreetingError("expected the greeting of a pytriton worker, got something else")
    if major != layout.MAJOR:
        raise GreetingError(
            f"the worker speaks protocol {major}.{minor}, this proxy {layout.MAJOR}.{layout.MINOR}: the major versions "
            f"must agree. Install the same version of pytriton-proxy-backend for both"
        )
    text_start = start + layout.GREETING.size
    if len(packet) < text_start:
        raise GreetingError(f"the greeting is cut off after {len(packet)} bytes")
    _, _, _, pid, _, max_in_flight, capabilities, _, text_length, model_version, *_ = layout.GREETING.unpack_from(
        packet, start
    )
    if len(packet) < text_start + text_length:
        raise GreetingError(f"the greeting is cut off after {len(packet)} bytes")
    if decoupled and not capabilities & layout.Capability.DECOUPLED:
        raise GreetingError("the model is decoupled, and the worker cannot answer a request more than once")
    text = packet[text_start : text_start + text_length].decode("utf-8", "replace")
    name, model_name, digest, token = [*text.split("\n"), "", "", ""][:4]
    try:
        memory_token = bytes.fromhex(token)
    except ValueError:
        memory_token = b""  # as good as none
    in_flight = min(max(max_in_flight, 1), 1024)
    capabilities &= layout.CAPABILITIES
    return Hello(name, model_name, model_version, digest, pid, in_flight, capabilities, (major, minor), memory_token)
