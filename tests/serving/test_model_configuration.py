"""What a model's configuration says reaches Triton's own parser, and does what it says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import tritonclient.grpc
from hypothesis import HealthCheck, given, settings

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.model_config.parser import ModelConfigParser
from pytriton.proxy.types import Request
from pytriton.triton import Triton
from support.serving import local_config, queued, running, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

X = [Tensor((1,), np.float32, "x")]
Y = [Tensor((1,), np.float32, "y")]
names = (f"m{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    # The metrics tell how many requests wait in a queue.
    config = local_config(
        allow_metrics=True, metrics_address="127.0.0.1", metrics_port=0, cache_config=["local,size=1048576"]
    )
    with short_home(), running(Triton(config=config)) as server:
        yield server


@pytest.fixture
def model(triton: Triton) -> Iterator[str]:
    """The name for the one model of a test, which is gone after it."""
    name = next(names)
    yield name
    triton.unbind(name)


def configuration(triton: Triton, name: str, version: int = 1) -> dict[str, Any]:
    with urllib.request.urlopen(
        f"{triton.http_url}/v2/models/{name}/versions/{version}/config", timeout=PATIENCE_S
    ) as answer:
        read: dict[str, Any] = json.load(answer)
    return read


def infer(triton: Triton, name: str, value: float, **arguments: Any) -> float:
    with ModelClient(url(triton), name, inference_timeout_s=PATIENCE_S) as client:
        return float(client.infer_sample(x=np.array([value], np.float32), **arguments)["y"][0])


def url(triton: Triton) -> str:
    if triton.http_url is None:
        raise AssertionError("the server is not running")
    return triton.http_url


class Gate:
    """A callable that notes what it gets, and keeps its first call until it is let go.

    It serves models with batching and without, which Triton queues alike.
    """

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, requests: Sequence[Request]) -> list[dict[str, Array]]:
        self.calls.append([float(request["x"].ravel()[0]) for request in requests])
        self.entered.set()
        if not self.open.wait(PATIENCE_S):
            raise TimeoutError("nobody opened the gate")
        return [{"y": request["x"]} for request in requests]


class Queue:
    """A model whose callable is busy, so that requests wait in Triton's queue."""

    def __init__(
        self,
        triton: Triton,
        name: str,
        batcher: DynamicBatcher,
        pool: ThreadPoolExecutor,
        gate: Gate,
        batching: bool,
    ) -> None:
        self._triton, self._name, self._pool = triton, name, pool
        self.gate = gate
        triton.bind(name, self.gate, X, Y, config=ModelConfig(batching=batching, max_batch_size=1, batcher=batcher))
        self.first = self.send(0)
        assert self.gate.entered.wait(PATIENCE_S)
        self._waiting = 0

    def send(self, value: float, **parameters: int) -> Future[float]:
        return self._pool.submit(infer, self._triton, self._name, value, parameters=parameters or None)

    def put(self, value: float, **parameters: int) -> Future[float]:
        """Sends a request and waits until it is in the queue."""
        future = self.send(value, **parameters)
        self._waiting += 1
        expected = self._waiting
        eventually(lambda: queued(self._triton, self._name) >= expected)
        return future

    def let_go(self) -> list[float]:
        """Opens the gate, and gives the values of the requests in the order in which they were served."""
        self.gate.open.set()
        assert self.first.result(PATIENCE_S) == 0
        return [value for call in self.gate.calls for value in call]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture(params=[True, False], ids=["batching", "alone"])
def make_queue(
    triton: Triton, model: str, pool: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> Iterator[MakeQueue]:
    """Binds the model of the test with a busy callable, which is let go at the latest when the test ends."""
    gate = Gate()
    yield lambda batcher: Queue(triton, model, batcher, pool, gate, request.param)
    gate.open.set()


MakeQueue = Callable[[DynamicBatcher], Queue]


def answer(requests: Sequence[Request]) -> list[dict[str, Array]]:
    return [{"y": request["x"]} for request in requests]


# ---- Triton's parser takes what is generated, and reports it unchanged ---------------------------------------------

DTYPES = [
    bool, int, float, str, bytes, object, "float32", "int8", "uint16", "bool", "object", "S5", "<f8",
    np.float16, np.uint8, np.uint32, np.uint64, np.int16, np.int32, np.bytes_, np.object_, np.str_, np.dtype("U3"),
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
SHAPES = st.lists(st.just(-1) | st.integers(1, 2**40), min_size=1, max_size=4)
MICROSECONDS = st.integers(0, 9 * 10**15)


@st.composite
def policies(draw: st.DrawFn, *, may_delay: bool) -> QueuePolicy:
    actions = [TimeoutAction.REJECT, TimeoutAction.DELAY] if may_delay else [TimeoutAction.REJECT]
    return QueuePolicy(
        timeout_action=draw(st.sampled_from(actions)),
        default_timeout_microseconds=draw(st.integers(1, 9 * 10**15)),
        allow_timeout_override=draw(st.booleans()),
        max_queue_size=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def batchers(draw: st.DrawFn, max_batch_size: int) -> DynamicBatcher:
    """Draws a batcher; where `max_batch_size` is 0, one for a model without batching."""
    levels = draw(st.sampled_from([0, 1, 3]))
    ordered = levels < 2 and draw(st.booleans())
    policy = policies(may_delay=not ordered)
    level = st.integers(1, max(levels, 1))
    sizes = st.lists(st.integers(1, max(max_batch_size, 1)), min_size=1, max_size=3)
    return DynamicBatcher(
        max_queue_delay_microseconds=draw(MICROSECONDS) if max_batch_size else 0,
        preferred_batch_size=draw(st.none() | sizes) if max_batch_size else None,
        preserve_ordering=ordered,
        priority_levels=levels,
        default_priority_level=draw(level) if levels else 0,
        default_queue_policy=draw(st.none() | policy),
        priority_queue_policy=draw(st.none() | st.dictionaries(level, policy, min_size=1)) if levels else None,
    )


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    batching, decoupled = draw(st.booleans()), draw(st.booleans())
    max_batch_size = draw(st.integers(1, 2**31 - 1))
    return ModelConfig(
        batching=batching,
        max_batch_size=max_batch_size,
        batcher=draw(st.none() | batchers(max_batch_size if batching else 0)),
        response_cache=not decoupled and draw(st.booleans()),
        decoupled=decoupled,
    )


tensors = st.lists(
    st.builds(Tensor, SHAPES, st.sampled_from(DTYPES), TEXTS), max_size=4, unique_by=lambda one: one.name
)
inputs = st.lists(
    st.builds(Tensor, SHAPES, st.sampled_from(DTYPES), TEXTS, st.booleans()), max_size=4, unique_by=lambda one: one.name
)


@given(config=model_configs(), inputs=inputs, outputs=tensors)
@settings(
    max_examples=40, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_configuration_is_loaded_as_it_is(
    triton: Triton, config: ModelConfig, inputs: list[Tensor], outputs: list[Tensor]
) -> None:
    name = next(names)
    triton.bind(name, answer, inputs, outputs, config=config)
    try:
        read = ModelConfigParser.from_dict(configuration(triton, name))
    finally:
        triton.unbind(name)
    assert read.model_name == name
    assert read.batching == config.batching
    assert read.max_batch_size == (config.max_batch_size if config.batching else 0)
    expected = config.batcher
    if config.batching and expected is not None and expected.preferred_batch_size is None:
        # Triton says so itself.
        expected = dataclasses.replace(expected, preferred_batch_size=[config.max_batch_size])
    # Without batching a batcher that asks for nothing is none.
    assert read.batcher == (None if expected == DynamicBatcher() else expected)
    assert read.decoupled == config.decoupled
    assert read.response_cache is None or not read.response_cache.enable
    for described, declared in ((read.inputs, inputs), (read.outputs, outputs)):
        assert described is not None
        assert [(spec.name, spec.shape, bool(spec.optional)) for spec in described] == [
            (tensor.name, tensor.shape, bool(tensor.optional)) for tensor in declared
        ]
        for spec, tensor in zip(described, declared, strict=True):
            # A string is declared in several ways and reported in one.
            assert spec.dtype is (np.bytes_ if np.dtype(tensor.dtype).kind in "SO" else tensor.dtype)


def test_the_limits_of_every_field_are_loaded(triton: Triton, model: str) -> None:
    policy = QueuePolicy(TimeoutAction.DELAY, 9 * 10**15, True, 2**32 - 1)
    batcher = DynamicBatcher(9 * 10**15, [2**31 - 1], False, 2**64 - 1, 2**64 - 1, policy, {2**64 - 1: policy})
    config = ModelConfig(max_batch_size=2**31 - 1, batcher=batcher)
    triton.bind(model, answer, [Tensor((2**63 - 1, -1), bool, "x")], Y, config=config)
    assert ModelConfigParser.from_dict(configuration(triton, model)).batcher == batcher


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(max_batch_size=0), r"ModelConfig\.max_batch_size=0 .* at least 1"),
        (ModelConfig(response_cache=True, decoupled=True), r"response_cache=True .* False for a decoupled model"),
        (ModelConfig(batcher=DynamicBatcher(preferred_batch_size=[5])), r"preferred_batch_size=5 .* from 1 to 4"),
        (ModelConfig(batcher=DynamicBatcher(priority_levels=2)), r"default_priority_level=0 .* from 1 to 2"),
        (ModelConfig(batcher=4), r"ModelConfig\.batcher=4 .* a DynamicBatcher, or None"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_configuration_is_refused_by_name_value_and_rule(
    triton: Triton, config: ModelConfig, message: str
) -> None:
    name = next(names)
    with pytest.raises(PyTritonBadParameterError, match=message) as caught:
        triton.bind(name, answer, X, Y, config=config)
    assert caught.value.parameter is not None
    assert caught.value.rule is not None
    # Nothing of it stays: the name is free.
    triton.bind(name, answer, X, Y)
    assert infer(triton, name, 3) == 3
    triton.unbind(name)


# ---- queues --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_into_the_queue_is_rejected(make_queue: MakeQueue) -> None:
    queue = make_queue(DynamicBatcher(default_queue_policy=QueuePolicy(max_queue_size=2)))
    others = [queue.send(value) for value in range(1, 6)]
    eventually(lambda: sum(future.done() for future in others) >= 3)
    rejected = [future for future in others if future.done()]
    for future in rejected:
        with pytest.raises(PyTritonClientError, match="Exceeds maximum queue size"):
            future.result(0)
    served = queue.let_go()
    kept = [future.result(PATIENCE_S) for future in others if future not in rejected]
    assert len(kept) == 2
    wait(others, PATIENCE_S)
    assert sorted([0.0, *kept]) == sorted([value for call in queue.gate.calls for value in call])
    assert served[0] == 0


def test_who_waits_too_long_is_rejected(make_queue: MakeQueue) -> None:
    # The first one, which keeps the callable busy, is of the level without a limit.
    policy = QueuePolicy(default_timeout_microseconds=50_000, timeout_action=TimeoutAction.REJECT)
    queue = make_queue(DynamicBatcher(priority_levels=2, default_priority_level=1, priority_queue_policy={2: policy}))
    late = queue.put(1, priority=2)
    time.sleep(0.05)
    queue.let_go()
    with pytest.raises(PyTritonClientInferenceServerError, match=r"(?i)timeout expired"):
        late.result(PATIENCE_S)
    assert queue.gate.calls == [[0]]


def test_who_waits_too_long_is_served_after_the_others(make_queue: MakeQueue) -> None:
    # Without a limit by default: only the request that brings a timeout has one.
    policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, allow_timeout_override=True)
    queue = make_queue(DynamicBatcher(default_queue_policy=policy))
    futures = [queue.put(1, timeout=1000), queue.put(2), queue.put(3, timeout=10**9)]
    time.sleep(0.05)
    queue.let_go()
    assert [future.result(PATIENCE_S) for future in futures] == [1, 2, 3]
    assert queue.gate.calls == [[0], [2], [3], [1]]


def test_a_request_cannot_bring_a_timeout_where_that_is_not_allowed(make_queue: MakeQueue) -> None:
    policy = QueuePolicy(default_timeout_microseconds=10**9)
    queue = make_queue(DynamicBatcher(default_queue_policy=policy))
    future = queue.put(1, timeout=1000)
    time.sleep(0.05)
    queue.let_go()
    assert future.result(PATIENCE_S) == 1


def test_priorities_come_first(make_queue: MakeQueue) -> None:
    queue = make_queue(DynamicBatcher(priority_levels=3, default_priority_level=2))
    futures = [queue.put(3, priority=3), queue.put(2), queue.put(1, priority=1), queue.put(2.5, priority=2)]
    queue.let_go()
    assert [future.result(PATIENCE_S) for future in futures] == [3, 2, 1, 2.5]
    assert queue.gate.calls == [[0], [1], [2], [2.5], [3]]


def test_every_priority_has_a_policy_of_its_own(make_queue: MakeQueue) -> None:
    batcher = DynamicBatcher(
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(max_queue_size=2),
        priority_queue_policy={2: QueuePolicy(max_queue_size=1)},
    )
    queue = make_queue(batcher)
    kept = [queue.put(1), queue.put(2, priority=2), queue.put(3)]
    for priority in (1, 2):
        with pytest.raises(PyTritonClientError, match="Exceeds maximum queue size"):
            queue.send(9, priority=priority).result(PATIENCE_S)
    queue.let_go()
    assert [future.result(PATIENCE_S) for future in kept] == [1, 2, 3]
    assert queue.gate.calls == [[0], [1], [3], [2]]


def test_requests_are_held_back_until_a_preferred_batch_is_full(
    triton: Triton, model: str, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    gate.open.set()
    batcher = DynamicBatcher(max_queue_delay_microseconds=10**9, preferred_batch_size=[3])
    triton.bind(model, gate, X, Y, config=ModelConfig(max_batch_size=8, batcher=batcher))
    futures = [pool.submit(infer, triton, model, value) for value in (1, 2, 3)]
    assert [future.result(PATIENCE_S) for future in futures] == [1, 2, 3]
    assert [sorted(call) for call in gate.calls] == [[1, 2, 3]]


def test_a_request_that_is_larger_than_a_batch_is_refused(triton: Triton, model: str) -> None:
    triton.bind(model, answer, X, Y, config=ModelConfig(max_batch_size=2))
    with ModelClient(url(triton), model) as client:
        assert client.infer_batch(np.zeros((2, 1), np.float32))["y"].shape == (2, 1)
        with pytest.raises(PyTritonClientInferenceServerError, match="batch-size must be <= 2"):
            client.infer_batch(np.zeros((3, 1), np.float32))


# ---- response cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_equal_requests_are_answered_from_the_cache(triton: Triton, model: str, cached: bool) -> None:
    calls: list[float] = []

    @batch
    def callable_(x: Array) -> dict[str, Array]:
        calls.extend(x.ravel().tolist())
        return {"y": x * 2}

    triton.bind(model, callable_, X, Y, config=ModelConfig(response_cache=cached))
    with ModelClient(url(triton), model) as client:
        for _ in range(10):
            assert client.infer_sample(np.array([3], np.float32))["y"] == [6]
        assert client.infer_sample(np.array([4], np.float32))["y"] == [8]
    assert calls == ([3, 4] if cached else [3] * 10 + [4])


def test_a_cache_that_the_server_lacks_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), Triton(config=local_config()) as triton:
        triton.bind("model", answer, X, Y, config=ModelConfig(response_cache=True))
        assert infer(triton, "model", 3) == 3
    (record,) = (record for record in caplog.records if "response_cache" in record.getMessage())
    assert record.levelname == "WARNING"
    assert "'model'" in record.getMessage()
    assert "cache_config" in record.getMessage()


# ---- versions and instances ----------------------------------------------------------------------------------------


def times(factor: float) -> Callable[[Sequence[Request]], list[dict[str, Array]]]:
    return lambda requests: [{"y": request["x"] * factor} for request in requests]


def test_versions_have_callables_of_their_own(triton: Triton, model: str) -> None:
    for number, factor in ((1, 10.0), (3, 30.0), (2, 20.0)):
        triton.bind(model, times(factor), X, Y, model_version=number)
    found: dict[str | None, float] = {}
    for version in ("1", "2", "3", None):
        with ModelClient(url(triton), model, version) as client:
            found[version] = float(client.infer_sample(np.ones(1, np.float32))["y"][0])
    # Without a version it is the highest one.
    assert found == {"1": 10, "2": 20, "3": 30, None: 30}
    assert triton.grpc_url is not None
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url.removeprefix("grpc://")) as grpc:
        assert grpc.get_model_metadata(model).versions == ["1", "2", "3"]


def test_versions_may_differ_in_what_triton_does_not_know(triton: Triton, model: str) -> None:
    triton.bind(model, times(1), X, Y)
    config = ModelConfig(attach_timeout_s=3, arena_budget_bytes=1 << 20, send_tracebacks=True, response_cache=True)
    triton.bind(model, [times(2), times(2)], X, Y, model_version=2, config=config, strict=True)
    with ModelClient(url(triton), model, "2") as client:
        assert client.infer_sample(np.ones(1, np.float32))["y"] == [2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inputs": [Tensor((1,), np.float64, "x")]}, "inputs .*float64.* and .*float32"),
        ({"outputs": [Tensor((2,), np.float32, "y")]}, "outputs"),
        ({"config": ModelConfig(max_batch_size=8)}, r"max_batch_size \(8 and 4\)"),
        ({"config": ModelConfig(batching=False)}, r"batching \(False and True\)"),
        ({"config": ModelConfig(batcher=DynamicBatcher(max_queue_delay_microseconds=5))}, "batcher .*microseconds=5"),
        ({"config": ModelConfig(decoupled=True)}, r"decoupled \(True and False\)"),
    ],
)
def test_versions_share_what_triton_knows(triton: Triton, model: str, changes: dict[str, Any], named: str) -> None:
    triton.bind(model, times(1), X, Y)
    with pytest.raises(PyTritonInvalidOperationError, match=rf"version 2 differs from version 1.*{named}"):
        triton.bind(model, times(2), model_version=2, **{"inputs": X, "outputs": Y, **changes})
    assert infer(triton, model, 1) == 1


def test_several_callables_serve_one_model_at_once(triton: Triton, model: str, pool: ThreadPoolExecutor) -> None:
    both = threading.Barrier(2)

    class Instance:
        def __init__(self, number: int) -> None:
            self._number = number

        def __call__(self, requests: Sequence[Request]) -> list[dict[str, Array]]:
            both.wait(PATIENCE_S)  # neither gets further unless the other one is called meanwhile
            return [{"y": np.full_like(request["x"], self._number)} for request in requests]

    triton.bind(model, [Instance(1), Instance(2)], X, Y, config=ModelConfig(max_batch_size=1))
    futures = [pool.submit(infer, triton, model, 0) for _ in range(2)]
    assert {future.result(PATIENCE_S) for future in futures} == {1, 2}


# ---- errors of the callable ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [True, False])
def test_the_traceback_goes_to_the_client_only_where_the_model_says_so(triton: Triton, model: str, send: bool) -> None:
    def fail(requests: Sequence[Request]) -> Any:
        raise ValueError("out of cheese")

    triton.bind(model, fail, X, Y, config=ModelConfig(send_tracebacks=send))
    with pytest.raises(PyTritonClientInferenceServerError, match="out of cheese") as caught:
        infer(triton, model, 1)
    text = str(caught.value)
    assert ("Traceback" in text) == send
    assert ("test_model_configuration.py" in text) == send
