"""Inference in process: requests of every form, their responses and errors, with bound callables behind."""

from __future__ import annotations

import contextlib
import gc
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.inprocess import (
    CancelledError,
    InferenceRequest,
    InferenceResponse,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Server,
    TimedOutError,
    Trace,
    TraceActivity,
    TraceLevel,
    TritonError,
    UnavailableError,
    UnsupportedError,
)
from pytriton.inprocess.capi.api import load_api
from pytriton.inprocess.requests import tracing
from pytriton.inprocess.requests.named import NamedModel
from pytriton.inprocess.requests.request import new_request
from pytriton.inprocess.requests.response import new_response
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from support.callables import identity
from support.servers import has_tracing, needs_tracing
from support.waiting import PATIENCE_S, eventually

MIB = 1 << 20

Array = np.ndarray[Any, Any]

SAME_TYPES: dict[str, Any] = {
    name: getattr(np, name)
    for name in ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
} | {"float16": np.float16, "float32": np.float32, "float64": np.float64, "bytes": bytes}

# Set by a test to let a callable that waits go on.
release = threading.Event()
entered = threading.Event()
left: queue.SimpleQueue[str] = queue.SimpleQueue()
seen: list[Request] = []


@batch
def double(x: Array) -> dict[str, Array]:
    return {"y": x * 2}


def two_inputs(requests: list[Request]) -> list[Any]:
    return [{"y": request["a"] + request.get("b", 0)} for request in requests]


def note(requests: list[Request]) -> list[Any]:
    """Notes what came with the requests, and answers with parameters of every type."""
    seen.extend(requests)
    parameters: dict[str, Any] = {"big": 2**40 + 1, "negative": -(2**40), "text": "ä", "flag": True, "half": 0.5}
    outputs = [
        {name: value for name, value in (("y", request["x"]), ("z", request["x"] + 1))
         if name in (request.requested_output_names or ("y", "z"))} for request in requests
    ]  # fmt: skip
    return [Response(output, parameters=parameters) for output in outputs]


def fail(requests: list[Request]) -> list[Any]:
    raise ValueError("bad luck")


def wait(requests: list[Request]) -> list[Any]:
    entered.set()
    assert release.wait(PATIENCE_S)
    return identity(requests)


def count(requests: list[Request]) -> Iterator[list[Any]]:
    for number in range(int(requests[0]["x"].item())):
        yield [{"y": np.full(1, number, np.float32)}]


def endless(requests: list[Request]) -> Iterator[list[Any]]:
    try:
        number = 0
        while True:
            yield [{"y": np.full(1, number, np.float32)}]
            number += 1
            time.sleep(0.001)
    finally:
        left.put("closed")


def patient(requests: list[Request]) -> list[Any]:
    """Waits for its cancellation."""
    entered.set()
    eventually(requests[0].is_cancelled)
    left.put("cancelled")
    return identity(requests)


def _one(name: str, dtype: Any = np.float32, shape: tuple[int, ...] = (-1,), **keywords: Any) -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=shape, **keywords)


def bind_all(server: Server) -> None:
    plain, decoupled = ModelConfig(batching=False), ModelConfig(batching=False, decoupled=True)
    x, y = [_one("x")], [_one("y")]
    server.bind("double", double, x, y, config=ModelConfig(max_batch_size=8))
    for name, dtype in SAME_TYPES.items():
        server.bind(name, identity, [_one("x", dtype, (-1, -1))], [_one("y", dtype, (-1, -1))], config=plain)
    server.bind("any", identity, x, y, config=plain)
    server.bind("two", two_inputs, [_one("a", shape=(2,)), _one("b", shape=(2,), optional=True)], y, config=plain)
    server.bind("note", note, x, [_one("y"), _one("z")], config=plain)
    server.bind("fail", fail, x, y, config=plain)
    server.bind("wait", wait, x, y, config=plain)
    server.bind("patient", patient, x, y, config=plain)
    server.bind("count", count, x, y, config=decoupled)
    server.bind("endless", endless, x, y, config=decoupled)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        bind_all(running)
        yield running


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    release.clear()
    entered.clear()
    seen.clear()
    yield
    release.set()


def ask(model: NamedModel, value: Any, **fields: Any) -> InferenceResponse:
    response: InferenceResponse
    (response,) = model.infer(inputs={"x": value}, **fields)
    return response


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SAME_TYPES if name != "bytes"])
def test_numbers_of_every_type(server: Server, name: str) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(SAME_TYPES[name])

    for value in (array, array.tolist(), inprocess.Tensor.from_dlpack(array), np.asfortranarray(array), array[::-1]):
        response = ask(server.model(name), value)

        out = np.from_dlpack(response.outputs["y"])
        assert out.dtype == array.dtype
        assert out.tolist() == np.asarray(value).tolist()
        assert response.final
        assert response.error is None


@pytest.mark.parametrize(
    "value",
    [
        [["hello", "wörld"]],
        [[b"\xff\0", b""]],
        [["a", "ü", b"\xff\0"]],
        np.array([["a", "bc"], ["", "d"]]),
        np.array([[b"a", "b\0"]], dtype=object),
        inprocess.Tensor.from_string_array([["x"]]),
    ],
    ids=["text", "bytes", "both", "U", "object", "Tensor"],
)
def test_strings(server: Server, value: Any) -> None:
    expected = np.asarray(inprocess.Tensor.from_bytes_array(value) if isinstance(value, list) else value, dtype=object)

    output = ask(server.model("bytes"), value).outputs["y"]

    encoded = [item.encode() if isinstance(item, str) else item for item in expected.ravel().tolist()]
    assert output.to_bytes_array().ravel().tolist() == encoded
    assert output.to_bytes_array().shape == expected.shape


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_tensors(server: Server, shape: tuple[int, int]) -> None:
    for name in ("float32", "bytes"):
        output = ask(server.model(name), np.empty(shape, object if name == "bytes" else np.float32)).outputs["y"]
        assert output.shape == shape
        assert np.asarray(output).shape == shape


def test_lists_get_the_type_of_the_model_where_it_holds_them(server: Server) -> None:
    assert np.asarray(ask(server.model("float32"), [[1, 2]]).outputs["y"]).tolist() == [[1.0, 2.0]]
    assert np.asarray(ask(server.model("uint8"), [[255]]).outputs["y"]).tolist() == [[255]]
    for name, value in [("uint8", [[256]]), ("int32", [[1.0]]), ("float16", [[1e6]]), ("bool_", [[2]])]:
        with pytest.raises(InvalidArgumentError, match="'x'") as caught:
            server.model(name).infer(inputs={"x": value})
        assert caught.value.where == f"model {name!r}, input 'x'"
        assert caught.value.expected is not None
        assert caught.value.received is not None


def test_lists_follow_a_model_that_is_loaded_with_another_type(server: Server) -> None:
    server.bind("changing", identity, [_one("x")], [_one("y")], config=ModelConfig(batching=False))
    model = server.model("changing")
    assert ask(model, [1]).outputs["y"].data_type is inprocess.DataType.FP32
    server.unbind("changing")
    server.bind("changing", identity, [_one("x", np.int16)], [_one("y", np.int16)], config=ModelConfig(batching=False))

    assert ask(model, [1]).outputs["y"].data_type is inprocess.DataType.INT16
    server.unbind("changing")


@pytest.mark.parametrize("value", [np.float32(2.5), 2.5, [np.float32(2.5)], np.array([2.5], np.float32)[0]])
def test_a_scalar_is_a_tensor_of_one_element(server: Server, value: Any) -> None:
    output = ask(server.model("any"), value).outputs["y"]
    assert output.shape == (1,)
    assert np.asarray(output).tolist() == [2.5]


def test_a_scalar_has_its_type_and_fits_one_element_only(server: Server) -> None:
    assert ask(server.model("bytes"), "one").outputs["y"].to_string_array().tolist() == [["one"]]
    with pytest.raises(InvalidArgumentError, match="expected FP32, received INT64"):
        server.model("any").infer(inputs={"x": np.int64(2)})
    with pytest.raises(InvalidArgumentError, match=r"shape \(2,\).*shape \(\)"):
        server.model("two").infer(inputs={"a": np.float32(2)})


def test_optional_inputs(server: Server) -> None:
    ones = np.ones(2, np.float32)
    for inputs, expected in [({"a": ones}, [1, 1]), ({"a": ones, "b": ones}, [2, 2])]:
        response = next(server.model("two").infer(inputs=inputs))
        assert np.asarray(response.outputs["y"]).tolist() == expected


def test_a_temporary_list_is_kept_as_long_as_the_request(server: Server) -> None:
    model = server.model("wait")
    # Beyond what is copied into the request.
    responses = model.infer(inputs={"x": list(range(100_000))})
    assert entered.wait(PATIENCE_S)
    garbage = [np.full(100_000, -1, np.float32) for _ in range(20)]
    gc.collect()
    release.set()
    out = np.asarray(next(responses).outputs["y"])
    assert np.array_equal(out, np.arange(100_000, dtype=np.float32))
    del garbage


def test_inputs_are_let_go_when_the_request_is_over(server: Server) -> None:
    array = np.ones(MIB, np.float32)
    before = sys.getrefcount(array)
    ask(server.model("any"), array)
    eventually(lambda: sys.getrefcount(array) == before)


# ---- what goes with a request ---------------------------------------------------------------------------------------


def test_all_fields_arrive(server: Server) -> None:
    parameters = {"i": -(2**40), "f": 0.25, "b": True, "s": "ä"}
    response = next(
        server.model("note").infer(
            inputs={"x": [1]},
            request_id="seven",
            correlation_id=2**40,
            flags=3,
            timeout=10**12,
            parameters=parameters,
        )
    )
    (request,) = seen
    assert request.request_id == "seven"
    assert request.correlation_id == 2**40
    assert request.sequence_start
    assert request.sequence_end
    assert request.timeout_us == 10**12
    assert {name: value for name, value in request.parameters.items() if name in parameters} == parameters
    assert type(request.parameters["b"]) is bool
    assert response.request_id == "seven"


def test_what_is_made_without_a_constructor_is_the_same(server: Server) -> None:
    model, inputs = server.model("any"), {"x": np.ones((1, 2), np.float32)}
    for fields in ({}, {"inputs": inputs}, {"flags": 1}, {"inputs": inputs, "request_id": "one"}):
        assert new_request(model, fields) == InferenceRequest(model, **fields)
    made, constructed = new_response(model, "one", True), InferenceResponse(model, "one", final=True)
    for name in InferenceResponse.__slots__:
        assert getattr(made, name) == getattr(constructed, name)


def test_correlation_ids_may_be_text(server: Server) -> None:
    next(server.model("note").infer(inputs={"x": [1]}, correlation_id="session ä"))
    assert seen[0].correlation_id == "session ä"


def test_parameters_of_responses_have_64_bits(server: Server) -> None:
    response = ask(server.model("note"), [1])
    assert response.parameters == {"big": 2**40 + 1, "negative": -(2**40), "text": "ä", "flag": True, "half": 0.5}


def test_outputs_can_be_selected(server: Server) -> None:
    assert set(ask(server.model("note"), [1]).outputs) == {"y", "z"}
    assert set(ask(server.model("note"), [1], requested_outputs=["z"]).outputs) == {"z"}


def test_the_response_names_the_version_and_the_model_of_the_caller_stays_open(server: Server) -> None:
    model = server.model("any")
    response = ask(model, [1])
    assert (response.model.name, response.model.version) == ("any", 1)
    assert model.version == -1
    assert np.asarray(ask(response.model, [2]).outputs["y"]).tolist() == [2]


def test_a_request_can_be_sent_again_also_while_it_is_in_flight(server: Server) -> None:
    model = server.model("double")
    request = InferenceRequest(model, inputs={"x": np.ones((1, 2), np.float32)})
    created = model.create_request(inputs=request.inputs)
    iterators = [model.infer(request) for _ in range(20)] + [model.infer(created)]
    assert all(np.asarray(next(responses).outputs["y"]).tolist() == [[2, 2]] for responses in iterators)


def test_a_queue_gets_all_responses_also_when_the_iterator_is_dropped(server: Server) -> None:
    responses: queue.SimpleQueue[InferenceResponse] = queue.SimpleQueue()
    server.model("count").infer(inputs={"x": [3]}, response_queue=responses)
    gc.collect()
    got: list[InferenceResponse] = []
    while not got or not got[-1].final:
        got.append(responses.get(timeout=PATIENCE_S))
    assert [np.asarray(response.outputs["y"]).item() for response in got if response.outputs] == [0, 1, 2]

    iterated = list(server.model("count").infer(inputs={"x": [2]}, response_queue=responses))
    assert [responses.get(timeout=PATIENCE_S) for _ in iterated] == iterated


@needs_tracing()
def test_traces(server: Server) -> None:
    trace = Trace(TraceLevel.TIMESTAMPS | TraceLevel.TENSORS)
    before = time.monotonic_ns()
    (response,) = server.model("double").infer(inputs={"x": [[1, 2]]}, request_id="traced", trace=trace)
    events = trace.wait(PATIENCE_S)

    assert response.error is None
    assert trace.done
    activities = [event.activity for event in events]
    for activity in (TraceActivity.REQUEST_START, TraceActivity.QUEUE_START, TraceActivity.REQUEST_END):
        assert activity in activities
    times = [event.timestamp_ns for event in events if event.timestamp_ns is not None]
    assert before <= min(times) <= max(times) <= time.monotonic_ns()
    assert {(event.model_name, event.model_version, event.request_id) for event in events} == {("double", 1, "traced")}
    (queued,) = [event for event in events if event.activity is TraceActivity.TENSOR_QUEUE_INPUT]
    assert queued.name == "x"
    assert np.asarray(queued.tensor).tolist() == [[1, 2]]
    with pytest.raises(InvalidArgumentError, match="Trace"):
        server.model("double").infer(inputs={"x": [[1]]}, trace=trace)


@needs_tracing()
def test_a_refused_request_leaves_its_trace_unused(server: Server) -> None:
    trace = Trace()
    with pytest.raises(InvalidArgumentError):
        server.model("double").infer(inputs={"x": np.ones((1, 1))}, trace=trace)
    next(server.model("double").infer(inputs={"x": [[1]]}, trace=trace))
    assert trace.wait(PATIENCE_S)


@pytest.mark.skipif(has_tracing(), reason="this tritonserver was built with tracing")
def test_a_server_without_tracing_says_so(server: Server) -> None:
    trace = Trace()
    for _ in range(2):
        with pytest.raises(
            UnsupportedError, match=r"built with tracing; .* is version .* says: .*not supported\. Leave"
        ):
            server.model("double").infer(inputs={"x": [[1]]}, trace=trace)
    (response,) = server.model("double").infer(inputs={"x": [[1]]})
    assert response.error is None


@pytest.mark.parametrize("what", ["TensorNew", "New", "SetContext"])
def test_a_trace_that_cannot_be_made_leaves_nothing(server: Server, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, with a library that says so at each of the places where it may."""
    level = TraceLevel.TENSORS if what == "TensorNew" else TraceLevel.TIMESTAMPS
    trace = Trace(level, context='{"a": 1}')

    def refuse(*arguments: Any) -> None:
        raise UnsupportedError("inference tracing not supported")

    monkeypatch.setattr(load_api(), f"TRITONSERVER_InferenceTrace{what}", refuse)
    expected = "inference tracing not supported" if what == "SetContext" else "built with tracing; .* is version"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=expected):
            server.model("double").infer(inputs={"x": [[1]]}, trace=trace)
    monkeypatch.undo()
    assert not tracing._started
    if has_tracing():
        next(server.model("double").infer(inputs={"x": [[1]]}, trace=trace))
        assert trace.wait(PATIENCE_S)


# ---- errors ---------------------------------------------------------------------------------------------------------

ROW = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("fields", "where", "text"),
    [
        ({"inputs": {"x": ROW.astype(np.float64)}}, "model 'double', input 'x'", "expected FP32, received FP64"),
        ({"inputs": {"x": [["a"]]}}, "model 'double', input 'x'", "expected FP32, received BYTES"),
        ({"inputs": {"x": ROW[0]}}, "model 'double', input 'x'", r"shape \(-1, -1\).*received shape \(2,\)"),
        ({"inputs": {"x": np.ones((9, 2), np.float32)}}, "model 'double', input 'x'", "batch of 1 to 8.*received.*9"),
        ({"inputs": {"x": ROW, "wrong": ROW}}, "model 'double', input 'wrong'", "expected an input of 'x'"),
        ({"inputs": {}}, "model 'double', input 'x'", "expected a value"),
        ({"inputs": {"x": [[1], [2, 3]]}}, "model 'double', input 'x'", "lists of one shape"),
        ({"inputs": {"x": [[10**400]]}}, "model 'double', input 'x'", "expected values of FP32"),
        *(
            ({"inputs": {"x": value}}, "model 'double', input 'x'", "expected values of FP32, received")
            for value in (
                [[None]],
                [[1, None]],
                [[1, "a"]],
                [[1.5, b"a"]],
                np.array([[1, None]]),
                np.array([["a", 1]], "O"),
            )
        ),
        ({"inputs": {"x": [["\ud800"]]}}, "model 'double', input 'x'", "UTF-8"),
        ({"inputs": {"x": None}}, "model 'double', input 'x'", "NoneType"),
        ({"inputs": {"x": object()}}, "model 'double', input 'x'", "object"),
        ({"inputs": [ROW]}, "model 'double'", "mapping"),
        ({"inputs": {1: ROW}}, "model 'double', input 1", "expected an input of 'x'"),
        ({"inputs": {"x": ROW}, "requested_outputs": ["wrong"]}, "model 'double', output 'wrong'", "'y'"),
        ({"inputs": {"x": ROW}, "requested_outputs": "y"}, "model 'double'", "sequence of names"),
        ({"inputs": {"x": ROW}, "parameters": {"p": {}}}, "model 'double'", "'p'.*str, int, bool or float.*dict"),
        ({"inputs": {"x": ROW}, "parameters": {"p": 2**63}}, "model 'double'", "9223372036854775807"),
        ({"inputs": {"x": ROW}, "parameters": {"p": "a\0b"}}, "model 'double'", "zero"),
        ({"inputs": {"x": ROW}, "parameters": 3}, "model 'double'", "mapping"),
        ({"inputs": {"x": ROW}, "parameters": {"p": "\ud800"}}, "model 'double'", "UTF-8"),
        ({"inputs": {"x": ROW}, "request_id": 3}, "model 'double'", "request_id"),
        ({"inputs": {"x": ROW}, "trace": 1}, "model 'double'", "a Trace"),
        ({"inputs": {"x": ROW}, "correlation_id": 1.5}, "model 'double'", "correlation_id"),
        ({"inputs": {"x": ROW}, "correlation_id": -1}, "model 'double'", "correlation_id"),
        ({"inputs": {"x": ROW}, "flags": "1"}, "model 'double'", "flags"),
        ({"inputs": {"x": ROW}, "priority": -1}, "model 'double'", "priority"),
        ({"inputs": {"x": ROW}, "timeout": 0.5}, "model 'double'", "timeout"),
        ({"inputs": {"x": ROW}, "response_timeout_s": "1"}, "model 'double'", "response_timeout_s"),
        ({"inputs": {"x": ROW}, "response_queue": queue.Queue(3)}, "model 'double'", "response_queue"),
        ({"inputs": {"x": ROW}, "response_queue": object()}, "model 'double'", "response_queue"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_at_the_call(
    server: Server, fields: dict[str, Any], where: str, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        server.model("double").infer(**fields)
    assert caught.value.where == where
    assert caught.value.expected is not None
    # What is wrong with one request is no matter to the next.
    assert np.asarray(ask(server.model("double"), ROW).outputs["y"]).tolist() == [[2, 2]]


def test_inputs_of_fixed_shape_and_unlike_batches(server: Server) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        server.model("two").infer(inputs={"a": np.ones(3, np.float32)})
    assert (caught.value.expected, caught.value.received) == ((2,), (3,))
    with pytest.raises(InvalidArgumentError) as caught:
        server.model("two").infer(inputs={"b": np.ones(2, np.float32)})
    assert caught.value.where == "model 'two', input 'a'"


def test_types_that_triton_does_not_have(server: Server) -> None:
    with pytest.raises(UnsupportedError, match="complex64") as caught:
        server.model("double").infer(inputs={"x": ROW.astype(np.complex64)})
    assert caught.value.where == "model 'double', input 'x'"


def test_unknown_models(server: Server) -> None:
    for value in (ROW, [[1.0]]):
        with pytest.raises(NotFoundError, match="nowhere") as caught:
            server.model("nowhere").infer(inputs={"x": value})
        assert (caught.value.where, caught.value.received) == ("model 'nowhere'", ("nowhere", -1))
    with pytest.raises(TritonError, match="77"):
        server.model("double", 77).infer(inputs={"x": ROW})
    # The C API would take these for another name and another version.
    for name, version in (("double\0", -1), ("\ud800", -1), ("double", 2**64 + 1)):
        with pytest.raises(InvalidArgumentError, match="expected model_"):
            server.model(name, version)


def test_a_request_and_its_fields_exclude_each_other(server: Server) -> None:
    model = server.model("double")
    with pytest.raises(InvalidArgumentError, match="inference_request"):
        model.infer(model.create_request(inputs={"x": ROW}), inputs={"x": ROW})
    with pytest.raises(InvalidArgumentError, match="InferenceRequest"):
        model.infer({"x": ROW})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown"):
        model.infer(unknown=1)


def test_a_request_goes_to_its_own_model_only(server: Server) -> None:
    request = server.model("double").create_request(inputs={"x": ROW})
    assert next(server.model("double", 1).infer(request)).final
    with pytest.raises(InvalidArgumentError, match=r"'any': expected a request to this model.*'double'"):
        server.model("any").infer(request)
    with pytest.raises(InvalidArgumentError, match=r"expected a request to this model.*None"):
        server.model("any").infer(inprocess.InferenceRequest(None, inputs={"x": ROW}))  # type: ignore[arg-type]


def test_gpu_outputs_need_cupy(server: Server) -> None:
    with contextlib.suppress(ImportError):
        __import__("cupy")
        pytest.skip("cupy is installed")
    with pytest.raises(UnsupportedError, match="cupy"):
        server.model("double").infer(inputs={"x": ROW}, output_memory_type="gpu")
    with pytest.raises(InvalidArgumentError, match="tpu"):
        server.model("double").infer(inputs={"x": ROW}, output_memory_type="tpu")
    (response,) = server.model("double").infer(inputs={"x": ROW}, output_memory_type="cpu")
    assert response.outputs["y"].memory_type is inprocess.MemoryType.CPU


def test_errors_of_callables_come_with_their_response(server: Server) -> None:
    with pytest.raises(InternalError, match="bad luck") as caught:
        next(server.model("fail").infer(inputs={"x": [1]}, request_id="r"))
    response = caught.value.args[-1]
    assert isinstance(response, InferenceResponse)
    assert response.request_id == "r"
    assert response.final

    (response,) = server.model("fail").infer(inputs={"x": [1]}, raise_on_error=False)
    assert isinstance(response.error, InternalError)
    assert "bad luck" in str(response.error)
    assert response.outputs == {}


# ---- many responses, cancellation, time limits ----------------------------------------------------------------------


def test_a_decoupled_model_ends_with_an_empty_item(server: Server) -> None:
    responses = list(server.model("count").infer(inputs={"x": [4]}))
    values = [np.asarray(response.outputs["y"]).item() for response in responses if response.outputs]
    assert values == [0, 1, 2, 3]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    # Nothing comes after the end.
    assert list(server.model("count").infer(inputs={"x": [0]}))[-1].final


def test_cancel_interrupts_the_work_and_the_wait(server: Server) -> None:
    responses = server.model("patient").infer(inputs={"x": [1]})
    assert entered.wait(PATIENCE_S)
    threading.Timer(0.05, responses.cancel).start()
    with pytest.raises(CancelledError, match="patient"):
        next(responses)
    assert left.get(timeout=PATIENCE_S) == "cancelled"
    with pytest.raises(StopIteration):
        next(responses)
    responses.cancel()


def test_a_cancelled_request_without_raising(server: Server) -> None:
    responses = server.model("patient").infer(inputs={"x": [1]}, raise_on_error=False)
    assert entered.wait(PATIENCE_S)
    responses.cancel()
    (response,) = responses
    assert isinstance(response.error, CancelledError)
    assert response.final
    assert left.get(timeout=PATIENCE_S) == "cancelled"


@pytest.mark.parametrize("how", ["break", "close", "with", "cancel"])
def test_an_iteration_that_is_left_cancels_its_request(server: Server, how: str) -> None:
    responses = server.model("endless").infer(inputs={"x": [1]})
    first = next(responses)
    if how == "close":
        responses.close()
        assert list(responses) == []
    elif how == "cancel":
        responses.cancel()
        with pytest.raises(CancelledError):
            list(responses)
    elif how == "with":
        with responses:
            next(responses)
    else:
        for _ in responses:
            break
    del responses
    gc.collect()
    assert left.get(timeout=PATIENCE_S) == "closed"
    assert np.asarray(first.outputs["y"]).item() == 0


def test_a_wait_for_a_response_has_a_limit_and_can_go_on(server: Server) -> None:
    responses = server.model("wait").infer(inputs={"x": [5]}, response_timeout_s=0.05)
    with pytest.raises(TimedOutError, match=r"0\.05 s.*model 'wait'") as caught:
        next(responses)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.where == "model 'wait'"
    release.set()

    def response() -> InferenceResponse | None:
        with contextlib.suppress(TimedOutError):
            return next(responses)
        return None

    assert np.asarray(eventually(response).outputs["y"]).tolist() == [5]
    assert ask(server.model("any"), [5], response_timeout_s=float("inf")).final


class _Alarm(Exception):
    pass


def test_a_signal_interrupts_the_wait_and_harms_nothing(server: Server) -> None:
    def ring(*_: object) -> None:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        responses = server.model("patient").infer(inputs={"x": [1]})
        assert entered.wait(PATIENCE_S)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(_Alarm):
            next(responses)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    responses.close()
    assert left.get(timeout=PATIENCE_S) == "cancelled"
    assert np.asarray(ask(server.model("any"), [1]).outputs["y"]).tolist() == [1]


# ---- under load, and after the end ----------------------------------------------------------------------------------


def test_threads_get_their_own_answers(server: Server) -> None:
    def work(thread: int) -> int:
        model = server.model("double")
        wrong = 0
        for number in range(400):
            value = np.array([[thread, number, thread * number]], np.float32)
            out = np.from_dlpack(next(model.infer(inputs={"x": value})).outputs["y"])
            wrong += out.tolist() != (value * 2).tolist()
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def test_threads_share_an_iterator(server: Server) -> None:
    """Each response goes to one of them, and none waits for a response after the last one."""
    total = 200
    responses = server.model("count").infer(inputs={"x": np.full(1, total, np.float32)})
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: [r.outputs["y"].to_host() for r in responses if r.outputs], range(4)))
    numbers = sorted(int(np.from_dlpack(tensor)[0]) for part in parts for tensor in part)
    assert numbers == list(range(total))


def test_an_answer_that_nobody_reads_keeps_no_model_from_being_unloaded(server: Server) -> None:
    server.bind("passing", identity, [_one("x")], [_one("y")], config=ModelConfig(batching=False))
    x = np.arange(5000, dtype=np.float32)
    unread = [server.model("passing").infer(inputs={"x": x}) for _ in range(3)]
    answers = [np.from_dlpack(next(unread[0]).outputs["y"])]
    server.unbind("passing")
    answers += [np.from_dlpack(next(responses).outputs["y"]) for responses in unread[1:]]
    gc.collect()
    for answer in answers:
        np.testing.assert_array_equal(answer, x)


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_outputs_may_be_written_to_whatever_their_size(server: Server, count: int) -> None:
    """Small ones come another way than large ones."""
    # Not numpy.from_dlpack, whose arrays may only be read in numpy 1.
    answer: Any = np.asarray(next(server.model("any").infer(inputs={"x": np.ones(count, np.float32)})).outputs["y"])
    answer += 1
    np.testing.assert_array_equal(answer, np.full(count, 2, np.float32))


def test_memory_stays_flat(server: Server) -> None:
    model = server.model("any")
    value = np.ones(MIB // 4, np.float32)

    def run(times: int) -> None:
        for number in range(times):
            assert np.from_dlpack(next(model.infer(inputs={"x": value})).outputs["y"])[-1] == 1
            if number % 4 == 0:
                with pytest.raises(InvalidArgumentError):
                    model.infer(inputs={"x": value, "wrong": value})

    run(50)
    before = _resident_mib()
    run(400)
    # Were each MiB kept, it would be 400 to 800.
    assert _resident_mib() - before < 100


def test_results_outlive_the_server_and_do_not_hold_it_up() -> None:
    # Triton itself would wait for its exit timeout, here longer than a test may take.
    with Server(exit_timeout=3600) as own:
        own.bind("same", identity, [_one("x")], [_one("y")], config=ModelConfig(batching=False))
        own.bind("text", identity, [_one("x", bytes)], [_one("y", bytes)], config=ModelConfig(batching=False))
        own.bind("count", count, [_one("x")], [_one("y")], config=ModelConfig(batching=False, decoupled=True))
        held = [ask(own.model("same"), np.full(100_000, number, np.float32)) for number in range(5)]
        text = ask(own.model("text"), ["kept"])
        unfinished = own.model("count").infer(inputs={"x": [3]})
        next(unfinished)
        own.stop()
    for number, response in enumerate(held):
        assert np.all(np.from_dlpack(response.outputs["y"]) == number)
    assert text.outputs["y"].to_string_array().tolist() == ["kept"]
    assert text.model.name == "text"
    rest: list[InferenceResponse] = []
    with contextlib.suppress(CancelledError):
        rest.extend(unfinished)
    assert all(np.asarray(item.outputs["y"]).item() in (1, 2) for item in rest if item.outputs)


def test_a_stop_cancels_what_runs_and_whoever_waits_is_told() -> None:
    own = Server()
    own.start()
    own.bind("patient", patient, [_one("x")], [_one("y")], config=ModelConfig(batching=False))
    model = own.model("patient")
    responses = model.infer(inputs={"x": [1]})
    assert entered.wait(PATIENCE_S)
    own.stop()
    with pytest.raises(CancelledError):
        next(responses)
    assert left.get(timeout=PATIENCE_S) == "cancelled"
    with pytest.raises((InvalidArgumentError, UnavailableError), match="not started"):
        model.infer(inputs={"x": [1]})


def test_models_of_the_python_backend_answer_alike(tmp_path: Path) -> None:
    code = (
        "import json\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        responses = []\n"
        "        for request in requests:\n"
        "            tensor = pb_utils.get_input_tensor_by_name(request, 'x')\n"
        "            out = pb_utils.Tensor.from_dlpack('y', tensor.to_dlpack())\n"
        "            responses.append(pb_utils.InferenceResponse([out]))\n"
        "        return responses\n"
    )
    entry = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {"backend": "python", "input": [{"name": "x"} | entry], "output": [{"name": "y"} | entry]}
    with Server(model_control_mode=inprocess.ModelControlMode.EXPLICIT) as own:
        model = own.load("python", {"config": json.dumps(config), "file:1/model.py": code.encode()})
        for size in (1, 1000, 100_000):
            value = np.arange(size, dtype=np.float32)
            assert np.array_equal(np.from_dlpack(ask(model, value).outputs["y"]), value)
