"""A worker's connection against packets that no proxy backend would send."""

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytriton.proxy.types import make_requests
from pytriton.proxy_backend import AttachError, ConnectionLostError, ProtocolError
from pytriton.proxy_backend.transport.connection import Connection
from pytriton.proxy_backend.wire.greetings import parse_answer

GOLDEN = Path(__file__).parents[2] / "golden"
GREETINGS = ["hello", "welcome", "welcome_minor_9", "refuse", "refuse_major_2", "refuse_major_2_short", "detach"]
# Offset in a packet, width, value.
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 120),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([0, 1, 2, 47, 48, 64, 4096, 1 << 31, (1 << 32) - 1, 1 << 63]) | st.integers(0, (1 << 64) - 1),
    ),
    max_size=3,
)


def changed(raw: bytes, changes: list[tuple[int, int, int]], cut: int | None = None) -> bytes:
    made = bytearray(raw)
    for offset, width, value in changes:
        at = offset // width * width
        made[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    return bytes(made[:cut])


@pytest.mark.slow
@given(
    st.binary(max_size=256)
    | st.builds(
        changed,
        st.sampled_from(GREETINGS).map(lambda name: (GOLDEN / f"{name}.bin").read_bytes()),
        CHANGES,
        st.none() | st.integers(0, 200),
    )
)
@settings(max_examples=2000, deadline=None)
def test_greetings(packet: bytes) -> None:
    try:
        welcome = parse_answer(packet)
    except AttachError as error:
        assert str(error)  # noqa: PT017
        return
    assert len(welcome.model_name.encode()) <= 3 * len(packet)
    assert welcome.arena_budget >= 0


MESSAGES = ["segment", "segment_close", "batch", "release_acknowledge", "release_block", "cancel", "detach", "fail"]
STEP = st.tuples(
    st.sampled_from([*MESSAGES, "good batch", "mutated batch", "noise"]),
    CHANGES,
    st.integers(0, 3),
    st.binary(max_size=96),
)


@pytest.mark.slow
@given(steps=st.lists(STEP, min_size=1, max_size=6))
@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_messages(
    steps: list[tuple[str, list[tuple[int, int, int]], int, bytes]], proxy: Any, golden: ModuleType
) -> None:
    """Whatever comes: the connection ends with one of three errors, or goes on and gives its batches."""
    if not proxy.endpoint.exists():
        proxy.listen()

    def play() -> None:
        peer = proxy.accept()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.welcome()
            for number, (name, changes, count, noise) in enumerate(steps, 1):
                fds = [os.memfd_create("fuzz", os.MFD_ALLOW_SEALING) for _ in range(count)]
                for fd in fds:
                    os.ftruncate(fd, 1 << 14)
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                if name == "noise":
                    packet = noise or b"x"
                elif name in MESSAGES:
                    packet = changed((GOLDEN / f"{name}.bin").read_bytes(), changes)
                else:
                    record = golden.batch_record(
                        number, [golden.Request(outputs=["y"])], [golden.Tensor("x", 2, [1, 3], b"abc")]
                    )
                    if name == "mutated batch":
                        record = changed(record, [(offset * 2, width, value) for offset, width, value in changes])
                    at = number << 12
                    peer.arena[1][at : at + len(record)] = record
                    packet = golden.message(golden.BATCH, batch=number, segment=1, offset=at, length=len(record))
                peer.send(packet, fds)
        # An orderly end, after everything that was sent is read.
        with contextlib.suppress(OSError):
            peer.socket.shutdown(1)
            peer.drained.wait(300)
        peer.close()
        proxy._peers.remove(peer)

    finished = threading.Event()

    def play_and_tell() -> None:
        play()
        finished.set()

    player = threading.Thread(target=play_and_tell)
    player.start()
    connection = Connection(proxy.endpoint, "fuzzed")
    proxy._peers[-1].drained.clear()
    try:
        while (batch := connection.receive()) is not None:
            for request in make_requests(batch, len(batch.rows)):
                with contextlib.suppress(ProtocolError):
                    dict(request.items())
                    dict(request.parameters)
                    list(request.requested_output_names or [])
            connection.fail(batch.number, "seen")
    except (ProtocolError, ConnectionLostError) as error:
        assert str(error)  # noqa: PT017
    finally:
        connection.close()
        proxy._peers[-1].drained.set()
        player.join(300)
    assert finished.is_set()
