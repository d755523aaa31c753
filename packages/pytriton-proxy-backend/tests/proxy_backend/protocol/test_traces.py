"""Both ends of a connection against the recorded conversations in `golden/traces`."""

import collections
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from pytriton.proxy_backend.errors import AttachError, ProtocolError, VersionMismatchError
from pytriton.proxy_backend.protocol.proxy import EndpointSettings, ProxyProtocol, SentBatch
from pytriton.proxy_backend.protocol.segments import PeerSegments, State
from pytriton.proxy_backend.protocol.worker import WorkerProtocol
from pytriton.proxy_backend.python_proxy.protocol import ZmqProxyProtocol, ZmqWorkerProtocol
from pytriton.proxy_backend.wire import messages
from pytriton.proxy_backend.wire.greetings import Hello
from support.paths import load_program

FOLDER = Path(__file__).parents[2] / "golden"
TRACES = sorted((FOLDER / "traces").glob("*.trace"))


class Block(NamedTuple):
    """A block as the protocol sees it."""

    segment: int
    offset: int


class Side:
    """What both replays have in common: packets to be sent and events, in order."""

    def __init__(self) -> None:
        self.packets: collections.deque[bytes] = collections.deque()
        self.events: collections.deque[str] = collections.deque()

    def freed(self, block: Any) -> None:
        self.events.append(f"freed {block.segment} {block.offset}")

    def do_segment(self, number: int, length: int) -> None:
        self.packets.append(messages.pack_segment(number, length))

    def do_close(self, number: int) -> None:
        self.packets.append(messages.pack_segment_close(number))


class WorkerSide(Side):
    """A worker: no callable, no memory, no socket."""

    def __init__(self, golden: ModuleType, settings: dict[str, int], link: str) -> None:
        super().__init__()
        hello = Hello(
            name="worker",
            model_name="model",
            model_version=1,
            tensors_digest=golden.DIGEST,
            max_in_flight=settings["max_in_flight"],
        )
        self.link = link
        self.state: WorkerProtocol[Block] = (ZmqWorkerProtocol if link == "zmq" else WorkerProtocol)(hello, self.freed)
        self.packets.append(self.state.greet())

    def receive(self, packet: bytes, descriptors: int, parts: list[int]) -> None:
        if self.link == "zmq" and descriptors:
            # It comes over the other socket.
            header = messages.read_header(packet, len(packet))
            self.state.segments.announce(header[5], header[8], descriptors)
            return
        header = self.state.receive(packet, len(packet), descriptors, *([parts] if self.link == "zmq" else ()))
        if header[0] == messages.BATCH:
            self.events.append(f"batch {header[3]}")
        elif header[0] == messages.CANCEL:
            self.events.append(f"cancelled {header[3]} {header[6]}")
        elif header[0] in (messages.PAUSE, messages.RESUME):
            self.events.append(f"paused {sorted(self.state.paused.get(header[3], ()))}")

    def ended(self) -> str:
        return "detached" if self.state.state is State.CLOSED else "not at all"

    def do_respond(self, number: int, segment: int, offset: int, length: int, how: str) -> None:
        packet, before = self.state.respond(number, Block(segment, offset), length, done=how == "done")
        self.packets.extend([*before, packet])

    def do_fail(self, number: int, code: int, text: str) -> None:
        packet, before = self.state.fail(number, code, text)
        self.packets.extend([*before, packet])

    def do_unused(self, segment: int, offset: int) -> None:
        self.state.segments.released.append((segment, offset))

    def do_tick(self) -> None:
        self.packets.extend(self.state.release())

    def do_detach(self) -> None:
        self.packets.append(self.state.detach())

    def see(self, what: str) -> None:
        kind, *numbers = what.split()
        if kind in ("full", "free"):
            assert self.state.must_wait(*map(int, numbers)) == (kind == "full")
        else:
            assert self.events.popleft() == what


class ProxySide(Side):
    """A proxy backend: no Triton, no memory, no socket."""

    def __init__(self, golden: ModuleType, settings: dict[str, int], link: str) -> None:
        super().__init__()
        self.link = link
        self.greeted = False
        kind = ZmqProxyProtocol if link == "zmq" else ProxyProtocol
        self.state: ProxyProtocol[SentBatch] = kind(
            EndpointSettings(
                model_name="model",
                model_version=1,
                batching=True,
                decoupled=bool(settings["decoupled"]),
                attach_timeout_s=1.0,
                arena_budget_bytes=settings["budget"],
                tensors_digest=golden.DIGEST,
            ),
            self.freed,
        )

    def receive(self, packet: bytes, descriptors: int, parts: list[int]) -> None:
        if not self.greeted:
            self.greeted = True
            self.packets.append(self.state.greet(packet))
            if self.link == "unix" and self.state.takes_batches:
                self.do_segment(1, 1 << 20)
            return
        if self.link == "zmq" and descriptors:
            header = messages.read_header(packet, len(packet))
            self.state.segments.announce(header[5], header[8], descriptors)
            return
        header, batch = self.state.receive(packet, len(packet), descriptors, *([parts] if self.link == "zmq" else ()))
        if batch is None:
            return
        if header[0] == messages.RESPONSE:
            self.events.append(f"answered {batch.number}")
        at = len(self.events)
        if self.state.answered(header, batch, 0.0):
            self.events.insert(at, f"done {batch.number}")
        if self.state.acknowledgement_due:
            self.packets.extend(self.state.acknowledge())

    def ended(self) -> str:
        if self.state.state is State.CLOSED:
            return "refused"
        return "detached" if self.state.state is State.DETACHING and not self.state.in_flight else "not at all"

    def do_batch(self, number: int, offset: int | str, length: int) -> None:
        assert self.state.takes_batches
        batch = SentBatch()
        batch.number = number
        batch.block = Block(0, 0) if isinstance(offset, str) else Block(1, offset)
        self.packets.append(self.state.send_batch(batch, length, 0.0))

    def do_cancel(self, number: int, request: int) -> None:
        self.packets.extend(self.state.cancel(number, request))

    def do_unused(self, segment: int, offset: int) -> None:
        self.state.segments.released.append((segment, offset))

    def do_tick(self) -> None:
        self.packets.extend(self.state.acknowledge())

    def see(self, what: str) -> None:
        assert self.events.popleft() == what


SIDES: dict[str, type[WorkerSide] | type[ProxySide]] = {"worker": WorkerSide, "proxy": ProxySide}


def cases() -> Iterator[Any]:
    for path in TRACES:
        for side in path.read_text().splitlines()[1].split()[1:]:
            yield pytest.param(path, side, id=f"{path.stem}-{side}")


def comparable(packet: bytes) -> bytes:
    """Return a packet without what is free in it: the sender of a greeting, and the text of a refusal."""
    kind = struct.unpack_from("<H", packet)[0]
    if kind not in (messages.HELLO, messages.WELCOME, messages.REFUSE):
        return packet
    if kind == messages.REFUSE:
        return packet[:4] + packet[48:60]
    return packet[:60] + packet[68:]


@pytest.mark.parametrize(("path", "side"), list(cases()))
def test_trace(path: Path, side: str, golden: ModuleType) -> None:
    lines = [line.split() for line in path.read_text().splitlines()[1:]]
    facts = {words[0]: words[1:] for words in lines[:3]}
    settings = {name: int(value) for name, value in (fact.split("=") for fact in facts["settings"])}
    replay = SIDES[side](golden, settings, facts["link"][0])
    error: Exception | None = None
    for verb, *words in lines[3:]:
        if verb == "end":
            if words[0] != side:
                continue
            expected = {"violation": ProtocolError, "refused": AttachError, "version": VersionMismatchError}
            if error is None:
                assert replay.ended() == words[1]
            else:
                assert type(error) is expected[words[1]], error
                error = None
            continue
        assert error is None or verb == "see", f"{error} before {verb} {words}"
        if words[0] != side:
            if verb == "send":
                packet = bytes.fromhex(words[4])
                parts = [] if words[3] == "-" else [int(words[3])]
                try:
                    replay.receive(packet, int(words[2]), parts)
                except (ProtocolError, AttachError) as raised:
                    error = raised
        elif verb == "send":
            assert replay.packets, f"{words[1]} was not sent"
            assert comparable(replay.packets.popleft()) == comparable(bytes.fromhex(words[4])), words[1]
        elif verb == "do":
            arguments = [int(word) if word.isdigit() else word for word in words[2:]]
            getattr(replay, f"do_{words[1]}")(*arguments)
        elif verb == "see":
            replay.see(" ".join(words[1:]))
        else:
            assert verb == "write"
    if error is not None:
        raise error
    assert not replay.packets
    assert not replay.events


def test_traces_are_what_the_generator_makes(golden: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "generate", golden)
    module = load_program(FOLDER / "generate_traces.py")
    assert list(module.stale_traces()) == []
    assert {path.name for path in TRACES} == set(module.traces())


def test_more_segments_than_anybody_needs_are_refused() -> None:
    segments = PeerSegments(1 << 40)
    for number in range(4096):
        segments.announce(number, 64, 1)
    with pytest.raises(ProtocolError, match="more than 4096"):
        segments.announce(4096, 64, 1)
    segments.close(0)
    segments.announce(4096, 64, 1)


def test_a_batch_expires_once_and_a_silent_worker_is_lost(golden: ModuleType) -> None:
    made = EndpointSettings(
        model_name="m", model_version=1, batching=True, decoupled=False, attach_timeout_s=1.0,
        arena_budget_bytes=1 << 20, execution_timeout_s=2.0,
    )  # fmt: skip
    state: ProxyProtocol[SentBatch] = ProxyProtocol(made, lambda block: None)
    state.greet(Hello(name="w", max_in_flight=2).pack())
    batches = [SentBatch(), SentBatch()]
    for number, batch in enumerate(batches, 1):
        batch.number, batch.block = number, Block(1, 64 * number)
        state.send_batch(batch, 64, now=10.0 + number)
    assert state.expire(12.9) == []
    assert state.expire(13.0) == [batches[0]]
    assert state.expire(13.1) == []
    assert not state.takes_batches
    assert not state.is_lost(13.9)
    assert state.is_lost(14.0)
    # Whatever comes shows that it is alive.
    state.receive(messages.pack_segment_close(9), messages.HEADER_SIZE)
    assert not state.is_lost(14.0)
    assert state.close() == batches


def test_a_worker_with_one_batch_at_a_time_is_lost_with_it() -> None:
    made = EndpointSettings(
        model_name="m", model_version=1, batching=True, decoupled=False, attach_timeout_s=1.0,
        arena_budget_bytes=1 << 20, execution_timeout_s=2.0,
    )  # fmt: skip
    state: ProxyProtocol[SentBatch] = ProxyProtocol(made, lambda block: None)
    state.greet(Hello(name="w", capabilities=0).pack())
    batch = SentBatch()
    batch.number, batch.block = 1, Block(1, 0)
    state.send_batch(batch, 64, now=0.0)
    assert state.cancel(1, 0) == []  # it does not read it
    assert state.expire(2.0) == [batch]
    assert state.is_lost(2.0)
