"""Callables of this process as models of a server in process: what `Triton` serves, served without a proxy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.decorators import batch, first_value, group_by_keys, sample
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.proxy.types import Request, Response
from support.callables import (
    BAD,
    GOOD,
    KINDS,
    STRICT,
    UNCASTABLE,
    WithFactory,
    X,
    Y,
    function,
    identity,
    name_of,
    yields_nothing,
    yields_twice,
)
from support.inprocess import chain_config
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]


class Results:
    """Returns what the test says."""

    def __init__(self) -> None:
        self.make: Callable[[list[Request]], Any] = function

    def __call__(self, requests: list[Request]) -> Any:
        return self.make(requests)


loose, strict, text, two = Results(), Results(), Results(), Results()


@pytest.fixture(scope="module")
def server() -> Iterator[inprocess.Server]:
    server = inprocess.Server()
    for kind, infer_func in KINDS.items():
        for decoupled in (False, True):
            server.bind(name_of(kind, decoupled), infer_func, X, Y, config=ModelConfig(decoupled=decoupled))
    server.bind("loose", loose, X, Y)
    server.bind("strict", strict, X, Y, strict=True)
    server.bind(
        "text", text, [Tensor(name="x", dtype=bytes, shape=(-1,))], [Tensor(name="y", dtype=bytes, shape=(-1,))]
    )
    server.bind("two", two, [*X, Tensor(name="w", dtype=np.int64, shape=(1,), optional=True)], [*Y, *X])
    server.bind("yields_twice", yields_twice, X, Y)
    server.bind("yields_nothing", yields_nothing, X, Y)
    server.bind("tracebacks", function, X, Y, config=ModelConfig(send_tracebacks=True))
    with server:
        yield server


def infer(server: inprocess.Server, name: str, version: int = -1, **inputs: Any) -> list[dict[str, Array]]:
    """The outputs of every response that has some."""
    responses = server.model(name, version).infer(inputs={key: np.asarray(value) for key, value in inputs.items()})
    return [
        {key: np.array(output) for key, output in response.outputs.items()}
        for response in responses
        if response.outputs
    ]


def ask(server: inprocess.Server, name: str, value: float) -> tuple[list[Any], str | None]:
    try:
        answers = infer(server, name, x=np.array([[value]], np.float32))
    except inprocess.TritonError as error:
        return [], str(error)
    return [item for answer in answers if "y" in answer for item in answer["y"].ravel().tolist()], None


# ---- callables and results, as in test_requests_and_responses --------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_callables_of_every_kind(kind: str, decoupled: bool, server: inprocess.Server) -> None:
    name = name_of(kind, decoupled)
    assert ask(server, name, 3) == ([6], None)
    values, error = ask(server, name, 13)
    assert values == []
    assert "the inference callable raised ValueError: thirteen" in str(error)
    assert "Traceback" not in str(error)
    assert ask(server, name, 4) == ([8], None)


def test_the_traceback_is_sent_where_the_model_says_so(server: inprocess.Server) -> None:
    error = str(ask(server, "tracebacks", 13)[1])
    assert "Traceback (most recent call last)" in error
    assert "in function" in error


@pytest.mark.parametrize(("name", "received"), [("yields_twice", "more than one"), ("yields_nothing", "none")])
def test_a_generator_of_a_coupled_model_yields_once(name: str, received: str, server: inprocess.Server) -> None:
    assert f"exactly one result, it yielded {received}" in str(ask(server, name, 1)[1])


@pytest.mark.parametrize("form", GOOD)
def test_results_of_every_form(form: str, server: inprocess.Server) -> None:
    for name, results in (("loose", loose), ("strict", strict)):
        results.make = lambda requests: [GOOD[form]]
        values, error = ask(server, name, 1)
        if name == "loose" or form in {*STRICT, "subclass", "masked"}:
            assert (values, error) == ([1], None)
        else:
            assert "the declared one" in str(error)


@pytest.mark.parametrize("name", ["loose", "strict"])
@pytest.mark.parametrize("what", [*BAD, *UNCASTABLE])
def test_what_cannot_be_sent_is_an_error_and_nothing_hangs(what: str, name: str, server: inprocess.Server) -> None:
    result, part = {**BAD, **UNCASTABLE}[what]
    {"loose": loose, "strict": strict}[name].make = lambda requests: result
    values, error = ask(server, name, 1)
    assert values == []
    assert f"model '{name}'" in str(error)
    assert part in str(error)


# ---- what a callable sees --------------------------------------------------------------------------------------------


def test_everything_that_comes_with_a_request_reaches_the_callable(server: inprocess.Server) -> None:
    seen: list[dict[str, Any]] = []

    def look(requests: list[Request]) -> list[Any]:
        for request in requests:
            seen.append(
                {
                    "id": request.request_id,
                    "parameters": dict(request.parameters),
                    "correlation": request.correlation_id,
                    "priority": request.priority,
                    "names": sorted(request),
                    "cancelled": request.is_cancelled(),
                    "outputs": request.requested_output_names,
                }
            )
        return [Response({"y": request["x"]}, {"i": 1 << 40, "s": "é", "b": True, "f": 0.5}) for request in requests]

    two.make = look
    parameters: dict[str, Any] = {"text": "é", "large": -(1 << 40), "yes": True, "half": 0.5}
    request = server.model("two").create_request(
        request_id="seven", correlation_id=9, parameters=parameters, inputs={"x": np.zeros((1, 2), np.float32)}
    )
    (response,) = list(server.model("two").infer(request))
    assert response.parameters == {"i": 1 << 40, "s": "é", "b": True, "f": 0.5}
    assert list(response.outputs) == ["y"]
    (one,) = seen
    assert one["id"] == "seven"
    assert one["correlation"] == 9
    assert one["names"] == ["x"]  # the optional one is absent
    assert one["cancelled"] is False
    assert {key: one["parameters"][key] for key in parameters} == parameters


def test_strings(server: inprocess.Server) -> None:
    text.make = lambda requests: [{"y": np.char.upper(request["x"].astype(bytes))} for request in requests]
    words = np.array([[b"a", b"bb", b"longer word"], [b"", b"x\0y", "é".encode()]], dtype=object)
    (answer,) = infer(server, "text", x=words)
    assert answer["y"].tolist() == [[b"A", b"BB", b"LONGER WORD"], [b"", b"X\0Y", "é".encode()]]


@pytest.mark.parametrize(
    "dtype",
    [bool, "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"],
    ids=lambda kind: str(np.dtype(kind)),
)
def test_every_numeric_type(dtype: Any) -> None:
    name = f"identity_{np.dtype(dtype)}"
    server = shared()
    server.bind(
        name,
        lambda requests: [{"y": request["x"]} for request in requests],
        [Tensor(name="x", dtype=np.dtype(dtype).type, shape=(3,))],
        [Tensor(name="y", dtype=np.dtype(dtype).type, shape=(3,))],
        strict=True,
    )
    value = np.array([[0, 1, 1]], dtype)
    (answer,) = infer(server, name, x=value)
    assert answer["y"].dtype == value.dtype
    assert answer["y"].tolist() == value.tolist()


_shared: list[inprocess.Server] = []


def shared() -> inprocess.Server:
    """The server of the tests below, which bind models of their own while it runs."""
    return _shared[0]


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[inprocess.Server]:
    with inprocess.Server(
        model_control_mode=inprocess.ModelControlMode.EXPLICIT, cache_config={"local": {"size": "1048576"}}
    ) as server:
        _shared.append(server)
        yield server
        _shared.clear()


def test_decorated_callables(own_server: inprocess.Server) -> None:
    @batch
    def whole(x: Array) -> dict[str, Array]:
        return {"y": x + len(x)}

    @sample
    def alone(x: Array) -> dict[str, Array]:
        return {"y": x * 2}

    @group_by_keys
    @first_value("w")
    def first(requests: list[Request], w: Any = None) -> list[Any]:
        return function(requests)

    own_server.bind("whole", whole, X, Y)
    own_server.bind("alone", alone, X, Y, config=ModelConfig(batching=False))
    assert infer(own_server, "whole", x=np.zeros((2, 3), np.float32))[0]["y"].tolist() == [[2, 2, 2]] * 2
    assert infer(own_server, "alone", x=np.ones(3, np.float32))[0]["y"].tolist() == [2, 2, 2]


def test_a_batch_is_one_array(own_server: inprocess.Server) -> None:
    """Requests that Triton joins come as one array, gathered once, whatever their rows."""
    shapes: list[tuple[int, ...]] = []
    started, go_on = threading.Event(), threading.Event()

    @batch
    def whole(x: Array) -> dict[str, Array]:
        shapes.append(x.shape)
        started.set()
        assert go_on.wait(PATIENCE_S)
        return {"y": x * 2}

    config = ModelConfig(max_batch_size=8, batcher=DynamicBatcher())
    own_server.bind("gathered", whole, X, Y, config=config)
    with ThreadPoolExecutor(8) as pool:
        blocker = pool.submit(infer, own_server, "gathered", x=np.zeros((1, 2), np.float32))
        assert started.wait(PATIENCE_S)
        rows = [1, 2, 1, 3]
        values = [np.full((count, 2), index, np.float32) for index, count in enumerate(rows)]
        answers = [pool.submit(infer, own_server, "gathered", x=value) for value in values]
        # All are in Triton's queue, as the only instance is busy.
        eventually(lambda: pending(own_server, "gathered") == 4)
        go_on.set()
        for value, answer in zip(values, answers, strict=True):
            assert np.array_equal(answer.result(PATIENCE_S)[0]["y"], value * 2)
        blocker.result(PATIENCE_S)
    assert shapes == [(1, 2), (7, 2)]
    statistics = own_server.model("gathered").statistics()["model_stats"][0]
    assert {int(entry["batch_size"]) for entry in statistics["batch_stats"]} == {1, 7}
    assert int(statistics["inference_stats"]["success"]["count"]) == 5


def pending(server: inprocess.Server, name: str) -> int:
    line = next(
        line
        for line in server.metrics().splitlines()
        if line.startswith("nv_inference_pending_request_count{") and f'model="{name}"' in line
    )
    return int(float(line.split()[-1]))


def test_one_bad_request_leaves_the_others_of_its_batch(own_server: inprocess.Server) -> None:
    started, go_on = threading.Event(), threading.Event()

    def some_fail(requests: list[Request]) -> list[Any]:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return [ValueError("odd") if request["x"].item() % 2 else {"y": request["x"]} for request in requests]

    own_server.bind("some_fail", some_fail, X, Y, config=ModelConfig(max_batch_size=8))
    with ThreadPoolExecutor(5) as pool:
        blocker = pool.submit(ask, own_server, "some_fail", 0)
        assert started.wait(PATIENCE_S)
        answers = [pool.submit(ask, own_server, "some_fail", value) for value in range(4)]
        eventually(lambda: pending(own_server, "some_fail") == 4)
        go_on.set()
        results = [answer.result(PATIENCE_S) for answer in answers]
        blocker.result(PATIENCE_S)
    assert [values for values, _ in results] == [[0], [], [2], []]
    assert all("ValueError: odd" in str(error) for _, error in results[1::2])


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_large_input_is_a_view_that_may_be_kept(own_server: inprocess.Server) -> None:
    kept: list[Array] = []

    def keep(requests: list[Request]) -> list[Any]:
        kept.extend(request["x"] for request in requests)
        return [{"y": request["x"][:, :1]} for request in requests]

    own_server.bind("keep", keep, X, Y)
    given = np.arange(16 << 20, dtype=np.float32).reshape(1, -1)
    address = given.ctypes.data
    for response in own_server.model("keep").infer(inputs={"x": given}):
        assert np.array(response.outputs["y"]).tolist() == [[0]]
    (view,) = kept
    assert view.nbytes == 64 << 20
    assert view.ctypes.data == address
    assert not view.flags.writeable
    own_server.unbind("keep")
    del given, response
    assert np.array_equal(view[0, ::1000], np.arange(0, 16 << 20, 1000, dtype=np.float32))


def test_a_callable_cannot_write_to_the_memory_of_its_caller(own_server: inprocess.Server) -> None:
    def clear(requests: list[Request]) -> list[Any]:
        for request in requests:
            request["x"][...] = 0
        return [{"y": request["x"][:, :1]} for request in requests]

    own_server.bind("clear", clear, X, Y)
    own_server.bind("clear_copy", clear, X, Y, copy_inputs=True)
    for length, name, works in ((4, "clear", True), (1 << 19, "clear", False), (1 << 19, "clear_copy", True)):
        given = np.ones((1, length), np.float32)
        values, error = [], ""
        try:
            values = infer(own_server, name, x=given)[0]["y"].tolist()
        except inprocess.InternalError as failure:
            error = str(failure)
        assert bool(given.all())
        assert (values == [[0]]) is works
        assert ("read-only" in error) is not works


def test_kept_small_inputs_and_large_outputs_stay_as_they_were(own_server: inprocess.Server) -> None:
    kept: list[Array] = []

    def keep(requests: list[Request]) -> list[Any]:
        kept.extend(request["x"] for request in requests)
        return [{"y": np.repeat(request["x"], 1 << 16, axis=1)} for request in requests]

    own_server.bind("keep_small", keep, X, Y)
    outputs = [infer(own_server, "keep_small", x=np.full((1, 2), value, np.float32))[0]["y"] for value in range(50)]
    assert [array[0].tolist() for array in kept] == [[value, value] for value in range(50)]
    for value, output in enumerate(outputs):
        assert output.shape == (1, 2 << 16)
        assert bool((output == value).all())


def test_many_callers_never_get_the_answer_of_another(own_server: inprocess.Server) -> None:
    @batch
    def negative(x: Array) -> dict[str, Array]:
        return {"y": -x}

    own_server.bind("negative", negative, X, Y, config=ModelConfig(max_batch_size=32))
    model = own_server.model("negative")

    def call(caller: int) -> int:
        wrong = 0
        for number in range(150):
            given = np.full((1 + number % 3, 5), caller * 1000 + number, np.float32)
            for response in model.infer(inputs={"x": given}):
                wrong += not np.array_equal(np.array(response.outputs["y"]), -given)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(call, range(8))) == 0


# ---- Triton's part ---------------------------------------------------------------------------------------------------


def test_the_response_cache_answers_without_the_callable(own_server: inprocess.Server) -> None:
    calls: list[int] = []

    def count(requests: list[Request]) -> list[Any]:
        calls.append(len(requests))
        return [{"y": request["x"]} for request in requests]

    own_server.bind("cached", count, X, Y, config=ModelConfig(response_cache=True))
    for _ in range(3):
        assert ask(own_server, "cached", 5) == ([5], None)
    assert calls == [1]


def test_a_response_has_the_label_of_its_largest_value(own_server: inprocess.Server) -> None:
    own_server.bind("scores", identity, X, Y, config=ModelConfig(max_batch_size=8))
    config = chain_config("scores")
    config["output"] = [{**config["output"][0], "label_filename": "labels.txt"}]
    model = own_server.load("labelled", config=config, files={"labels.txt": "cat\ndog\n"})
    responses = [next(model.infer(inputs={"x": x})) for x in ([[1, 5]], [[5]], [[3], [4]])]
    # Of several rows, one label would not say which is meant.
    assert [response.classification_label for response in responses] == ["dog", "cat", None]
    assert next(own_server.model("scores").infer(inputs={"x": [[5]]})).classification_label is None


@pytest.mark.parametrize("batching", [True, False])
def test_queue_policies(own_server: inprocess.Server, batching: bool) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(requests: list[Request]) -> list[Any]:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return [{"y": request["x"]} for request in requests]

    policy = QueuePolicy(max_queue_size=1)
    config = ModelConfig(batching=batching, max_batch_size=1, batcher=DynamicBatcher(default_queue_policy=policy))
    # With the batch axis, or with the same axes without batching.
    tensors = (X, Y) if batching else ([Tensor((-1, -1), np.float32, "x")], [Tensor((-1, -1), np.float32, "y")])
    own_server.bind("short_queue", wait, *tensors, config=config)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, own_server, "short_queue", 1)
        assert started.wait(PATIENCE_S)
        second = pool.submit(ask, own_server, "short_queue", 2)
        eventually(lambda: pending(own_server, "short_queue") == 1)
        assert "Exceeds maximum queue size" in str(ask(own_server, "short_queue", 3)[1])
        go_on.set()
        assert first.result(PATIENCE_S) == ([1], None)
        assert second.result(PATIENCE_S) == ([2], None)
    own_server.unbind("short_queue")


def test_priorities(own_server: inprocess.Server) -> None:
    started, go_on = threading.Event(), threading.Event()
    order: list[float] = []

    def note(requests: list[Request]) -> list[Any]:
        started.set()
        assert go_on.wait(PATIENCE_S)
        order.extend(request["x"].item() for request in requests)
        return [{"y": request["x"]} for request in requests]

    batcher = DynamicBatcher(priority_levels=2, default_priority_level=2)
    model = own_server.bind("ranked", note, X, Y, config=ModelConfig(max_batch_size=1, batcher=batcher))
    waiting = [model.infer(inputs={"x": np.zeros((1, 1), np.float32)})]
    assert started.wait(PATIENCE_S)
    for value, priority in ((1, 2), (2, 2), (3, 1)):
        waiting.append(model.infer(inputs={"x": np.full((1, 1), value, np.float32)}, priority=priority))
    eventually(lambda: pending(own_server, "ranked") == 3)
    go_on.set()
    for responses in waiting:
        list(responses)
    assert order == [0, 3, 1, 2]


def test_several_callables_serve_at_the_same_time(own_server: inprocess.Server) -> None:
    both = threading.Barrier(2)

    def meet(number: int, requests: list[Request]) -> list[Any]:
        both.wait(PATIENCE_S)
        return [{"y": np.full_like(request["x"], number)} for request in requests]

    callables = [functools.partial(meet, 1), functools.partial(meet, 2)]
    own_server.bind("several", callables, X, Y, config=ModelConfig(max_batch_size=1))
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, own_server, "several", 0) for _ in range(2)]
        assert sorted(answer.result(PATIENCE_S)[0][0] for answer in answers) == [1, 2]


def test_the_task_factory_of_a_callable_makes_its_own_tasks_only(own_server: inprocess.Server) -> None:
    callable_ = WithFactory()
    own_server.bind("factory", callable_, X, Y, config=ModelConfig(max_batch_size=1))
    assert [ask(own_server, "factory", value) for value in range(3)] == [([2 * value], None) for value in range(3)]
    assert callable_.made == ["coroutine"] * 3
