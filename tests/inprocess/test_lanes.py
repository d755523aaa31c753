"""Batches that pass no Python but their callable: answers as with all of it, and nothing kept or written twice."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.inprocess.callables.bindings import BoundCallables
from pytriton.inprocess.callables.runners import SyncRunner
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.proxy_backend.runtime.plain import PlainBatches
from pytriton.proxy_backend.runtime.statistics import Counters, WorkerStatistics
from pytriton.proxy_backend.wire.accelerator import accelerator
from support.callables import X, Y
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]
F4 = np.float32


@pytest.fixture(scope="module")
def server() -> Iterator[inprocess.Server]:
    with inprocess.Server() as server:
        yield server


@pytest.fixture(params=["accelerated", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with lanes, which take all they can from the first batch on, and without."""
    if request.param == "python":
        monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    else:
        monkeypatch.delenv("PYTRITON_ACCELERATOR", raising=False)
        assert accelerator() is not None, "run `python3 tools/dev.py native`"
        monkeypatch.setattr(PlainBatches, "_is_known", lambda *_: True)
    return str(request.param)


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python did: it got a batch as it came, or a call that was made."""
    seen: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        function = getattr(SyncRunner, name)

        def call(*arguments: Any) -> None:
            seen.append(name)
            function(*arguments)

        return call

    monkeypatch.setattr(SyncRunner, "execute", noted("execute"))
    monkeypatch.setattr(SyncRunner, "_go_on", noted("_go_on"))
    return seen


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[Counters]:
    """The counters of the models that are bound from now on."""
    made: list[Counters] = []

    class Noted(Counters):
        __slots__ = ()

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setitem(BoundCallables.__init__.__globals__, "Counters", Noted)
    return made


def columns(function: Callable[[Array], Any]) -> Any:
    @batch
    def infer(x: Array) -> Any:
        return function(x)

    return infer


def listed(function: Callable[[Array], Any]) -> Any:
    def infer(requests: list[Request]) -> Any:
        return [function(request["x"]) for request in requests]

    return infer


def ask(server: inprocess.Server, name: str, *rows: Sequence[float], **fields: Any) -> Any:
    """The output, or the error, of one request."""
    try:
        [response] = server.model(name).infer(inputs={"x": np.array(rows, F4)}, **fields)
    except inprocess.TritonError as error:
        return type(error).__name__, error.message
    return {name: np.from_dlpack(tensor).tolist() for name, tensor in response.outputs.items()}


def names() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"lane_{number}"


new_name = names().__next__


def bind(server: inprocess.Server, infer: Any, config: ModelConfig | None = None, **options: Any) -> str:
    name = new_name()
    server.bind(name, infer, X, Y, config=config or ModelConfig(max_batch_size=16), **options)
    return name


# ---- what is plain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [columns, listed])
def test_what_repeats_needs_no_python(kind: Any, server: inprocess.Server, in_python: list[str]) -> None:
    name = bind(server, kind(lambda x: {"y": x * 2}))
    for number in range(10):
        assert ask(server, name, [number, 1]) == {"y": [[2 * number, 2]]}
    # The first of its look is Python's.
    assert in_python == ["execute"]
    for number in range(10):
        assert ask(server, name, [number, 1], request_id=f"{number}", timeout=10_000_000 + number, priority=0) == {
            "y": [[2 * number, 2]]
        }
    assert in_python == ["execute"]


@pytest.mark.parametrize("kind", [columns, listed])
def test_sizes_need_no_python(kind: Any, server: inprocess.Server, in_python: list[str]) -> None:
    name = bind(server, kind(lambda x: {"y": x[:, ::2] * 2}))
    for number in range(1, 30):
        rows = np.arange(number % 4 * 7 + 14, dtype=F4).reshape(-1, 7)[:, : number % 7 + 1].tolist()
        wanted = [[2 * value for value in row[::2]] for row in rows]
        assert ask(server, name, *rows, request_id="i" * number) == {"y": wanted}
    assert in_python == ["execute"]
    # Left in place by the caller, and too much for a record: both are Python's, and what comes after is not.
    for width in (1 << 18, (1 << 14) + 2):
        assert ask(server, name, [1.0] * width) == {"y": [[2.0] * (width // 2)]}
    seen = len(in_python)
    assert seen > 1
    assert ask(server, name, [3.0]) == {"y": [[6.0]]}
    assert len(in_python) == seen


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", [columns, listed])
def test_counts_are_the_same(kind: Any, server: inprocess.Server, counters: list[Counters]) -> None:
    def infer(x: Array) -> Any:
        if x.flat[0] == 3:
            raise ValueError("3")
        return {"y": x}

    name = bind(server, kind(infer))
    for number in range(1, 9):
        answer = ask(server, name, *[[number, 1]] * number)
        assert answer == {"y": [[number, 1]] * number} if number != 3 else answer[0] == "InternalError"

    def found(counted: WorkerStatistics) -> Any:
        return counted.requests, counted.batches, counted.rows.sum, counted.input_bytes, counted.output_bytes

    expected = 8, 8, 36, 36 * 8, 33 * 8
    counted = counters[0].snapshot()
    assert found(counted) == expected
    assert counted.rows.counts[:5] == (1, 1, 2, 4, 0)
    assert counted.failed_requests["callable"] == 1
    assert (counted.callable_seconds.count, counted.callable_seconds.sum > 0) == (8, True)
    assert counted.queued_seconds > 0
    server.unbind(name)
    assert found(counters[0].snapshot()) == expected


@pytest.mark.usefixtures("both_ways")
def test_instances_count_together(server: inprocess.Server, counters: list[Counters]) -> None:
    name = bind(server, [columns(lambda x: {"y": x}) for _ in range(4)])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(server, name, [number]), range(400)))
    assert answers == [{"y": [[number]]} for number in range(400)]
    counted = counters[0].snapshot()
    assert (counted.requests, counted.rows.sum, counted.output_bytes) == (400, 400, 1600)


def test_inputs_are_arrays_like_any_other(server: inprocess.Server) -> None:
    seen: list[tuple[Any, ...]] = []

    def infer(x: Array) -> Any:
        seen.append((type(x), x.dtype, x.shape, x.strides, x.tolist(), str(x.flags)))
        x += 1  # as without a lane: the memory is the batch's own
        return {"y": x[::-1].copy()}

    name = bind(server, columns(infer))
    for _ in range(6):
        assert ask(server, name, [1, 2], [3, 4]) == {"y": [[4, 5], [2, 3]]}
    assert seen[1:] == seen[:-1]


def other_results() -> dict[str, Callable[[Array], Any]]:
    return {
        "as it is": lambda x: {"y": x},
        "a view": lambda x: {"y": x[:, ::-1]},
        "in the other order": lambda x: {"y": np.asfortranarray(x)},
        "read-only": lambda x: {"y": np.broadcast_to(F4(7), x.shape)},
        "another dtype": lambda x: {"y": x.astype(np.float64)},
        "another byte order": lambda x: {"y": x.astype(">f4")},
        "a subclass": lambda x: {"y": np.ma.masked_array(x)},
        "nothing in it": lambda x: {"y": x[:, :0]},
        "too many rows": lambda x: {"y": np.concatenate([x, x])},
        "large": lambda x: {"y": np.repeat(x, 1 << 15, axis=1)},
        "without an axis": lambda x: {"y": np.array(1, F4)},
        "an output too many": lambda x: {"y": x, "other": x},
        "no output": lambda x: {},
        "no array": lambda x: {"y": x.tolist()},
        "none": lambda x: {"y": None},
        "no dictionary": lambda x: 7,
        "an error": lambda x: ValueError("returned"),
        "raises": lambda x: x.reshape(-1, 77),
        "leaves": lambda x: sys.exit(3),
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [columns, listed])
def test_other_results_come_in_between(
    kind: Any, strict: bool, server: inprocess.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result twice, then a plain one, and all of it once more without a lane."""
    results = other_results()
    chosen = ["as it is"]

    def play() -> list[Any]:
        name = bind(server, kind(lambda x: results[chosen[0]](x)), strict=strict)
        answers: list[Any] = []
        for what in results:
            for chosen[0] in (what, what, "as it is"):
                number = len(answers)
                answer = ask(server, name, [number, 2], [3, 4])
                if chosen[0] == "as it is":
                    assert answer == {"y": [[number, 2], [3, 4]]}
                answers.append(answer if isinstance(answer, dict) else (answer[0], answer[1].replace(name, "")))
        return answers

    with_lane = play()
    monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    assert play() == with_lane


@pytest.mark.usefixtures("both_ways")
def test_results_that_need_an_event_loop(server: inprocess.Server) -> None:
    async def later(x: Array) -> Any:
        return [{"y": x + 1}]

    def infer(requests: list[Request]) -> Any:
        x = requests[0]["x"]
        return later(x) if x.flat[0] < 5 else iter_of(x)

    def iter_of(x: Array) -> Iterator[Any]:
        yield [{"y": x + 2}]

    name = bind(server, infer)
    for number in range(10):
        assert ask(server, name, [number]) == {"y": [[number + (1 if number < 5 else 2)]]}


# ---- whose a batch is --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("both_ways")
def test_requests_may_be_asked_for_and_kept(server: inprocess.Server) -> None:
    """A batch belongs to its requests once somebody has asked for them, also when it is answered."""
    kept: list[Any] = []

    def infer(requests: list[Request]) -> Any:
        kept.extend(requests)
        return [{"y": request["x"] + request.parameters["add"]} for request in requests]

    name = bind(server, infer)
    for number in range(8):
        answer = ask(server, name, [number], request_id=f"id {number}", parameters={"add": number})
        assert answer == {"y": [[2 * number]]}
    for number, request in enumerate(kept):
        assert (request["x"].item(), request.request_id, request.parameters) == (
            number,
            f"id {number}",
            {"add": number},
        )
        assert not request.is_cancelled()


@pytest.mark.usefixtures("both_ways")
def test_a_callable_sees_that_its_caller_is_gone(server: inprocess.Server) -> None:
    inside, seen = threading.Event(), threading.Event()

    def infer(requests: list[Request]) -> Any:
        if requests[0]["x"].item() == 0:
            inside.set()
            eventually(requests[0].is_cancelled)
            seen.set()
        return [{"y": request["x"]} for request in requests]

    name = bind(server, infer)
    for _ in range(3):
        assert ask(server, name, [1]) == {"y": [[1]]}
    responses = server.model(name).infer(inputs={"x": np.zeros((1, 1), F4)})
    assert inside.wait(PATIENCE_S)
    responses.cancel()
    assert seen.wait(PATIENCE_S)
    assert ask(server, name, [1]) == {"y": [[1]]}


@pytest.mark.usefixtures("both_ways")
def test_inputs_that_are_kept_keep_their_memory(server: inprocess.Server) -> None:
    kept: list[Array] = []
    keep = [True]

    def infer(x: Array) -> Any:
        if keep[0]:
            kept.append(x[:, 1:])
        return {"y": x}

    name = bind(server, columns(infer))
    for number in range(30):
        keep[0] = number % 3 != 0
        assert ask(server, name, [number, number]) == {"y": [[number, number]]}
    assert [x.item() for x in kept] == [number for number in range(30) if number % 3 != 0]
    server.unbind(name)
    assert [x.item() for x in kept] == [number for number in range(30) if number % 3 != 0]


@pytest.mark.usefixtures("both_ways")
def test_outputs_that_are_inputs_stay_as_they_are(server: inprocess.Server) -> None:
    """The response has memory of its own, whatever the next batch writes."""
    name = bind(server, columns(lambda x: {"y": x}))
    model = server.model(name)
    outputs = [
        np.from_dlpack(next(model.infer(inputs={"x": np.full((1, 3), number, F4)})).outputs["y"])
        for number in range(30)
    ]
    assert [output.tolist() for output in outputs] == [[[number] * 3] for number in range(30)]


@pytest.mark.usefixtures("both_ways")
def test_a_view_that_another_thread_drops(server: inprocess.Server) -> None:
    kept: list[Array] = []

    def infer(x: Array) -> Any:
        kept.append(x)
        return {"y": x}

    name = bind(server, columns(infer))
    ends = threading.Event()

    def drop() -> None:
        while not ends.is_set():
            if kept:
                x = kept.pop()
                assert (x == x[:, :1]).all()
            time.sleep(0)

    with ThreadPoolExecutor(5) as pool:
        dropping = pool.submit(drop)
        answers = list(pool.map(lambda number: ask(server, name, [number] * 4), range(400)))
        ends.set()
        dropping.result(PATIENCE_S)
    assert answers == [{"y": [[number] * 4]} for number in range(400)]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", [columns, listed])
def test_nothing_is_kept(kind: Any, server: inprocess.Server) -> None:
    class Kept(list[Any]):
        pass

    seen: list[weakref.ref[Any]] = []

    def infer(x: Array) -> Any:
        y = x + 1
        seen.extend([weakref.ref(x), weakref.ref(y)])
        return {"y": y}

    made = kind(infer)
    alive = weakref.ref(made)
    name = bind(server, made)
    del made
    for number in range(20):
        assert ask(server, name, [number]) == {"y": [[number + 1]]}
    eventually(lambda: all(reference() is None for reference in seen))
    server.unbind(name)
    gc.collect()
    assert alive() is None


# ---- the rest of a runner ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("both_ways")
def test_the_context_is_the_callables_own(server: inprocess.Server) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    seen: list[int] = []

    def infer(x: Array) -> Any:
        seen.append(variable.get())
        variable.set(seen[-1] + 1)
        return {"y": x}

    name = bind(server, columns(infer))
    variable.set(100)
    for number in range(6):
        assert ask(server, name, [number]) == {"y": [[number]]}
    assert seen == list(range(7, 13))
    assert variable.get() == 100


@pytest.mark.usefixtures("both_ways")
def test_an_unrecoverable_error_is_the_last_call(server: inprocess.Server) -> None:
    calls: list[float] = []

    def infer(x: Array) -> Any:
        calls.append(x.item())
        if x.item() == 5:
            raise PyTritonUnrecoverableError("the device is gone")
        return {"y": x}

    name = bind(server, columns(infer))
    for number in range(5):
        assert ask(server, name, [number]) == {"y": [[number]]}
    kind, text = ask(server, name, [5])
    assert (kind, "the device is gone" in text) == ("InternalError", True)
    for _ in range(3):
        kind, text = ask(server, name, [6])
        assert (kind, "cannot go on" in text) == ("UnavailableError", True)
    assert calls == [0, 1, 2, 3, 4, 5]


def test_a_limit_of_time_is_kept_in_python(server: inprocess.Server, in_python: list[str]) -> None:
    name = bind(server, columns(lambda x: {"y": x}), ModelConfig(execution_timeout_s=60))
    for number in range(4):
        assert ask(server, name, [number]) == {"y": [[number]]}
    assert in_python == ["execute"] * 4


def test_large_inputs_are_not_plain(server: inprocess.Server, in_python: list[str]) -> None:
    is_own: list[bool] = []

    def infer(x: Array) -> Any:
        is_own.append(x.flags.writeable)
        return {"y": x[:, :1]}

    name = bind(server, columns(infer))
    large = np.zeros((1, 1 << 18), F4)
    for number in range(6):
        large[0, 0] = number
        inputs = large if number % 2 else large[:, :5]
        [response] = server.model(name).infer(inputs={"x": inputs})
        assert np.from_dlpack(response.outputs["y"]).tolist() == [[number]]
    assert is_own == [True, False] * 3
    assert in_python == ["execute"] * 4


@pytest.mark.usefixtures("both_ways")
def test_where_a_callable_is_stuck(server: inprocess.Server) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def infer(x: Array) -> Any:
        if x.item() == 5:
            inside.set()
            assert go_on.wait(PATIENCE_S)
        return {"y": x}

    name = bind(server, columns(infer))
    for number in range(4):
        assert ask(server, name, [number]) == {"y": [[number]]}
    assert server._bindings is not None
    [bound] = [model for model in server._bindings._models.values() if model.bound.name == name]
    eventually(lambda: bound.busy() == [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, name, [5])
        assert inside.wait(PATIENCE_S)
        [text] = bound.busy()
        assert "assert go_on.wait(PATIENCE_S)" in text
        go_on.set()
        assert waiting.result(PATIENCE_S) == {"y": [[5]]}
    eventually(lambda: bound.busy() == [])


@pytest.mark.usefixtures("both_ways")
def test_batches_of_many_requests(server: inprocess.Server) -> None:
    sizes: list[list[int]] = []

    @batch
    def infer(x: Array) -> dict[str, Array]:
        sizes.append(list(x.shape))
        return {"y": x * 2}

    name = bind(
        server, infer, ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=2000))
    )

    def call(number: int) -> Any:
        rows = [[number, row] for row in range(1 + number % 3)]
        return ask(server, name, *rows, request_id=f"{number}")

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(call, range(320)))
    for number, answer in enumerate(answers):
        assert answer == {"y": [[2 * number, 2 * row] for row in range(1 + number % 3)]}
    assert sum(rows for rows, _ in sizes) == sum(1 + number % 3 for number in range(320))


@pytest.mark.usefixtures("both_ways")
def test_several_inputs_and_outputs_without_a_batch_axis(server: inprocess.Server) -> None:
    tensors = [Tensor((-1,), F4, "a"), Tensor((2, -1), np.int64, "b")]
    name = new_name()

    def infer(requests: list[Request]) -> Any:
        return [{"a": request["a"] * 2, "b": request["b"] + 1} for request in requests]

    server.bind(name, infer, tensors, tensors, config=ModelConfig(batching=False))
    for number in range(6):
        inputs = {"a": np.full(3, number, F4), "b": np.full((2, number + 1), number, np.int64)}
        [response] = server.model(name).infer(inputs=inputs)
        assert np.from_dlpack(response.outputs["a"]).tolist() == [2 * number] * 3
        assert np.from_dlpack(response.outputs["b"]).tolist() == [[number + 1] * (number + 1)] * 2
