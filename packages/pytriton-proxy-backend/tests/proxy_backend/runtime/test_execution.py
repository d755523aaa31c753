"""Batches through callables of every kind: what each request gets, and what is counted and logged, against a model."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import Request, Response
from pytriton.proxy_backend.errors import ArenaFullError, ConnectionLostError
from pytriton.proxy_backend.model import ModelSpec, TensorSpec
from pytriton.proxy_backend.runtime import access
from pytriton.proxy_backend.runtime.batch_loop import LazyLoop
from pytriton.proxy_backend.runtime.execution import Execution
from pytriton.proxy_backend.runtime.results import steps
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, lay_out_batch
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import read_responses

F4 = np.dtype("float32")
NUMBER = 7
NO_ROOM = ArenaFullError("no room", needed=2, budget=1, in_use=0)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "model",
        "version": 1,
        "inputs": (TensorSpec(name="x", dtype=F4, shape=(1,)),),
        "outputs": (TensorSpec(name="y", dtype=F4, shape=(1,)),),
        "batching": True,
        "max_batch_size": 8,
        **changes,
    }
    return ModelSpec(**values)


class Arrived:
    """A batch in memory in which callers can still give up."""

    def __init__(self, count: int, traced: Sequence[int] = ()) -> None:
        requests = [
            RequestData(
                {"x": np.full((1 + index % 2, 1), index, F4)},
                ["y"],
                str(index),
                parameters={"traceparent": PARENT} if index in traced else {},
            )
            for index in range(count)
        ]
        record = lay_out_batch(requests, batching=True)
        self.memory = mmap.mmap(-1, record.layout.length)
        record.write(self.memory, 0, NUMBER)

    def batch(self) -> Batch:
        return BatchReader(True).read(np.frombuffer(self.memory, np.uint8), self.memory, 0, NUMBER)

    def cancel(self, index: int) -> None:
        self.memory[self.batch().metadata.cancelled_offset(index)] = 1


class Sink:
    """Takes the responses to one batch, as the proxy backend reads them."""

    def __init__(self, count: int, *, decoupled: bool) -> None:
        self.got: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
        self.failed: tuple[str, ErrorCode] | None = None
        self.is_done = False
        self.records = 0
        self.refuses: Callable[[int], BaseException | None] = lambda _number: None
        self._decoupled = decoupled

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        assert number == NUMBER
        assert not self.is_done
        self.records += 1
        if (error := self.refuses(self.records)) is not None:
            raise error
        # On an address of 64 bytes, as the protocol wants it.
        memory = mmap.mmap(-1, record.layout.length)
        record.write(memory, 0, number)
        for each in read_responses(memoryview(memory), number, len(self.got), decoupled=self._decoupled):
            told = ("error", ErrorCode(each.code)) if each.error is not None else ("empty",) if each.empty else (
                {name: array.tolist() for name, array in each.outputs.items()}, dict(each.parameters),
            )  # fmt: skip
            self.got[each.request].append((*told, each.final))
        self.is_done = done

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        assert number == NUMBER
        assert not self.is_done
        self.failed, self.is_done = (text, code), True


# ---- scripts -------------------------------------------------------------------------------------------------------


@dataclass
class Script:
    """What a callable gives in each step, by request, which callers give up before it, and whether it raises then."""

    count: int
    steps: list[list[str]]
    cancelled: dict[int, int] = field(default_factory=dict)
    raises: bool = False
    taken: int = 0

    def value(self, step: int, index: int) -> np.ndarray[Any, Any]:
        return np.full((1 + index % 2, 1), 100 * step + index, F4)

    def result(self, step: int, index: int) -> Any:
        value = self.value(step, index)
        return {
            "value": {"y": value},
            "wrong dtype": {"y": value.astype("f8")},
            "parameters": Response({"y": value}, {"step": step}),
            "last": Response({"y": value}, final=True),
            "end": Response({}, final=True),
            "none": None,
            "error": ValueError("this one"),
            "bad": {"y": [1]},
        }[self.steps[step][index]]

    def take(self, step: int, arrived: Arrived) -> list[Any]:
        self.taken += 1
        for index, before in self.cancelled.items():
            if before == step:
                arrived.cancel(index)
        return [self.result(step, index) for index in range(self.count)]


def scripts(generator: random.Random, *, decoupled: bool) -> Script:
    count = generator.choice((1, 1, 2, 3))
    if not decoupled:
        step = generator.choices(["value", "wrong dtype", "parameters", "none", "error", "bad"], k=count)
        return Script(count, [step] if generator.random() < 0.9 else [["value"] * count])
    rare = ["parameters", "last", "end", "none", "error", "bad", "wrong dtype"]
    steps = [
        ["value" if generator.random() < 0.7 else generator.choice(rare) for _ in range(count)]
        for _ in range(generator.randrange(7))
    ]
    cancelled = {index: generator.randrange(7) for index in range(count) if generator.random() < 0.2}
    return Script(count, steps, cancelled, raises=generator.random() < 0.2)


@dataclass
class Expected:
    """What becomes of a batch."""

    got: list[list[tuple[Any, ...]]]
    outcomes: list[str]
    failed: dict[str, int]
    fails: bool = False
    taken: int = 0


def expect(script: Script, *, decoupled: bool) -> Expected:
    """Return what becomes of a script, one request at a time."""
    found = Expected([[] for _ in range(script.count)], [], {})
    is_open = [True] * script.count
    outcomes = ["ok"] * script.count

    def end(index: int, kind: str) -> None:
        is_open[index] = False
        if kind != "ok":
            outcomes[index] = kind
            found.failed[kind] = found.failed.get(kind, 0) + 1

    for step, kinds in enumerate(script.steps):
        if not any(is_open):
            break
        found.taken += 1
        for index, kind in enumerate(kinds):
            if not is_open[index]:
                continue
            output = {"y": script.value(step, index).tolist()}
            got = found.got[index]
            if decoupled and script.cancelled.get(index, 99) <= step:
                got.append(("error", ErrorCode.CANCELLED, True))
                end(index, "cancelled")
            elif kind in ("error", "bad") or (kind == "none" and not decoupled):
                got.append(("error", ErrorCode.INTERNAL, True))
                end(index, "returned" if kind == "error" else "output")
            elif kind == "end":
                got.append(("empty", True))
                end(index, "ok")
            elif kind != "none":
                is_last = kind == "last" or not decoupled
                got.append((output, {"step": step} if kind == "parameters" else {}, is_last))
                if is_last:
                    end(index, "ok")
    left = [index for index in range(script.count) if is_open[index]]
    found.fails = script.raises and bool(left)
    for index in left:
        if found.fails:
            end(index, "callable")
        else:
            found.got[index].append(("empty", True))
    found.outcomes = outcomes
    return found


# ---- ways to give it -----------------------------------------------------------------------------------------------


Way = Callable[[Script, Arrived], Callable[[Any], Any]]


def stream(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    def infer(requests: Sequence[Request]) -> Iterator[Any]:
        assert [request["x"].tolist() for request in requests] == [
            [[float(index)]] * (1 + index % 2) for index in range(script.count)
        ]
        for step in range(len(script.steps)):
            yield script.take(step, arrived)
        if script.raises:
            raise ValueError("all of them")

    return infer


def stream_async(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    async def infer(requests: Sequence[Request]) -> AsyncIterator[Any]:
        for given in stream(script, arrived)(requests):
            await asyncio.sleep(0)
            yield given

    return infer


def stream_of_a_coroutine(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    async def infer(requests: Sequence[Request]) -> Any:
        await asyncio.sleep(0)
        return stream(script, arrived)(requests)

    return infer


def whole(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    return lambda requests: next(stream(script, arrived)(requests))


def whole_in_a_tuple(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    return lambda requests: tuple(next(stream(script, arrived)(requests)))


def whole_of_a_coroutine(script: Script, arrived: Arrived) -> Callable[[Any], Any]:
    async def infer(requests: Sequence[Request]) -> Any:
        await asyncio.sleep(0)
        return next(stream(script, arrived)(requests))

    return infer


def served(execution: Execution) -> None:
    loop = LazyLoop()
    execution.run(loop.run)
    loop.close()


def served_async(execution: Execution) -> None:
    asyncio.run(execution.run_async())


Serve = Callable[[Execution], None]
STREAMS: list[tuple[Way, Serve]] = [
    (stream, served),
    (stream_async, served),
    (stream_of_a_coroutine, served),
    (stream_async, served_async),
    (stream_of_a_coroutine, served_async),
]
WHOLE: list[tuple[Way, Serve]] = [
    (whole, served),
    (whole_in_a_tuple, served),
    (whole_of_a_coroutine, served),
    (whole_of_a_coroutine, served_async),
    (whole, served_async),
    *STREAMS,
]


def make_untraced(service: Service, batch: Batch) -> Execution:
    return Execution(service, batch)


def make_traced(service: Service, batch: Batch) -> Execution:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from pytriton.proxy_backend.runtime.tracing import make_traced_execution

    return make_traced_execution(service, batch, trace.TracerProvider().get_tracer("test"))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records of the access log."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(access, "log_access", found.append)
    return found


@pytest.mark.parametrize("make", [make_untraced, make_traced])
@pytest.mark.parametrize(
    ("way", "serve", "decoupled"),
    [(way, serve, False) for way, serve in WHOLE] + [(way, serve, True) for way, serve in STREAMS],
)
def test_each_request_gets_what_the_callable_gave_it(
    way: Way,
    serve: Serve,
    decoupled: bool,
    make: Callable[[Service, Batch], Execution],
    logged: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = random.Random(3)
    for _ in range(25):
        script = scripts(generator, decoupled=decoupled)
        arrived = Arrived(script.count, traced=range(generator.randrange(3), script.count))
        service = Service(way(script, arrived), spec(decoupled=decoupled))
        sink = Sink(script.count, decoupled=decoupled)
        service.sink, service.is_logged = sink, True
        serve(make(service, arrived.batch()))
        expected = expect(script, decoupled=decoupled)
        assert sink.got == expected.got
        assert sink.is_done
        if expected.fails:
            assert sink.failed == ("model 'model': the inference callable raised ValueError: all of them", 1)
        else:
            assert sink.failed is None
        # What nobody is there for any more is not asked for; a stream that was given up gets one more step.
        assert script.taken == expected.taken or (
            "cancelled" in expected.outcomes and script.taken == expected.taken + 1
        )
        assert not any("after its last response" in record.getMessage() for record in caplog.records)
        counted = service.counters.snapshot()
        assert (counted.requests, counted.batches, counted.callable_seconds.count) == (script.count, 1, 1)
        assert {kind: count for kind, count in counted.failed_requests.items() if count} == expected.failed
        outputs = [each for got in expected.got for each in got if isinstance(each[0], dict)]
        assert counted.output_bytes == sum(4 * len(each[0]["y"]) for each in outputs)
        firsts = sum(any(isinstance(each[0], dict) for each in got) for got in expected.got)
        assert counted.first_response_seconds.count == (firsts if decoupled else 0)
        assert {int(each["request_id"]): each["outcome"] for each in logged} == dict(enumerate(expected.outcomes))
        assert len(logged) == script.count
        logged.clear()


class Whole:
    """A callable over the whole batch, as `@batch` makes it."""

    def __init__(self, give: Callable[[dict[str, Any]], Any]) -> None:
        self.give = give
        self.seen: list[Any] = []

    def __pytriton_whole__(self, columns: dict[str, Any], rows: list[int], requests: Callable[[], Any]) -> Any:
        self.seen.append((rows, [(request["x"].tolist(), request.span is not None) for request in requests()]))
        return self.give(columns)


@pytest.mark.parametrize("make", [make_untraced, make_traced])
@pytest.mark.parametrize(
    "give",
    [
        lambda columns: {"y": columns["x"] * 2},
        lambda columns: {"y": columns["x"].astype("f8") * 2},
        lambda columns: [{"y": columns["x"][begin:end] * 2} for begin, end in ((0, 1), (1, 3), (3, 4))],
    ],
)
def test_a_callable_over_the_whole_batch(
    give: Callable[[dict[str, Any]], Any], make: Callable[[Service, Batch], Execution]
) -> None:
    infer = Whole(give)
    service = Service(infer, spec())  # type: ignore[arg-type] # nobody calls it
    service.sink = sink = Sink(3, decoupled=False)
    served(make(service, Arrived(3, traced=range(3)).batch()))
    xs = [[[float(index)]] * (1 + index % 2) for index in range(3)]
    assert infer.seen == [([1, 2, 1], [(x, make is make_traced) for x in xs])]
    assert sink.got == [[({"y": [[2 * x] for [x] in each]}, {}, True)] for each in xs]
    assert sink.failed is None


@pytest.mark.parametrize("strict", [False, True])
def test_outputs_that_the_model_has_not(strict: bool) -> None:
    service = Service(lambda requests: [{"y": each["x"], "more": each["x"]} for each in requests], spec(strict=strict))
    service.sink = sink = Sink(2, decoupled=False)
    served(Execution(service, Arrived(2).batch()))
    if strict:
        assert sink.got == [[("error", ErrorCode.INTERNAL, True)]] * 2
    else:
        assert sink.got == [[({"y": [[0.0]]}, {}, True)], [({"y": [[1.0]] * 2}, {}, True)]]


# ---- spans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_callable_runs_inside_of_its_spans(is_async: bool, raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.context import attach, detach, get_current, get_value, set_value
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import StatusCode, get_current_span

    from pytriton.proxy.tracers import tracer_of
    from pytriton.proxy_backend.runtime.tracing import make_traced_execution

    seen: list[Any] = []
    ended: list[Any] = []

    class Processor(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            # What holds where the worker was made is nothing to its callers.
            assert get_value("of the worker", parent_context) is None

        def on_end(self, span: Any) -> None:
            ended.append(span)

    provider = TracerProvider()
    provider.add_span_processor(Processor())
    tracer = provider.get_tracer("test")
    script = Script(3, [["error", "value", "bad"]], raises=raises)
    arrived = Arrived(3, traced=(1, 2))

    def infer(requests: Sequence[Request]) -> Any:
        seen.extend([get_current_span(), *(request.span for request in requests)])
        assert [request.span and tracer_of(request.span) for request in requests] == [None, tracer, tracer]
        if raises:
            raise ValueError("all of them")
        return script.take(0, arrived)

    async def infer_async(requests: Sequence[Request]) -> Any:
        return infer(requests)

    class NotedSink(Sink):
        def respond(self, number: int, record: Record, *, done: bool) -> None:
            assert [span.name for span in ended] == ["proxy_inference_callable"] * 2
            super().respond(number, record, done=done)

    service = Service(infer_async if is_async else infer, spec())
    service.sink = sink = NotedSink(3, decoupled=False)
    token = attach(set_value("of the worker", 1))
    try:
        before = get_current()
        execution = make_traced_execution(service, arrived.batch(), tracer)

        async def serve() -> None:
            await execution.run_async()
            assert get_current() == before

        if is_async:
            asyncio.run(serve())
        else:
            served(execution)
        assert get_current() == before
    finally:
        detach(token)
    assert sink.is_done
    assert sink.got == expect(script, decoupled=False).got if not raises else sink.failed is not None
    assert seen[0] is seen[2]
    assert seen[1] is None
    assert [span.name for span in ended] == [
        "proxy_inference_callable", "proxy_inference_callable", "pytriton.batch", "pytriton.proxy", "pytriton.proxy"
    ]  # fmt: skip
    statuses = [(span.status.status_code, span.status.description) for span in ended]
    if raises:
        assert statuses == [(StatusCode.ERROR, "ValueError: all of them")] * 5
        assert ended[2].events[0].attributes["exception.message"] == "all of them"
    else:
        assert statuses[:4] == [(StatusCode.UNSET, None)] * 4
        assert statuses[4][0] is StatusCode.ERROR
        assert statuses[4][1].startswith("OutputError: ")
    # That a span is ended twice, say.
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


# ---- what fails ----------------------------------------------------------------------------------------------------


class StopServing(Exception):
    """After it, the callable must not be called again."""


class WrongInput(Exception):
    """What a caller has sent."""

    __pytriton_of_caller__ = True


def raising(error: BaseException) -> Callable[[Any], Any]:
    def infer(requests: Sequence[Request]) -> Any:
        raise error

    return infer


@pytest.mark.parametrize("serve", [served, served_async])
@pytest.mark.parametrize(
    ("error", "kind", "code", "text", "told"),
    [
        (
            WrongInput("so"),
            "callable",
            ErrorCode.INVALID_ARG,
            "model 'model': so",
            "model model: the inference callable cannot take an input: so, requests 0, 1",
        ),
        (
            ValueError("so"),
            "callable",
            ErrorCode.INTERNAL,
            "model 'model': the inference callable raised ValueError: so",
            "model model: the inference callable failed, requests 0, 1",
        ),
        (
            StopServing("so"),
            "callable",
            ErrorCode.INTERNAL,
            "model 'model': the inference callable raised StopServing: so",
            "model model: the callable cannot go on: so",
        ),
        (asyncio.CancelledError(), "cancelled", ErrorCode.CANCELLED, "model 'model': the request was cancelled", ""),
        (NO_ROOM, "memory", ErrorCode.INTERNAL, str(NO_ROOM), f"{NO_ROOM}, requests 0, 1"),
    ],
)
def test_what_a_callable_raises_is_the_answer_to_all(
    error: BaseException,
    kind: str,
    code: ErrorCode,
    text: str,
    told: str,
    serve: Serve,
    logged: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # What a caller has sent is looked for in the requests of a model that answers each once.
    service = Service(raising(error), spec(decoupled=True), (StopServing,))
    service.sink = sink = Sink(2, decoupled=True)
    service.is_logged = True
    execution = Execution(service, Arrived(2).batch())
    serve(execution)
    said = [record.getMessage() for record in caplog.records]
    assert [each.partition("\n")[0] for each in said] == [told] * bool(told)
    assert [each.count("\nValueError: so") for each in said] == [int(isinstance(error, ValueError))] * len(said)
    assert sink.failed == (text, code)
    assert service.counters.snapshot().failed_requests[kind] == 2
    assert [each["outcome"] for each in logged] == [kind, kind]
    assert execution.failure is (error if isinstance(error, StopServing) else None)
    # Its frames refer to the inputs.
    assert error.__traceback__ is None


@pytest.mark.parametrize("make", [make_untraced, make_traced])
@pytest.mark.parametrize("serve", [served, served_async])
@pytest.mark.parametrize("wrong", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_a_request_that_a_callable_refuses_fails_alone(
    serve: Serve, wrong: tuple[int, ...], make: Callable[[Service, Batch], Execution]
) -> None:
    def infer(requests: Sequence[Request]) -> Any:
        numbers = [int(request["x"][0, 0]) for request in requests]
        assert [request.span is not None for request in requests] == [make is make_traced] * len(requests)
        if refused := [number for number in numbers if number in wrong]:
            raise WrongInput(refused)
        return [{"y": request["x"]} for request in requests]

    service = Service(infer, spec())
    service.sink = sink = Sink(3, decoupled=False)
    serve(make(service, Arrived(3, traced=range(3)).batch()))
    for index, got in enumerate(sink.got):
        if index in wrong:
            assert got == [("error", ErrorCode.INVALID_ARG, True)]
        else:
            assert got == [({"y": [[float(index)]] * (1 + index % 2)}, {}, True)]


def test_what_is_wrong_with_one_result_is_told_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    arrived = Arrived(3)
    service = Service(whole(Script(3, [["value", "error", "bad"]]), arrived), spec())
    service.sink = Sink(3, decoupled=False)
    served(Execution(service, arrived.batch()))
    returned, bad = caplog.records
    assert returned.getMessage().startswith("model model: the callable returned an error, request 1\n")
    assert bad.getMessage().startswith("model 'model', output 'y', request 2 of the batch: an output must be")
    assert bad.getMessage().endswith(", request 2")
    assert (returned.levelname, bad.levelname) == ("WARNING", "ERROR")


@pytest.mark.parametrize("serve", [served, served_async])
@pytest.mark.parametrize("is_logged", [False, True])
def test_a_lost_connection_ends_it(serve: Serve, is_logged: bool, logged: list[dict[str, Any]]) -> None:
    service = Service(lambda requests: [{"y": request["x"]} for request in requests], spec())
    service.sink = sink = Sink(2, decoupled=False)
    service.is_logged = is_logged
    sink.refuses = lambda _: ConnectionLostError("nobody is there")
    with pytest.raises(ConnectionLostError):
        serve(Execution(service, Arrived(2).batch()))
    assert sink.failed is None
    assert [each["outcome"] for each in logged] == ["lost", "lost"] * is_logged


@pytest.mark.parametrize(("way", "serve"), STREAMS)
@pytest.mark.parametrize(("given", "received"), [(0, "none"), (2, "more than one")])
def test_a_generator_for_one_response_gives_one(way: Way, serve: Serve, given: int, received: str) -> None:
    script = Script(2, [["value", "value"]] * given)
    arrived = Arrived(2)
    service = Service(way(script, arrived), spec())
    service.sink = sink = Sink(2, decoupled=False)
    serve(Execution(service, arrived.batch()))
    assert sink.got == [[], []]
    assert sink.failed is not None
    assert f"must yield exactly one result, it yielded {received}." in sink.failed[0]
    assert service.counters.snapshot().failed_requests["output"] == 2


class Paced:
    """Holds a stream up after each response, until it is asked again."""

    def __init__(self) -> None:
        self.held: list[bool] = []
        self.is_gone = False

    def must_wait(self, number: int) -> bool:
        assert number == NUMBER
        self.held.append(not self.held or not self.held[-1])
        return self.held[-1]

    def wait_taken(self, number: int, is_given_up: Callable[[], bool]) -> None:
        assert number == NUMBER
        assert is_given_up() is self.is_gone
        self.held.append(True)

    def when_resumed(self, number: int, then: Callable[[], object]) -> None:
        assert number == NUMBER
        asyncio.get_running_loop().call_soon(then)

    def resume_next(self, number: int) -> None:
        assert number == NUMBER


@pytest.mark.parametrize(("way", "serve"), STREAMS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_waits_until_its_callers_take_what_they_were_sent(way: Way, serve: Serve, count: int) -> None:
    script = Script(count, [["value"] * count] * 3)
    arrived = Arrived(count)
    service = Service(way(script, arrived), spec(decoupled=True))
    service.sink = sink = Sink(count, decoupled=True)
    service.pacing = pacing = Paced()
    serve(Execution(service, arrived.batch()))
    assert sink.got == expect(script, decoupled=True).got
    assert sum(pacing.held) >= 3


def test_a_stream_of_which_all_callers_are_gone_waits_for_none() -> None:
    arrived = Arrived(2)
    service = Service(print, spec(decoupled=True))
    service.wait_taken(arrived.batch(), NUMBER)
    service.pacing = pacing = Paced()
    service.wait_taken(None, NUMBER)
    assert pacing.held == []
    for index, is_gone in ((0, False), (1, True)):
        arrived.cancel(index)
        pacing.is_gone = is_gone
        service.wait_taken(arrived.batch(), NUMBER)
    assert pacing.held == [True, True]


class Gathered:
    """Keeps the records of streams, and sends them where somebody asks for it."""

    def __init__(self, sink: Sink) -> None:
        self.kept: list[tuple[int, Record]] = []
        self._sink = sink

    def respond_soon(self, number: int, record: Record) -> None:
        self.kept.append((number, record))

    def flush(self) -> None:
        for number, record in self.kept:
            self._sink.respond(number, record, done=False)
        self.kept.clear()


@pytest.mark.parametrize("is_long", [False, True])
def test_what_waits_goes_with_others_and_what_takes_long_goes_alone(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**9]
    monkeypatch.setattr(steps, "monotonic_ns", lambda: now[0])
    script = Script(1, [["value"]] * 4)
    arrived = Arrived(1)
    sink = Sink(1, decoupled=True)
    together = Gathered(sink)
    soon: list[int] = []

    async def infer(requests: Sequence[Request]) -> AsyncIterator[Any]:
        for step in range(4):
            now[0] += steps.TURN_NS * is_long
            yield script.take(step, arrived)
            await asyncio.sleep(0)
            soon.append(len(together.kept))
            together.flush()

    service = Service(infer, spec(decoupled=True))
    service.sink, service.together = sink, together
    served_async(Execution(service, arrived.batch()))
    assert sink.got == expect(script, decoupled=True).got
    # The first one is checked, and not kept.
    assert soon == [0, *[0 if is_long else 1] * 3]


@pytest.mark.parametrize(("way", "serve"), STREAMS)
@pytest.mark.parametrize("count", [1, 2])
def test_bytes_that_found_no_room_are_not_counted(way: Way, serve: Serve, count: int) -> None:
    script = Script(count, [["value"] * count] * 3)
    arrived = Arrived(count)
    service = Service(way(script, arrived), spec(decoupled=True))
    service.sink = sink = Sink(count, decoupled=True)
    sink.refuses = lambda number: NO_ROOM if number > 2 else None
    serve(Execution(service, arrived.batch()))
    # What waits for nothing may have sent two in one record.
    sent = len(sink.got[0])
    assert sent >= 2
    assert sink.got == [got[:sent] for got in expect(script, decoupled=True).got]
    assert sink.failed == (str(NO_ROOM), ErrorCode.INTERNAL)
    counted = service.counters.snapshot()
    assert counted.output_bytes == sent * sum(4 * (1 + index % 2) for index in range(count))
    assert counted.failed_requests["memory"] == count


@pytest.mark.parametrize("error", [ValueError("late"), StopServing("late"), asyncio.CancelledError()])
def test_an_error_after_the_last_response_is_told_to_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that its caller gave up gets one more step, to clean up."""
    arrived = Arrived(1)

    def infer(requests: Sequence[Request]) -> Iterator[Any]:
        yield [{"y": requests[0]["x"]}]
        arrived.cancel(0)
        yield [{"y": requests[0]["x"]}]
        assert requests[0].is_cancelled()
        raise error

    service = Service(infer, spec(decoupled=True), (StopServing,))
    service.sink = sink = Sink(1, decoupled=True)
    execution = Execution(service, arrived.batch())
    served(execution)
    assert sink.got == [[({"y": [[0.0]]}, {}, False), ("error", ErrorCode.CANCELLED, True)]]
    assert sink.failed is None
    assert execution.failure is (error if isinstance(error, StopServing) else None)
    assert error.__traceback__ is None
    told = [record.getMessage().partition("\n")[0] for record in caplog.records]
    is_told = not isinstance(error, asyncio.CancelledError)
    assert told == ["model model: the callable failed after its last response"] * is_told
    assert service.counters.snapshot().failed_requests["callable"] == 0
