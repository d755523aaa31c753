"""Greetings: what a worker says of itself in HELLO, and the answer to it, WELCOME or REFUSE."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import layout
from .errors import AttachError, VersionMismatchError
from .layout import CAPABILITIES, GREETING, GREETING_VERSION, MAGIC, MAX_TEXT, Capability, MessageType, ModelFlag
from .limits import MAX_IN_FLIGHT
from .messages import HEADER_SIZE, Buffer, pack_greeting

_OURS = (layout.MAJOR, layout.MINOR)
_KNOWN = sum(Capability)
_BODY = HEADER_SIZE
_TEXT = HEADER_SIZE + GREETING.size


class GreetingError(Exception):
    """A worker cannot be let in; the text is the reason, for both."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a worker says of itself."""

    name: str  # what it calls itself, for people
    model_name: str = ""  # the model that it is for; empty is any
    model_version: int = 0  # the model's version; 0 is any
    tensors_digest: str = ""  # the digest of the model's tensors; empty is any
    max_in_flight: int = 1  # batches that it takes at once
    capabilities: int = CAPABILITIES  # what it can do
    memory_token: bytes = b""  # where it shares memory beside ZeroMQ, what it has told the other socket
    pid: int = 0  # its process
    version: tuple[int, int] = _OURS  # of the protocol that it speaks

    def pack(self, kind: MessageType = MessageType.HELLO) -> bytes:
        """Return the packet that this process sends; a connection for calls greets with CALLER."""
        lines = f"\n{self.model_name}\n{self.tensors_digest}\n{self.memory_token.hex()}".rstrip("\n").encode()
        # The name is for people, so it is cut if it is too long; the identity of the model stays.
        name = self.name.replace("\n", " ").encode("utf-8", "replace")[: max(0, MAX_TEXT - len(lines))]
        return _pack(
            kind,
            name + lines,
            max_in_flight=self.max_in_flight,
            capabilities=self.capabilities,
            model_version=self.model_version,
        )


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What the proxy backend says about the model when a worker attaches; times are in seconds, `None` is no limit."""

    model_name: str
    model_version: int
    batching: bool
    decoupled: bool
    capabilities: Capability
    arena_budget: int
    arena_idle_s: float
    execution_timeout_s: float | None = None
    max_in_flight: int = 1

    def pack(self) -> bytes:
        """Return the packet."""
        return _pack(
            MessageType.WELCOME,
            self.model_name.encode("utf-8", "replace"),
            max_in_flight=self.max_in_flight,
            capabilities=self.capabilities,
            model_flags=ModelFlag.BATCHING * self.batching | ModelFlag.DECOUPLED * self.decoupled,
            model_version=self.model_version,
            arena_budget=self.arena_budget,
            arena_idle_ms=round(self.arena_idle_s * 1000),
            execution_timeout_ms=round((self.execution_timeout_s or 0) * 1000),
        )


def pack_refuse(reason: str) -> bytes:
    """Return a REFUSE."""
    return _pack(MessageType.REFUSE, reason.encode("utf-8", "replace"))


def _pack(
    kind: MessageType,
    text: bytes,
    *,
    max_in_flight: int = 0,
    capabilities: int = 0,
    model_flags: int = 0,
    model_version: int = 0,
    arena_budget: int = 0,
    arena_idle_ms: int = 0,
    execution_timeout_ms: int = 0,
) -> bytes:
    text = text[:MAX_TEXT]
    greeting = GREETING.pack(
        MAGIC, *_OURS, os.getpid(), os.geteuid(), max_in_flight, capabilities, model_flags, len(text), model_version,
        arena_budget, arena_idle_ms, execution_timeout_ms,
    )  # fmt: skip
    return pack_greeting(kind, greeting + text)


def _version(packet: Buffer) -> tuple[int, tuple[int, int]] | None:
    """Return the kind of a greeting and its version, all that other major versions promise; `None` if it is none."""
    if len(packet) < _BODY + GREETING_VERSION.size:
        return None
    kind, _, size, *_ = layout.MESSAGE.unpack_from(packet)
    magic, major, minor = GREETING_VERSION.unpack_from(packet, _BODY)
    return (kind, (major, minor)) if magic == MAGIC and size == len(packet) else None


def parse_hello(packet: Buffer, *, decoupled: bool) -> Hello:
    """Read the greeting of a worker."""
    if len(packet) < _BODY + GREETING_VERSION.size:
        raise GreetingError(f"expected a greeting, got a packet of {len(packet)} bytes")
    kind, version = _version(packet) or (None, _OURS)
    if kind != MessageType.HELLO:
        raise GreetingError("expected the greeting of a pytriton worker, got something else")
    if version[0] != layout.MAJOR:
        raise GreetingError(
            f"the worker speaks protocol {_shown(version)}, this proxy {_shown(_OURS)}: the major versions must agree. "
            f"Install the same version of pytriton-proxy-backend for both"
        )
    fields = GREETING.unpack_from(packet, _BODY) if len(packet) >= _TEXT else None
    if fields is None or len(packet) < _TEXT + fields[8]:
        raise GreetingError(f"the greeting is cut off after {len(packet)} bytes")
    _, _, _, pid, _, max_in_flight, capabilities, _, text_length, model_version, *_ = fields
    if decoupled and not capabilities & Capability.DECOUPLED:
        raise GreetingError("the model is decoupled, and the worker cannot answer a request more than once")
    text = bytes(packet[_TEXT : _TEXT + text_length]).decode("utf-8", "replace")
    name, model_name, digest, token = [*text.split("\n"), "", "", ""][:4]
    try:
        memory_token = bytes.fromhex(token)
    except ValueError:
        memory_token = b""  # the same as none
    return Hello(
        name=name,
        model_name=model_name,
        model_version=model_version,
        tensors_digest=digest,
        max_in_flight=min(max(max_in_flight, 1), MAX_IN_FLIGHT),
        capabilities=capabilities & (CAPABILITIES | Capability.STANDS_IN),
        memory_token=memory_token,
        pid=pid,
        version=version,
    )


def parse_answer(packet: Buffer) -> Welcome:
    """Read the answer to a greeting."""
    if len(packet) < _BODY + GREETING_VERSION.size:
        raise AttachError(f"an answer of {len(packet)} bytes came to the greeting, which is too short for one")
    kind, version = _version(packet) or (None, _OURS)
    if kind is None:
        raise AttachError("the peer on this socket is not a pytriton proxy backend")
    # Another major version guarantees only its magic and version; the rest is shown as far as it can be read.
    fields = GREETING.unpack(bytes(packet[_BODY:_TEXT]).ljust(GREETING.size, b"\0"))
    max_in_flight, capabilities, model_flags, text_length, model_version, budget, idle_ms, timeout_ms = fields[5:]
    text = bytes(packet[_TEXT : _TEXT + text_length]).decode("utf-8", "replace")
    if version[0] != layout.MAJOR:
        # It mostly says the same.
        told = "" if not text or (_shown(version) in text and _shown(_OURS) in text) else f" (it says: {text})"
        raise VersionMismatchError(
            f"this worker speaks protocol {_shown(_OURS)}, the proxy backend {_shown(version)}: the major versions "
            f"must agree. Install the same version of pytriton-proxy-backend for both{told}",
            ours=_OURS,
            theirs=version,
        )
    if len(packet) < _TEXT + text_length:
        raise AttachError(
            f"the answer to the greeting, protocol {_shown(version)}, is cut off after {len(packet)} bytes"
        )
    if kind == MessageType.REFUSE:
        raise AttachError(f"the proxy backend refused this worker: {text}")
    if kind != MessageType.WELCOME:
        raise AttachError(f"message {kind} came instead of an answer to the greeting")
    return Welcome(
        model_name=text,
        model_version=model_version,
        batching=bool(model_flags & ModelFlag.BATCHING),
        decoupled=bool(model_flags & ModelFlag.DECOUPLED),
        capabilities=Capability(capabilities & _KNOWN),
        arena_budget=budget,
        arena_idle_s=idle_ms / 1000,
        execution_timeout_s=timeout_ms / 1000 or None,
        max_in_flight=max_in_flight,
    )


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
