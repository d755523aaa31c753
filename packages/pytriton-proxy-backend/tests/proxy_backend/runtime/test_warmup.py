"""Warm-up: batches that a callable serves before its worker attaches."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import Request
from pytriton.proxy_backend import AttachError, ModelSpec, OutputError, TensorSpec, Worker
from pytriton.proxy_backend.errors import GoldenError
from pytriton.proxy_backend.runtime.access import ACCESS_LOGGER, ACCESS_VARIABLE
from pytriton.proxy_backend.runtime.results.golden import Golden
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.runtime.warmup import warm_up, warm_up_async
from support.waiting import PATIENCE_S

F4 = np.dtype("float32")
Make = Callable[..., Worker]


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


def requests(*rows: int) -> list[Request]:
    return [Request({"x": np.zeros((count, 2), F4)}) for count in rows]


@pytest.fixture
def make(proxy: Any) -> Iterator[Make]:
    """Makes workers for the scripted proxy backend, and ends them."""
    made = []

    def build(infer_func: Callable[..., Any], *, model: ModelSpec | None = None, **options: Any) -> Worker:
        made.append(Worker(infer_func, model or spec(), proxy.endpoint, **options))
        return made[-1]

    yield build
    proxy.close()
    for worker in made:
        assert worker.stop(PATIENCE_S)


def plain(batch: list[Request]) -> list[dict[str, Any]]:
    seen.append([len(request["x"]) for request in batch])
    return [{"y": request["x"]} for request in batch]


async def coroutine(batch: list[Request]) -> list[dict[str, Any]]:
    await asyncio.sleep(0)
    return plain(batch)


def generator(batch: list[Request]) -> Iterator[Any]:
    for _ in range(2):
        yield plain(batch)


async def async_generator(batch: list[Request]) -> Any:
    for _ in range(2):
        await asyncio.sleep(0)
        yield plain(batch)


seen: list[list[int]] = []


async def pausing_generator(batch: list[Request]) -> Any:
    yield plain(batch)
    yield plain(batch)
    # What was given before goes nowhere, either.
    await asyncio.sleep(0)
    yield plain(batch)


@pytest.mark.parametrize(
    ("infer_func", "decoupled", "calls"),
    [
        (plain, False, [[1], [2, 1]]),
        (lambda batch: coroutine(batch), False, [[1], [2, 1]]),
        (coroutine, False, [[1], [2, 1]]),
        (coroutine, True, [[1], [2, 1]]),
        (generator, True, [[1], [1], [2, 1], [2, 1]]),
        (async_generator, True, [[1], [1], [2, 1], [2, 1]]),
        (pausing_generator, True, [[1], [1], [1], [2, 1], [2, 1], [2, 1]]),
    ],
)
def test_callables_of_every_kind_run_to_their_end(
    infer_func: Callable[..., Any], decoupled: bool, calls: list[list[int]], make: Make
) -> None:
    seen.clear()
    worker = make(infer_func, model=spec(decoupled=decoupled), warmup=[requests(1), requests(2, 1)])
    worker.start()
    worker.wait_warm(PATIENCE_S)
    assert seen == calls
    statistics = worker.statistics
    assert (statistics.requests, statistics.batches) == (0, 0)


@pytest.mark.parametrize(
    ("infer_func", "decoupled"),
    [(plain, False), (coroutine, False), (generator, True), (async_generator, True), (pausing_generator, True)],
)
def test_what_nobody_asked_for_is_in_no_log_and_no_metric(
    infer_func: Callable[..., Any],
    decoupled: bool,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ACCESS_VARIABLE, "1")
    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        worker = make(infer_func, model=spec(decoupled=decoupled), warmup=[requests(1), requests(2, 1)])
        worker.start()
        worker.wait_warm(PATIENCE_S)
    assert [record for record in caplog.records if record.name == ACCESS_LOGGER] == []
    assert worker.statistics == make(infer_func).statistics


def test_is_over_before_anybody_is_greeted(make: Make, proxy: Any) -> None:
    go_on = threading.Event()

    def slow(batch: list[Request]) -> Any:
        assert go_on.wait(PATIENCE_S)
        return [{"y": request["x"]} for request in batch]

    proxy.listen()
    worker = make(slow, warmup=[requests(1)])
    worker.start()
    with pytest.raises(AttachError, match=r"the warm-up of model 'model' was not over after 0\.05 s"):
        worker.wait_warm(0.05)
    with pytest.raises(AttachError, match=r"not attached after [\d.]+ s: its warm-up is not over"):
        worker.wait_attached(0.05)
    go_on.set()
    worker.wait_warm(PATIENCE_S)
    proxy.accept().welcome()
    worker.wait_attached(PATIENCE_S)


def test_a_coroutine_keeps_the_event_loop_of_its_warm_up(make: Make, proxy: Any, golden: ModuleType) -> None:
    """What is made on the loop during warm-up (a lock, a session) must work when requests come, and after a restart."""
    loops = []
    ticks = []
    background: list[asyncio.Task[None]] = []

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.005)

    async def infer(batch: list[Request]) -> Any:
        loops.append(asyncio.get_running_loop())
        if not background:
            background.append(asyncio.create_task(tick()))
        return [{"y": request["x"]} for request in batch]

    proxy.listen()
    worker = make(infer, warmup=[requests(1)])
    worker.start()
    for _ in range(2):
        peer = proxy.accept()
        peer.welcome()
        worker.wait_attached(PATIENCE_S)
        record = golden.batch_record(
            1, [golden.Request(outputs=["y"])], [golden.Tensor("x", golden.FP32, [1, 1], bytes(4))]
        )
        before = len(ticks)
        peer.batch(1, record)
        assert peer.answer().kind == golden.RESPONSE
        assert len(ticks) >= before
        peer.socket.close()
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1


def test_runs_in_the_context_of_the_worker(make: Make) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    context = contextvars.copy_context()
    context.run(variable.set, "bound")
    found = []

    def look(batch: list[Request]) -> Any:
        found.append(variable.get())
        return [{"y": request["x"]} for request in batch]

    async def look_async(batch: list[Request]) -> Any:
        return look(batch)

    for infer in (look, look_async):
        worker = make(infer, context=context, warmup=[requests(1)])
        worker.start()
        worker.wait_warm(PATIENCE_S)
    assert found == ["bound", "bound"]


def fails(batch: list[Request]) -> Any:
    raise ValueError("no such weights")


async def fails_async(batch: list[Request]) -> Any:
    raise ValueError("no such weights")


def fails_late(batch: list[Request]) -> Iterator[Any]:
    yield [{"y": request["x"]} for request in batch]
    raise ValueError("no such weights")


@pytest.mark.parametrize(
    ("infer_func", "decoupled", "cause", "reason"),
    [
        (fails, False, ValueError, "ValueError: no such weights"),
        (fails_async, False, ValueError, "ValueError: no such weights"),
        (fails_late, True, ValueError, "ValueError: no such weights"),
        (lambda batch: [ValueError("no such weights")] * len(batch), False, ValueError, "ValueError: no such weights"),
        (lambda batch: [], False, OutputError, "expected a list of 1, got a list of 0"),
        (lambda batch: [{"y": object()}], False, OutputError, "output 'y', request 0 of the batch"),
        (fails_late, False, ValueError, "no such weights"),
    ],
)
def test_a_failure_ends_the_worker_with_the_error(
    infer_func: Callable[..., Any], decoupled: bool, cause: type[Exception], reason: str, make: Make
) -> None:
    worker = make(infer_func, model=spec(decoupled=decoupled), warmup=[requests(1)])
    worker.start()
    for wait in (worker.wait_warm, worker.wait_attached):
        with pytest.raises(AttachError, match=f"the warm-up of model 'model' failed: .*{reason}") as caught:
            wait(PATIENCE_S)
        assert type(caught.value.__cause__) is cause
    assert type(worker.error) is cause
    assert not worker.is_alive


def test_without_warm_up_a_worker_is_warm_at_once(make: Make) -> None:
    worker = make(plain)
    worker.start()
    worker.wait_warm(PATIENCE_S)
    assert not worker.is_attached


def undriven(_awaitable: Awaitable[Any]) -> Any:
    raise AssertionError


def two_outputs(**changes: Any) -> ModelSpec:
    outputs = tuple(TensorSpec(name=name, dtype=F4, shape=(-1,)) for name in ("y", "z"))
    return spec(outputs=outputs, strict=True, **changes)


def test_a_request_is_answered_with_what_it_asks_for() -> None:
    service = Service(plain, two_outputs())
    x = {"x": np.zeros((1, 2), F4)}
    # Without an input that is needed, nothing is expected.
    warm_up(service, [[Request(x, requested_output_names=["y"])]], undriven)
    warm_up(Service(lambda _: [{"y": np.zeros((1, 2), F4)}], two_outputs()), [[Request({})]], undriven)
    with pytest.raises(OutputError, match="missing: z"):
        warm_up(service, [[Request(x)]], undriven)


@pytest.mark.parametrize("infer_func", [plain, coroutine, generator, async_generator])
def test_all_that_is_answered_is_recorded(infer_func: Callable[..., Any]) -> None:
    found: list[dict[str, Any]] = []
    service = Service(infer_func, spec(decoupled=infer_func in (generator, async_generator)))
    for known in (None, found):
        service.golden = Golden(1e-3, known, found.append)
        if infer_func in (coroutine, async_generator):
            asyncio.run(warm_up_async(service, [requests(1), requests(2, 1)]))
        else:
            warm_up(service, [requests(1), requests(2, 1)], undriven)
        steps = 2 if service.model.decoupled else 1
        assert [each["shape"] for each in found] == [[1, 2]] * steps + [[2, 2], [1, 2]] * steps
        assert {each["output"] for each in found} == {"y"}
    service.golden = Golden(1e-3, found, found.append)
    with pytest.raises(GoldenError, match="outputs in all warm-up requests, got 0"):
        warm_up(service, [], undriven)
    with pytest.raises(GoldenError, match="outputs in all warm-up requests, got 0"):
        asyncio.run(warm_up_async(service, []))
