"""A worker against a scripted proxy backend: every byte that it sends and takes, without a server."""

import asyncio
import contextvars
import functools
import gc
import logging
import os
import re
import socket
import string
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from pytriton.proxy.types import Request, Response
from pytriton.proxy_backend import AttachError, ModelSpec, TensorSpec, VersionMismatchError, Worker
from pytriton.proxy_backend.protocol import worker as worker_protocol
from pytriton.proxy_backend.transport import connection
from support.waiting import PATIENCE_S, Held, eventually

GOLDEN = Path(__file__).parents[2] / "golden"
pytestmark = pytest.mark.usefixtures("both_ways")
F4 = np.dtype("float32")
Serve = Callable[..., tuple[Worker, Any]]


def spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "model",
        "version": 1,
        "inputs": (TensorSpec(name="x", dtype=F4, shape=(-1,)),),
        "outputs": (TensorSpec(name="y", dtype=F4, shape=(-1,)),),
        "batching": True,
        "max_batch_size": 8,
        **changes,
    }
    return ModelSpec(**values)


def double(requests: list[Request]) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [{"y": request["x"] * 2} for request in requests]


@pytest.fixture
def make_worker(proxy: Any) -> Iterator[Callable[..., Worker]]:
    """Makes workers for the scripted proxy backend, and ends them."""
    made = []

    def make(infer_func: Callable[..., Any] = double, *, model: ModelSpec | None = None, **options: Any) -> Worker:
        worker = Worker(infer_func, model or spec(), proxy.endpoint, **options)
        made.append(worker)
        return worker

    yield make
    proxy.close()
    for worker in made:
        assert worker.stop(PATIENCE_S)


@pytest.fixture
def serve(proxy: Any, make_worker: Callable[..., Worker]) -> Serve:
    """Starts a worker and gives the proxy backend's end of its connection."""

    def start(infer_func: Callable[..., Any] = double, *, welcome: dict[str, Any] | None = None, **options: Any) -> Any:
        proxy.listen()
        worker = make_worker(infer_func, **options)
        worker.start()
        peer = proxy.accept()
        peer.welcome(**(welcome or {}))
        worker.wait_attached(PATIENCE_S)
        return worker, peer

    return start


def record(
    golden: ModuleType, number: int, *rows: list[float], outputs: list[str] | None = None, **fields: Any
) -> bytes:
    """A batch of one request per list, whose input x has shape (1, len)."""
    requests = [golden.Request(outputs=["y"] if outputs is None else outputs, **fields) for _ in rows]
    if len({len(row) for row in rows}) == 1:
        payload = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        tensors = [golden.Tensor("x", golden.FP32, [len(rows), len(rows[0])], payload)]
    else:
        tensors = [
            golden.Tensor("x", golden.FP32, [1, len(row)], struct.pack(f"<{len(row)}f", *row), owner=i)
            for i, row in enumerate(rows)
        ]
    return bytes(golden.batch_record(number, requests, tensors))


def values(responses: list[Any]) -> list[Any]:
    return [response.outputs["y"].tolist() for response in responses]


# ---- attaching -----------------------------------------------------------------------------------------------------


def test_attaches_as_soon_as_somebody_listens(
    proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType
) -> None:
    worker = make_worker()
    worker.start()
    with pytest.raises(AttachError, match=rf"not attached after [\d.]+ s: nobody accepts it at {proxy.endpoint}"):
        worker.wait_attached(0.05)
    assert worker.is_alive
    assert worker.error is None
    proxy.listen()
    peer = proxy.accept()
    hello = peer.welcome()
    worker.wait_attached(PATIENCE_S)
    assert worker.is_attached
    sent = golden.message(golden.HELLO, body=hello.body)
    assert sent == golden.greeting(
        golden.HELLO,
        f"double\nmodel\n{golden.DIGEST}",
        pid=os.getpid(),
        uid=os.geteuid(),
        max_in_flight=1,
        capabilities=3 + 64 + 128,
        model_version=1,
    )
    with pytest.raises(RuntimeError, match="started before"):
        worker.start()


def test_who_waits_for_a_socket_asks_rarely_and_is_told_of_it(
    proxy: Any, make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    connect = connection._connect

    def counted(endpoint: Path) -> socket.socket:
        tried.append(time.monotonic())
        return connect(endpoint)

    monkeypatch.setattr(connection, "_connect", counted)
    worker = make_worker()
    begun = time.monotonic()
    worker.start()
    with pytest.raises(AttachError):
        worker.wait_attached(1.5)
    # Two at the beginning, and one every two seconds.
    assert len(tried) <= 2 + (time.monotonic() - begun) / 2.0
    proxy.listen()
    proxy.accept().welcome()
    worker.wait_attached(PATIENCE_S)


def test_hello_is_the_golden_one(proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType) -> None:
    async def classify(requests: list[Request]) -> list[Any]:
        return [{}]

    classify.__qualname__ = "classify"
    proxy.listen()
    make_worker(classify).start()
    body = bytearray(proxy.accept().receive().body)
    assert struct.unpack_from("<II", body, 12) == (os.getpid(), os.geteuid())
    struct.pack_into("<II", body, 12, 4242, 1000)
    assert golden.message(golden.HELLO, body=bytes(body)) == (GOLDEN / "hello.bin").read_bytes()


def test_a_long_name_is_cut_to_what_a_packet_holds(proxy: Any, make_worker: Callable[..., Worker]) -> None:
    def work(requests: list[Request]) -> None: ...

    work.__qualname__ = "x" * 10_000
    proxy.listen()
    make_worker(work).start()
    assert proxy.accept().receive().size == 4096


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ("refuse", AttachError, "it runs as user 7"),
        ("refuse_major_2", VersionMismatchError, r"protocol 1\.0, the proxy backend 2\.0.*speak 2\.0"),
        ("refuse_major_2_short", VersionMismatchError, r"protocol 1\.0, the proxy backend 2\.5"),
        ("detach", AttachError, "too short"),
        ("batch", AttachError, "too short"),
        ("hello", AttachError, "message 1 came instead"),
    ],
)
def test_a_refusal_ends_the_worker_with_its_reason(
    answer: str,
    kind: type[Exception],
    reason: str,
    proxy: Any,
    make_worker: Callable[..., Worker],
) -> None:
    proxy.listen()
    worker = make_worker()
    worker.start()
    peer = proxy.accept()
    peer.receive()
    peer.send((GOLDEN / f"{answer}.bin").read_bytes())
    with pytest.raises(AttachError, match=reason):
        worker.wait_attached(PATIENCE_S)
    assert type(worker.error) is kind
    assert not worker.is_alive
    with pytest.raises(EOFError):
        peer.receive()


@pytest.mark.parametrize("cut", [0, 59, 60, 100, 117])
def test_an_answer_that_is_cut_off(
    cut: int, proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType
) -> None:
    welcome = (GOLDEN / "welcome.bin").read_bytes()
    raw = golden.message(golden.WELCOME, body=welcome[48 : max(cut, 48)])
    proxy.listen()
    worker = make_worker()
    worker.start()
    peer = proxy.accept()
    peer.receive()
    peer.send(raw)
    with pytest.raises(AttachError, match=r"too short|cut off"):
        worker.wait_attached(PATIENCE_S)


def test_a_foreign_peer(proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType) -> None:
    proxy.listen()
    worker = make_worker()
    worker.start()
    peer = proxy.accept()
    peer.receive()
    peer.send(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 200)
    with pytest.raises(AttachError, match="not a pytriton proxy backend"):
        worker.wait_attached(PATIENCE_S)


def test_who_waits_in_steps_is_told_how_long_it_has_been(proxy: Any, make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.start()
    for least in (0.05, 0.1):
        with pytest.raises(AttachError) as waited:
            worker.wait_attached(0.05)
        told = re.search(r"was not attached after ([\d.]+) s", str(waited.value))
        assert told is not None
        assert float(told[1]) >= least
    # Whoever looks after several workers comes to the last one without any time left.
    with pytest.raises(AttachError, match=r"after 0\.[1-9]|after [1-9]"):
        worker.wait_attached(0.0)


def test_every_attach_loss_and_detach_is_logged_when_it_happens(
    proxy: Any, make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton.proxy_backend")
    worker = make_worker()
    worker.start()
    with pytest.raises(AttachError):
        worker.wait_attached(0.05)
    assert "Serving model" not in caplog.text
    proxy.listen()
    peer = proxy.accept()
    peer.welcome()
    worker.wait_attached(PATIENCE_S)
    assert f"Serving model model (version 1) at {proxy.endpoint}" in caplog.text
    peer.close()
    peer = proxy.accept()
    peer.welcome()
    worker.wait_attached(PATIENCE_S)
    stopping = threading.Thread(target=worker.stop, args=(PATIENCE_S,))
    stopping.start()
    peer.receive()
    peer.close()
    stopping.join()
    told = [record.getMessage().partition(" (version 1)")[0] for record in caplog.records]
    assert told == ["Serving model model", "Lost model model", "Serving model model", "Detached from model model"]


def test_a_worker_whose_starter_reports_the_first_attach_logs_those_that_follow(
    proxy: Any, make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton.proxy_backend")
    worker = make_worker()
    worker.log_attachment_at(logging.DEBUG)
    worker.start()
    proxy.listen()
    peer = proxy.accept()
    peer.welcome()
    worker.wait_attached(PATIENCE_S)
    peer.close()
    peer = proxy.accept()
    assert "Serving model" not in caplog.text
    peer.welcome()
    assert eventually(lambda: caplog.text.count("Serving model") == 1)
    peer.close()


def test_a_stopped_worker_is_freed_with_its_callable_at_once(proxy: Any) -> None:
    class Weights:
        def __call__(self, **_: Any) -> Any:
            raise NotImplementedError

    proxy.listen()
    callable_ = Weights()
    weights = weakref.ref(callable_)
    worker = Worker(callable_, spec(), proxy.endpoint)
    del callable_
    worker.start()
    peer = proxy.accept()
    peer.welcome()
    worker.wait_attached(PATIENCE_S)
    # Nobody listens any more: a worker that greets is waited for.
    proxy.close()
    gc.collect()
    gc.disable()
    try:
        worker.stop(PATIENCE_S)
        del worker
        assert weights() is None
    finally:
        gc.enable()


def test_a_socket_of_a_python_proxy_is_told_from_one_of_the_native_proxy(
    proxy: Any, make_worker: Callable[..., Worker]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(proxy.endpoint))
        other.listen()
        worker = make_worker()
        worker.start()
        with pytest.raises(AttachError, match=rf"no native proxy listens.*: ipc://{proxy.endpoint}"):
            worker.wait_attached(PATIENCE_S)


def test_a_silent_peer_is_tried_again_and_named(
    proxy: Any, make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is stopped, or has no descriptor left, may go on later."""
    caplog.set_level(logging.WARNING, "pytriton.proxy_backend")
    monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", 0.1)
    proxy.listen()
    worker = make_worker()
    worker.start()
    reason = f"the proxy backend at {proxy.endpoint} did not answer a greeting within 0.1 s"
    eventually(lambda: reason in caplog.text)
    with pytest.raises(AttachError, match=rf"was not attached after [\d.]+ s: .* The last attempt: {reason}"):
        worker.wait_attached(0.3)
    assert worker.is_alive
    assert caplog.text.count(reason) == 1
    monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", PATIENCE_S)
    while True:  # connections that the worker has left are there still
        peer = proxy.accept()
        try:
            peer.welcome()
            break
        except BrokenPipeError:
            continue
    worker.wait_attached(PATIENCE_S)


@pytest.mark.parametrize("read_first", [False, True])
def test_a_server_that_ends_during_the_greeting_is_tried_again(
    read_first: bool, proxy: Any, make_worker: Callable[..., Worker]
) -> None:
    proxy.listen()
    worker = make_worker()
    worker.start()
    first = proxy.accept()
    if read_first:
        first.receive()
    first.close()
    proxy.accept().welcome()
    worker.wait_attached(PATIENCE_S)
    assert worker.error is None


def test_a_worker_that_waits_for_an_answer_to_its_greeting_stops_at_once(
    proxy: Any, make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytriton.proxy_backend.transport.connection.GREETING_TIMEOUT_S", 10 * PATIENCE_S)
    proxy.listen()
    worker = make_worker()
    worker.start()
    proxy.accept().receive()
    assert worker.stop(PATIENCE_S)
    assert worker.error is None


def test_a_later_minor_with_a_longer_greeting_and_more_capabilities(
    serve: Serve, proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType
) -> None:
    _, peer = serve(welcome={"minor": 9, "capabilities": (1 << 64) - 1, "tail": b"later fields" * 3})
    peer.batch(1, record(golden, 1, [1, 2]))
    assert values(peer.responses(peer.answer())) == [[[2, 4]]]


def test_no_capabilities_at_all(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(welcome={"capabilities": 0})
    peer.batch(1, record(golden, 1, [1, 2]))
    assert values(peer.responses(peer.answer())) == [[[2, 4]]]


@pytest.mark.parametrize(
    ("flags", "version", "text"),
    [(0, 1, "batching=False"), (3, 1, "decoupled=True"), (1, 2, "model 'model' version 2, this worker is for")],
)
def test_another_kind_of_model(
    flags: int, version: int, text: str, proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType
) -> None:
    proxy.listen()
    worker = make_worker()
    worker.start()
    peer = proxy.accept()
    peer.receive()
    peer.send(golden.greeting(golden.WELCOME, "model", model_flags=flags, model_version=version))
    with pytest.raises(AttachError, match=text):
        worker.wait_attached(PATIENCE_S)


# ---- serving -------------------------------------------------------------------------------------------------------


def test_a_batch_and_its_answer(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve()
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1, 2], [3, 4], [5, number]), consumed=number - 1)
        packet = peer.answer()
        assert (packet.kind, packet.batch) == (golden.RESPONSE, number)
        # The inputs are free again, and told so with the answer: no message more.
        assert packet.flags == golden.INPUT_RELEASED | golden.BATCH_DONE
        responses = peer.responses(packet)
        assert values(responses) == [[[2, 4]], [[6, 8]], [[10, 2 * number]]]
        assert [response.flags for response in responses] == [golden.FINAL] * 3
    assert peer.released == []
    assert list(peer.outputs) == [1]


def test_only_requested_outputs_come(serve: Serve, golden: ModuleType) -> None:
    outputs = (TensorSpec(name="y", dtype=F4, shape=(-1,)), TensorSpec(name="z", dtype=F4, shape=(-1,)))
    _, peer = serve(lambda requests: [{"y": r["x"], "z": -r["x"]} for r in requests], model=spec(outputs=outputs))
    requests = [golden.Request(outputs=names) for names in (["z"], ["y", "z"], ["y"])]
    peer.batch(
        1, golden.batch_record(1, requests, [golden.Tensor("x", golden.FP32, [3, 1], struct.pack("<3f", 1, 2, 3))])
    )
    responses = peer.responses(peer.answer())
    assert [{name: array.tolist() for name, array in r.outputs.items()} for r in responses] == [
        {"z": [[-1]]},
        {"y": [[2]], "z": [[-2]]},
        {"y": [[3]]},
    ]
    peer.batch(2, record(golden, 2, [1], [2], outputs=["z"]), consumed=1)
    assert [list(r.outputs) for r in peer.responses(peer.answer())] == [["z"], ["z"]]


def test_results_of_many_kinds(serve: Serve, golden: ModuleType) -> None:
    def mixed(requests: list[Request]) -> Any:
        return (
            {"y": requests[0]["x"]},
            Response({"y": np.zeros((1, 0), F4)}, {"score": 0.5, "n": -1, "ok": True, "why": "größer"}),
            [np.array([[7]], F4)],
            KeyError("no such label"),
            requests[4],
        )

    _, peer = serve(mixed, model=spec(max_batch_size=8))
    peer.batch(1, record(golden, 1, *([[1.0]] * 5)))
    responses = peer.responses(peer.answer())
    assert [r.flags for r in responses] == [1, 1, 1, 3, 3]
    assert responses[0].outputs["y"].tolist() == [[1]]
    assert responses[1].outputs["y"].shape == (1, 0)
    assert responses[1].parameters == {"score": 0.5, "n": -1, "ok": True, "why": "größer"}
    assert responses[2].outputs["y"].tolist() == [[7]]
    assert responses[3].error == "model 'model': the inference callable raised KeyError: 'no such label'"
    assert responses[3].outputs == {}
    assert responses[4].error.endswith("none of the outputs that are asked for: expected y, got x")


def test_results_that_look_alike_are_still_checked_one_by_one(serve: Serve, golden: ModuleType) -> None:
    """A batch of plain arrays, and after it batches that differ in one place from what was sent before."""
    seconds: list[Any] = [
        np.full((1, 1), 5, F4),
        np.full((1, 1), 5.0),
        np.full((2, 1), 5, F4),
        np.full((1, 3), 5, F4),
        np.full((1, 1), 5, ">f4"),
        np.ma.masked_array(np.full((1, 1), 5, F4)),
        np.full((1, 0), 5, F4),
        np.full((3, 2), 5, F4)[::2, 1:],
    ]
    _, peer = serve(lambda requests: [{"y": requests[0]["x"]}, {"y": seconds[0]}])
    for number in range(1, 2 * len(seconds) + 1):
        peer.batch(number, record(golden, number, [1.0], [2.0]), consumed=number - 1)
        responses = peer.responses(peer.answer())
        assert responses[0].outputs["y"].tolist() == [[1]]
        second = responses[1].outputs["y"]
        assert second.dtype == F4
        assert second.tolist() == seconds[0].tolist()
        if number % 2 == 0:
            seconds.pop(0)


@pytest.mark.parametrize("label", [np.array([[1]]), np.array([[None]], object)])
def test_what_is_no_string_is_not_sent_where_strings_are_declared(
    label: np.ndarray[Any, Any], serve: Serve, golden: ModuleType
) -> None:
    outputs = (TensorSpec(name="y", dtype=np.dtype(object), shape=(-1,)),)
    _, peer = serve(lambda requests: [{"y": label} for _ in requests], model=spec(outputs=outputs))
    peer.batch(1, record(golden, 1, [1.0], [2.0]))
    for index, response in enumerate(peer.responses(peer.answer())):
        assert response.flags & golden.ERROR
        assert f"output 'y', request {index} of the batch" in response.error


class Untold(Exception):
    """An error whose text nobody can have, as of libraries that format it late, from what is not there."""

    def __str__(self) -> str:
        raise KeyError("no such placeholder")


async def leave_task() -> None:
    """asyncio takes this exception of a task of its own for the end of the whole loop."""

    async def leave() -> None:
        raise SystemExit(4)

    await asyncio.create_task(leave())


@pytest.mark.parametrize(
    ("infer_func", "text"),
    [
        (lambda requests: 1 / 0, "the inference callable raised ZeroDivisionError: division by zero"),
        (lambda requests: [], "one element per request: expected a list of 1, got a list of 0"),
        (lambda requests: [{"y": np.zeros(1 << 24, "f8")[None]}], "Raise arena_budget_bytes"),
        (lambda requests: (_ for _ in range(2)), "must yield exactly one result"),
        (lambda requests: exec("raise SystemExit(3)"), "SystemExit: 3"),
        (lambda requests: requests[0].data.clear() or [{"y": requests[0]["x"]}], "KeyError: 'x'"),
        (lambda requests: exec("raise RuntimeError('ü' * 5000)"), "üüü"),
        (lambda requests: exec("raise Untold"), "Untold: <its text cannot be told: __str__ raised KeyError>"),
        (lambda requests: exec("raise ValueError('\\ud800')"), "ValueError: ?"),
        (lambda requests: Untold(), "got Untold"),
        (lambda requests: asyncio.sleep(0, Untold), "got type: <class"),
        (lambda requests: leave_task(), "SystemExit: 4"),
    ],
)
def test_a_failure_is_told_and_the_next_batch_is_served(
    infer_func: Callable[..., Any], text: str, serve: Serve, golden: ModuleType
) -> None:
    calls = []

    def work(requests: list[Request]) -> Any:
        calls.append(len(requests))
        return infer_func(requests) if len(calls) == 1 else double(requests)

    _, peer = serve(work)
    peer.batch(1, record(golden, 1, [1.0]))
    packet = peer.answer()
    assert (packet.kind, packet.batch, packet.place) == (golden.FAIL, 1, 1)
    assert packet.flags & golden.BATCH_DONE
    assert packet.size <= 4096
    assert text in packet.body.decode()
    peer.batch(2, record(golden, 2, [1.0]))
    assert values(peer.responses(peer.answer())) == [[[2]]]


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_event_loop_outlives_what_a_task_of_the_callable_raises(
    decoupled: bool, serve: Serve, golden: ModuleType
) -> None:
    async def work(requests: list[Request]) -> Any:
        if requests[0]["x"].item() == 4:
            await leave_task()
        return double(requests)

    worker, peer = serve(work, model=spec(decoupled=decoupled), welcome={"model_flags": 3 if decoupled else 1})
    for number in (1, 2):
        peer.batch(number, record(golden, number, [4.0]))
        assert "SystemExit: 4" in peer.answer().body.decode()
    peer.batch(3, record(golden, 3, [1.0]))
    assert values(peer.responses(peer.answer())) == [[[2]]]
    assert worker.is_alive


def test_a_batch_that_cannot_be_read_fails_and_the_connection_goes_on(serve: Serve, golden: ModuleType) -> None:
    worker, peer = serve()
    good = record(golden, 1, [1.0, 2.0])
    for number, (offset, value, text) in enumerate(
        [(0, 0, "expected the record of batch"), (4, 99, "99 requests"), (64 + 80 + 8, 77, "data type number 77")], 1
    ):
        raw = bytearray(record(golden, number, [1.0, 2.0]))
        struct.pack_into("<I", raw, offset, value)
        peer.batch(number, bytes(raw))
        packet = peer.answer()
        assert (packet.kind, packet.batch, packet.place) == (golden.FAIL, number, 3)
        assert "the worker cannot read the batch" in packet.body.decode()
        assert text in packet.body.decode()
    peer.batch(9, record(golden, 9, [1.0, 2.0]))
    assert values(peer.responses(peer.answer())) == [[[2, 4]]]
    assert worker.error is None
    # The blocks of the three are given back as well.
    while len(peer.released) < 3:
        peer.keep_account(peer.receive())
    del good


def test_callables_of_every_kind(proxy: Any, make_worker: Callable[..., Worker], golden: ModuleType) -> None:
    async def coroutine(requests: list[Request]) -> Any:
        await asyncio.sleep(0)
        return double(requests)

    async def generator(requests: list[Request]) -> Any:
        yield double(requests)

    def one(requests: list[Request]) -> Any:
        yield double(requests)

    class Plain:
        def __call__(self, requests: list[Request]) -> Any:
            return double(requests)

        def method(self, requests: list[Request]) -> Any:
            return double(requests)

    class Async:
        async def __call__(self, requests: list[Request]) -> Any:
            return double(requests)

    callables: list[tuple[Callable[..., Any], int]] = [
        (coroutine, 64),
        (generator, 64),
        (one, 1),
        (Plain(), 1),
        (Plain().method, 1),
        (Async(), 64),
        (functools.partial(coroutine), 64),
        (functools.partial(double), 1),
        (lambda requests: coroutine(requests), 1),
        (lambda requests: generator(requests), 1),
    ]
    proxy.listen()
    for infer_func, in_flight in callables:
        worker = make_worker(infer_func)
        worker.start()
        peer = proxy.accept()
        hello = peer.welcome()
        assert struct.unpack_from("<I", hello.body, 20) == (in_flight,)
        for number in (1, 2):
            peer.batch(number, record(golden, number, [1, 2], [3, 4]))
            assert values(peer.responses(peer.answer())) == [[[2, 4]], [[6, 8]]]


def test_runs_in_its_context(serve: Serve, golden: ModuleType) -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=0.0)
    context = contextvars.copy_context()
    context.run(variable.set, 5.0)
    _, peer = serve(lambda requests: [{"y": np.full((1, 1), variable.get(), F4)}], context=context)
    peer.batch(1, record(golden, 1, [1.0]))
    assert values(peer.responses(peer.answer())) == [[[5]]]


def test_an_unrecoverable_error_answers_first(serve: Serve, golden: ModuleType) -> None:
    class BrokenError(Exception):
        pass

    told: list[BaseException] = []

    def work(requests: list[Request]) -> Any:
        raise BrokenError("the device is gone")

    worker, peer = serve(work, unrecoverable=(BrokenError,), on_unrecoverable=told.append)
    peer.batch(1, record(golden, 1, [1.0]))
    packet = peer.answer()
    assert "BrokenError: the device is gone" in packet.body.decode()
    eventually(lambda: not worker.is_alive)
    assert type(worker.error) is BrokenError
    assert told == [worker.error]
    with pytest.raises(EOFError):
        peer.answer()


# ---- whose memory it is --------------------------------------------------------------------------------------------


def test_inputs_that_are_kept_stay_until_the_last_view_is_gone(serve: Serve, golden: ModuleType) -> None:
    kept: list[Any] = []

    def keep(requests: list[Request]) -> Any:
        x = requests[0]["x"]
        kept.extend([x[:, 1:], x.T, x.reshape(2, 1)])
        return double(requests)

    _, peer = serve(keep)
    at = peer.batch(1, record(golden, 1, [1.0, 2.0]))
    packet = peer.answer()
    assert packet.flags == golden.BATCH_DONE
    for left in (3, 2, 1):
        peer.socket.settimeout(0.05 if left > 1 else PATIENCE_S)
        assert len(kept) == left
        assert kept[-1].ravel()[-1] == 2
        kept.pop()
        gc.collect()
        if left > 1:
            with pytest.raises(TimeoutError):
                peer.receive()
    release = peer.receive()
    assert (release.kind, release.segment, release.offset) == (golden.RELEASE, 1, at)


async def double_async(requests: list[Request]) -> list[dict[str, np.ndarray[Any, Any]]]:
    return double(requests)


@pytest.mark.slow
@pytest.mark.parametrize("infer", [double, double_async])
def test_a_worker_without_requests_sleeps(infer: Callable[..., Any], serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(infer)
    (thread,) = (each for each in threading.enumerate() if each.name == "pytriton-model")

    def naps() -> str:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))

    for number in (1, 2):
        peer.batch(number, record(golden, number, [1.0, 2.0]))
        assert values(peer.responses(peer.answer())) == [[[2.0, 4.0]]]

        seen, since = naps(), time.monotonic()

        def sleeps() -> bool:
            nonlocal seen, since
            if (now := naps()) != seen:
                seen, since = now, time.monotonic()
            # Longer than two of the ticks of a worker that has something to give back.
            return time.monotonic() - since > 2.5

        eventually(sleeps)


def test_inputs_that_are_kept_for_long_go_back(serve: Serve, golden: ModuleType) -> None:
    kept: list[Any] = []

    def keep(requests: list[Request]) -> Any:
        kept.append(requests[0]["x"])
        return double(requests)

    _, peer = serve(keep)
    at = peer.batch(1, record(golden, 1, [1.0, 2.0]))
    peer.answer()
    # A worker that has nothing to give back rests after a second.
    time.sleep(2.5)
    kept.clear()
    release = peer.receive()
    assert (release.kind, release.offset) == (golden.RELEASE, at)


def test_a_release_travels_with_the_next_answer(serve: Serve, golden: ModuleType) -> None:
    kept: list[Any] = []

    def keep(requests: list[Request]) -> Any:
        kept[:] = [requests[0]["x"]]
        return double(requests)

    _, peer = serve(keep)
    places = []
    for number in range(1, 4):
        places.append((1, peer.batch(number, record(golden, number, [1.0]))))
        assert peer.answer().flags == golden.BATCH_DONE
    assert peer.released == places[:-1]


def test_requests_that_are_kept_keep_the_inputs(serve: Serve, golden: ModuleType) -> None:
    kept: list[Any] = []

    def keep(requests: list[Request]) -> Any:
        kept.append(requests[0])
        return double(requests)

    _, peer = serve(keep)
    at = peer.batch(1, record(golden, 1, [1.0], parameters={"a": 1}))
    assert peer.answer().flags == golden.BATCH_DONE
    assert kept[0].parameters == {"a": 1}
    assert kept[0]["x"].tolist() == [[1]]
    kept.clear()
    gc.collect()
    release = peer.receive()
    assert (release.kind, release.offset) == (golden.RELEASE, at)


@pytest.mark.parametrize(
    "infer_func",
    [
        double,
        lambda requests: [{"y": request["x"]} for request in requests],
        lambda requests: [
            {"y": requests[0].__pytriton_batch__(requests)[0]["x"][i : i + 1]} for i in range(len(requests))
        ],
        lambda requests: exec("raise ValueError(requests)", {"requests": requests}),
        lambda requests: (double(requests) for _ in range(1)),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_inputs_go_back_with_the_answer(
    infer_func: Callable[..., Any], count: int, serve: Serve, golden: ModuleType
) -> None:
    _, peer = serve(infer_func)
    for number in (1, 2):
        peer.batch(number, record(golden, number, *([[1.0, 2.0]] * count)))
        flags = peer.answer().flags
        # An error that holds the requests itself may give them back a little later, but not never.
        if not flags & golden.INPUT_RELEASED:
            gc.collect()
            release = peer.receive()
            assert (release.kind, release.segment) == (golden.RELEASE, 1)


def test_a_full_arena_waits_for_the_acknowledgement(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(lambda requests: [{"y": np.ones((1, 200_000), F4)}], welcome={"arena_budget": 1 << 20})
    peer.batch(1, record(golden, 1, [1.0]))
    first = peer.answer()
    peer.batch(2, record(golden, 2, [1.0]), consumed=0)
    peer.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        peer.receive()
    peer.socket.settimeout(PATIENCE_S)
    peer.message(golden.RELEASE, consumed=1)
    second = peer.answer()
    assert second.batch == 2
    assert (second.segment, second.offset) == (first.segment, first.offset)
    # BATCH acknowledges as well.
    peer.batch(3, record(golden, 3, [1.0]), consumed=2)
    assert peer.answer().batch == 3


def test_outputs_over_the_budget(serve: Serve, golden: ModuleType) -> None:
    sizes = [100, 300_000, 100]
    _, peer = serve(lambda requests: [{"y": np.ones((1, sizes.pop(0)), F4)}], welcome={"arena_budget": 1 << 20})
    peer.batch(1, record(golden, 1, [1.0]))
    peer.answer()
    peer.batch(2, record(golden, 2, [1.0]), consumed=1)
    text = peer.answer().body.decode()
    assert "1048576 bytes" in text
    assert "Raise arena_budget_bytes" in text
    assert any(word.isdigit() and 1_200_000 <= int(word) < 1_201_000 for word in text.split())
    peer.batch(3, record(golden, 3, [1.0]))
    assert peer.responses(peer.answer())[0].outputs["y"].shape == (1, 100)


def test_a_budget_that_an_idle_arena_has_room_for_is_not_refused(serve: Serve, golden: ModuleType) -> None:
    """Segments that were made for smaller outputs make way."""
    sizes = [100, 400_000, 900_000]
    _, peer = serve(lambda requests: [{"y": np.ones((1, sizes.pop(0)), F4)}], welcome={"arena_budget": 4 << 20})
    for number in (1, 2, 3):
        peer.batch(number, record(golden, number, [1.0]), consumed=number - 1)
        [response] = peer.responses(peer.answer())
        assert response.outputs["y"].sum() == [100, 400_000, 900_000][number - 1]
    assert peer.closed_outputs


def test_output_memory_grows_and_goes_back(serve: Serve, golden: ModuleType) -> None:
    sizes = [100, 1_000_000, 100]
    _, peer = serve(lambda requests: [{"y": np.ones((1, sizes.pop(0)), F4)}], welcome={"arena_idle_ms": 0})
    peer.batch(1, record(golden, 1, [1.0]))
    peer.answer()
    assert list(peer.outputs) == [1]
    peer.batch(2, record(golden, 2, [1.0]), consumed=1)
    peer.answer()
    assert list(peer.outputs) == [1, 2]
    peer.message(golden.RELEASE, consumed=2)
    while not peer.closed_outputs:
        peer.keep_account(peer.receive())
    assert peer.closed_outputs == [2]
    peer.batch(3, record(golden, 3, [1.0]), consumed=2)
    assert peer.answer().segment == 1


# ---- the end of a connection ---------------------------------------------------------------------------------------


def test_attaches_again_when_the_server_went_away(
    serve: Serve, proxy: Any, golden: ModuleType, arena_descriptors: Callable[[], set[str]]
) -> None:
    worker, peer = serve()
    counts = []
    for _ in range(10):
        counts.append(len(arena_descriptors()))
        peer.batch(1, record(golden, 1, [1.0]))
        assert values(peer.responses(peer.answer())) == [[[2]]]
        peer.close()
        peer = proxy.accept()
        peer.welcome()
        assert worker.is_alive
    worker.wait_attached(PATIENCE_S)
    # The memory of the connections before is gone: what is open is that of this one and the last.
    assert max(counts) <= 6, counts


def test_stop_finishes_what_is_in_flight(serve: Serve, golden: ModuleType) -> None:
    slow = Held(double)
    worker, peer = serve(slow)
    peer.batch(1, record(golden, 1, [1.0]))
    assert slow.entered.wait(PATIENCE_S)
    ended: list[bool] = []
    stopper = threading.Thread(target=lambda: ended.append(worker.stop(PATIENCE_S)))
    stopper.start()
    assert peer.answer().kind == golden.DETACH
    slow.release.set()
    assert values(peer.responses(peer.answer())) == [[[2]]]
    peer.close()
    stopper.join(PATIENCE_S)
    assert ended == [True]
    assert worker.error is None
    assert not worker.is_alive
    assert worker.stop(0)


def test_stop_says_when_it_took_too_long_and_cuts_the_connection(serve: Serve, golden: ModuleType) -> None:
    stuck = Held(double)
    worker, peer = serve(stuck)
    peer.batch(1, record(golden, 1, [1.0]))
    assert stuck.entered.wait(PATIENCE_S)
    assert not worker.stop(0.05)
    assert peer.answer().kind == golden.DETACH
    with pytest.raises(EOFError):
        peer.receive()
    stuck.release.set()


def test_stop_before_anybody_listens(make_worker: Callable[..., Worker]) -> None:
    assert make_worker().stop(0)
    worker = make_worker()
    worker.start()
    assert worker.stop(PATIENCE_S)
    assert not worker.is_alive


def doorbells(golden: ModuleType) -> dict[str, tuple[bytes, int]]:
    """Packets that end a connection, and with how many descriptors."""
    message = golden.message
    return {
        "too short": (b"x" * 47, 0),
        "wrong size": (message(golden.CANCEL)[:4] + b"\x07\0\0\0" + message(golden.CANCEL)[8:], 0),
        "unknown message": (message(99), 0),
        "a worker's message": (message(golden.DETACH), 0),
        "a second greeting": (golden.greeting(golden.WELCOME, "model"), 0),
        "block in an unknown segment": (message(golden.BATCH, batch=1, segment=9, length=64), 0),
        "block past the end": (message(golden.BATCH, batch=1, segment=1, offset=4 << 20, length=64), 0),
        "block with an overflow": (message(golden.BATCH, batch=1, segment=1, offset=(1 << 64) - 64, length=128), 0),
        "block that is not aligned": (message(golden.BATCH, batch=1, segment=1, offset=8, length=64), 0),
        "more acknowledged than sent": (message(golden.RELEASE, consumed=1), 0),
        "segment without a descriptor": (message(golden.SEGMENT, segment=2, length=4096), 0),
        "segment with two": (message(golden.SEGMENT, segment=2, length=4096), 2),
        "segment announced twice": (message(golden.SEGMENT, segment=1, length=4096), 1),
        "segment larger than its memory": (message(golden.SEGMENT, segment=2, length=4097), 1),
        "segment of nothing": (message(golden.SEGMENT, segment=2, length=0), 1),
    }


@pytest.mark.parametrize("name", sorted(doorbells(__import__("unittest.mock").mock.MagicMock())))
def test_a_malformed_message_ends_the_connection_and_no_more(
    name: str, serve: Serve, proxy: Any, golden: ModuleType
) -> None:
    worker, peer = serve()
    packet, count = doorbells(golden)[name]
    fds = [os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(count)]
    for fd in fds:
        os.ftruncate(fd, 4096)
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    peer.send(packet, fds)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.receive()
    again = proxy.accept()
    again.welcome()
    again.batch(1, record(golden, 1, [1.0]))
    assert values(again.responses(again.answer())) == [[[2]]]
    assert worker.error is None


def test_memory_over_the_budget_is_refused(serve: Serve, proxy: Any, golden: ModuleType) -> None:
    worker, peer = serve(welcome={"arena_budget": 8 << 20})
    peer.segment(2, 4 << 20)
    peer.batch(1, record(golden, 1, [1.0]))
    assert values(peer.responses(peer.answer())) == [[[2]]]
    peer.message(golden.SEGMENT_CLOSE, segment=2)
    peer.segment(3, 4 << 20)
    peer.segment(4, 4096)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.receive()
    proxy.accept().welcome()
    worker.wait_attached(PATIENCE_S)


def test_memory_that_could_shrink_is_refused(serve: Serve, proxy: Any, golden: ModuleType) -> None:
    _, peer = serve()
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    peer.send(golden.message(golden.SEGMENT, segment=2, length=4096), [fd])
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.receive()
    proxy.accept().welcome()


def test_descriptors_with_a_message_that_carries_none_end_the_connection_and_are_closed(
    serve: Serve, proxy: Any, golden: ModuleType
) -> None:
    _, peer = serve()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        peer.send(golden.message(golden.CANCEL, batch=77), [os.open(os.devnull, os.O_RDONLY) for _ in range(8)])
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.receive()
        peer = proxy.accept()
        peer.welcome()
    peer.batch(1, record(golden, 1, [1.0]))
    assert values(peer.responses(peer.answer())) == [[[2]]]
    # 40 came; a few of this process's own, as those of the peers, come and go meanwhile.
    assert len(os.listdir("/proc/self/fd")) < before + 30


# ---- async, decoupled, cancelled -----------------------------------------------------------------------------------


def test_an_async_callable_has_many_batches_in_flight(serve: Serve, golden: ModuleType) -> None:
    gates: dict[float, asyncio.Event] = {}

    async def work(requests: list[Request]) -> Any:
        number = float(requests[0]["x"][0, 0])
        gates[number] = asyncio.Event()
        if number == 3:  # the last one lets the others go, in another order than they came
            for other in (2.0, 1.0):
                gates[other].set()
                await asyncio.sleep(0)
            gates[number].set()
        await gates[number].wait()
        return double(requests)

    _, peer = serve(work)
    for number in (1, 2, 3):
        peer.batch(number, record(golden, number, [number]))
    answers = {}
    for _ in range(3):
        packet = peer.answer()
        assert packet.flags == golden.INPUT_RELEASED | golden.BATCH_DONE
        answers[packet.batch] = values(peer.responses(packet))
    assert answers == {1: [[[2]]], 2: [[[4]]], 3: [[[6]]]}


def test_async_memory_pressure_does_not_lose_batches(serve: Serve, golden: ModuleType) -> None:
    async def work(requests: list[Request]) -> Any:
        await asyncio.sleep(0)
        return [{"y": np.ones((1, 100_000), F4)}]

    _, peer = serve(work, welcome={"arena_budget": 1 << 20})
    for number in range(1, 11):
        peer.batch(number, record(golden, number, [number]))
    seen = set()
    for count in range(1, 11):
        seen.add(peer.answer().batch)
        peer.message(golden.RELEASE, consumed=count)
    assert seen == set(range(1, 11))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoupled_generators_stream(asynchronous: bool, serve: Serve, golden: ModuleType) -> None:
    def count(requests: list[Request]) -> Iterator[Any]:
        for step in range(3):
            # The second request has nothing to say at the first step, and an error at the second.
            second: Any = [None, ValueError("enough"), {"y": np.zeros((1, 1), F4)}][step]
            yield [{"y": np.full((1, 1), step, F4)}, second]

    async def count_async(requests: list[Request]) -> Any:
        for results in count(requests):
            await asyncio.sleep(0)
            yield results

    _, peer = serve(count_async if asynchronous else count, model=spec(decoupled=True), welcome={"model_flags": 3})
    peer.batch(1, record(golden, 1, [1.0], [2.0]))
    packets = [peer.answer() for _ in range(4)]
    assert [packet.flags & golden.BATCH_DONE for packet in packets] == [0, 0, 0, golden.BATCH_DONE]
    assert packets[-1].flags & golden.INPUT_RELEASED
    steps = [[(r.request, r.flags) for r in peer.responses(packet)] for packet in packets]
    assert steps == [
        [(0, 0)],
        [(0, 0), (1, golden.FINAL | golden.ERROR)],
        [(0, 0)],
        [(0, golden.FINAL | golden.EMPTY)],
    ]


def test_a_decoupled_stream_that_fails_half_way(serve: Serve, golden: ModuleType) -> None:
    def work(requests: list[Request]) -> Iterator[Any]:
        yield double(requests)
        raise RuntimeError("half way")

    _, peer = serve(work, model=spec(decoupled=True), welcome={"model_flags": 3})
    peer.batch(1, record(golden, 1, [1.0]))
    assert peer.answer().kind == golden.RESPONSE
    packet = peer.answer()
    assert packet.kind == golden.FAIL
    assert "RuntimeError: half way" in packet.body.decode()


def test_a_stream_whose_requests_all_failed_ends_the_batch(serve: Serve, golden: ModuleType) -> None:
    def work(requests: list[Request]) -> Iterator[Any]:
        yield [ValueError("no")]

    _, peer = serve(work, model=spec(decoupled=True), welcome={"model_flags": 3})
    peer.batch(1, record(golden, 1, [1.0]))
    packet = peer.answer()
    assert packet.flags & golden.BATCH_DONE
    assert [r.error for r in peer.responses(packet)] == ["model 'model': the inference callable raised ValueError: no"]
    peer.batch(2, record(golden, 2, [1.0]))
    assert peer.answer().batch == 2


STREAMS = {"model": spec(decoupled=True), "welcome": {"model_flags": 3}}


def one(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": np.full((1, 1), value, F4)}


def in_both_ways(steps: Callable[[list[Request]], Iterator[Any]]) -> list[Callable[..., Any]]:
    async def steps_async(requests: list[Request]) -> Any:
        results = steps(requests)
        try:
            for result in results:
                await asyncio.sleep(0)
                yield result
        finally:
            results.close()  # type: ignore[attr-defined] # it is a generator

    return [steps, steps_async]


@pytest.mark.parametrize("way", [0, 1])
def test_requests_of_a_batch_end_one_after_the_other(way: int, serve: Serve, golden: ModuleType) -> None:
    closed = []

    def steps(requests: list[Request]) -> Iterator[Any]:
        try:
            yield [one(0), one(0), Response(one(0), {"why": "done"}, final=True)]
            yield [one(1), Response(final=True), one(1)]  # the last one has ended: what is for it goes nowhere
            yield [Response(one(2)), None, None]
            yield [Response(one(3), final=True), None, None]
            yield [one(4)] * 3
        finally:
            closed.append(True)

    worker, peer = serve(in_both_ways(steps)[way], **STREAMS)
    peer.batch(1, record(golden, 1, [1.0], [2.0], [3.0]))
    packets = [peer.answer() for _ in range(4)]
    assert [packet.flags & golden.BATCH_DONE for packet in packets] == [0, 0, 0, golden.BATCH_DONE]
    steps_seen = [peer.responses(packet) for packet in packets]
    final, empty = golden.FINAL, golden.EMPTY
    assert [[(r.request, r.flags) for r in step] for step in steps_seen] == [
        [(0, 0), (1, 0), (2, final)], [(0, 0), (1, final | empty)], [(0, 0)], [(0, final)],
    ]  # fmt: skip
    assert steps_seen[0][2].parameters == {"why": "done"}
    eventually(lambda: bool(closed))
    assert worker.statistics.batches == 1
    assert set(worker.statistics.failed_requests.values()) == {0}
    peer.batch(2, record(golden, 2, [1.0]))
    assert peer.answer().batch == 2


@pytest.mark.parametrize("way", [0, 1])
def test_a_stream_that_nobody_reads_any_more_is_closed(way: int, serve: Serve, golden: ModuleType) -> None:
    closed = []

    def steps(requests: list[Request]) -> Iterator[Any]:
        try:
            while True:
                yield [one(0) for _ in requests]
                time.sleep(0.001)
        except GeneratorExit:
            closed.append(True)
            raise

    worker, peer = serve(in_both_ways(steps)[way], **STREAMS)
    at = peer.batch(1, record(golden, 1, [1.0], [2.0]))
    peer.answer()
    peer.arena[1][at + 64 + 80 + 72] = 1  # the second request
    while len(responses := peer.responses(peer.answer())) == 2 and responses[1].flags == 0:
        pass
    assert (responses[1].request, responses[1].flags, responses[1].code) == (1, golden.FINAL | golden.ERROR, 7)
    assert "the request was cancelled" in responses[1].error
    assert [r.request for r in peer.responses(peer.answer())] == [0]
    assert not closed
    peer.arena[1][at + 64 + 72] = 1
    while not (packet := peer.answer()).flags & golden.BATCH_DONE:
        pass
    assert [(r.request, r.code) for r in peer.responses(packet)] == [(0, 7)]
    eventually(lambda: bool(closed))
    assert worker.statistics.failed_requests["cancelled"] == 2


@pytest.mark.parametrize("way", [0, 1])
def test_a_stream_is_closed_when_what_it_yields_cannot_be_sent(way: int, serve: Serve, golden: ModuleType) -> None:
    closed = []

    def steps(requests: list[Request]) -> Iterator[Any]:
        try:
            yield [one(0)] * len(requests)
            yield "nonsense"
        finally:
            closed.append(True)
            raise KeyError("of closing")

    _, peer = serve(in_both_ways(steps)[way], **STREAMS)
    peer.batch(1, record(golden, 1, [1.0]))
    assert peer.answer().flags & golden.BATCH_DONE == 0
    packet = peer.answer()
    assert packet.kind == golden.FAIL
    assert "expected a list of 1, got str: 'nonsense'" in packet.body.decode()
    eventually(lambda: bool(closed))
    peer.batch(2, record(golden, 2, [1.0]))
    assert peer.answer().batch == 2


@pytest.mark.parametrize("way", [0, 1])
def test_an_error_behind_the_last_response_is_told_to_nobody(way: int, serve: Serve, golden: ModuleType) -> None:
    def steps(requests: list[Request]) -> Iterator[Any]:
        try:
            yield [Response(one(0), final=True) for _ in requests]
        finally:
            raise RuntimeError("while it is closed")

    worker, peer = serve(in_both_ways(steps)[way], **STREAMS)
    for number in (1, 2):
        peer.batch(number, record(golden, number, [1.0]))
        packet = peer.answer()
        assert (packet.kind, packet.batch, packet.flags & golden.BATCH_DONE) == (golden.RESPONSE, number, 2)
    assert set(worker.statistics.failed_requests.values()) == {0}


def test_a_stream_that_sees_its_end_for_itself(serve: Serve, golden: ModuleType) -> None:
    asked = []

    def steps(requests: list[Request]) -> Iterator[Any]:
        while True:
            yield [one(0)]
            time.sleep(0.001)
            if requests[0].is_cancelled():
                asked.append(True)
                raise RuntimeError("nobody is there")

    _, peer = serve(steps, **STREAMS)
    at = peer.batch(1, record(golden, 1, [1.0]))
    peer.answer()
    peer.arena[1][at + 64 + 72] = 1
    while not (packet := peer.answer()).flags & golden.BATCH_DONE:
        pass
    # Either it asked before its next yield, or it was told there and asked then.
    eventually(lambda: bool(asked))
    assert packet.batch == 1
    peer.batch(2, record(golden, 2, [1.0]))
    assert peer.answer().batch == 2


def test_a_decoupled_coroutine_takes_as_many_streams_as_the_protocol_allows(
    proxy: Any, make_worker: Callable[..., Worker]
) -> None:
    async def stream(requests: list[Request]) -> Any:
        yield [one(0)]

    proxy.listen()
    make_worker(stream, model=spec(decoupled=True)).start()
    assert struct.unpack_from("<I", proxy.accept().receive().body, 20) == (1024,)


def test_a_plain_callable_of_a_decoupled_model_answers_once_or_not_at_all(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(lambda requests: [None, one(1), Response(one(2), final=True)], **STREAMS)
    peer.batch(1, record(golden, 1, [1.0], [2.0], [3.0]))
    packet = peer.answer()
    assert packet.flags & golden.BATCH_DONE
    assert [(r.request, r.flags) for r in peer.responses(packet)] == [
        (0, golden.FINAL | golden.EMPTY), (1, golden.FINAL), (2, golden.FINAL),
    ]  # fmt: skip


def test_a_result_that_cannot_be_sent_leaves_the_other_requests_whole(serve: Serve, golden: ModuleType) -> None:
    results: list[Any] = [one(1), None, {"y": np.array([["no number"]])}, Response(final=True), one(5)]
    worker, peer = serve(lambda requests: results)
    peer.batch(1, record(golden, 1, *[[float(i)] for i in range(5)]))
    responses = peer.responses(peer.answer())
    assert [r.flags & golden.ERROR for r in responses] == [0, 2, 2, 2, 0]
    assert responses[0].outputs["y"] == 1
    assert "got NoneType" in responses[1].error
    assert "its values cannot be cast" in responses[2].error
    assert "expected y, got none" in responses[3].error  # without `decoupled` there is one response, and this is it
    assert responses[4].outputs["y"] == 5
    assert worker.statistics.failed_requests["output"] == 3


def test_a_fast_stream_reads_acknowledgements_before_it_takes_more_memory(serve: Serve, golden: ModuleType) -> None:
    go_on = threading.Event()

    def work(requests: list[Request]) -> Iterator[Any]:
        for step in range(8):
            if step == 4:
                assert go_on.wait(PATIENCE_S)
            yield [{"y": np.ones((1, 50_000), F4)}]

    _, peer = serve(work, **STREAMS)
    peer.batch(1, record(golden, 1, [1.0]))
    for _ in range(4):
        peer.answer()
    peer.message(golden.RELEASE, consumed=4)
    go_on.set()
    while not peer.answer().flags & golden.BATCH_DONE:
        pass
    assert len(peer.outputs) == 1


def test_a_stream_does_not_fill_its_budget_with_what_nobody_has_read(
    serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_protocol, "STREAM_WINDOW", 1 << 20)
    yielded = []

    def work(requests: list[Request]) -> Iterator[Any]:
        for step in range(40):
            yielded.append(step)
            yield [{"y": np.ones((1, 50_000), F4)}]

    _, peer = serve(work, **STREAMS)
    peer.batch(1, record(golden, 1, [1.0]))
    for _ in range(5):
        peer.answer()
    assert len(yielded) <= 6  # five of 200 kB are a MiB, and the sixth waits
    answered = 5
    while True:
        peer.message(golden.RELEASE, consumed=answered)
        if peer.answer().flags & golden.BATCH_DONE:
            break
        answered += 1
    assert answered == 40
    assert sum(map(len, peer.outputs.values())) <= 2 << 20


def test_a_stream_waits_for_room_while_nothing_else_comes(serve: Serve, golden: ModuleType) -> None:
    def work(requests: list[Request]) -> Iterator[Any]:
        for _ in range(20):
            yield [{"y": np.ones((1, 100_000), F4)}]

    _, peer = serve(work, model=spec(decoupled=True), welcome={"model_flags": 3, "arena_budget": 1 << 20})
    peer.batch(1, record(golden, 1, [1.0]))
    for consumed in range(1, 21):
        assert peer.answer().flags & golden.BATCH_DONE == 0
        peer.message(golden.RELEASE, consumed=consumed)
    assert peer.answer().flags & golden.BATCH_DONE


def test_cancellation_reaches_an_async_callable(serve: Serve, golden: ModuleType) -> None:
    cancelled = threading.Event()

    async def work(requests: list[Request]) -> Any:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    _, peer = serve(work)
    peer.batch(1, record(golden, 1, [1.0], [2.0]))
    peer.message(golden.CANCEL, batch=1, index=1)
    peer.message(golden.CANCEL, batch=1, index=1)
    peer.message(golden.CANCEL, batch=1, index=99)
    peer.message(golden.CANCEL, batch=77, index=0)
    assert not cancelled.wait(0.1)  # the other request still wants its answer
    peer.message(golden.CANCEL, batch=1, index=0)
    packet = peer.answer()
    assert (packet.kind, packet.place) == (golden.FAIL, 7)
    assert "cancelled" in packet.body.decode()
    assert cancelled.is_set()


def test_cancellation_is_seen_inside_a_loop(serve: Serve, golden: ModuleType) -> None:
    looking = threading.Event()

    def work(requests: list[Request]) -> Any:
        while not requests[1].is_cancelled():
            looking.set()
            time.sleep(0.001)
        return [{"y": np.full((1, 1), request.is_cancelled(), F4)} for request in requests]

    _, peer = serve(work)
    at = peer.batch(1, record(golden, 1, [1.0], [2.0]))
    assert looking.wait(PATIENCE_S)
    peer.arena[1][at + 64 + 80 + 72] = 1
    assert values(peer.responses(peer.answer())) == [[[0]], [[1]]]


# ---- statistics ----------------------------------------------------------------------------------------------------


def test_statistics(serve: Serve, golden: ModuleType) -> None:
    def work(requests: list[Request]) -> Any:
        value = requests[0]["x"][0, 0]
        if value == 1:
            raise ValueError("one")
        if value == 2:
            return [{"y": object()} for _ in requests]
        if value == 3:
            return [KeyError("three"), *({"y": request["x"]} for request in requests[1:])]
        time.sleep(0.002)
        return [{"y": request["x"]} for request in requests]

    worker, peer = serve(work)
    sent_ns = time.monotonic_ns() - 5_000_000
    tensor = golden.Tensor("x", golden.FP32, [3, 2], struct.pack("<6f", *[0.0] * 6))
    rows = [golden.Request(rows=1, outputs=["y"]), golden.Request(rows=2, outputs=["y"])]
    peer.batch(1, golden.batch_record(1, rows, [tensor], stamps=(sent_ns, sent_ns)))
    assert [response.outputs["y"].shape for response in peer.responses(peer.answer())] == [(1, 2), (2, 2)]
    for number, value in enumerate([1.0, 2.0, 3.0], 2):
        peer.batch(number, record(golden, number, [value], [value]))
        peer.answer()
    peer.message(golden.CANCEL, batch=4, index=0)
    eventually(lambda: worker.statistics.cancelled_requests == 1)
    found = worker.statistics
    assert (found.requests, found.batches) == (8, 4)
    assert found.failed_requests == {
        "callable": 2, "returned": 1, "output": 2, "memory": 0, "input": 0, "cancelled": 0,
    }  # fmt: skip
    assert found.rows.bounds[:4] == (1, 2, 4, 8)
    assert found.rows.counts[:4] == (0, 3, 1, 0)
    assert (found.rows.sum, found.rows.count) == (9, 4)
    assert found.callable_seconds.count == 4
    assert found.callable_seconds.sum >= 0.002
    slow = sum(
        count
        for bound, count in zip(found.callable_seconds.bounds, found.callable_seconds.counts, strict=False)
        if bound < 0.002
    )
    assert slow <= 3  # not the one that slept
    assert 0.005 <= found.queued_seconds < PATIENCE_S  # the other records have no stamps
    assert found.input_bytes == 24 + 3 * 8
    assert found.output_bytes == 24 + 4


def test_statistics_of_what_cannot_be_read(serve: Serve, golden: ModuleType) -> None:
    worker, peer = serve()
    peer.batch(1, b"\0" * 64)
    assert peer.answer().kind == golden.FAIL
    assert worker.statistics.failed_requests["input"] == 1


def test_the_time_of_a_generator_is_that_inside_of_it(serve: Serve, golden: ModuleType) -> None:
    def work(requests: list[Request]) -> Any:
        for _ in range(4):
            time.sleep(0.002)
            yield [{"y": request["x"]} for request in requests]

    worker, peer = serve(work, model=spec(decoupled=True), welcome={"model_flags": 3})
    peer.batch(1, record(golden, 1, [1.0]))
    for _ in range(5):
        peer.answer()
    found = worker.statistics
    assert (found.batches, found.callable_seconds.count) == (1, 1)
    assert 0.008 <= found.callable_seconds.sum < PATIENCE_S
    assert found.output_bytes == 16


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_response_to_each_request_of_a_stream(asynchronous: bool, serve: Serve, golden: ModuleType) -> None:
    async def work_async(requests: list[Request]) -> Any:
        for results in work(requests):
            yield results

    def work(requests: list[Request]) -> Iterator[Any]:
        value = {"y": requests[0]["x"]}
        time.sleep(0.002)
        yield [value, None, None, None]
        time.sleep(0.02)
        # The third gets an error in place of a response, the fourth none.
        yield [value, value, ValueError("no"), None]

    worker, peer = serve(work_async if asynchronous else work, model=spec(decoupled=True), welcome={"model_flags": 3})
    peer.batch(1, record(golden, 1, *[[1.0]] * 4))
    for _ in range(3):
        peer.answer()
    found = worker.statistics.first_response_seconds
    assert found.count == 2
    assert 0.024 <= found.sum < PATIENCE_S
    bounds = [bound for bound, count in zip(found.bounds, found.counts, strict=False) if count]
    assert bounds[0] >= 0.002
    assert bounds[-1] >= 0.022


@pytest.mark.parametrize("send", [False, True])
def test_tracebacks_reach_the_caller_only_where_the_model_says_so(send: bool, serve: Serve, golden: ModuleType) -> None:
    def secret_place(requests: list[Request]) -> Any:
        raise ValueError("boom")

    _, peer = serve(secret_place, model=spec(send_tracebacks=send))
    peer.batch(1, record(golden, 1, [1.0]))
    text = peer.answer().body.decode()
    assert text.startswith("model 'model': the inference callable raised ValueError: boom")
    assert ("Traceback" in text) is ("in secret_place" in text) is send


@pytest.mark.parametrize("letter", ["o", "ü", "%", "\n"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_long_error_keeps_its_begin_and_its_end(alone: bool, letter: str, serve: Serve, golden: ModuleType) -> None:
    """A caller over gRPC gets no error at all where it is too long for the trailers."""

    def work(requests: list[Request]) -> Any:
        error = ValueError(f"begin {letter * 100_000} end")
        if alone:
            return [error]
        raise error

    _, peer = serve(work)
    peer.batch(1, record(golden, 1, [1.0]))
    packet = peer.answer()
    text = peer.responses(packet)[0].error if alone else packet.body.decode()
    assert text.startswith(f"model 'model': the inference callable raised ValueError: begin {letter * 2}")
    assert " [...] " in text
    assert text.endswith(f"{letter * 2} end")
    # Percent-encoded, as in a trailer: clients take 8 KiB of them all.
    assert len(text.encode()) <= 3976
    assert 3900 < len(quote(text, safe=string.punctuation.replace("%", "") + " ")) <= 7168


def test_parameters_beyond_the_limit_of_the_protocol(
    serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytriton.proxy_backend.wire.layout.MAX_METADATA", 1 << 12)
    _, peer = serve(lambda requests: [Response({"y": request["x"]}, {"long": "x" * 4000}) for request in requests])
    peer.batch(1, record(golden, 1, [1.0]))
    assert re.search(r"take \d{4} bytes, the protocol allows 4096", peer.answer().body.decode())
    peer.batch(2, record(golden, 2, [1.0]))
    assert peer.answer().batch == 2
