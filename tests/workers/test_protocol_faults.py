"""Bad workers against the real server: it lives on, and the next good worker gets the next request."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import importlib.util
import itertools
import json
import os
import queue
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from pytriton.proxy.types import Request
from pytriton.proxy_backend import AttachError, ModelSpec, TensorSpec, Worker
from pytriton.proxy_backend.wire.layout import Capability
from support.bare_server import F4, Array, BareServer, serving
from support.callables import double
from support.paths import ROOT, load_program
from support.waiting import PATIENCE_S, Held, eventually

GENERATOR = ROOT / "packages/pytriton-proxy-backend/tests/golden/generate.py"
MIB = 1 << 20
# More than one socket has room for messages, and longer than anybody waits for room.
LEAVING, UNREAD_S = 400, 6.0

TYPES: dict[str, Any] = {
    "BOOL": bool, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BYTES": object,
}  # fmt: skip
if importlib.util.find_spec("ml_dtypes") is not None:
    import ml_dtypes

    TYPES["BF16"] = ml_dtypes.bfloat16
else:
    TYPES["BF16"] = None


wire = load_program(GENERATOR)


class Server(BareServer):
    """Has a few models."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.add("plain", extra="dynamic_batching { priority_levels: 5 default_priority_level: 2 }")
        self.add("short", attach_timeout_s=0.3)
        self.add("tight", arena_budget_bytes=4 * MIB, arena_idle_s=0.0)
        self.add(
            "stream", decoupled=True, extra="model_transaction_policy { decoupled: true }", arena_budget_bytes=4 * MIB
        )
        self.add("single", batching=False)
        # A batch is one request that is full, or as many as leave.
        wide = f"preferred_batch_size: [ {LEAVING} ] max_queue_delay_microseconds: 600000000"
        self.add("wide", rows=2 * LEAVING, extra=f"dynamic_batching {{ {wide} }}")
        self._add_types()

    def _add_types(self) -> None:
        """A model with one input and one output of each type, none of which a request must have."""
        inputs, outputs = "", ""
        for name in TYPES:
            triton = {"BYTES": "STRING"}.get(name, name)
            inputs += f', {{ name: "{name}" data_type: TYPE_{triton} dims: [ -1 ] optional: true }} '
            outputs += f', {{ name: "{name}_OUT" data_type: TYPE_{triton} dims: [ -1 ] }} '
        extra = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
        self.add("types", extra=extra, more_input=inputs, more_output=outputs)
        dtypes = {name: np.dtype(dtype) for name, dtype in TYPES.items() if dtype is not None}
        self.models["types"] = ModelSpec(
            name="types",
            version=1,
            inputs=tuple(TensorSpec(name=name, dtype=d, shape=(-1,), optional=True) for name, d in dtypes.items()),
            outputs=tuple(TensorSpec(name=f"{name}_OUT", dtype=d, shape=(-1,)) for name, d in dtypes.items()),
            batching=True,
            max_batch_size=8,
            strict=False,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        made = Server(Path(folder))
        with serving(made):
            yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


ONE = np.array([[1, 2]], F4)


def assert_alive(server: Server, name: str = "plain") -> None:
    """A good worker gets the next request."""
    with server.worker(name, double):
        assert server.infer(name, ONE).tolist() == [[2, 4]]


class BadWorker:
    """The worker's end of a connection, at the wire."""

    def __init__(self, endpoint: Path, *, hello: bytes | None = b"") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(endpoint))
        self.memory: dict[int, int] = {}
        if hello is not None:
            self.send(hello or wire.greeting(wire.HELLO, "bad", pid=os.getpid(), uid=os.geteuid()))

    def send(self, packet: bytes, fds: tuple[int, ...] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([packet], ancillary)
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self) -> tuple[int, ...]:
        """The next message's fields, () at the end of the connection."""
        try:
            data, ancillary, _, _ = self.socket.recvmsg(4096, 256)
        except ConnectionResetError:
            return ()
        for _, _, raw in ancillary:
            fds = array.array("i")
            fds.frombytes(raw)
            for fd in fds:
                os.close(fd)
        self.packet = data
        return struct.unpack_from("<HHIQQIIQQ", data) if data else ()

    def receive_kind(self, kind: int) -> tuple[int, ...]:
        while True:
            fields = self.receive()
            assert fields, f"the connection ended before message {kind}"
            if fields[0] == kind:
                return fields

    def wait_closed(self) -> None:
        while self.receive():
            pass

    def segment(self, number: int, size: int, record: bytes = b"", *, seals: int = fcntl.F_SEAL_SHRINK) -> None:
        """Announces a segment that begins with `record`."""
        fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        os.pwrite(fd, record, 0)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.send(wire.message(wire.SEGMENT, segment=number, length=size), (fd,))

    def __enter__(self) -> BadWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# ---- greetings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", None),
        (b"\xff" * 48, None),
        (random.Random(1).randbytes(200), None),
        (wire.message(wire.DETACH), "before its greeting"),
        (wire.message(wire.HELLO), "not the greeting of a pytriton worker"),
        (wire.greeting(wire.HELLO, "x", magic=b"PYTHON!!"), "not the greeting of a pytriton worker"),
        (wire.greeting(wire.WELCOME, "x"), "before its greeting"),
        (wire.greeting(wire.HELLO, "x")[:48] + b"PYTRITON", None),
    ],
    ids=["http", "ones", "noise", "detach", "nothing", "magic", "welcome", "size"],
)
def test_a_foreign_peer(hello: bytes, reason: str | None, server: Server) -> None:
    with BadWorker(server.endpoint("plain"), hello=hello) as bad:
        bad.wait_closed()
        if reason is not None:
            server.wait_for_log(reason)
    assert_alive(server)


@pytest.mark.parametrize(
    ("hello", "theirs"),
    [
        (wire.greeting(wire.HELLO, "x", major=2, minor=1), "2.1"),
        (wire.greeting(wire.HELLO, "x", major=0, minor=7), "0.7"),
        (wire.message(wire.HELLO, body=struct.pack("<8sHH", b"PYTRITON", 2, 5)), "2.5"),
    ],
    ids=["2.1", "0.7", "short"],
)
def test_another_major_is_told_both_versions(hello: bytes, theirs: str, server: Server) -> None:
    with BadWorker(server.endpoint("plain"), hello=hello) as bad:
        bad.receive_kind(wire.REFUSE)
        text = bad.packet[120:].decode()
        assert f"the worker speaks protocol {theirs}, this proxy backend 1.0" in text
        bad.wait_closed()
    assert_alive(server)


def test_a_greeting_that_is_cut_off_is_refused(server: Server) -> None:
    whole = wire.greeting(wire.HELLO, "name")
    for cut in (60, 100, len(whole) - 1):
        with BadWorker(server.endpoint("plain"), hello=wire.message(wire.HELLO, body=whole[48:cut])) as bad:
            bad.receive_kind(wire.REFUSE)
            assert b"cut off" in bad.packet
            bad.wait_closed()
    assert_alive(server)


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        ("x\nother", 1, "this socket is of model 'plain' version 1, the worker is for model 'other' version 1"),
        ("x\nplain", 2, "this socket is of model 'plain' version 1, the worker is for model 'plain' version 2"),
        ("x\nplain\n0123abcd", 1, "the worker was made for other tensors than model 'plain' has"),
    ],
    ids=["model", "version", "tensors"],
)
def test_a_worker_for_something_else_is_refused_and_both_sides_log_why(
    text: str, version: int, reason: str, server: Server
) -> None:
    hello = wire.greeting(wire.HELLO, text, model_version=version)
    with BadWorker(server.endpoint("plain"), hello=hello) as bad:
        bad.receive_kind(wire.REFUSE)
        assert reason in bad.packet[120:].decode()
        bad.wait_closed()
    server.wait_for_log(reason)
    assert_alive(server)


def test_a_worker_with_other_tensors_ends_with_the_reason(server: Server) -> None:
    model = dataclasses.replace(
        server.models["plain"], inputs=(TensorSpec(name="x", dtype=np.dtype("int32"), shape=(-1,)),)
    )
    worker = Worker(double, model, server.endpoint("plain"))
    worker.start()
    with pytest.raises(AttachError, match="refused this worker: the worker was made for other tensors"):
        worker.wait_attached(PATIENCE_S)
    assert not worker.is_alive
    assert_alive(server)


def test_a_later_minor_attaches(server: Server) -> None:
    # All but the one by which a peer says that it works nothing.
    capabilities = (1 << 64) - 1 - Capability.ASLEEP
    hello = wire.greeting(wire.HELLO, "later", minor=9, capabilities=capabilities, tail=b"later fields" * 3)
    with BadWorker(server.endpoint("plain"), hello=hello) as worker:
        worker.receive_kind(wire.WELCOME)
        (_, major, minor, pid, uid, in_flight, known, flags, _, version, budget, idle, limit) = struct.unpack_from(
            "<8sHHIIIQIIQQQQ", worker.packet, 48
        )
        assert (major, minor, pid, uid) == (1, 0, server.process.pid, os.geteuid())
        assert known == sum(Capability) - Capability.ASLEEP
        assert (in_flight, flags, version, budget, idle, limit) == (1, 1, 1, 4 << 30, 10_000, 0)
        assert worker.packet[120:] == b"plain"
        fields = worker.receive_kind(wire.SEGMENT)
        assert (fields[5], fields[8]) == (1, MIB)


def test_a_decoupled_model_refuses_a_worker_that_cannot_stream(server: Server) -> None:
    with BadWorker(server.endpoint("stream"), hello=wire.greeting(wire.HELLO, "old", capabilities=0)) as bad:
        bad.receive_kind(wire.REFUSE)
        assert b"cannot answer so" in bad.packet
        bad.wait_closed()


def test_silent_peers_are_shown_the_door_and_stand_in_nobodys_way(server: Server) -> None:
    silent = [BadWorker(server.endpoint("plain"), hello=None) for _ in range(30)]
    try:
        assert_alive(server)
        for bad in silent:
            bad.wait_closed()
        server.wait_for_log("did not greet within 5000 ms")
    finally:
        for bad in silent:
            bad.socket.close()


# ---- answers -------------------------------------------------------------------------------------------------------

Y_ONE = struct.pack("<2f", 2, 4)


def good_record(batch: int) -> bytes:
    return bytes(wire.response_record(batch, [wire.Answer(0, rows=1)], [wire.Tensor("y", wire.FP32, [1, 2], Y_ONE)]))


def patched(batch: int, *fields: tuple[str, int, int]) -> bytes:
    raw = bytearray(good_record(batch))
    for form, offset, value in fields:
        struct.pack_into("<" + form, raw, offset, value)
    return bytes(raw)


def respond(bad: BadWorker, number: int, record: bytes, **fields: Any) -> None:
    bad.segment(1, max(len(record), 64), record)
    values = {"batch": number, "segment": 1, "offset": 0, "length": len(record), "flags": 3, **fields}
    bad.send(wire.message(wire.RESPONSE, **values))


def respond_together(bad: BadWorker, records: bytes, **fields: Any) -> None:
    bad.segment(1, max(len(records), 64), records)
    bad.send(wire.message(wire.RESPONSES, **{"segment": 1, "length": len(records), **fields}))


ENTRY = 64
TENSOR = 112
DIMS = 160


def segment_twice(bad: BadWorker, batch: int) -> None:
    bad.segment(1, 4096)
    bad.segment(1, 4096)


def segments_over_the_budget(bad: BadWorker, batch: int) -> None:
    for number in range(1, 6):
        bad.segment(number, 1 << 30)


def detach_and_close(bad: BadWorker, batch: int) -> None:
    bad.send(wire.message(wire.DETACH))
    bad.socket.close()


FAULTS: dict[str, Callable[[BadWorker, int], object]] = {
    "unknown batch": lambda bad, batch: respond(bad, batch, good_record(batch), batch=batch + 1000),
    "unknown segment": lambda bad, batch: respond(bad, batch, good_record(batch), segment=7),
    "offset outside": lambda bad, batch: respond(bad, batch, good_record(batch), offset=1 << 20),
    "offset overflows": lambda bad, batch: respond(bad, batch, good_record(batch), offset=(1 << 64) - 64),
    "length overflows": lambda bad, batch: respond(bad, batch, good_record(batch), length=(1 << 64) - 1),
    "length of a byte more": lambda bad, batch: respond(
        bad, batch, good_record(batch), length=len(good_record(batch)) + 1
    ),
    "offset not aligned": lambda bad, batch: respond(bad, batch, good_record(batch), offset=8, length=64),
    "record cut off": lambda bad, batch: respond(bad, batch, good_record(batch), length=63),
    "record cut short": lambda bad, batch: respond(bad, batch, good_record(batch), length=128),
    "no magic": lambda bad, batch: respond(bad, batch, patched(batch, ("I", 0, 0))),
    "batch of another": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", 16, batch + 1))),
    "metadata length": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", 24, 1 << 40))),
    "record length": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", 32, 1 << 40))),
    "entry count": lambda bad, batch: respond(bad, batch, patched(batch, ("I", 4, 1 << 31))),
    "tensor count": lambda bad, batch: respond(bad, batch, patched(batch, ("I", 8, 1 << 31))),
    "entries offset": lambda bad, batch: respond(bad, batch, patched(batch, ("I", 40, 0))),
    "tensors offset": lambda bad, batch: respond(bad, batch, patched(batch, ("I", 44, (1 << 32) - 8))),
    "request index": lambda bad, batch: respond(bad, batch, patched(batch, ("I", ENTRY, 9))),
    "error text": lambda bad, batch: respond(
        bad, batch, patched(batch, ("I", ENTRY + 4, 3), ("I", ENTRY + 16, 1 << 30))
    ),
    "parameters": lambda bad, batch: respond(bad, batch, patched(batch, ("I", ENTRY + 28, 1 << 30))),
    "name": lambda bad, batch: respond(bad, batch, patched(batch, ("I", TENSOR, 1 << 30))),
    "name without its end": lambda bad, batch: respond(bad, batch, patched(batch, ("I", TENSOR + 4, 0x10))),
    "dtype": lambda bad, batch: respond(bad, batch, patched(batch, ("I", TENSOR + 8, 99))),
    "dims count": lambda bad, batch: respond(bad, batch, patched(batch, ("I", TENSOR + 12, 1 << 30))),
    "owner": lambda bad, batch: respond(bad, batch, patched(batch, ("I", TENSOR + 16, 1))),
    "payload offset": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", TENSOR + 24, 0))),
    "payload outside": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", TENSOR + 24, 1 << 40))),
    "payload length": lambda bad, batch: respond(bad, batch, patched(batch, ("Q", TENSOR + 32, 12))),
    "negative dimension": lambda bad, batch: respond(bad, batch, patched(batch, ("q", DIMS, -1))),
    "dimensions that overflow": lambda bad, batch: respond(
        bad, batch, patched(batch, ("q", DIMS, 1 << 62), ("q", DIMS + 8, 1 << 62))
    ),
    "rows": lambda bad, batch: respond(bad, batch, patched(batch, ("I", ENTRY + 8, 2))),
    "two responses": lambda bad, batch: respond(
        bad, batch, wire.response_record(batch, [wire.Answer(0, rows=0), wire.Answer(0, rows=0)])
    ),
    "done without an answer": lambda bad, batch: respond(bad, batch, wire.response_record(batch, [])),
    "together, of an unknown batch": lambda bad, batch: respond_together(
        bad, good_record(batch + 1000) + good_record(batch)
    ),
    "together, and cut short": lambda bad, batch: respond_together(bad, good_record(batch)[:192]),
    "together, and less than a header": lambda bad, batch: respond_together(bad, bytes(48)),
    "together, without a length": lambda bad, batch: respond_together(bad, patched(batch, ("Q", 32, 0))),
    "together, and not aligned": lambda bad, batch: respond_together(bad, patched(batch, ("Q", 32, 200))),
    "together, outside": lambda bad, batch: respond_together(bad, good_record(batch), offset=1 << 20),
    "together, and malformed": lambda bad, batch: respond_together(bad, patched(batch, ("I", 4, 1 << 31))),
    "fails an unknown batch": lambda bad, batch: bad.send(wire.message(wire.FAIL, batch=batch + 1)),
    "releases what is not in use": lambda bad, batch: bad.send(wire.message(wire.RELEASE, segment=1, offset=1 << 19)),
    "releases an unknown segment": lambda bad, batch: bad.send(wire.message(wire.RELEASE, segment=99)),
    "a second greeting": lambda bad, batch: bad.send(wire.greeting(wire.HELLO, "again")),
    "unknown message": lambda bad, batch: bad.send(wire.message(99)),
    "a message of the proxy": lambda bad, batch: bad.send(wire.message(wire.BATCH, batch=1)),
    "wrong size": lambda bad, batch: bad.send(b"\x0b\0\0\0\x07\0\0\0" + bytes(40)),
    "short packet": lambda bad, batch: bad.send(b"x"),
    "large packet": lambda bad, batch: bad.send(wire.message(wire.FAIL, batch=batch, body=b"x" * 5000)),
    "segment without a descriptor": lambda bad, batch: bad.send(wire.message(wire.SEGMENT, segment=1, length=4096)),
    "segment twice": segment_twice,
    "segment that is not sealed": lambda bad, batch: bad.segment(1, 4096, seals=0),
    "segment that is no memfd": lambda bad, batch: bad.send(
        wire.message(wire.SEGMENT, segment=1, length=4096), (os.open(os.devnull, os.O_RDWR),)
    ),
    "segment larger than its memory": lambda bad, batch: bad.send(
        wire.message(wire.SEGMENT, segment=1, length=1 << 40), (os.memfd_create("bad", os.MFD_ALLOW_SEALING),)
    ),
    "segment over the budget": lambda bad, batch: bad.segment(1, (4 << 30) + 128),
    "segments over the budget": segments_over_the_budget,
    "segment with two descriptors": lambda bad, batch: bad.send(
        wire.message(wire.SEGMENT, segment=1, length=64),
        (os.dup(0), os.dup(0)),
    ),
    "a descriptor too many": lambda bad, batch: bad.send(
        wire.message(wire.RELEASE, segment=1), (os.open(os.devnull, os.O_RDWR),)
    ),
    "it leaves": lambda bad, batch: bad.socket.close(),
    "it leaves in an orderly way": detach_and_close,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_answer_fails_its_request_and_no_other(name: str, server: Server, pool: ThreadPoolExecutor) -> None:
    with BadWorker(server.endpoint("plain")) as bad:
        bad.receive_kind(wire.WELCOME)
        answer = pool.submit(server.infer, "plain", ONE)
        fields = bad.receive_kind(wire.BATCH)
        FAULTS[name](bad, fields[3])
        with pytest.raises(InferenceServerException) as caught:
            answer.result(PATIENCE_S)
        text = str(caught.value)
        assert f"worker 'bad' (pid {os.getpid()})" in text
        if name != "done without an answer":
            assert "was lost while it worked on this request" in text
            if bad.socket.fileno() != -1:
                bad.wait_closed()
    assert_alive(server)


def test_a_good_answer_of_a_handmade_worker(server: Server, pool: ThreadPoolExecutor) -> None:
    """The same path with nothing wrong in it, so that the faults above are what makes the difference."""
    with BadWorker(server.endpoint("plain")) as worker:
        answer = pool.submit(server.infer, "plain", ONE)
        fields = worker.receive_kind(wire.BATCH)
        respond(worker, fields[3], good_record(fields[3]))
        assert answer.result(PATIENCE_S).tolist() == [[2, 4]]


def test_answers_that_are_wrong_for_the_request_only(server: Server, pool: ThreadPoolExecutor) -> None:
    """What the protocol allows and Triton does not: an error for the request, the connection goes on."""
    with BadWorker(server.endpoint("plain")) as worker:
        worker.receive_kind(wire.WELCOME)
        for number, tensor in enumerate(
            [wire.Tensor("nonsense", wire.FP32, [1, 2], Y_ONE), wire.Tensor("y", wire.BYTES, [1, 2], b"\xff\0\0\0a")], 1
        ):
            answer = pool.submit(server.infer, "plain", ONE)
            batch = worker.receive_kind(wire.BATCH)[3]
            record = wire.response_record(batch, [wire.Answer(0, rows=1)], [tensor])
            worker.segment(number, 4096, record)
            worker.send(wire.message(wire.RESPONSE, batch=batch, segment=number, length=len(record), flags=3))
            reason = ["unexpected inference output 'nonsense'", "of the worker: string 0 of 2: expected 255 bytes"][
                number - 1
            ]
            with pytest.raises(InferenceServerException, match=reason):
                answer.result(PATIENCE_S)
        answer = pool.submit(server.infer, "plain", ONE)
        batch = worker.receive_kind(wire.BATCH)[3]
        worker.segment(9, 4096, good_record(batch))
        worker.send(wire.message(wire.RESPONSE, batch=batch, segment=9, length=4096, flags=3))
        assert answer.result(PATIENCE_S).tolist() == [[2, 4]]


def test_mutated_packets_and_records(server: Server) -> None:
    seed = random.Random(5)
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            with contextlib.suppress(InferenceServerException):
                server.infer("plain", ONE)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        for _ in range(150):
            with BadWorker(server.endpoint("plain")) as bad:
                batch = bad.receive_kind(wire.BATCH)[3]
                raw = bytearray(good_record(batch))
                for _ in range(seed.randint(0, 3)):
                    width = seed.choice([1, 2, 4, 8])
                    at = seed.randrange(len(raw) // width) * width
                    value = seed.choice([0, 1, 1 << 31, (1 << 32) - 1, 1 << 63, seed.getrandbits(64)])
                    raw[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
                kind = seed.choice([wire.RESPONSE, wire.RESPONSE, wire.RESPONSES])
                packet = bytearray(wire.message(kind, batch=batch, segment=1, length=len(raw), flags=3))
                for _ in range(seed.randint(0, 2)):
                    packet[seed.choice([*range(4), *range(8, 48)])] = seed.getrandbits(8)
                bad.segment(1, len(raw), bytes(raw))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    bad.send(bytes(packet))
                    bad.send(wire.message(wire.FAIL, batch=batch, flags=3))
    finally:
        with server.worker("plain", double):
            stop.set()
            asking.join(PATIENCE_S)
    assert server.process.is_running
    assert_alive(server)


def test_a_flood_of_segments_and_descriptors_ends_the_connection_and_leaves_nothing(
    server: Server, pool: ThreadPoolExecutor
) -> None:
    assert_alive(server)
    before = server.descriptors()
    mapped = server.arena_mappings()

    def flood(send: Callable[[BadWorker, int], None]) -> None:
        with BadWorker(server.endpoint("plain")) as bad:
            answer = pool.submit(server.infer, "plain", ONE)
            bad.receive_kind(wire.BATCH)  # while it works on a batch, its messages are read at once
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for number in range(1, 10_000):
                    send(bad, number)
            with pytest.raises(InferenceServerException, match="was lost"):
                answer.result(PATIENCE_S)

    flood(lambda bad, number: bad.segment(number, 4096))
    server.wait_for_log("too many segments")
    flood(lambda bad, number: bad.send(wire.message(wire.CANCEL), tuple(os.dup(0) for _ in range(100))))
    eventually(lambda: server.descriptors() <= before + 2)
    eventually(lambda: server.arena_mappings() <= mapped + 2)
    assert_alive(server)


def test_callers_who_leave_take_no_room_from_others(server: Server, pool: ThreadPoolExecutor) -> None:
    """A worker that reads nothing for a while is told of all of them later, and of the batch that came then."""
    hello = wire.greeting(
        wire.HELLO, "late", pid=os.getpid(), uid=os.geteuid(), max_in_flight=2, capabilities=Capability.CANCEL
    )
    with (
        BadWorker(server.endpoint("wide"), hello=hello) as late,
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        x = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        x.set_data_from_numpy(ONE)
        ended: queue.Queue[object] = queue.Queue()
        calls = [client.async_infer("wide", [x], lambda result, error: ended.put(error)) for _ in range(LEAVING)]
        first = late.receive_kind(wire.BATCH)[3]
        for call in calls:
            call.cancel()
        for _ in calls:
            ended.get(timeout=PATIENCE_S)
        answer = pool.submit(server.infer, "wide", np.zeros((2 * LEAVING, 2), F4))
        time.sleep(UNREAD_S)
        told: set[int] = set()
        second = 0
        while len(told) < LEAVING or not second:
            kind, _, _, number, _, _, index, *_ = late.receive()
            second = number if kind == wire.BATCH else second
            if kind == wire.CANCEL:
                assert number == first
                told.add(index)
        for number in (first, second):
            late.send(wire.message(wire.FAIL, batch=number, flags=3, body=b"late"))
        with pytest.raises(InferenceServerException, match="late"):
            answer.result(PATIENCE_S)


# ---- workers that die, or are not there ----------------------------------------------------------------------------

VICTIM = """
import sys, time
from pathlib import Path
import numpy as np
from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
f4 = np.dtype("float32")
spec = ModelSpec(name="plain", version=1, inputs=(TensorSpec(name="x", dtype=f4, shape=(-1,)),),
                 outputs=(TensorSpec(name="y", dtype=f4, shape=(-1,)),), batching=True, max_batch_size=8)
def stuck(requests):
    print("got", len(requests), flush=True)
    time.sleep(3600)
worker = Worker(stuck, spec, Path(sys.argv[1]))
worker.start()
worker.wait_attached(600)
print("attached", flush=True)
time.sleep(3600)
"""


def test_a_worker_that_is_killed_fails_its_own_requests_at_once(server: Server, pool: ThreadPoolExecutor) -> None:
    command = [sys.executable, "-c", VICTIM, str(server.endpoint("plain"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "attached\n"
            doomed = pool.submit(server.infer, "plain", ONE)
            assert victim.stdout.readline() == "got 1\n"
            with server.worker("plain", double):
                # The others carry on while it is stuck, and when it is gone.
                assert server.infer("plain", ONE).tolist() == [[2, 4]]
                victim.send_signal(signal.SIGKILL)
                with pytest.raises(InferenceServerException) as caught:
                    doomed.result(PATIENCE_S)
                assert f"worker 'stuck' (pid {victim.pid}) was lost while it worked on this request" in str(
                    caught.value
                )
                for _ in range(5):
                    assert server.infer("plain", ONE).tolist() == [[2, 4]]
        finally:
            victim.kill()
    assert_alive(server)


def test_without_a_worker_a_request_waits_and_then_fails_as_unavailable(server: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensor = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(ONE)
        begin = time.monotonic()
        with pytest.raises(InferenceServerException, match=r"no worker is attached\. Waited 300 ms") as caught:
            client.infer("short", [tensor], client_timeout=PATIENCE_S)
        assert time.monotonic() - begin >= 0.3
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert str(server.endpoint("short")) in str(caught.value)
    assert_alive(server, "short")


def test_a_request_waits_for_the_worker_that_comes(server: Server, pool: ThreadPoolExecutor) -> None:
    answers = [pool.submit(server.infer, "plain", ONE) for _ in range(4)]
    with server.worker("plain", double):
        assert [answer.result(PATIENCE_S).tolist() for answer in answers] == [[[2, 4]]] * 4


def test_a_worker_that_detaches_finishes_what_it_has(server: Server, pool: ThreadPoolExecutor) -> None:
    slow = Held(double)
    with server.worker("plain", slow) as worker:
        answer = pool.submit(server.infer, "plain", ONE)
        assert slow.entered.wait(PATIENCE_S)
        stopped: Future[bool] = pool.submit(worker.stop, PATIENCE_S)
        slow.release.set()
        assert answer.result(PATIENCE_S).tolist() == [[2, 4]]
        assert stopped.result(PATIENCE_S)
    assert_alive(server)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_inputs_over_the_budget(server: Server) -> None:
    with server.worker("tight", double):
        with pytest.raises(InferenceServerException) as caught:
            server.infer("tight", np.zeros((1, 2 * MIB), F4))
        text = str(caught.value)
        [size] = re.findall(r"take (\d+) bytes", text)
        assert 8 * MIB < int(size) < 8 * MIB + 1024
        assert f"may have {4 * MIB} bytes" in text
        assert "arena_budget_bytes" in text
        assert server.infer("tight", ONE).tolist() == [[2, 4]]


def test_outputs_over_the_budget(server: Server) -> None:
    with (
        server.worker("tight", lambda requests: [{"y": np.zeros((1, 2 * MIB), F4)} for _ in requests]),
        pytest.raises(InferenceServerException, match=f"may have {4 * MIB} bytes.*arena_budget_bytes"),
    ):
        server.infer("tight", ONE)
    assert_alive(server, "tight")


def test_inputs_that_fit_only_when_smaller_segments_make_way(server: Server) -> None:
    with server.worker("tight", lambda requests: [{"y": r["x"][:, :1]} for r in requests]):
        for count in (2, 400_000, 900_000, 2, 900_000):
            assert server.infer("tight", np.full((1, count), count, F4)).tolist() == [[count]]


def test_memory_goes_back_when_nobody_uses_it(server: Server) -> None:
    with server.worker("tight", double):
        server.infer("tight", ONE)
        before = server.arena_mappings()
        for _ in range(3):
            assert server.infer("tight", np.ones((1, 500_000), F4)).shape == (1, 500_000)
        assert server.arena_mappings() > before
        eventually(lambda: server.arena_mappings() <= before)
        assert server.infer("tight", ONE).tolist() == [[2, 4]]


def test_inputs_that_the_callable_keeps_are_not_written_over(server: Server) -> None:
    kept: list[Array] = []

    def keep(requests: list[Request]) -> list[dict[str, Array]]:
        kept.extend(request["x"][:, ::2] for request in requests)
        return double(requests)

    with server.worker("plain", keep):
        for value in range(20):
            server.infer("plain", np.full((1, 3), value, F4))
        assert [array.tolist() for array in kept] == [[[value, value]] for value in range(20)]
        kept.clear()


# ---- streams -------------------------------------------------------------------------------------------------------


def stream(server: Server, count: int) -> list[float]:
    """All responses to one request of the decoupled model."""
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    values: list[float] = []
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[count]], F4))
        client.async_stream_infer("stream", [tensor], enable_empty_final_response=True)
        while True:
            result, error = results.get(timeout=PATIENCE_S)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                values.append(float(result.as_numpy("y")[0, 0]))
            if response.parameters["triton_final_response"].bool_param:
                return values


def count_up(requests: list[Request]) -> Iterator[list[dict[str, Array] | None]]:
    counts = [int(request["x"][0, 0]) for request in requests]
    for step in range(max(counts)):
        yield [{"y": np.array([[step]], F4)} if step < count else None for count in counts]


async def count_up_async(requests: list[Request]) -> Any:
    for results in count_up(requests):
        yield results


@pytest.mark.parametrize("infer_func", [count_up, count_up_async])
@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_a_stream_of_any_length(infer_func: Callable[..., Any], count: int, server: Server) -> None:
    """Also one with more responses than a socket holds acknowledgements, while the callable reads none of them."""
    with server.worker("stream", infer_func):
        assert stream(server, count) == list(range(count))


def test_a_stream_whose_worker_is_lost(server: Server, pool: ThreadPoolExecutor) -> None:
    with BadWorker(server.endpoint("stream")) as bad:
        bad.receive_kind(wire.WELCOME)
        answer = pool.submit(stream, server, 3)
        batch = bad.receive_kind(wire.BATCH)[3]
        record = wire.response_record(
            batch, [wire.Answer(0, flags=0, rows=1)], [wire.Tensor("y", wire.FP32, [1, 1], b"\0\0\0\0")]
        )
        respond(bad, batch, record, flags=0)
        bad.receive_kind(wire.RELEASE)
        bad.socket.close()
        with pytest.raises(InferenceServerException, match="was lost while it worked on this request"):
            answer.result(PATIENCE_S)
    with server.worker("stream", count_up):
        assert stream(server, 2) == [0, 1]


# ---- what travels along --------------------------------------------------------------------------------------------


def test_everything_about_a_request_arrives(server: Server) -> None:
    seen: list[dict[str, Any]] = []

    def look(requests: list[Request]) -> list[dict[str, Array]]:
        seen.extend(
            {
                "id": r.request_id,
                "parameters": dict(r.parameters),
                "priority": r.priority,
                "timeout_us": r.timeout_us,
                "correlation": r.correlation_id,
                "start": r.sequence_start,
                "end": r.sequence_end,
                "outputs": r.requested_output_names,
            }
            for r in requests
        )
        return double(requests)

    body: dict[str, Any] = {
        "id": "größe 7",
        "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}],
        "outputs": [{"name": "y"}],
        "parameters": {
            "text": "grüße", "empty": "", "count": -5, "large": 1 << 62, "flag": False, "rate": 0.25,
            "priority": 3, "timeout": 5_000_000, "sequence_id": 77, "sequence_start": True, "sequence_end": True,
        },
    }  # fmt: skip

    def post() -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{server.url}/v2/models/plain/infer",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return dict(json.load(response))

    with server.worker("plain", look):
        assert post()["outputs"][0]["data"] == [2, 4]
        body["parameters"] = {"sequence_id": "séance"}
        assert post()["outputs"][0]["data"] == [2, 4]
        body["parameters"] = {}
        del body["id"]
        post()
    first, second, third = seen
    assert first["id"] == "größe 7"
    assert first["outputs"] == ["y"]
    sent = {"text": "grüße", "empty": "", "count": -5, "large": 1 << 62, "flag": False, "rate": 0.25}
    assert {name: first["parameters"][name] for name in sent} == sent
    assert type(first["parameters"]["flag"]) is bool
    assert first["timeout_us"] == 5_000_000
    assert first["priority"] == 3
    assert (first["correlation"], first["start"], first["end"]) == (77, True, True)
    assert second["correlation"] == "séance"
    assert (third["id"], third["correlation"], third["parameters"], third["priority"]) == ("", 0, {}, 2)


def test_a_model_without_batching(server: Server, pool: ThreadPoolExecutor) -> None:
    with server.worker("single", double):
        answers = [pool.submit(server.infer, "single", np.full(3, value, F4)) for value in range(8)]
        assert [answer.result(PATIENCE_S).tolist() for answer in answers] == [[2 * value] * 3 for value in range(8)]
        assert server.infer("single", np.zeros(0, F4)).shape == (0,)


def test_tensors_without_elements(server: Server) -> None:
    with server.worker("plain", double):
        assert server.infer("plain", np.zeros((2, 0), F4)).shape == (2, 0)


def test_batches_of_requests_with_different_shapes(server: Server, pool: ThreadPoolExecutor) -> None:
    with server.worker("plain", double):
        sizes = [1, 5, 2, 5, 3, 1] * 5
        answers = [pool.submit(server.infer, "plain", np.full((1 + size % 2, size), size, F4)) for size in sizes]
        for size, answer in zip(sizes, answers, strict=True):
            assert answer.result(PATIENCE_S).tolist() == [[2 * size] * size] * (1 + size % 2)


# ---- types ---------------------------------------------------------------------------------------------------------


def identity(requests: list[Request]) -> list[dict[str, Array]]:
    return [{f"{name}_OUT": array for name, array in request.items()} for request in requests]


def ask_types(server: Server, inputs: dict[str, Array], outputs: list[str] | None = None) -> dict[str, Array]:
    """One request over gRPC with these inputs, and the optional x of the model left out."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensors = []
        for name, array_ in inputs.items():
            tensor = tritonclient.grpc.InferInput(name, list(array_.shape), name)
            try:
                tensor.set_data_from_numpy(array_)
            except InferenceServerException:  # clients before r26.06 want BF16 as float32
                tensor.set_data_from_numpy(array_.astype(F4))
            tensors.append(tensor)
        wanted = [f"{name}_OUT" for name in outputs or inputs]
        result = client.infer(
            "types",
            tensors,
            outputs=[tritonclient.grpc.InferRequestedOutput(name) for name in wanted],
            client_timeout=PATIENCE_S,
        )
        return {name.removesuffix("_OUT"): result.as_numpy(name) for name in wanted}


def sample_of(name: str, rows: int) -> Array:
    if name == "BYTES":
        made = np.empty((rows, 3), object)
        made[:] = [[b"", "gr\u00fc\u00dfe".encode(), b"\0\xff" * row] for row in range(rows)]
        return made
    dtype = np.dtype(TYPES[name])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([[limits.min, limits.max, row] for row in range(rows)], dtype)
    if dtype.kind == "b":
        return np.array([[True, False, row % 2] for row in range(rows)], dtype)
    return np.array([[-1.5, np.inf, row] for row in range(rows)], dtype)


@pytest.mark.parametrize("name", [name for name, dtype in TYPES.items() if dtype is not None])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_type_makes_the_round_trip(name: str, rows: int, server: Server) -> None:
    sent = sample_of(name, rows)
    with server.worker("types", identity):
        received = ask_types(server, {name: sent})[name]
        assert received.shape == sent.shape
        assert received.tolist() == sent.tolist()
        assert ask_types(server, {name: np.zeros((1, 0), TYPES[name])})[name].shape == (1, 0)


@pytest.mark.skipif(TYPES["BF16"] is not None, reason="ml_dtypes is installed")
def test_bf16_without_its_package_is_an_error_that_names_it(server: Server) -> None:
    header = json.dumps(
        {
            "inputs": [
                {"name": "BF16", "shape": [1, 1], "datatype": "BF16", "parameters": {"binary_data_size": 2}},
            ]
        }
    ).encode()
    request = urllib.request.Request(
        f"http://{server.url}/v2/models/types/infer",
        header + b"\x80\x3f",
        {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"},
    )
    with server.worker("types", identity):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        with caught.value as response:
            assert "pip install ml_dtypes" in response.read().decode()


def test_requests_of_one_batch_that_lack_different_inputs(server: Server, pool: ThreadPoolExecutor) -> None:
    sizes: list[int] = []

    def look(requests: list[Request]) -> list[dict[str, Array]]:
        sizes.append(len(requests))
        time.sleep(0.05)  # the others come meanwhile, and together
        return identity(requests)

    # Triton joins only requests with the same inputs; these come in any order.
    sets = [["INT8"], ["INT8", "BYTES"], ["BYTES", "FP32", "INT8"], ["FP32", "INT8", "BYTES"], ["FP64"]]
    sets = [names for names in sets for _ in range(4)]
    with server.worker("types", look):
        for round_ in itertools.count():
            answers = [
                (names, pool.submit(ask_types, server, {name: sample_of(name, 1) for name in names})) for names in sets
            ]
            for names, answer in answers:
                received = answer.result(PATIENCE_S)
                assert {name: received[name].tolist() for name in names} == {
                    name: sample_of(name, 1).tolist() for name in names
                }
            if round_ and max(sizes) > 1:
                break


def test_only_the_outputs_that_are_asked_for_come(server: Server) -> None:
    inputs = {name: sample_of(name, 2) for name in ("INT8", "FP32", "BYTES")}
    with server.worker("types", identity):
        assert ask_types(server, inputs, ["FP32"])["FP32"].tolist() == inputs["FP32"].tolist()
