"""A worker that is asleep is woken; one that is awake takes no such message."""

import dataclasses
from pathlib import Path

import pytest

from pytriton.proxy_backend.errors import ProtocolError
from pytriton.proxy_backend.protocol.worker import WorkerProtocol
from pytriton.proxy_backend.wire.greetings import Hello, parse_answer
from pytriton.proxy_backend.wire.layout import CAPABILITIES, Capability

GOLDEN = Path(__file__).parents[2] / "golden"


def attached(capabilities: Capability) -> WorkerProtocol:  # type: ignore[type-arg] # no block is ever freed
    state: WorkerProtocol = WorkerProtocol(Hello(name="w", capabilities=capabilities), print)  # type: ignore[type-arg]
    welcome = dataclasses.replace(parse_answer((GOLDEN / "welcome.bin").read_bytes()), capabilities=capabilities)
    packet = welcome.pack()
    state.receive(packet, len(packet))
    return state


def test_wake() -> None:
    wake = (GOLDEN / "wake.bin").read_bytes()
    asleep = attached(CAPABILITIES | Capability.ASLEEP)
    asleep.receive(wake, len(wake))
    assert asleep.is_woken
    with pytest.raises(ProtocolError, match="which a proxy backend does not send to an attached worker"):
        attached(CAPABILITIES).receive(wake, len(wake))
