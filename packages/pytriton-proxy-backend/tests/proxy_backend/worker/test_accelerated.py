"""Batches that the accelerator serves: the same answers as without it, and nothing kept, lost or written twice."""

import contextlib
import gc
import itertools
import math
import operator
import os
import random
import signal
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
from pytriton.proxy_backend.runtime.batch_loop import LazyLoop
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.transport.connection import Connection
from pytriton.proxy_backend.wire.accelerator import accelerator
from pytriton.proxy_backend.worker import accelerated
from pytriton.proxy_backend.worker.accelerated import serve_accelerated
from support.batch_callables import Columns, Listed
from support.waiting import PATIENCE_S, eventually

F4 = np.dtype("float32")
F8 = np.dtype("float64")
Array = np.ndarray[Any, Any]
Serve = Callable[..., tuple[Worker, Any]]
INPUT_RELEASED, BATCH_DONE = 1, 2


def spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "model",
        "version": 1,
        "inputs": (TensorSpec(name="x", dtype=F4, shape=(-1,)),),
        "outputs": (TensorSpec(name="y", dtype=F4, shape=(-1,)), TensorSpec(name="z", dtype=F8, shape=(-1,))),
        "batching": True,
        "max_batch_size": 8,
        **changes,
    }
    return ModelSpec(**values)


@pytest.fixture
def serve(proxy: Any) -> Iterator[Serve]:
    """Starts a worker and gives the proxy backend's end of its connection."""
    made = []

    def start(infer_func: Any, *, model: ModelSpec | None = None, **welcome: Any) -> tuple[Worker, Any]:
        proxy.listen()
        worker = Worker(infer_func, model or spec(), proxy.endpoint)
        made.append(worker)
        worker.start()
        peer = proxy.accept()
        peer.welcome(**welcome)
        worker.wait_attached(PATIENCE_S)
        return worker, peer

    yield start
    proxy.close()
    for worker in made:
        assert worker.stop(PATIENCE_S)


@pytest.fixture
def python_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the batches that Python answers."""
    numbers: list[int] = []

    class Execution(accelerated.Execution):  # type: ignore[name-defined,misc]
        def __init__(self, service: Any, batch: Any, *called: Any) -> None:
            numbers.append(batch.number)
            super().__init__(service, batch, *called)

    monkeypatch.setattr(accelerated, "Execution", Execution)
    monkeypatch.setattr(accelerated, "make_execution", lambda service, batch, tracer: Execution(service, batch))
    return numbers


def record(
    golden: ModuleType, number: int, *rows: list[float], outputs: tuple[str, ...] = ("y",), **more: Any
) -> bytes:
    """A batch of one request per list, whose input x has shape (1, len)."""
    requests = [golden.Request(outputs=list(outputs), **more) for _ in rows]
    payload = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    return bytes(
        golden.batch_record(number, requests, [golden.Tensor("x", golden.FP32, [len(rows), len(rows[0])], payload)])
    )


def sized_record(golden: ModuleType, number: int, rows: list[int], width: int, **more: Any) -> tuple[bytes, Array]:
    """A batch of requests with so many rows each, and its input."""
    x = np.arange(sum(rows) * width, dtype=F4).reshape(sum(rows), width) + number
    requests = [golden.Request(rows=count, outputs=["y", "z"], **more) for count in rows]
    tensor = golden.Tensor("x", golden.FP32, list(x.shape), x.tobytes())
    return bytes(golden.batch_record(number, requests, [tensor])), x


def ask(peer: Any, golden: ModuleType, number: int, *rows: list[float], **more: Any) -> tuple[Any, list[Any]]:
    """Sends a batch; returns the answer, and its responses where it is no error."""
    peer.batch(number, record(golden, number, *rows, **more))
    packet = peer.answer()
    assert packet.batch == number
    return packet, peer.responses(packet) if packet.kind == golden.RESPONSE else []


def outputs_of(responses: list[Any]) -> list[dict[str, Any]]:
    return [{name: array.tolist() for name, array in response.outputs.items()} for response in responses]


# ---- the way itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Columns, Listed])
def test_what_repeats_needs_no_python(kind: Any, serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    worker, peer = serve(kind(lambda **data: {"y": data["x"] * 2}))
    for number in range(1, 41):
        rows = [[number + place, 0.5] for place in range(1 + number % 3)]
        packet, responses = ask(peer, golden, number, *rows)
        assert packet.flags == BATCH_DONE | INPUT_RELEASED
        assert outputs_of(responses) == [{"y": [[2 * value for value in row]]} for row in rows]
        assert [(response.request, response.flags) for response in responses] == [(i, 1) for i in range(len(rows))]
    # Three looks: of each the first batch; of the first also the block for the response is missing.
    assert len(python_calls) <= 4
    assert peer.released == []
    counted = worker.statistics
    sizes = [1 + number % 3 for number in range(1, 41)]
    assert (counted.requests, counted.batches, counted.rows.sum) == (sum(sizes), 40, sum(sizes))
    assert (counted.input_bytes, counted.output_bytes) == (8 * sum(sizes), 8 * sum(sizes))
    assert counted.rows.counts[:3] == (sizes.count(1), sizes.count(2), sizes.count(3))
    assert counted.callable_seconds.count == 40


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", [Columns, Listed])
def test_counts_are_the_same(kind: Any, serve: Serve, golden: ModuleType) -> None:
    def infer(**data: Array) -> Any:
        if data["x"].flat[0] == 3:
            raise ValueError("3")
        return {"y": data["x"]}

    worker, peer = serve(kind(infer))
    for number in range(1, 9):
        ask(peer, golden, number, *[[number, 1.0]] * number)
    counted = worker.statistics
    assert (counted.requests, counted.batches, counted.rows.sum) == (36, 8, 36)
    assert counted.rows.counts[:5] == (1, 1, 2, 4, 0)
    assert (counted.input_bytes, counted.output_bytes) == (36 * 8, 33 * 8)
    assert counted.failed_requests["callable"] == 3
    times = counted.callable_seconds
    assert times.count == 8
    lows, highs = (0.0, *times.bounds), (*times.bounds, math.inf)
    assert sum(map(operator.mul, times.counts, lows)) <= times.sum
    assert times.sum <= sum(count * high for count, high in zip(times.counts, highs, strict=True) if count)
    assert counted.queued_seconds == 0


def test_switched_off(
    serve: Serve, golden: ModuleType, python_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    monkeypatch.delattr(accelerated, "AcceleratedSource")
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    for number in range(1, 5):
        assert outputs_of(ask(peer, golden, number, [number])[1]) == [{"y": [[number]]}]
    assert python_calls == []


def test_a_worker_that_looks_for_batches(
    serve: Serve, golden: ModuleType, python_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they come at once, later than it looks, or several at a time: every one is answered."""
    monkeypatch.setenv(accelerated.BUSY_POLL_VARIABLE, "2000")
    worker, peer = serve(Columns(lambda **data: {"y": data["x"] * 2}))
    for number in range(1, 61):
        if number % 20 == 0:
            # It sleeps by now.
            eventually(lambda: "S (sleeping)" in states_of(worker))
        rows = [[float(number)]] * (2 if number % 17 == 0 else 1)
        assert outputs_of(ask(peer, golden, number, *rows)[1]) == [{"y": [[2.0 * number]]}] * len(rows)
    assert len(python_calls) <= 4
    # What is not for the accelerator comes as soon.
    _, [response] = ask(peer, golden, 61, [1.0], outputs=("y", "z"))
    assert "z" not in response.outputs


@pytest.mark.parametrize(("processors", "expected"), [(0.5, 0), (1, 0), (1.9, 0), (2, 400), (64, 400)])
def test_a_worker_looks_where_there_are_processors(
    processors: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(accelerated.BUSY_POLL_VARIABLE, raising=False)
    monkeypatch.setattr(accelerated, "usable_processors", lambda: processors)
    assert accelerated._busy_poll_us() == expected
    monkeypatch.setenv(accelerated.BUSY_POLL_VARIABLE, "7")
    assert accelerated._busy_poll_us() == 7


@pytest.mark.parametrize("text", ["-1", "10001", "1.5", "soon", ""])
def test_looking_for_so_long_is_no_setting(
    text: str, serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(accelerated.BUSY_POLL_VARIABLE, text)
    caplog.set_level("WARNING", "pytriton.proxy_backend")
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    assert outputs_of(ask(peer, golden, 1, [1.0])[1]) == [{"y": [[1.0]]}]
    assert f"PYTRITON_BUSY_POLL_US: expected microseconds from 0 to 10000, got {text!r}" in caplog.text


def states_of(worker: Worker) -> str:
    """What the kernel says of the threads of a worker."""
    threads = [thread for thread in threading.enumerate() if thread.name == f"pytriton-{worker.model.name}"]
    return "".join(Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads)


def test_inputs_are_arrays_like_any_other(serve: Serve, golden: ModuleType) -> None:
    seen: list[tuple[Any, ...]] = []

    def infer(**data: Array) -> Any:
        [(name, x)] = data.items()
        flags = x.flags
        seen.append((name, type(x), x.dtype, x.shape, x.strides, x.tolist(), str(flags)))
        x += 1  # as without the accelerator: the memory is the batch's own
        return {"y": x[::-1].copy()}

    _, peer = serve(Columns(infer))
    for number in range(1, 6):
        _, responses = ask(peer, golden, number, [1.0, 2.0], [3.0, 4.0])
        assert outputs_of(responses) == [{"y": [[4.0, 5.0]]}, {"y": [[2.0, 3.0]]}]
    assert seen[1:] == seen[:-1]


# ---- what is not plain ---------------------------------------------------------------------------------------------


def other_results() -> dict[str, Callable[[Array], Any]]:
    return {
        "as it is": lambda x: {"y": x},
        "a view": lambda x: {"y": x[:, ::-1]},
        "in the other order": lambda x: {"y": np.asfortranarray(x)},
        "read-only": lambda x: {"y": np.broadcast_to(np.float32(7), x.shape)},
        "another dtype": lambda x: {"y": x.astype(F8)},
        "another byte order": lambda x: {"y": x.astype(">f4")},
        "an equal dtype": lambda x: {"y": x.view(np.dtype(F4, metadata={"of": "mine"}))},
        "a subclass": lambda x: {"y": np.ma.masked_array(x)},
        "nothing in it": lambda x: {"y": x[:, :0]},
        "too many rows": lambda x: {"y": np.concatenate([x, x])},
        "too few": lambda x: {"y": x[:0]},
        "without an axis": lambda x: {"y": np.array(1, F4)},
        "more axes": lambda x: {"y": x.reshape(*x.shape, *[1] * 12)},
        "an output too many": lambda x: {"y": x, "other": x},
        "all outputs": lambda x: {"y": x, "z": x.astype(F8)},
        "another output": lambda x: {"z": x.astype(F8)},
        "no output": lambda x: {},
        "no array": lambda x: {"y": x.tolist()},
        "none": lambda x: {"y": None},
        "no dictionary": lambda x: 7,
        "a list": lambda x: [x],
        "an error": lambda x: ValueError("returned"),
        "raises": lambda x: x.reshape(-1, 77),
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Columns, Listed])
def test_other_results_come_in_between(
    kind: Any, strict: bool, serve: Serve, proxy: Any, golden: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result twice, then a plain batch, and all of it once more without the accelerator."""
    results = other_results()
    chosen = ["as it is"]

    def play() -> list[Any]:
        worker, peer = serve(kind(lambda **data: results[chosen[0]](data["x"])), model=spec(strict=strict))
        answers: list[Any] = []
        for what in results:
            for chosen[0] in (what, what, "as it is"):
                number = len(answers) + 1
                packet, responses = ask(peer, golden, number, [number, 2.0], [3.0, 4.0])
                assert packet.flags & BATCH_DONE
                if chosen[0] == "as it is" and not strict:
                    assert outputs_of(responses) == [{"y": [[number, 2.0]]}, {"y": [[3.0, 4.0]]}]
                told = [(response.flags, response.code, response.error) for response in responses]
                answers.append((chosen[0], packet.kind, packet.body, told, outputs_of(responses)))
        assert worker.statistics.batches == len(answers)
        proxy.close()
        assert worker.stop(PATIENCE_S)
        return answers

    accelerated_answers = play()
    monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    assert play() == accelerated_answers


def test_every_request_with_an_id_of_its_own(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    for number in range(1, 31):
        _, responses = ask(peer, golden, number, [number], id="i" * (number * number))
        assert outputs_of(responses) == [{"y": [[number]]}]
    # The first, before which there is also no block.
    assert python_calls in ([1], [1, 2])


def about(number: int) -> dict[str, Any]:
    """What comes along with a request, different for each number, and of the same length up to 99."""
    parameters = {"text": f"p{number:02}", "int": -number, "bool": number % 2 == 0, "double": number / 3}
    times = {"priority": number, "timeout_us": 1000 * number}
    return {
        "id": f"id {number:02}",
        "correlation_id": 10 * number,
        "flags": number % 4,
        "parameters": parameters,
        **times,
    }


def seen_of(request: Any) -> dict[str, Any]:
    names = {"id": "request_id", "correlation_id": "correlation_id", "parameters": "parameters"}
    found = {key: getattr(request, name) for key, name in names.items()}
    return {
        **found,
        "flags": request.sequence_start + 2 * request.sequence_end,
        "priority": request.priority,
        "timeout_us": request.timeout_us,
    }


def test_what_comes_along_differs(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    kept: list[Any] = []

    def infer(requests: list[Any]) -> Any:
        kept.append(requests[0])
        assert seen_of(requests[0]) == about(len(kept))
        return [{"y": request["x"]} for request in requests]

    _, peer = serve(infer)
    for number in range(1, 31):
        _, responses = ask(peer, golden, number, [number], **about(number))
        assert outputs_of(responses) == [{"y": [[number]]}]
    assert len(python_calls) <= 2
    # Long after the memory of their batches went back: what nobody asked for yet, too.
    assert [seen_of(request) for request in kept] == [about(number) for number in range(1, 31)]
    assert [request.requested_output_names for request in kept] == [["y"]] * 30


def test_a_call_that_python_takes_over_knows_what_came_along(serve: Serve, golden: ModuleType) -> None:
    seen: list[Any] = []

    def infer(requests: list[Any]) -> Any:
        seen.append(requests[0])
        return [{"y": request["x"].astype(F8)} for request in requests]  # which has to be cast

    _, peer = serve(infer)
    for number in range(1, 11):
        assert outputs_of(ask(peer, golden, number, [number], **about(number))[1]) == [{"y": [[number]]}]
    assert [seen_of(request) for request in seen] == [about(number) for number in range(1, 11)]


@pytest.mark.usefixtures("both_ways")
def test_an_id_that_lies_in_something_else(serve: Serve, golden: ModuleType) -> None:
    """Nothing that says where the inputs are may be passed over for lying in an id."""
    ids: list[str] = []

    def infer(requests: list[Any]) -> Any:
        ids.append(requests[0].request_id)
        return [{"y": request["x"]} for request in requests]

    _, peer = serve(infer)
    tensors = 64 + 80
    for number in range(1, 7):
        raw = bytearray(record(golden, number, [number, 0.0], id="12"))
        # The id is the eight bytes that say where the input is, which is 64 bytes later from the fourth batch on.
        struct.pack_into("<II", raw, 64 + 32, tensors + 24, 8)
        (place,) = struct.unpack_from("<Q", raw, tensors + 24)
        raw = raw[:place].ljust(place + 128, b"\0")
        struct.pack_into("<Q", raw, 32, len(raw))
        if number >= 4:
            place += 64
            struct.pack_into("<Q", raw, tensors + 24, place)
        struct.pack_into("<ff", raw, place, number, 0.0)
        peer.batch(number, bytes(raw))
        packet = peer.answer()
        assert outputs_of(peer.responses(packet)) == [{"y": [[number, 0.0]]}]
        assert len(ids) == number


def test_a_model_that_does_not_batch(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    model = spec(batching=False, max_batch_size=0)
    _, peer = serve(Listed(lambda **data: {"y": data["x"] * 2}), model=model, model_flags=0)
    for number in range(1, 21):
        requests = [golden.Request(outputs=["y"], id=f"{number:02}")]
        payload = struct.pack("<3f", number, 1, 2)
        peer.batch(
            number, bytes(golden.batch_record(number, requests, [golden.Tensor("x", golden.FP32, [3], payload)]))
        )
        responses = peer.responses(peer.answer())
        assert outputs_of(responses) == [{"y": [2.0 * number, 2.0, 4.0]}]
    assert len(python_calls) <= 2


def test_more_looks_than_are_kept(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    _, peer = serve(Columns(lambda **data: {"y": data["x"] + 1}))
    number = 0
    for _ in range(3):
        for look in range(1, 141):
            number += 1
            _, responses = ask(peer, golden, number, [float(number)], parameters={f"look {look}": 1})
            assert outputs_of(responses) == [{"y": [[number + 1.0]]}]
    assert len(python_calls) < 2 * 140


def test_more_looks_of_results_than_are_kept(serve: Serve, golden: ModuleType) -> None:
    widths = iter(range(1, 1000))
    # With an axis too many: such shapes are sent as they are, and nothing may differ in them.
    _, peer = serve(Columns(lambda **data: {"y": np.full((1, next(widths) % 20 + 1, 1), data["x"][0, 0])}))
    for number in range(1, 61):
        _, responses = ask(peer, golden, number, [number])
        assert outputs_of(responses) == [{"y": [[[number]] * (number % 20 + 1)]}]


# ---- sizes that differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Columns, Listed])
def test_sizes_need_no_python(kind: Any, serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    """Rows, dimensions and lengths of ids differ from batch to batch, and so do those of the outputs."""
    worker, peer = serve(kind(lambda **data: {"y": data["x"][:, ::2].copy(), "z": data["x"].astype(F8)}))
    rng = random.Random(3)
    total = input_bytes = output_bytes = 0
    seen: set[tuple[Any, ...]] = set()
    for number in range(1, 101):
        rows = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
        width = rng.randint(1, 90)
        raw, x = sized_record(golden, number, rows, width, id="i" * rng.randint(0, 200))
        peer.batch(number, raw)
        responses = peer.responses(peer.answer())
        starts = [0, *itertools.accumulate(rows)]
        assert [(response.request, response.flags) for response in responses] == [(i, 1) for i in range(len(rows))]
        for response, begin, end in zip(responses, starts, starts[1:], strict=False):
            assert (response.outputs["y"].dtype, response.outputs["z"].dtype) == (F4, F8)
            np.testing.assert_array_equal(response.outputs["y"], x[begin:end, ::2])
            np.testing.assert_array_equal(response.outputs["z"], x[begin:end])
        total += sum(rows)
        input_bytes += x.nbytes
        output_bytes += x[:, ::2].nbytes + 2 * x.nbytes
        seen.add((tuple(rows), width))
    # Of one, two and three requests the first, and what came before there was a block large enough.
    assert len(python_calls) < 10 < len(seen)
    counted = worker.statistics
    assert (counted.batches, counted.rows.sum) == (100, total)
    assert (counted.input_bytes, counted.output_bytes) == (input_bytes, output_bytes)


def test_rows_that_change_hands(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    """The same array, which belongs to the requests in other ways: every answer has the rows of its request."""
    _, peer = serve(Columns(lambda **data: {"y": data["x"], "z": data["x"].astype(F8)}))
    for number, rows in enumerate([[1, 3], [1, 3], [3, 1], [2, 2], [1, 3], [3, 1]], 1):
        raw, x = sized_record(golden, number, rows, 2)
        peer.batch(number, raw)
        responses = peer.responses(peer.answer())
        assert [response.outputs["y"].tolist() for response in responses] == [
            x[: rows[0]].tolist(),
            x[rows[0] :].tolist(),
        ]
    assert len(python_calls) <= 2


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Columns, Listed])
def test_sizes_and_results_in_any_order(
    kind: Any, strict: bool, serve: Serve, proxy: Any, golden: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many batches of other sizes with other results, and all of it once more without the accelerator."""
    results: dict[str, Callable[[Array], Any]] = {
        **other_results(),
        "one column": lambda x: {"y": x[:, :1].copy(), "z": x.astype(F8)},
        "both": lambda x: {"y": x * 2, "z": x.astype(F8)},
        "one is wider": lambda x: {"y": x, "z": np.repeat(x, 3, axis=1).astype(F8)},
        "three dimensions": lambda x: {"y": x[:, :, None].copy(), "z": x.astype(F8)},
    }
    # A declared dimension, which few of the results have.
    outputs = (TensorSpec(name="y", dtype=F4, shape=(-1,)), TensorSpec(name="z", dtype=F8, shape=(4,)))
    chosen = ["both"]

    def play() -> list[Any]:
        rng = random.Random(7)
        model = spec(strict=strict, outputs=outputs)
        worker, peer = serve(kind(lambda **data: results[chosen[0]](data["x"])), model=model)
        answers: list[Any] = []
        for number in range(1, 401):
            chosen[0] = rng.choice(["both", "both", "one column", *results])
            rows = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
            raw, _ = sized_record(golden, number, rows, rng.choice([1, 4, 4, 9]), id="i" * rng.randint(0, 40))
            peer.batch(number, raw)
            packet = peer.answer()
            responses = peer.responses(packet) if packet.kind == golden.RESPONSE else []
            told = [(response.request, response.flags, response.code, response.error) for response in responses]
            answers.append((chosen[0], packet.kind, packet.body, told, outputs_of(responses)))
        assert worker.statistics.batches == len(answers)
        proxy.close()
        assert worker.stop(PATIENCE_S)
        return answers

    accelerated_answers = play()
    monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    assert play() == accelerated_answers


def test_requests_of_batches_of_other_sizes_know_what_came_along(serve: Serve, golden: ModuleType) -> None:
    kept: list[Any] = []

    def infer(requests: list[Any]) -> Any:
        kept.extend(requests)
        return [{"y": request["x"], "z": request["x"].astype(F8)} for request in requests]

    _, peer = serve(infer)
    wanted = []
    for number in range(1, 31):
        rows = [1 + number % 3, 1 + number % 2]
        raw, x = sized_record(golden, number, rows, 1 + number % 5, **about(number))
        peer.batch(number, raw)
        peer.answer()
        wanted += [(about(number), x[: rows[0]].tolist()), (about(number), x[rows[0] :].tolist())]
    assert [(seen_of(request), request["x"].tolist()) for request in kept] == wanted


def test_traced_batches_are_not_plain(serve: Serve, golden: ModuleType, python_calls: list[int]) -> None:
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for number, more in enumerate(
        [{"trace_context": f'{{"traceparent": "{parent}"}}'}] * 3
        + [{"parameters": {"TraceParent": parent}}] * 3
        + [{"parameters": {"other": "text"}}] * 3,
        1,
    ):
        assert outputs_of(ask(peer, golden, number, [number], **more)[1]) == [{"y": [[number]]}]
    assert python_calls[:6] == [1, 2, 3, 4, 5, 6]
    assert len(python_calls) == 7


def keeping(kept: list[Array]) -> Callable[..., Any]:
    """A callable that keeps its inputs."""

    def infer(**data: Array) -> Any:
        kept.append(data["x"])
        return {"y": data["x"]}

    return infer


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Columns, Listed])
def test_inputs_that_are_kept_keep_their_memory(kind: Any, serve: Serve, golden: ModuleType) -> None:
    kept: list[Array] = []

    def infer(**data: Array) -> Any:
        if data["x"][0, 0] % 2:
            kept.append(data["x"][:, 1:])
        return {"y": data["x"]}

    _, peer = serve(kind(infer))
    places = {}
    for number in range(1, 11):
        before = peer.free
        packet, _ = ask(peer, golden, number, [number, 10.0 * number])
        places[number] = (1, before)
        assert bool(packet.flags & INPUT_RELEASED) == (number % 2 == 0)
    assert [array.tolist() for array in kept] == [[[10.0 * number]] for number in range(1, 11, 2)]
    assert peer.released == []
    del kept[1:]
    gc.collect()
    # Each is named once, before the next response.
    ask(peer, golden, 12, [12.0, 0.0])
    assert sorted(peer.released) == [places[number] for number in (3, 5, 7, 9)]
    assert kept[0].tolist() == [[10.0]]


def test_memory_that_becomes_free_while_nothing_comes(serve: Serve, golden: ModuleType) -> None:
    kept: list[Array] = []
    _, peer = serve(Columns(keeping(kept)))
    for number in (1, 2, 3):
        packet, _ = ask(peer, golden, number, [number])
        assert packet.flags == BATCH_DONE
    kept.clear()
    released: list[int] = []
    while len(released) < 3:
        packet = peer.receive()
        assert packet.kind == golden.RELEASE
        released.append(packet.offset)
    assert len(set(released)) == 3


def test_inputs_outlive_the_connection(serve: Serve, golden: ModuleType) -> None:
    kept: list[Array] = []
    worker, peer = serve(Columns(keeping(kept)))
    for number in (1, 2, 3):
        ask(peer, golden, number, [number, 5.0])
    peer.close()
    assert worker.stop(PATIENCE_S)
    gc.collect()
    assert [array.tolist() for array in kept] == [[[1.0, 5.0]], [[2.0, 5.0]], [[3.0, 5.0]]]
    kept.clear()
    gc.collect()


def test_a_response_that_is_not_acknowledged_stays(serve: Serve, golden: ModuleType) -> None:
    """The block of a response is used again only when the proxy backend has read it."""
    _, peer = serve(Columns(lambda **data: {"y": data["x"] * 3}))
    for number in range(1, 5):
        ask(peer, golden, number, [number])
    assert peer.consumed == 4
    waiting = []
    for number in range(5, 9):
        peer.batch(number, record(golden, number, [number]), consumed=4)
        waiting.append(peer.answer())
    assert len({(packet.segment, packet.offset) for packet in waiting}) == 4
    for number, packet in enumerate(waiting, 5):
        assert outputs_of(peer.responses(packet)) == [{"y": [[3.0 * number]]}]
    for number in range(9, 13):
        _, responses = ask(peer, golden, number, [number])
        assert outputs_of(responses) == [{"y": [[3.0 * number]]}]


def test_acknowledged_one_late(serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of batches that are sent ahead: two blocks take turns, and nothing comes to Python."""
    seen: list[int] = []
    take = Connection.take

    def noted(self: Connection, size: int, fds: list[int]) -> bool:
        seen.append(size)
        return take(self, size, fds)

    monkeypatch.setattr(Connection, "take", noted)
    _, peer = serve(Columns(lambda **data: {"y": data["x"] * 3}))
    for number in range(1, 5):
        ask(peer, golden, number, [number])
    seen.clear()
    places = []
    before = None
    for number in range(5, 15):
        peer.batch(number, record(golden, number, [number]), consumed=max(4, number - 2))
        packet = peer.answer()
        places.append((packet.segment, packet.offset))
        # It stays what it is until it is acknowledged.
        for told, expected in ((before, 3.0 * (number - 1)), (packet, 3.0 * number)):
            if told is not None:
                assert outputs_of(peer.responses(told)) == [{"y": [[expected]]}]
        before = packet
    assert seen == []
    assert len(set(places)) == 2
    assert all(first != second for first, second in itertools.pairwise(places))
    # A batch that is not plain, in between: Python knows both blocks, and what is left of them when it is done.
    peer.batch(15, record(golden, 15, [15], [16]), consumed=13)
    assert outputs_of(peer.responses(peer.answer())) == [{"y": [[45.0]]}, {"y": [[48.0]]}]
    for number in range(16, 20):
        peer.batch(number, record(golden, number, [number]), consumed=number - 2)
        assert outputs_of(peer.responses(peer.answer())) == [{"y": [[3.0 * number]]}]


def test_too_much_acknowledged(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    for number in range(1, 5):
        ask(peer, golden, number, [number])
    peer.batch(5, record(golden, 5, [5.0]), consumed=6)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.answer()


def test_results_that_grow_and_shrink(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(Columns(lambda **data: {"y": np.full((1, int(data["x"][0, 0])), 7, F4)}))
    for number, width in enumerate([1, 10, 100_000, 100_000, 3, 700_000, 700_000, 3, 100_000, 3] * 2, 1):
        _, [response] = ask(peer, golden, number, [float(width)])
        assert response.outputs["y"].shape == (1, width)
        assert (response.outputs["y"] == 7).all()


def test_larger_responses_ask_for_no_block(serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    make_room = accelerated.AcceleratedSource.make_room

    def counted(self: Any, place: int, length: int) -> Any:
        asked.append(length)
        return make_room(self, place, length)

    monkeypatch.setattr(accelerated.AcceleratedSource, "make_room", counted)
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    number = 0
    for _ in range(2):
        asked.clear()
        for size in range(1, 9):
            number += 1
            rows = [[float(size)] * 4] * size
            assert outputs_of(ask(peer, golden, number, *rows)[1]) == [{"y": [row]} for row in rows]
    # The first time, each size comes to Python, which has the block back then.
    assert len(asked) <= 1


def test_a_segment_that_is_closed_and_one_of_its_number(serve: Serve, golden: ModuleType) -> None:
    _, peer = serve(Columns(lambda **data: {"y": data["x"]}))
    for number in range(1, 5):
        ask(peer, golden, number, [number])
    peer.message(golden.SEGMENT_CLOSE, segment=1)
    peer.arena[1].close()
    peer.segment(1, 1 << 16)
    peer.free = 0
    for number in range(5, 9):
        assert outputs_of(ask(peer, golden, number, [number])[1]) == [{"y": [[number]]}]
    peer.message(golden.SEGMENT_CLOSE, segment=1)
    peer.batch(9, record(golden, 9, [9.0]))
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.answer()


def test_nothing_is_kept(serve: Serve, golden: ModuleType) -> None:
    results: list[weakref.ref[Array]] = []

    def infer(**data: Array) -> Any:
        if data["x"][0, 0] == 1:
            raise ValueError("1")
        y = data["x"] + 1
        results.append(weakref.ref(y))
        return {"y": y} if data["x"][0, 0] != 2 else {"y": y, "z": y}

    _, peer = serve(Columns(infer))
    x = np.dtype("float32")
    none = None
    counts = []
    number = 0
    for _ in range(3):
        for _ in range(300):
            number += 1
            ask(peer, golden, number, [float(number % 7)])
        gc.collect()
        counts.append((sys.getrefcount(x), sys.getrefcount(none), len(gc.get_objects())))
        assert not any(result() is not None for result in results)
        results.clear()
    first, *later = counts
    for now in later:
        # Not exact: other threads, and what is made once, come in between. 300 batches would be seen.
        assert all(abs(value - before) < 150 for value, before in zip(now, first, strict=True)), counts


# ---- what happens to a worker --------------------------------------------------------------------------------------


def test_a_signal_while_it_waits(proxy: Any, golden: ModuleType) -> None:
    """In the main thread: a handler runs at once, and what it raises ends the wait with nothing lost."""
    proxy.listen()
    native = accelerator()
    assert native is not None
    seen: list[int] = []
    handled = threading.Event()
    raises: list[bool] = []

    def handle(*_: object) -> None:
        seen.append(len(seen))
        handled.set()
        if raises:
            raise KeyboardInterrupt

    answers = []

    def play() -> None:
        peer = proxy.accept()
        peer.welcome()
        for number in range(1, 4):
            answers.append(outputs_of(ask(peer, golden, number, [number])[1]))
        # Whether it waits already or not, the handler runs: that is what is waited for.
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handled.wait(PATIENCE_S)
        for number in range(4, 6):
            answers.append(outputs_of(ask(peer, golden, number, [number])[1]))
        raises.append(True)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    player = threading.Thread(target=play)
    player.start()
    try:
        connection = Connection(proxy.endpoint, "signals")
        service = Service(Columns(lambda **data: {"y": data["x"]}), spec())
        with contextlib.closing(connection), pytest.raises(KeyboardInterrupt):
            serve_accelerated(service, connection, LazyLoop(), lambda error: None, native.Lane)
    finally:
        player.join()
        signal.signal(signal.SIGUSR1, before)
    assert answers == [[{"y": [[number]]}] for number in range(1, 6)]
    assert seen == [0, 1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_callable_that_forks(serve: Serve, golden: ModuleType, tmp_path: Path) -> None:
    """The child returns from the callable as well, and has no part in the connection."""
    children = []

    def infer(**data: Array) -> Any:
        if data["x"][0, 0] == 4:
            child = os.fork()
            if child == 0:
                (tmp_path / "child").write_text(str(os.getpid()))
                return {"y": data["x"] + 100}
            children.append(child)
            # The child is in the accelerator, or past it, when its process has ended.
            os.waitpid(child, 0)
        return {"y": data["x"]}

    _, peer = serve(Columns(infer))
    for number in range(1, 8):
        _, responses = ask(peer, golden, number, [number])
        assert outputs_of(responses) == [{"y": [[number]]}]
    assert int((tmp_path / "child").read_text()) == children[0]


def test_many_workers_in_one_process(proxy: Any, socket_folder: Path, golden: ModuleType) -> None:
    proxies = [type(proxy)(socket_folder / f"{place}.sock", golden) for place in range(4)]
    workers = []
    failed: list[BaseException] = []

    def play(place: int) -> None:
        try:
            peer = proxies[place].accept()
            peer.welcome()
            for number in range(1, 201):
                _, responses = ask(peer, golden, number, [place, number])
                assert outputs_of(responses) == [{"y": [[place, number]]}]
        except BaseException as error:
            failed.append(error)

    players = []
    try:
        for place, proxy in enumerate(proxies):
            proxy.listen()
            workers.append(Worker(Columns(lambda **data: {"y": data["x"].copy()}), spec(), proxy.endpoint))
            players.append(threading.Thread(target=play, args=(place,)))
            players[-1].start()
            workers[-1].start()
        for player in players:
            player.join()
    finally:
        for proxy in proxies:
            proxy.close()
        for worker in workers:
            assert worker.stop(PATIENCE_S)
    assert failed == []


def test_its_types_are_not_for_others(serve: Serve, golden: ModuleType) -> None:
    native = accelerator()
    assert native is not None
    kept: list[Array] = []
    _, peer = serve(Columns(keeping(kept)))
    for number in range(1, 4):
        ask(peer, golden, number, [number])
    block: Any = type(kept[-1].base)
    assert block.__name__ == "Block"
    with pytest.raises(TypeError):
        block()
    with pytest.raises((TypeError, SystemError)):
        native.Lane()
    counters = np.zeros(1)
    with pytest.raises(ValueError, match=r"1 counters, 331 expected"):
        native.Lane(-1, bytearray(8), (counters.ctypes.data, 1), counters, print, True, 0, None)


# ---- a hostile peer ------------------------------------------------------------------------------------------------

PLACE = st.tuples(
    st.sampled_from(["packet", "record"]),
    st.integers(0, 500),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 1, 2, 47, 48, 64, 4096, 1 << 31, (1 << 32) - 1, 1 << 63]) | st.integers(0, (1 << 64) - 1),
)


def outcome(kind: Any, changes: list[tuple[str, int, int, int]], proxy: Any, golden: ModuleType) -> list[Any]:
    """What comes of a batch like those that were served, but for a few bytes: answers, up to the connection's end."""
    # Anew for each: a worker that lost its connection attaches again, to whoever listens.
    proxy.listen()
    worker = Worker(kind(lambda **data: {"y": data["x"] + 1, "z": data["x"].astype(F8)}), spec(), proxy.endpoint)
    worker.start()
    peer = proxy.accept()
    more: dict[str, Any] = {} if kind is Columns else {"id": "an id", "parameters": {"a": 1, "b": "text"}}
    answers: list[Any] = []
    try:
        peer.welcome()
        for number in (1, 2, 3):
            raw, x = sized_record(golden, number, [1, number], 2, **more)
            peer.batch(number, raw)
            assert [response.outputs["y"].tolist() for response in peer.responses(peer.answer())] == [
                (x[:1] + 1).tolist(),
                (x[1:] + 1).tolist(),
            ]
        parts = {"record": bytearray(sized_record(golden, 4, [2, 1], 2, **more)[0])}
        parts["packet"] = bytearray(
            golden.message(golden.BATCH, batch=4, consumed=3, segment=1, offset=1 << 16, length=len(parts["record"]))
        )
        for part, offset, width, value in changes:
            at = offset // width * width % (len(parts[part]) // width * width)
            parts[part][at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
        peer.arena[1][1 << 16 : (1 << 16) + len(parts["record"])] = bytes(parts["record"])
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            peer.send(bytes(parts["packet"]))
            peer.message(golden.DETACH)  # which no proxy backend sends: the end in any case
            while True:
                packet = peer.answer()
                if packet.kind == golden.RESPONSE:
                    responses = peer.responses(packet)
                    assert all(not response.error for response in responses)
                    for response in responses:
                        for name, array in response.outputs.items():
                            answers.append((response.request, name, array.dtype, array.shape, array.tobytes()))
                else:
                    answers.append((packet.kind, packet.body))
    finally:
        proxy.close()
        assert worker.stop(PATIENCE_S)
    return answers


@pytest.mark.slow
# Of a parameter the name is empty, and lies behind the end.
@example(changes=[("record", 312, 8, 0), ("record", 313, 1, 2)])
@given(changes=st.lists(PLACE, min_size=1, max_size=3))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.parametrize("kind", [Columns, Listed])
def test_changed_batches(
    kind: Any,
    changes: list[tuple[str, int, int, int]],
    proxy: Any,
    golden: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is changed in a batch, the accelerator makes of it what Python does."""
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("PYTRITON_ACCELERATOR", switch)
        found.append(outcome(kind, changes, proxy, golden))
    assert found[0] == found[1]
