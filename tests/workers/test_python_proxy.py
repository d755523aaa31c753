"""The Python proxy: protocol 1 over ZeroMQ, from Triton's Python backend to workers here and on other hosts."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import make_requests
from pytriton.proxy_backend import AttachError, ProtocolError, Worker, description_path, write_description
from pytriton.proxy_backend.protocol.segments import PeerSegments
from pytriton.proxy_backend.python_proxy.keys import CurveKeys, KeyFileError, KeysMissingError
from pytriton.proxy_backend.python_proxy.memory import MemoryCaller, SharedMemory, memory_path
from pytriton.proxy_backend.python_proxy.model import listen
from pytriton.proxy_backend.python_proxy.sockets import BindError, WouldBlockError, ZmqSocket, make_keys
from pytriton.proxy_backend.python_proxy.workers import AttachedWorker, BatchInFlight
from pytriton.proxy_backend.settings import PythonProxySettings
from pytriton.proxy_backend.transport.arena import ViewedBlock
from pytriton.proxy_backend.wire import messages
from pytriton.proxy_backend.wire.batch import BatchReader, RequestData, lay_out_batch
from pytriton.proxy_backend.wire.greetings import Hello, pack_refuse, parse_answer
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter, read_responses
from support.callables import double
from support.processes import stopped
from support.python_proxy import (
    Caller,
    Link,
    Proxy,
    network_namespace,
    proxy,
    spec,
    wait_line,
    worker,
    worker_process,
)
from support.waiting import PATIENCE_S, eventually

UNAVAILABLE = int(ErrorCode.UNAVAILABLE)
# Short enough for tests that wait for it, and long enough for a machine that is busy.
LINK_TIMEOUT_S = 3.0


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        yield Path(folder)


@pytest.fixture
def address(short: Path) -> str:
    return f"ipc://{short}/model.1.zmq"


@pytest.fixture(params=["shared memory", "messages"])
def either_address(request: pytest.FixtureRequest, short: Path) -> str:
    """An address where tensors travel in shared memory, or one where they do not."""
    if request.param == "shared memory":
        return f"ipc://{short}/model.1.zmq"
    # There is room for the link's own socket alone.
    return f"ipc://{short}/{'m' * (105 - len(str(short)))}"


# ---- records -------------------------------------------------------------------------------------------------------


def read_batch(record: bytearray, number: int, *, batching: bool = True) -> Any:
    """Reads a batch as a worker does."""
    block = ViewedBlock.__new__(ViewedBlock, (len(record),), np.uint8, record, 0)
    block.released = collections.deque()
    block.place = (0, 0)
    batch = BatchReader(batching).read(block, memoryview_of(record), 0, number)
    return make_requests(batch, len(batch.rows))


def memoryview_of(record: bytearray) -> Any:
    return (ctypes.c_char * len(record)).from_buffer(record)


def written(record: Record) -> bytearray:
    memory = bytearray(record.layout.length)
    record.write(memory, 0, 7)
    return memory


def record_of(requests: Sequence[RequestData], *, batching: bool = True) -> Any:
    return written(lay_out_batch(requests, batching=batching, received_ns=1, sent_ns=2))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "object"])
def test_workers_read_what_the_proxy_writes(dtype: str) -> None:
    values = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    if dtype == "object":
        values = np.array([[b"a", b"", "ü".encode()], [b"b", b"\0", b"c"]], dtype=object)
    requests = [
        RequestData(
            {"x": values, "lone": values[:, :1]} if index == 1 else {"x": values},
            outputs=["y", "z"],
            request_id=f"request {index}",
            correlation_id="text" if index else 12,
            flags=index,
            timeout_us=5,
            trace_context="00-11-22-01",
            parameters={"i": -3, "b": True, "d": 0.5, "s": "naïve"},
        )
        for index in range(3)
    ]
    for index, request in enumerate(read_batch(record_of(requests), 7)):
        np.testing.assert_array_equal(request["x"], values)
        assert ("lone" in request) == (index == 1)
        assert request.parameters == {"i": -3, "b": True, "d": 0.5, "s": "naïve"}
        assert type(request.parameters["b"]) is bool
        assert request.requested_output_names == ["y", "z"]
        assert (request.request_id, request.correlation_id) == (f"request {index}", "text" if index else 12)
        assert request.timeout_us == 5


def test_inputs_that_do_not_fit_together_stay_apart() -> None:
    shapes = [(1, 2), (2, 3), (1, 0)]
    requests = [RequestData({"x": np.ones(shape, np.float32)}, outputs=["y"]) for shape in shapes]
    assert [request["x"].shape for request in read_batch(record_of(requests), 7)] == shapes
    [lone] = read_batch(record_of([RequestData({"x": np.ones(3)}, outputs=["y"])], batching=False), 7, batching=False)
    assert lone["x"].shape == (3,)


def response_record(answers: Sequence[ResponseData]) -> bytearray:
    return written(ResponseWriter().lay_out(answers))


ANSWERS = {
    "joined": [ResponseData(index, {"y": np.full((index + 1, 2), index, np.float32)}) for index in range(3)],
    "apart": [
        ResponseData(0, {"y": np.ones((1, 2))}),
        ResponseData(1, {"y": np.ones((1, 3)), "z": np.array([b"s"], object)}),
    ],
    "mixed": [
        ResponseData(1, {"y": np.ones(1)}, {"i": 1, "f": 2.5, "b": False, "s": "ü"}),
        ResponseData(0, error="no", code=ErrorCode.INVALID_ARG),
        ResponseData(2, empty=True),
    ],
}


@pytest.mark.parametrize("kind", list(ANSWERS))
def test_the_proxy_reads_what_workers_write(kind: str) -> None:
    record = response_record(ANSWERS[kind])
    for answer, response in zip(ANSWERS[kind], read_responses(memoryview(record), 7, 3, decoupled=False), strict=True):
        assert (response.request, response.error, response.empty) == (answer.request, answer.error, answer.empty)
        assert response.parameters == dict(answer.parameters)
        assert response.outputs.keys() == answer.outputs.keys()
        for name, value in answer.outputs.items():
            np.testing.assert_array_equal(response.outputs[name], value)
    assert answer.error is None or response.code == answer.code


@pytest.mark.parametrize("kind", list(ANSWERS))
def test_malformed_responses_are_errors_of_the_protocol_and_nothing_else(kind: str) -> None:
    good = response_record(ANSWERS[kind])
    source = random.Random(kind)
    refused = 0
    for _ in range(3000):
        record = bytearray(good)
        for _ in range(source.choice((1, 1, 2, 8))):
            record[source.randrange(len(record))] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
        if source.random() < 0.1:
            del record[source.randrange(len(record)) :]
        try:
            read_responses(memoryview(record), 7, 3, decoupled=bool(source.getrandbits(1)))
        except ProtocolError:
            refused += 1
    assert refused


# ---- proxy and workers ---------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_and_goes_with_the_proxy(short: Path) -> None:
    path = short / "model.1.zmq"
    with proxy(f"ipc://{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
        # As when a model is loaded again: the new one listens before the old one is gone.
        with proxy(f"ipc://{path}") as successor, worker(double, f"ipc://{path}"):
            successor.send([1])[0].wait()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(BindError, match="not a socket"), proxy(f"ipc://{path}"):
        pass
    assert path.read_text() == "mine"


def test_requests_get_their_own_answers(either_address: str) -> None:
    with proxy(either_address) as served, worker(double, either_address):
        shared = served.only_worker().memory is not None
        assert shared == either_address.endswith("model.1.zmq")
        for size in (1, 3, 8):
            callers = served.send(*([index, size] for index in range(size)))
            for index, caller in enumerate(callers):
                np.testing.assert_array_equal(caller.wait()["y"], [[2 * index, 2 * size]])


def test_large_arrays_and_inputs_that_are_kept_stay_whole(either_address: str) -> None:
    kept: list[Any] = []

    def keep(requests: Any) -> Any:
        kept.extend(request["x"] for request in requests)
        return double(requests)

    rows = np.arange(1 << 20, dtype=np.float32)
    with proxy(either_address) as served, worker(keep, either_address):
        for factor in (1, 2, 3):
            [caller] = served.send(rows * np.float32(factor))
            np.testing.assert_array_equal(caller.wait()["y"][0], rows * np.float32(2 * factor))
        [caller] = served.send(np.zeros(20 << 20, np.float32))
        code, text = caller.wait()
        assert code == ErrorCode.INVALID_ARG
        assert "arena_budget_bytes" in text
        served.send([1])[0].wait()
    for factor, array in zip((1, 2, 3), kept, strict=False):
        assert array.flags.aligned
        np.testing.assert_array_equal(array[0], rows * np.float32(factor))


def test_requests_that_are_too_large_together_and_one_that_is_by_itself(either_address: str) -> None:
    sizes = [5 << 20, 5 << 20, 5 << 20, 1, 17 << 20, 7 << 20, 0]

    def lengths(requests: Any) -> Any:
        return [{"y": np.array([[request["x"].size]], np.float32)} for request in requests]

    with proxy(either_address) as served, worker(lengths, either_address):
        for size, caller in zip(sizes, served.send(*(np.zeros(size, np.float32) for size in sizes)), strict=True):
            answer = caller.wait()
            if size > 16 << 20:
                assert answer[0] == ErrorCode.INVALID_ARG
                assert "arena_budget_bytes" in answer[1]
            else:
                assert answer["y"] == size


def test_errors_of_the_callable_are_those_of_its_requests(either_address: str) -> None:
    def fail(requests: Any) -> Any:
        if len(requests) == 1:
            raise ValueError("not today")
        return [ValueError("not you"), {"y": requests[1]["x"]}]

    with proxy(either_address) as served, worker(fail, either_address):
        code, text = served.send([1])[0].wait()
        assert code == ErrorCode.INTERNAL
        assert "ValueError: not today" in text
        first, second = served.send([1], [2])
        assert "not you" in first.wait()[1]
        np.testing.assert_array_equal(second.wait()["y"], [[2]])


def test_without_a_worker_a_request_waits_a_bounded_time(address: str) -> None:
    with proxy(address, attach_timeout_s=0.3) as served:
        code, text = served.send([1])[0].wait()
        assert code == UNAVAILABLE
        assert address in text
        with worker(double, address):
            served.send([1])[0].wait()
        served.wait_workers(0)
        assert served.send([1])[0].wait()[0] == UNAVAILABLE


def test_none_of_the_outputs_is_an_error(either_address: str) -> None:
    with (
        proxy(either_address) as served,
        worker(lambda requests: [{"Y": request["x"]} for request in requests], either_address),
    ):
        code, text = served.send([1])[0].wait()
        assert code == ErrorCode.INTERNAL
        assert "none of the outputs that are asked for: expected y, got Y" in text


def test_each_request_waits_for_a_worker_as_long_as_promised(address: str) -> None:
    """Also those that come while others wait, and those that come when others have just waited in vain."""
    with proxy(address, attach_timeout_s=1.0) as served:
        came: list[tuple[float, Any]] = []
        for _ in range(20):
            came.append((time.monotonic(), served.start([1])[0][0]))
            time.sleep(0.1)
        for began, caller in came:
            code, text = caller.wait()
            assert code == UNAVAILABLE
            assert "Waited 1 s" in text
            assert caller.ended_at - began >= 1.0
        with worker(double, address):
            served.send([1])[0].wait()


def test_a_request_waits_for_a_worker_that_comes(address: str) -> None:
    with proxy(address) as served:
        [caller], thread = served.start([1])
        with worker(double, address):
            np.testing.assert_array_equal(caller.wait()["y"], [[2]])
            thread.join(PATIENCE_S)


def test_batches_go_to_the_worker_that_is_idle(address: str) -> None:
    hold = threading.Event()

    def slow(requests: Any) -> Any:
        hold.wait(PATIENCE_S)
        return double(requests)

    with proxy(address) as served, worker(slow, address):
        # Returns when the next batch would be for somebody: as long as there is one busy worker, not before.
        [first], thread = served.start([1])
        with worker(double, address):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            for value in range(20):
                np.testing.assert_array_equal(served.send([value])[0].wait()["y"], [[2 * value]])
            assert not first.ended.is_set()
            hold.set()
            first.wait()


def test_detaching_finishes_what_is_in_flight(address: str) -> None:
    begun, hold = threading.Event(), threading.Event()

    def slow(requests: Any) -> Any:
        begun.set()
        hold.wait(PATIENCE_S)
        return double(requests)

    with proxy(address) as served, worker(slow, address) as leaving:
        [caller], thread = served.start([1])
        assert begun.wait(PATIENCE_S)
        stopper = threading.Thread(target=leaving.stop, args=(PATIENCE_S,))
        stopper.start()
        hold.set()
        np.testing.assert_array_equal(caller.wait()["y"], [[2]])
        stopper.join(PATIENCE_S)
        thread.join(PATIENCE_S)
        served.wait_workers(0)


def test_workers_come_back_after_the_proxy(address: str) -> None:
    with contextlib.ExitStack() as stack:
        with proxy(address) as served:
            stack.enter_context(worker(double, address))
            served.send([1])[0].wait()
        with proxy(address) as served:
            np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])


def test_async_callables_work_on_many_batches_and_learn_of_cancellations(either_address: str) -> None:
    cancelled = threading.Event()

    async def infer(requests: Any) -> Any:
        if requests[0]["x"][0, 0] < 0:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        await asyncio.sleep(0.01)
        return double(requests)

    with proxy(either_address) as served, worker(infer, either_address):
        [stuck] = served.send([-1])
        batches = [served.send([value]) for value in range(20)]
        for value, [caller] in enumerate(batches):
            np.testing.assert_array_equal(caller.wait()["y"], [[2 * value]])
        assert not stuck.ended.is_set()
        stuck.cancelled = True
        assert stuck.wait()[0] == ErrorCode.CANCELLED
        assert cancelled.is_set()


def test_streams_have_many_responses(either_address: str) -> None:
    def stream(requests: Any) -> Any:
        for index in range(300):
            yield [{"y": request["x"] + index} for request in requests]

    model = spec(decoupled=True)
    with proxy(either_address, decoupled=True) as served, worker(stream, either_address, model):
        for caller in served.send([1], [2]):
            caller.ended.wait(PATIENCE_S)
            values = [response.outputs["y"][0, 0] for response in caller.responses if not response.empty]
            np.testing.assert_array_equal(values, values[0] + np.arange(300))
            assert [response.final for response in caller.responses] == [False] * 300 + [True]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decoupled": True}, "decoupled=False"),
        ({"name": "other"}, "the worker is for model 'other' version 1"),
        ({"version": 2}, "version 2"),
        ({"outputs": spec().inputs}, "other tensors"),
    ],
    ids=["decoupled", "name", "version", "tensors"],
)
def test_a_worker_for_another_model_is_refused(address: str, fields: dict[str, Any], words: str) -> None:
    with proxy(address), pytest.raises(AttachError, match=words), worker(double, address, spec(**fields)):
        pass


def test_a_shell_attaches_a_worker(short: Path, address: str) -> None:
    write_description(description_path(short / "model.1.zmq"), spec())
    (short / "doubling.py").write_text("def infer(requests): return [{'y': r['x'] * 2} for r in requests]")
    command = [sys.executable, "-m", "pytriton.proxy_backend", "worker", f"{short}/doubling.py:infer", "--endpoint"]
    with proxy(address) as served:
        process = subprocess.Popen([*command, address], stderr=subprocess.DEVNULL)
        try:
            np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


def test_a_worker_that_is_stopped_counts_as_gone_and_comes_back(address: str, tmp_path: Path) -> None:
    with proxy(address, link_timeout_s=LINK_TIMEOUT_S) as served, worker_process(tmp_path, address) as process:
        served.send([1])[0].wait()
        with stopped(process.pid):
            [caller], thread = served.start([2])
            assert caller.wait()[0] == UNAVAILABLE
            thread.join(PATIENCE_S)
        np.testing.assert_array_equal(served.send([3])[0].wait()["y"], [[6]])


def _bad_version() -> bytes:
    packet = bytearray(Hello(name="w").pack())
    packet[messages.HEADER_SIZE + 8] = 9
    return bytes(packet)


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"", b"packet of 0 bytes"),
        (b"x" * 200, b"something else"),
        (pack_refuse("w"), b"something else"),
        (_bad_version(), b"protocol 9.0"),
        (Hello(name="w").pack()[:100], b"something else"),
    ],
    ids=["nothing", "no message", "no hello", "another version", "cut off"],
)
def test_who_does_not_greet_as_a_worker_is_refused(address: str, packet: bytes, words: bytes) -> None:
    with proxy(address) as served, worker(double, address):
        peer = ZmqSocket(address, listen=False)
        try:
            answer = exchange(peer, packet)
            assert messages.read_header(answer, len(answer))[0] == messages.REFUSE
            assert words in answer
        finally:
            peer.close()
        served.send([1])[0].wait()


def exchange(peer: ZmqSocket, packet: bytes, *parts: bytes) -> bytes:
    """Sends a message when there is somebody to send it to, and waits for one."""
    send(peer, packet, *parts)
    return eventually(peer.receive).packet


def send(peer: ZmqSocket, packet: bytes, *parts: bytes) -> None:
    def sent() -> bool:
        try:
            peer.send(packet, *parts)
        except WouldBlockError:
            return False
        return True

    eventually(sent)


@pytest.mark.parametrize(
    ("packet", "parts"),
    [
        (b"short", ()),
        (messages.pack_response(999, 0, 0, 0, messages.BATCH_DONE), ()),
        (messages.pack_segment(1, 64), ()),
        (messages.pack_response(1, 0, 0, 100, messages.BATCH_DONE), (b"x" * 99,)),
        (messages.pack_response(1, 0, 0, 100, messages.BATCH_DONE), (b"x" * 100,)),
        (messages.pack_response(1, 0, 0, 100, messages.BATCH_DONE) + b"xx", (b"x" * 100,)),
    ],
    ids=["short", "unknown batch", "segment", "another length", "no record", "another size"],
)
def test_a_worker_that_sends_garbage_loses_its_connection_and_nobody_else_does(
    address: str, packet: bytes, parts: Sequence[bytes]
) -> None:
    with proxy(address) as served:
        peer = ZmqSocket(address, listen=False)
        try:
            greeting = Hello(name="bad").pack()
            assert parse_answer(exchange(peer, greeting)).model_name == "model"
            [caller], thread = served.start([1])
            served.wait_workers(1)
            eventually(lambda: peer.receive() is not None)
            send(peer, packet, *parts)
            code, text = caller.wait()
            assert code == UNAVAILABLE
            assert "worker 'bad'" in text
            thread.join(PATIENCE_S)
        finally:
            peer.close()
        with worker(double, address):
            served.send([1])[0].wait()


def test_a_killed_worker_fails_its_requests_at_once_and_no_others(address: str, tmp_path: Path) -> None:
    with proxy(address) as served, worker_process(tmp_path, address) as process:
        served.send([1])[0].wait()
        [lost], thread = served.start([-1])
        wait_line(process, "busy")
        with worker(double, address):
            process.kill()
            code, text = lost.wait()
            assert code == UNAVAILABLE
            assert f"pid {process.pid}" in text
            thread.join(PATIENCE_S)
            for value in range(5):
                np.testing.assert_array_equal(served.send([value])[0].wait()["y"], [[2 * value]])


# ---- repeats and time limits ---------------------------------------------------------------------------------------


def test_what_is_repeatable_goes_to_another_worker_once(address: str, tmp_path: Path) -> None:
    with proxy(address, repeatable=True) as served, worker_process(tmp_path, address) as process:
        served.only_worker()
        [caller], thread = served.start([-1])
        wait_line(process, "busy")
        with worker(double, address):
            process.kill()
            np.testing.assert_array_equal(caller.wait()["y"], [[-2]])
            thread.join(PATIENCE_S)


def test_what_is_repeatable_fails_where_no_other_worker_comes(address: str, tmp_path: Path) -> None:
    with (
        proxy(address, repeatable=True, attach_timeout_s=0.3) as served,
        worker_process(tmp_path, address) as process,
    ):
        served.only_worker()
        [caller], thread = served.start([-1])
        wait_line(process, "busy")
        process.kill()
        code, text = caller.wait()
        assert code == UNAVAILABLE
        assert f"pid {process.pid}" in text
        assert "No other worker attached within 0.3 s" in text
        thread.join(PATIENCE_S)


def test_a_batch_that_never_reached_its_worker_goes_to_another_one(address: str) -> None:
    with proxy(address) as served, worker(double, address):
        # What the endpoint's thread finds when a worker ended between the claim and the sending.
        served.wait_workers(1)
        ghost = AttachedWorker(b"nobody", -1, served.endpoint._settings)
        ghost.protocol.greet(Hello(name="ghost").pack())
        ghost.load = 1
        batch = BatchInFlight([RequestData({"x": np.array([[3]], np.float32)}, outputs=["y"])], [caller := Caller()])
        served.endpoint._pool.outgoing.append((ghost, batch))
        served.endpoint._socket.wake()
        np.testing.assert_array_equal(caller.wait()["y"], [[6]])


def test_a_callable_that_takes_too_long_fails_its_request_and_is_reported(address: str) -> None:
    hold = threading.Event()

    def slow(requests: Any) -> Any:
        if requests[0]["x"][0, 0] < 0:
            hold.wait(PATIENCE_S)
        return double(requests)

    with proxy(address, execution_timeout_s=3.0) as served, worker(slow, address) as stuck:
        [caller], thread = served.start([-1])
        code, text = caller.wait()
        assert code == UNAVAILABLE
        assert "execution timeout, 3 s" in text
        thread.join(PATIENCE_S)
        eventually(lambda: stuck.stuck is not None)
        with worker(double, address):
            np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])
        hold.set()
        np.testing.assert_array_equal(served.send([3])[0].wait()["y"], [[6]])
        assert stuck.stuck is None


def test_an_async_callable_that_takes_too_long_keeps_its_worker(address: str) -> None:
    async def infer(requests: Any) -> Any:
        if requests[0]["x"][0, 0] < 0:
            await asyncio.sleep(PATIENCE_S)
        return double(requests)

    with proxy(address, execution_timeout_s=3.0) as served, worker(infer, address):
        attached = served.only_worker()
        assert served.send([-1])[0].wait()[0] == UNAVAILABLE
        np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])
        assert served.only_worker() is attached


def test_requests_that_wait_for_a_worker_do_not_wait_for_each_other(address: str) -> None:
    with proxy(address) as served:
        # Triton calls with the next batch when the call with the one before has returned.
        sent = [served.send([value])[0] for value in range(20)]
        with worker(double, address):
            for value, caller in enumerate(sent):
                np.testing.assert_array_equal(caller.wait()["y"], [[2 * value]])


# ---- shared memory -------------------------------------------------------------------------------------------------


def test_a_synchronous_callable_sees_that_its_caller_is_gone(address: str) -> None:
    def patient(requests: Any) -> Any:
        eventually(requests[0].is_cancelled)
        return [{"y": np.array([[float(requests[0].is_cancelled())]], np.float32)}]

    with proxy(address) as served, worker(patient, address):
        [caller], thread = served.start([1])
        eventually(lambda: served.only_worker().protocol.in_flight)
        caller.cancelled = True
        np.testing.assert_array_equal(caller.wait()["y"], [[1]])
        thread.join(PATIENCE_S)


def test_memory_goes_back_and_none_is_left(short: Path, address: str) -> None:
    descriptors, mappings = open_descriptors(), arena_mappings()
    with proxy(address) as served:
        for _ in range(3):
            served.wait_workers(0)
            with worker(double, address):
                for size in (1, 1 << 10, 1 << 22, 1 << 20):
                    assert served.send(np.ones(size))[0].wait()["y"].sum() == 2 * size
                eventually(lambda: _nothing_lent(served))
    assert list(short.iterdir()) == []
    eventually(lambda: arena_mappings() <= mappings)
    assert open_descriptors() <= descriptors


def _nothing_lent(served: Proxy) -> bool:
    worker = served.only_worker()
    return worker.memory is not None and not worker.protocol.lent


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def arena_mappings() -> int:
    gc.collect()
    return sum("pytriton-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_batches_for_which_there_is_no_room_travel_in_messages(address: str) -> None:
    kept: list[Any] = []

    def keep(requests: Any) -> Any:
        kept.extend(request["x"] for request in requests)
        return [{"y": request["x"][:, :1]} for request in requests]

    rows = np.ones(4 << 20, np.float32)
    with proxy(address) as served, worker(keep, address):
        # 6 of 16 MiB, where there are 64.
        for factor in range(6):
            np.testing.assert_array_equal(served.send(rows * factor)[0].wait()["y"], [[factor]])
    for factor, array in enumerate(kept):
        assert (array == factor).all()


def test_a_model_of_another_server_keeps_its_workers(address: str) -> None:
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1]); "
        "s.listen(); print('listening', flush=True); sys.stdin.read()"
    )
    path = str(memory_path(address))
    # Its parent is another one than that of this process.
    command = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", sys.executable, "-c"]
    with subprocess.Popen([*command, script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        wait_line(other, "listening")
        with pytest.raises(BindError, match="another server"), proxy(address):
            pass
        assert Path(path).is_socket()
        other.communicate(timeout=PATIENCE_S)
    # Nobody is there any more.
    with proxy(address) as served, worker(double, address):
        served.send([1])[0].wait()


@pytest.mark.parametrize("what", ["unknown segment", "outside", "given back twice", "no memfd", "not sealed", "text"])
def test_a_worker_that_is_wrong_about_memory_loses_its_connection_alone(address: str, what: str) -> None:
    release = messages.pack_release(1, 64)
    answers = {"unknown segment": (9, 0), "outside": (1, 1 << 40), "given back twice": None}
    with proxy(address) as served:
        caller = MemoryCaller(address)
        peer = ZmqSocket(address, listen=False)
        try:
            greeting = Hello(name="bad", memory_token=caller.token).pack()
            assert parse_answer(exchange(peer, greeting)).model_name == "model"
            memory = caller.accepted(PeerSegments(1 << 20))
            assert memory is not None
            [request], thread = served.start([1])
            eventually(lambda: peer.receive() is not None)
            segment, offset = answers.get(what) or (1, 0)
            if what == "no memfd":
                with tempfile.TemporaryFile() as file:
                    _announce(memory, [file.fileno()])
            elif what == "not sealed":
                fd = os.memfd_create("unsealed")
                os.ftruncate(fd, 4096)
                _announce(memory, [fd])
                os.close(fd)
            elif what == "text":
                memory._channel.send(b"hello")
            if what == "given back twice":
                send(peer, release)
            else:
                send(peer, messages.pack_response(1, segment, offset, 64, messages.BATCH_DONE))
            code, text = request.wait()
            assert code == UNAVAILABLE
            assert "worker 'bad'" in text
            thread.join(PATIENCE_S)
            memory.close()
        finally:
            peer.close()
            caller.close()
        with worker(double, address):
            served.send([1])[0].wait()


def _announce(memory: SharedMemory, descriptors: list[int]) -> None:
    packet = messages.pack_segment(1, 4096)
    socket.send_fds(memory._channel, [packet], descriptors)


# ---- over a network ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a proxy, of a worker that it knows, and of a stranger."""
    folder = tmp_path_factory.mktemp("keys")
    made = {name: make_keys(folder / name, name) for name in ("proxy", "friend", "stranger")}
    known = folder / "known"
    known.mkdir()
    (known / "friend.key").write_bytes(made["friend"][0].read_bytes())
    return {
        "listener": (made["proxy"][1], known),
        **{
            name: CurveKeys(secret_key_file=made[name][1], server_key_file=made["proxy"][0])
            for name in ("friend", "stranger")
        },
        "mistaken": CurveKeys(secret_key_file=made["friend"][1], server_key_file=made["stranger"][0]),
    }


def test_keys_open_the_way_over_tcp(keys: dict[str, Any]) -> None:
    with proxy("tcp://127.0.0.1:*", keys=keys["listener"]) as served:
        with worker(double, served.address, keys=keys["friend"]):
            np.testing.assert_array_equal(served.send([3])[0].wait()["y"], [[6]])
        with pytest.raises(AttachError, match="keys"), worker(double, served.address, keys=keys["stranger"]):
            pass


def test_keys_come_and_go_while_the_model_is_loaded(tmp_path: Path, keys: dict[str, Any]) -> None:
    (known := tmp_path / "known").mkdir()
    (known / "broken.key").write_text("this is no key")
    stranger = keys["stranger"]
    with proxy("tcp://127.0.0.1:*", keys=(keys["listener"][0], known)) as served:
        with pytest.raises(AttachError, match="keys"), worker(double, served.address, keys=stranger):
            pass
        (known / "stranger.key").write_bytes(stranger.secret_key_file.with_suffix(".key").read_bytes())
        with worker(double, served.address, keys=stranger):
            served.send([1])[0].wait()
        (known / "stranger.key").unlink()
        with pytest.raises(AttachError, match="keys"), worker(double, served.address, keys=stranger):
            pass


@pytest.mark.parametrize("who", ["mistaken", "nobody"])
def test_who_has_no_right_keys_does_not_get_in(keys: dict[str, Any], who: str) -> None:
    with proxy("tcp://127.0.0.1:*", keys=keys["listener"], attach_timeout_s=0.2) as served:
        outside = Worker(double, spec(), served.address, curve_keys=keys.get(who), insecure=True)
        outside.start()
        try:
            with pytest.raises(AttachError):
                outside.wait_attached(1.0)
            assert served.send([1])[0].wait()[0] == UNAVAILABLE
        finally:
            assert outside.stop(PATIENCE_S)


def test_both_sides_want_keys_over_tcp_unless_they_are_told_otherwise() -> None:
    with pytest.raises(KeysMissingError, match=r"127\.0\.0\.1.*every user of this machine.*--replace"):
        listen(PythonProxySettings(address="tcp://127.0.0.1:*"))
    for address in ("tcp://127.0.0.1:9", "tcp://[::1]:9", "tcp://localhost:9", "ipc://@abstract"):
        with pytest.raises(KeysMissingError, match=r"curve_keys=.*insecure=True") as refused:
            Worker(double, spec(), address)
        assert refused.value.address == address
    with proxy("tcp://127.0.0.1:*", insecure=True) as served, worker(double, served.address, insecure=True):
        np.testing.assert_array_equal(served.send([3])[0].wait()["y"], [[6]])


def test_keys_are_files_of_their_owner_alone(tmp_path: Path, keys: dict[str, Any]) -> None:
    public, secret = make_keys(tmp_path, "mine")
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyFileError, match="never overwritten"):
        make_keys(tmp_path, "mine")
    secret.chmod(0o644)
    careless = CurveKeys(secret_key_file=secret, server_key_file=public)
    with pytest.raises(AttachError, match="chmod 600"), worker(double, "tcp://127.0.0.1:9", keys=careless):
        pass
    secret.chmod(0o600)
    wrong = CurveKeys(secret_key_file=tmp_path / "none", server_key_file=public)
    with pytest.raises(AttachError, match="none"), worker(double, "tcp://127.0.0.1:9", keys=wrong):
        pass
    with (
        pytest.raises(KeyFileError, match="no secret key"),
        proxy("tcp://127.0.0.1:*", keys=(_private(public), tmp_path)),
    ):
        pass


def _private(path: Path) -> Path:
    path.chmod(0o600)
    return path


def count_over_a_cut(served: Proxy, process: subprocess.Popen[str], cut: Callable[[bool], None]) -> None:
    """Every request has exactly one answer or one error, and afterwards the next one works."""
    served.send([1])[0].wait()
    [lost], thread = served.start([-1])
    wait_line(process, "busy")
    cut(True)
    code, text = lost.wait()
    assert code == UNAVAILABLE
    assert "its connection ended" in text
    thread.join(PATIENCE_S)
    served.wait_workers(0)
    cut(False)
    # The process is busy for an hour: another one takes its place.
    process.kill()


def test_a_tcp_link_that_is_cut_and_comes_back(tmp_path: Path, keys: dict[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(proxy("tcp://127.0.0.1:*", keys=keys["listener"], link_timeout_s=LINK_TIMEOUT_S))
        with Link(int(served.address.rpartition(":")[2])) as link:
            address = f"tcp://127.0.0.1:{link.port}"

            def cut(now: bool) -> None:
                (link.cut.set if now else link.cut.clear)()

            with worker(double, address, keys=keys["friend"]) as patient:
                np.testing.assert_array_equal(served.send([1])[0].wait()["y"], [[2]])
                cut(True)
                served.wait_workers(0)
                eventually(lambda: not patient.is_attached)
                cut(False)
                np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])
            served.wait_workers(0)
            with worker_process(tmp_path, address, keys=keys["friend"]) as process:
                count_over_a_cut(served, process, cut)
            with worker_process(tmp_path, address, keys=keys["friend"]):
                np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])


def test_another_network_namespace_whose_link_is_cut_and_comes_back(tmp_path: Path, keys: dict[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        try:
            here, device, over_there = stack.enter_context(network_namespace())
        except PermissionError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")

        def cut(now: bool) -> None:
            state = "down" if now else "up"
            subprocess.run(["ip", "link", "set", device, state], check=True, timeout=PATIENCE_S)

        served = stack.enter_context(proxy(f"tcp://{here}:*", keys=keys["listener"], link_timeout_s=LINK_TIMEOUT_S))
        with worker_process(tmp_path, served.address, keys=keys["friend"], prefix=over_there) as process:
            count_over_a_cut(served, process, cut)
        with worker_process(tmp_path, served.address, keys=keys["friend"], prefix=over_there) as process:
            np.testing.assert_array_equal(served.send([2])[0].wait()["y"], [[4]])
            # One that waits attaches again by itself.
            cut(True)
            served.wait_workers(0)
            cut(False)
            np.testing.assert_array_equal(served.send([3])[0].wait()["y"], [[6]])
