"""The whole way: client, tritonserver, native proxy, worker, callable, and back."""

from __future__ import annotations

import functools
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from pytriton.client import FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch, sample
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton
from support.callables import X, Y
from support.serving import arena_mappings, local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S

Array = np.ndarray[Any, Any]

NUMERIC = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64,
]  # fmt: skip

kept: list[Array] = []
batches: list[int] = []
started = threading.Event()
release = threading.Event()
cancelled = threading.Event()


def doubled(requests: list[Request]) -> list[dict[str, Array]]:
    return [{"y": request["x"] * 2} for request in requests]


class Model:
    def method(self, requests: list[Request]) -> list[dict[str, Array]]:
        return doubled(requests)

    @batch
    def batched_method(self, x: Array) -> dict[str, Array]:
        return {"y": x * 2}

    def __call__(self, requests: list[Request]) -> list[dict[str, Array]]:
        return doubled(requests)


class AnyAttribute(Model):
    """An object that makes up attributes, as mocks and clients of remote calls do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class AsyncModel:
    async def __call__(self, requests: list[Request]) -> list[dict[str, Array]]:
        return doubled(requests)


@batch
def batched(x: Array) -> dict[str, Array]:
    return {"y": x * 2}


@batch
def batched_list(x: Array) -> list[Array]:
    return [x * 2]


@batch
async def batched_async(x: Array) -> dict[str, Array]:
    return {"y": x * 2}


async def plain_async(requests: list[Request]) -> list[dict[str, Array]]:
    return doubled(requests)


def one_yield(requests: list[Request]) -> Iterator[list[dict[str, Array]]]:
    yield doubled(requests)


def scaled(factor: int, requests: list[Request]) -> list[dict[str, Array]]:
    return [{"y": request["x"] * factor} for request in requests]


CALLABLES: dict[str, Callable[..., Any]] = {
    "function": doubled,
    "lambda": lambda requests: [{"y": request["x"] * 2} for request in requests],
    "method": Model().method,
    "object": Model(),
    "partial": functools.partial(scaled, 2),
    "batched": batched,
    "batched_list": batched_list,
    "batched_method": Model().batched_method,
    "coroutine": plain_async,
    "batched_coroutine": batched_async,
    "async_object": AsyncModel(),
    "generator": one_yield,
    "tuple_of_dicts": lambda requests: tuple(doubled(requests)),
    "list_of_lists": lambda requests: [[request["x"] * 2] for request in requests],
    "response": lambda requests: [Response({"y": request["x"] * 2}) for request in requests],
    "awaitable": lambda requests: plain_async(requests),
    "any_attribute": AnyAttribute(),
}


def fail(requests: list[Request]) -> Any:
    value = float(requests[0]["x"].ravel()[0])
    results: dict[int, Callable[[], Any]] = {
        0: lambda: 1 / 0,
        1: list,
        2: lambda: None,
        3: lambda: [{"y": [1.0]}],
        4: lambda: [{"y": np.array(["a"], dtype=object)}],
        5: lambda: [{"y": np.array([1j])}],
        6: lambda: [{"y": np.float32(1)}],
        7: lambda: [3],
        8: lambda: [[]],
        9: lambda: [{"y": None}],
        10: lambda: (_ for _ in ()),
        11: lambda: ([{"y": np.zeros((1, 1), np.float32)}] for _ in range(2)),
        12: lambda: (_ for _ in ()).throw(SystemExit(3)),
        13: lambda: [ValueError("just this one")],
        14: lambda: [ValueError("before \0 and behind it")],
    }
    return results[int(value)]()


def strict(requests: list[Request]) -> Any:
    value = int(requests[0]["x"].ravel()[0])
    results = [
        {"y": np.zeros((1, 1), np.float64)},
        {"y": np.zeros((1, 1), np.float32), "z": np.zeros((1, 1), np.float32)},
        {},
        {"y": np.zeros((1, 1, 1), np.float32)},
        {"y": np.zeros((1, 1), np.float32)},
    ]
    return [results[value]]


def keep(requests: list[Request]) -> list[dict[str, Array]]:
    kept.extend(request["x"][:, ::2].T for request in requests)
    return doubled(requests)


def describe(requests: list[Request]) -> list[dict[str, Array]]:
    texts = []
    for request in requests:
        parameters = sorted((name, value) for name, value in request.parameters.items())
        fields = (request.request_id, request.priority, request.timeout_us, request.correlation_id)
        texts.append(repr((*fields, parameters)))
    return [{"text": np.array([[text.encode()]])} for text in texts]


def optional(requests: list[Request]) -> list[dict[str, Array]]:
    return [{"names": np.array([[",".join(sorted(request)).encode()]])} for request in requests]


def block(requests: list[Request]) -> list[dict[str, Array]]:
    batches.append(len(requests))
    started.set()
    release.wait(PATIENCE_S)
    return doubled(requests)


@sample
def total(**inputs: Array) -> dict[str, Array]:
    return {"sum": np.asarray(sum(array.sum() for array in inputs.values()), dtype=np.float64).reshape(1)}


def count_up(requests: list[Request]) -> Iterator[list[dict[str, Array] | None]]:
    """Yields 0, 1, ... up to each request's own number: they end one after the other."""
    limits = [int(request["x"].ravel()[0]) for request in requests]
    if -1 in limits:
        raise ValueError("minus one is not a number of responses")
    for step in range(max(limits)):
        yield [{"y": np.full((1, 1), step, np.float32)} if step < limit else None for limit in limits]
    if 13 in limits:
        raise ValueError("thirteen went wrong")


async def count_up_async(requests: list[Request]) -> AsyncIterator[list[dict[str, Array]]]:
    for step in range(int(requests[0]["x"].ravel()[0])):
        yield [{"y": np.full((1, 1), step, np.float32)} for _ in requests]


def until_cancelled(requests: list[Request]) -> Iterator[list[dict[str, Array]]]:
    started.set()
    while not requests[0].is_cancelled():
        time.sleep(0.01)
        yield [{"y": np.zeros((1, 1), np.float32)} for _ in requests]
    cancelled.set()


def every_type(requests: list[Request]) -> list[dict[str, Array]]:
    return [{name: value[..., ::-1] for name, value in request.items()} for request in requests]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config(log_verbose=0))
        plain = ModelConfig(max_batch_size=16)
        for name, callable_ in CALLABLES.items():
            triton.bind(f"kind_{name}", callable_, X, Y, config=plain)
        triton.bind("fail", fail, X, Y, config=plain)
        triton.bind("strict", strict, X, Y, config=plain, strict=True)
        triton.bind("keep", keep, X, Y, config=plain)
        triton.bind("block", block, X, Y, config=ModelConfig(max_batch_size=4))
        triton.bind("small", doubled, X, Y, config=ModelConfig(max_batch_size=4, arena_budget_bytes=2 << 20))
        triton.bind("identity", lambda requests: requests, X, [Tensor(name="x", dtype=np.float32, shape=(-1,))])
        triton.bind("cast", lambda requests: [{"y": r["x"].astype(np.float64)} for r in requests], X, Y, config=plain)
        triton.bind("describe", describe, X, [Tensor(name="text", dtype=bytes, shape=(1,))], config=plain)
        triton.bind(
            "optional",
            optional,
            [
                *X,
                Tensor(name="a", dtype=np.int32, shape=(1,), optional=True),
                Tensor(name="b", dtype=bytes, shape=(1,), optional=True),
            ],
            [Tensor(name="names", dtype=object, shape=(1,))],
            config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=20000)),
        )
        triton.bind(
            "total",
            total,
            [Tensor(name="a", dtype=np.float64, shape=(-1, -1)), Tensor(name="b", dtype=np.int64, shape=(2,))],
            [Tensor(name="sum", dtype=np.float64, shape=(1,))],
            config=ModelConfig(batching=False),
        )
        called_self = [Tensor(name="self", dtype=np.float32, shape=(1,))]
        triton.bind("called_self", batch(lambda **inputs: inputs), called_self, called_self)
        types = [Tensor(name=np.dtype(dtype).name, dtype=dtype, shape=(-1,)) for dtype in NUMERIC]
        types.append(Tensor(name="text", dtype=bytes, shape=(-1,)))
        triton.bind("every_type", every_type, types, types, config=plain, strict=True)
        triton.bind("count_up", count_up, X, Y, config=ModelConfig(max_batch_size=4, decoupled=True))
        triton.bind("count_up_async", count_up_async, X, Y, config=ModelConfig(max_batch_size=1, decoupled=True))
        triton.bind("until_cancelled", until_cancelled, X, Y, config=ModelConfig(max_batch_size=1, decoupled=True))
        with running(triton):
            yield triton


@pytest.fixture(params=["http", "grpc"])
def connect(request: pytest.FixtureRequest, triton: Triton) -> Iterator[Callable[[str], ModelClient]]:
    made: list[ModelClient] = []

    def make(model: str) -> ModelClient:
        url = triton.http_url if request.param == "http" else triton.grpc_url
        assert url is not None
        made.append(ModelClient(url, model, init_timeout_s=PATIENCE_S, inference_timeout_s=PATIENCE_S))
        return made[-1]

    yield make
    for client in made:
        client.close()


Connect = Callable[[str], ModelClient]


@pytest.mark.parametrize("kind", CALLABLES)
def test_every_kind_of_callable(kind: str, connect: Connect) -> None:
    client = connect(f"kind_{kind}")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(client.infer_batch(x)["y"], x * 2)
    np.testing.assert_array_equal(client.infer_sample(x=x[1])["y"], x[1] * 2)


def test_an_input_called_self(connect: Connect) -> None:
    client = connect("called_self")
    assert client.infer_sample(self=[3])["self"].tolist() == [3]
    with FuturesModelClient.from_existing_client(client) as futures:
        assert futures.infer_batch(self=[[3]]).result()["self"].tolist() == [[3]]


@pytest.mark.parametrize("kind", ["function", "batched", "batched_coroutine", "coroutine"])
def test_concurrent_requests_are_not_mixed_up(kind: str, connect: Connect) -> None:
    client = connect(f"kind_{kind}")

    def ask(number: int) -> bool:
        x = np.full((1 + number % 5, 3), number, np.float32)
        return bool(np.array_equal(client.infer_batch(x)["y"], x * 2))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(160)))


def test_every_type(connect: Connect) -> None:
    client = connect("every_type")
    generator = np.random.default_rng(1)
    inputs: dict[str, Array] = {
        np.dtype(dtype).name: generator.integers(0, 2, (4, 3)).astype(dtype) for dtype in NUMERIC
    }
    inputs["text"] = np.array([[b"", b"a\0b", "é".encode()]] * 4, dtype=object)
    result = client.infer_batch(**inputs)
    for name, sent in inputs.items():
        assert result[name].dtype == (np.dtype(object) if name == "text" else sent.dtype)
        np.testing.assert_array_equal(result[name], sent[:, ::-1])


@pytest.mark.parametrize("width", [0, 1, 7])
def test_empty_and_odd_sizes(width: int, connect: Connect) -> None:
    x = np.ones((2, width), np.float32)
    result = connect("kind_function").infer_batch(x)["y"]
    assert result.shape == (2, width)
    np.testing.assert_array_equal(result, x * 2)


def test_the_request_itself_is_an_answer(connect: Connect) -> None:
    np.testing.assert_array_equal(connect("identity").infer_sample(np.array([3, 1], np.float32))["x"], [3, 1])


def test_outputs_are_cast_unless_strict(connect: Connect) -> None:
    result = connect("cast").infer_sample(np.array([1.5], np.float32))["y"]
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, [1.5])


def test_a_model_without_batching(connect: Connect) -> None:
    client = connect("total")
    result = client.infer_sample(a=np.ones((2, 3)), b=np.array([1, 2], np.int64))
    np.testing.assert_array_equal(result["sum"], [9.0])


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (0, ["model 'fail'", "ZeroDivisionError", "division by zero"]),
        (1, ["model 'fail'", "one element per request", "expected a list of 1", "a list of 0"]),
        (2, ["expected a list of 1", "NoneType"]),
        (3, ["output 'y'", "request 0", "expected a numpy array", "got list"]),
        (4, ["output 'y'", "cannot be cast", "expected dtype float32", "got dtype object"]),
        (5, ["output 'y'", "expected dtype float32", "got dtype complex128"]),
        (6, ["output 'y'", "batch axis", "got shape ()"]),
        (7, ["request 0", "mapping from output names", "got int"]),
        (8, ["one array per declared output", "expected 1 (y)", "got 0"]),
        (9, ["output 'y'", "expected a numpy array", "got None"]),
        (10, ["exactly one result", "yielded none"]),
        (11, ["exactly one result", "more than one", "decoupled=True"]),
        (12, ["SystemExit", "3"]),
        (13, ["ValueError", "just this one"]),
        (14, [r"before \0 and behind it"]),
    ],
)
def test_what_a_callable_does_wrong_is_told_to_its_caller(value: int, parts: list[str], connect: Connect) -> None:
    client = connect("fail")
    with pytest.raises(PyTritonClientInferenceServerError) as caught:
        client.infer_sample(np.array([value], np.float32))
    for part in parts:
        assert part in str(caught.value)
    # The traceback stays in the server's log.
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (0, ["expected dtype float32", "got dtype float64"]),
        (1, ["not declared: z"]),
        (2, ["missing: y"]),
        (3, ["expected shape (batch, -1)", "got shape (1, 1, 1)"]),
    ],
)
def test_strict(value: int, parts: list[str], connect: Connect) -> None:
    client = connect("strict")
    with pytest.raises(PyTritonClientInferenceServerError) as caught:
        client.infer_sample(np.array([value], np.float32))
    for part in parts:
        assert part in str(caught.value)
    client.infer_sample(np.array([4], np.float32))


def test_a_batch_that_is_too_large(connect: Connect) -> None:
    with pytest.raises(PyTritonClientInferenceServerError, match="batch-size must be <= 4"):
        connect("block").infer_batch(np.ones((5, 1), np.float32))


def test_parameters_of_every_type(triton: Triton) -> None:
    client = tritonclient.http.InferenceServerClient(str(triton.http_url).removeprefix("http://"))
    tensor = tritonclient.http.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    result = client.infer(
        "describe",
        [tensor],
        request_id="seven",
        priority=0,
        timeout=9_000_000,
        parameters={"text": "wört", "number": -5, "flag": True, "share": 0.25},
    )
    text = result.as_numpy("text").item().decode()
    assert text == repr(("seven", 0, 9_000_000, 0, [("flag", True), ("number", -5), ("share", 0.25), ("text", "wört")]))
    client.close()


def test_optional_inputs_that_differ_between_requests(connect: Connect) -> None:
    client = connect("optional")
    x = np.ones(1, np.float32)
    extras: list[dict[str, Array]] = [{}, {"a": np.ones(1, np.int32)}, {"b": np.array([b"b"])}]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: client.infer_sample(x=x, **extras[i % 3])["names"].item(), range(24)))
    assert answers == [[b"x", b"a,x", b"b,x"][i % 3] for i in range(24)]


def test_only_wanted_outputs_are_sent(triton: Triton) -> None:
    client = tritonclient.http.InferenceServerClient(str(triton.http_url).removeprefix("http://"))
    tensors = []
    for dtype in NUMERIC:
        array: Array = np.ones((1, 2), dtype)
        wire = tritonclient.utils.np_to_triton_dtype(array.dtype)
        tensor = tritonclient.http.InferInput(array.dtype.name, [1, 2], wire)
        tensors.append(tensor.set_data_from_numpy(array))
    text = tritonclient.http.InferInput("text", [1, 2], "BYTES")
    tensors.append(text.set_data_from_numpy(np.array([[b"a", b"b"]], dtype=object)))
    result = client.infer("every_type", tensors, outputs=[tritonclient.http.InferRequestedOutput("text")])
    assert [output["name"] for output in result.get_response()["outputs"]] == ["text"]
    assert result.as_numpy("text").tolist() == [[b"b", b"a"]]
    client.close()


def test_inputs_that_a_callable_keeps_stay_valid(triton: Triton, connect: Connect) -> None:
    kept.clear()
    client = connect("keep")
    sent = [np.full((2, 64), number, np.float32) for number in range(40)]
    for x in sent:
        client.infer_batch(x)
    # The memory under them was not given to later requests.
    assert len(kept) == len(sent)
    for number, view in enumerate(kept):
        np.testing.assert_array_equal(view, np.full((32, 2), number, np.float32))
    kept.clear()
    gc.collect()
    client.infer_batch(sent[0])
    kept.clear()


def test_a_large_tensor_and_its_memory(connect: Connect, triton: Triton) -> None:
    x = np.arange(16 << 20, dtype=np.float32).reshape(1, -1)  # 64 MiB
    result = connect("kind_batched").infer_batch(x)["y"]
    np.testing.assert_array_equal(result, x * 2)
    assert arena_mappings(server_pid(triton))


def test_inputs_over_the_budget(connect: Connect) -> None:
    client = connect("small")
    with pytest.raises(PyTritonClientInferenceServerError) as caught:
        client.infer_batch(np.ones((1, 1 << 20), np.float32))
    for part in ("model 'small'", "inputs of the batch take 41945", str(2 << 20), "arena_budget_bytes"):
        assert part in str(caught.value)
    np.testing.assert_array_equal(client.infer_batch(np.ones((1, 2), np.float32))["y"], [[2, 2]])


def test_many_callers_of_a_slow_model_share_batches(triton: Triton) -> None:
    assert triton.http_url is not None
    batches.clear()
    with ThreadPoolExecutor(9) as pool, ModelClient(triton.http_url, "block") as client:
        # Until some have come while the first one was held.
        while max(batches, default=1) == 1:
            release.clear()
            started.clear()
            first = pool.submit(client.infer_sample, np.zeros(1, np.float32))
            assert started.wait(PATIENCE_S)
            rest = [pool.submit(client.infer_sample, np.full(1, number, np.float32)) for number in range(8)]
            release.set()
            first.result(PATIENCE_S)
            answers = [float(future.result(PATIENCE_S)["y"][0]) for future in rest]
            assert answers == [number * 2.0 for number in range(8)]


# ---- decoupled models -----------------------------------------------------------------------------------------------


class Stream:
    """One gRPC stream and what came over it."""

    def __init__(self, triton: Triton) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(str(triton.grpc_url).removeprefix("grpc://"))
        self.answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, model: str, value: float, request_id: str) -> None:
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
        self.client.async_stream_infer(model, [tensor], request_id=request_id, enable_empty_final_response=True)

    def collect(self, expected: int) -> dict[str, list[Any]]:
        """Reads until so many requests have ended: their values in order, an error as its text."""
        answers: dict[str, list[Any]] = {}
        ended = 0
        while ended < expected:
            result, error = self.answers.get(timeout=PATIENCE_S)
            if error is not None:
                answers.setdefault("error", []).append(str(error))
                ended += 1
                continue
            response = result.get_response()
            values = answers.setdefault(response.id, [])
            array = result.as_numpy("y")
            if array is not None:
                values.append(float(array.item()))
            ended += response.parameters["triton_final_response"].bool_param
        return answers

    def close(self, *, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


@pytest.fixture
def stream(triton: Triton) -> Iterator[Stream]:
    stream = Stream(triton)
    yield stream
    stream.close()


@pytest.mark.parametrize("model", ["count_up", "count_up_async"])
def test_any_number_of_responses(model: str, stream: Stream) -> None:
    for number in (3, 1, 5, 0):
        if number or model == "count_up_async":
            stream.send(model, number, str(number))
    if model == "count_up_async":
        assert stream.collect(4) == {str(number): [float(step) for step in range(number)] for number in (3, 1, 5, 0)}
    else:
        assert stream.collect(3) == {str(number): [float(step) for step in range(number)] for number in (3, 1, 5)}


def test_an_error_before_and_after_responses(stream: Stream) -> None:
    stream.send("count_up", -1, "first")
    (error,) = stream.collect(1)["error"]
    assert "minus one is not a number of responses" in error
    stream.send("count_up", 13, "second")
    answers = stream.collect(1)
    assert answers["second"] == [float(step) for step in range(13)]
    assert "thirteen went wrong" in answers["error"][0]
    stream.send("count_up", 2, "third")
    assert stream.collect(1) == {"third": [0.0, 1.0]}


def test_cancellation_reaches_the_callable(triton: Triton) -> None:
    started.clear()
    cancelled.clear()
    stream = Stream(triton)
    stream.send("until_cancelled", 0, "endless")
    assert started.wait(PATIENCE_S)
    stream.close(cancel=True)
    assert cancelled.wait(PATIENCE_S)
