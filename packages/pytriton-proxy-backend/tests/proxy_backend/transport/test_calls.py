"""Calls into a server whose proxy backend the test moves step by step, or that does what it must not."""

import contextlib
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.errors import ArenaFullError, AttachError, CallFailedError, ConnectionLostError
from pytriton.proxy_backend.transport.calls import Call, CallResult, Calls
from pytriton.proxy_backend.wire import layout, messages
from support.waiting import PATIENCE_S, eventually

CALLS = {"capabilities": 7}
X = {"x": np.arange(3, dtype=np.float32)}


@pytest.fixture
def attach(proxy: Any, golden: ModuleType) -> Iterator[Callable[..., tuple[Calls, Any]]]:
    """Connects, and answers the greeting."""
    made: list[Calls] = []
    proxy.listen()

    def connect(**welcome: Any) -> tuple[Calls, Any]:
        peers: list[Any] = []

        def answer() -> None:
            peer = proxy.accept()
            peers.append(peer)
            greeted = peer.receive()
            assert greeted.kind == golden.CALLER
            fields = {"model_version": 1, "arena_budget": 1 << 20, "arena_idle_ms": 10_000, **CALLS, **welcome}
            peer.send(golden.greeting(golden.WELCOME, "model", **fields))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            made.append(Calls(proxy.endpoint, "test"))
        finally:
            thread.join()
        return made[-1], peers[0]

    yield connect
    for calls in made:
        calls.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GREETING_TIMEOUT_S", "ARENA_TIMEOUT_S"):
        monkeypatch.setattr(f"pytriton.proxy_backend.transport.call_connection.{name}", PATIENCE_S)


def next_call(peer: Any, golden: ModuleType) -> Any:
    """The next CALL; what comes before it is noted."""
    while True:
        packet = peer.receive()
        if packet.kind == golden.CALL:
            return packet
        if packet.kind != golden.CANCEL:
            assert peer.keep_account(packet), packet


def answer_of(call: Call) -> CallResult:
    return call.result(PATIENCE_S)


def respond(peer: Any, golden: ModuleType, number: int, record: bytes, flags: int = 3, at: int = 0) -> None:
    if 1 not in peer.arena:
        peer.segment(1, 1 << 20)
    peer.arena[1][at : at + len(record)] = record
    peer.message(golden.RESPONSE, flags=flags, batch=number, segment=1, offset=at, length=len(record))


def test_a_call_and_its_answers(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    call = calls.infer("größer", X, ["y"], version=3, request_id="id", parent=(7, 2), stream=True)
    packet = next_call(peer, golden)
    assert (packet.batch, packet.flags, packet.place) == (1, golden.STREAM, golden.INFER)
    assert packet.body == golden.call_body(3, "größer", parent=(7, 2))
    record = peer.outputs[packet.segment][packet.offset : packet.offset + packet.length]
    assert struct.unpack_from("<4sI8xQ", record) == (b"PTB1", 1, 1)
    first = golden.answer_record(
        1, golden.Answer(0, flags=0), [golden.Tensor("y", golden.FP32, [1], b"\0" * 4, owner=0)]
    )
    respond(peer, golden, 1, first, 0)
    failed = golden.answer_record(1, golden.Answer(0, flags=2, error_code=4, error="größer"))
    respond(peer, golden, 1, failed, 0, at=4096)
    peer.message(golden.RELEASE, segment=packet.segment, offset=packet.offset)
    peer.message(golden.RESULT, flags=golden.BATCH_DONE, batch=1)
    results = list(call)
    assert [(result.outputs.keys(), result.final) for result in results] == [
        ({"y"}, False),
        (set(), False),
        (set(), True),
    ]
    error = results[1].error
    assert error is not None
    assert (str(error), error.code) == ("größer", 4)
    # Blocks go back when nothing is a view of them any more, before the next call.
    results.clear()
    calls.infer("other", X)
    again = next_call(peer, golden)
    assert sorted(peer.released) == [(1, 0), (1, 4096)]
    # The place of the first record is free again.
    assert (again.segment, again.offset) == (packet.segment, packet.offset)


def test_what_has_no_record(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(calls.metric_value(5)))
    thread.start()
    packet = next_call(peer, golden)
    assert (packet.place, packet.length, packet.body) == (10, 0, golden.call_body(5, ""))
    bits = int.from_bytes(struct.pack("<d", -2.5), "little")
    peer.message(golden.RESULT, flags=golden.BATCH_DONE, batch=packet.batch, length=bits)
    thread.join()
    assert values == [-2.5]
    errors: list[CallFailedError] = []

    def load() -> None:
        with pytest.raises(CallFailedError) as caught:
            calls.load_model("m", {"file:1/a": b"content"}, config="{}")
        errors.append(caught.value)

    thread = threading.Thread(target=load)
    thread.start()
    packet = next_call(peer, golden)
    body = "größer".encode()
    peer.message(golden.FAIL, flags=golden.BATCH_DONE | golden.INPUT_RELEASED, batch=packet.batch, index=2, body=body)
    thread.join()
    assert [(str(error), error.code) for error in errors] == [("größer", 2)]


def test_a_full_arena(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    large = {"x": np.zeros(600_000, np.uint8)}
    first = calls.infer("m", large)
    with pytest.raises(ArenaFullError):
        calls.infer("m", {"x": np.zeros(2_000_000, np.uint8)})
    made: list[Call] = []
    thread = threading.Thread(target=lambda: made.append(calls.infer("m", large)))
    thread.start()
    packet = next_call(peer, golden)
    peer.message(golden.FAIL, flags=golden.BATCH_DONE, batch=packet.batch, index=1, body=b"no")
    assert str(answer_of(first).error) == "no"
    # Only now its block comes back, as while Triton still reads from it.
    peer.message(golden.RELEASE, segment=packet.segment, offset=packet.offset)
    thread.join()
    assert next_call(peer, golden).batch == 2
    made[0].cancel()
    assert peer.receive()[:4] == (golden.CANCEL, 0, 48, 2)


def test_a_call_that_cannot_be_written_takes_no_room(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    with pytest.raises(struct.error):
        calls.infer("m", X, version=1 << 70)
    first = calls.infer("m", X)
    packet = next_call(peer, golden)
    assert (packet.batch, packet.segment, packet.offset) == (1, 1, 0)
    peer.message(golden.RESULT, flags=golden.BATCH_DONE | golden.INPUT_RELEASED, batch=1)
    assert answer_of(first).final


def test_a_call_with_a_limit_is_cancelled_where_nobody_answers(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    with pytest.raises(TimeoutError, match="did not answer a call within 0"):
        calls.unload_model("m", timeout_s=0.1)
    call = next_call(peer, golden)
    assert call.place == layout.Operation.UNLOAD_MODEL
    assert peer.receive()[:4] == (golden.CANCEL, 0, 48, call.batch)


@pytest.mark.parametrize(
    "wrong",
    [
        "answer to nobody", "outside", "unaligned", "released twice", "of another kind", "cut off", "a descriptor",
        "a segment without one", "closed",
    ],
)  # fmt: skip
def test_a_peer_that_breaks_the_protocol(wrong: str, attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    call = calls.infer("m", X)
    packet = next_call(peer, golden)
    if wrong == "answer to nobody":
        peer.message(golden.RESULT, flags=golden.BATCH_DONE, batch=2)
    elif wrong == "outside":
        peer.message(golden.RESPONSE, flags=golden.BATCH_DONE, batch=1, segment=1, length=64)
    elif wrong == "unaligned":
        peer.segment(1, 4096)
        peer.message(golden.RESPONSE, flags=golden.BATCH_DONE, batch=1, segment=1, offset=8, length=64)
    elif wrong == "released twice":
        for _ in range(2):
            peer.message(golden.RELEASE, segment=packet.segment, offset=packet.offset)
    elif wrong == "of another kind":
        peer.message(golden.BATCH, batch=1)
    elif wrong == "cut off":
        peer.send(golden.message(golden.RESULT, batch=1)[:40])
    elif wrong == "a descriptor":
        peer.send(golden.message(golden.RESULT, batch=1), [os.dup(0)])
    elif wrong == "a segment without one":
        peer.message(golden.SEGMENT, segment=1, length=4096)
    else:
        peer.close()
    error = answer_of(call).error
    assert error is not None
    assert error.code == layout.ErrorCode.UNAVAILABLE
    assert "the call was lost" in str(error)
    with pytest.raises(ConnectionLostError, match="no calls into the server any more"):
        calls.infer("m", X)


def test_what_nobody_foresaw_ends_all_calls_with_an_error(
    attach: Callable[..., Any], golden: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, peer = attach()

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("injected")

    pending = calls.infer("model", X)
    monkeypatch.setattr(calls._connection, "_take", fail)
    # The first of its packets ends the connection, which may be before the last is sent.
    with contextlib.suppress(BrokenPipeError):
        respond(peer, golden, next_call(peer, golden).batch, b"")
    error = answer_of(pending).error
    assert "the connection for calls failed: ZeroDivisionError: injected" in str(error)
    with pytest.raises(ConnectionLostError, match="injected"):
        calls.infer("model", X)
    assert "The answers to calls cannot be read: their connection is closed" in caplog.text


def test_a_record_that_cannot_be_read_fails_its_call_alone(attach: Callable[..., Any], golden: ModuleType) -> None:
    calls, peer = attach()
    randomly = random.Random(5)
    tensors = [golden.Tensor("y", golden.FP32, [3], struct.pack("<3f", 1, 2, 3), owner=0)]
    for number in range(1, 301):
        call = calls.infer("m", X)
        packet = next_call(peer, golden)
        assert packet.batch == number
        record = bytearray(golden.answer_record(number, golden.Answer(0, flags=0, parameters={"a": 1}), tensors))
        for _ in range(randomly.randrange(4)):
            record[randomly.randrange(len(record))] = randomly.randrange(256)
        respond(peer, golden, number, bytes(record))
        result = answer_of(call)
        assert result.final
        assert result.error is not None or result.outputs.keys() <= {"y"} or len(result.outputs) == 1
        del result
    call = calls.infer("m", X)
    next_call(peer, golden)
    respond(peer, golden, 301, golden.answer_record(301, golden.Answer(0, flags=0), tensors))
    assert answer_of(call).outputs["y"].tolist() == [1, 2, 3]


def test_a_proxy_backend_without_calls(
    proxy: Any, attach: Callable[..., Any], golden: ModuleType, socket_folder: Path
) -> None:
    with pytest.raises(AttachError, match="takes no calls"):
        attach(capabilities=3)
    refusing = threading.Thread(target=lambda: proxy.accept().send(golden.greeting(golden.REFUSE, "not you")))
    refusing.start()
    with pytest.raises(AttachError, match="refused this worker: not you"):
        Calls(proxy.endpoint, "test")
    refusing.join()

    def hang_up() -> None:
        peer = proxy.accept()
        peer.receive()
        peer.close()

    older = threading.Thread(target=hang_up)
    older.start()
    with pytest.raises(AttachError, match="older"):
        Calls(proxy.endpoint, "test")
    older.join()
    with pytest.raises(FileNotFoundError):
        Calls(socket_folder / "nobody", "test")


def test_metrics_are_discarded_wherever_it_is_asked_for(attach: Callable[..., Any], golden: ModuleType) -> None:
    """A finalizer may run while this very thread holds the lock."""
    calls, peer = attach()
    with calls._connection._lock:
        calls.discard_metric(4)
    calls.discard_metric_family(2)
    packets = [next_call(peer, golden) for _ in range(2)]
    assert [(packet.place, packet.body) for packet in packets] == [
        (layout.Operation.METRIC_DELETE, golden.call_body(4, "")),
        (layout.Operation.METRIC_FAMILY_DELETE, golden.call_body(2, "")),
    ]
    peer.message(golden.FAIL, flags=golden.BATCH_DONE, batch=packets[0].batch, index=3, body=b"there is none")
    peer.message(golden.RESULT, flags=golden.BATCH_DONE, batch=packets[1].batch)
    eventually(lambda: not calls._connection._pending)
    assert messages.as_float(0) == 0
