"""Responses of an asynchronous generator that does not wait between them: they go together, and none is another."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import Request, Response
from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
from support.waiting import PATIENCE_S

Serve = Callable[..., Any]
Step = tuple[list[Any], bool]
MODEL = ModelSpec(
    name="model",
    version=1,
    inputs=(TensorSpec(name="x", dtype=np.dtype("float32"), shape=(1,)),),
    outputs=(
        TensorSpec(name="y", dtype=np.dtype("float32"), shape=(-1,)),
        TensorSpec(name="text", dtype=np.dtype(object), shape=(1,)),
    ),
    batching=True,
    max_batch_size=8,
    decoupled=True,
)


@pytest.fixture
def serve(proxy: Any, golden: ModuleType) -> Iterator[Serve]:
    """Starts a worker, and gives a function that asks it and returns all messages, and all responses in them."""
    workers: list[Worker] = []

    def start(
        infer_func: Any, on_response: Callable[[Any], None] = lambda _: None, model: ModelSpec = MODEL, **welcome: Any
    ) -> Callable[[], tuple[list[Any], list[Any]]]:
        if not workers:
            proxy.listen()
        worker = Worker(infer_func, model, proxy.endpoint)
        workers.append(worker)
        worker.start()
        peer = proxy.accept()
        peer.welcome(model_flags=3 if model.batching else 2, **welcome)
        worker.wait_attached(PATIENCE_S)

        def ask() -> tuple[list[Any], list[Any]]:
            request = golden.Request(outputs=["y", "text"])
            x = golden.Tensor("x", golden.FP32, [1, 1], np.zeros((1, 1), np.float32).tobytes())
            peer.batch(1, bytes(golden.batch_record(1, [request], [x])))
            packets: list[Any] = []
            responses: list[Any] = []
            while not (packets and packets[-1].flags & golden.BATCH_DONE):
                packets.append(peer.answer())
                if packets[-1].kind == golden.RESPONSE:
                    responses += peer.responses(packets[-1])
                    on_response(responses[-1])
                    peer.message(golden.RELEASE, consumed=len(packets))
            return packets, responses

        return ask

    yield start
    proxy.close()
    for worker in workers:
        worker.stop(PATIENCE_S)


def shown(responses: list[Any]) -> list[Any]:
    return [
        (
            response.request,
            response.flags,
            response.error,
            response.parameters,
            {name: (array.dtype.kind, array.shape, array.tolist()) for name, array in response.outputs.items()},
        )
        for response in responses
    ]


def make_steps(generator: random.Random) -> list[Step]:
    """Give what a generator yields, and whether it waits before; most of it looks like what comes before it."""
    steps: list[Step] = []
    # Written to again and again, as models do.
    shared = np.zeros((1, 3), np.float32)
    kinds = ["alike"] * 12 + [
        "shape",
        "dtype",
        "none",
        "parameters",
        "large",
        "bytes",
        "missing",
        "superfluous",
        "text",
    ]
    for number in range(generator.randrange(5, 200)):
        text = np.array([[f"{number} ä" * generator.randrange(3)]], object)
        outputs: dict[str, Any] = {"y": shared, "text": text}
        result: Any = outputs
        match generator.choice(kinds):
            case "shape":
                outputs["y"] = np.full((2, 1), number, np.float32)
                outputs["text"] = np.repeat(text, 2, 0)
            case "dtype":
                outputs["y"] = np.full((1, 3), number, np.int64)
            case "none":
                result = None
            case "parameters":
                result = Response(outputs, {"number": number})
            case "large":
                outputs["y"] = np.full((1, 5000), number, np.float32)
            case "bytes":
                outputs["text"] = np.array([[bytearray(b"changes")]], object)
            case "missing":
                del outputs["text"]
            case "superfluous":
                outputs["z"] = text
            case "text":
                outputs["text"] = np.array([[f"{number}"]])
        steps.append(([result], generator.random() < 0.05))
    return steps


def played(steps: list[Step]) -> Iterator[Step]:
    """Yield steps; arrays that several share have the number of the step, and not any longer than it takes."""
    for number, (results, waits) in enumerate(steps):
        for result in results:
            given = result.data if isinstance(result, Response) else result
            if given is not None and given["y"].shape == (1, 3) and given["y"].dtype == np.float32:
                given["y"][...] = number
        yield results, waits


@pytest.mark.parametrize("seed", range(8))
def test_they_are_what_an_ordinary_generator_gives(seed: int, both_ways: str, serve: Serve, golden: ModuleType) -> None:
    steps = make_steps(random.Random(seed))

    def plain(requests: list[Request]) -> Iterator[Any]:
        for results, _ in played(steps):
            yield results

    async def streaming(requests: list[Request]) -> AsyncIterator[Any]:
        for results, waits in played(steps):
            if waits:
                await asyncio.sleep(0)
            yield results

    _, expected = serve(plain)()
    packets, responses = serve(streaming)()
    assert shown(responses) == shown(expected)
    assert len(packets) <= len(expected)


def test_many_go_in_few_messages(serve: Serve, golden: ModuleType) -> None:
    async def count(requests: list[Request]) -> AsyncIterator[Any]:
        for number in range(640):
            yield [{"y": np.full((1, 1), number, np.float32), "text": np.array([[str(number)]], object)}]

    packets, responses = serve(count)()
    assert [response.outputs["y"].item() for response in responses[:-1]] == list(range(640))
    assert len(packets) < len(responses)


def test_what_is_there_goes_before_the_generator_waits(serve: Serve, golden: ModuleType) -> None:
    told = threading.Event()

    async def count(requests: list[Request]) -> AsyncIterator[Any]:
        text = np.array([["x"]], object)
        for number in range(3):
            yield [{"y": np.full((1, 1), number, np.float32), "text": text}]
        # Only who has those before lets it go on.
        await asyncio.get_running_loop().run_in_executor(None, told.wait, PATIENCE_S)
        assert told.is_set()
        yield [{"y": np.full((1, 1), 3, np.float32), "text": text}]

    def tell(response: Any) -> None:
        if "y" in response.outputs and response.outputs["y"].item() == 2:
            told.set()

    _, responses = serve(count, tell)()
    assert [response.outputs["y"].item() for response in responses[:-1]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": np.zeros(3, np.float32), "text": np.array(["x"], object)},
        {"y": np.zeros(0, np.float32), "text": np.array(["x"], object)},
        {"y": np.zeros(1, np.float32), "text": np.array(["x"])},
        {"text": np.array(["x"], object), "y": np.zeros(2, np.float32)},
        *(
            [{"y": np.zeros(1, np.float32), "text": np.array(["x"], np.dtypes.StringDType())}]
            if hasattr(np.dtypes, "StringDType")
            else []
        ),
    ],
)
def test_outputs_of_every_shape_and_kind_of_a_model_that_does_not_batch(
    outputs: dict[str, Any], both_ways: str, serve: Serve, golden: ModuleType
) -> None:
    async def streaming(requests: list[Request]) -> AsyncIterator[Any]:
        for _ in range(5):
            yield [outputs]

    def plain(requests: list[Request]) -> Iterator[Any]:
        for _ in range(5):
            yield [outputs]

    model = dataclasses.replace(MODEL, batching=False, max_batch_size=0)
    _, expected = serve(plain, model=model)()
    _, responses = serve(streaming, model=model)()
    assert shown(responses) == shown(expected)


def test_what_takes_long_to_make_goes_at_once(serve: Serve, golden: ModuleType) -> None:
    """A generator that computes does not wait, either: what it gave is not kept while it makes the next."""
    told = threading.Event()

    async def count(requests: list[Request]) -> AsyncIterator[Any]:
        for number in range(4):
            if number == 3:
                assert told.wait(PATIENCE_S)
            else:
                time.sleep(0.01)
            await asyncio.sleep(0)
            yield [{"y": np.full((1, 1), number, np.float32), "text": np.array([["x"]], object)}]

    def tell(response: Any) -> None:
        if "y" in response.outputs and response.outputs["y"].item() == 2:
            told.set()

    _, responses = serve(count, tell)()
    assert [response.outputs["y"].item() for response in responses[:-1]] == [0, 1, 2, 3]


def test_they_come_before_the_failure_that_follows_them(serve: Serve, golden: ModuleType) -> None:
    async def count(requests: list[Request]) -> AsyncIterator[Any]:
        for number in range(5):
            yield [{"y": np.full((1, 1), number, np.float32), "text": np.array([["x"]], object)}]
        raise RuntimeError("no more")

    packets, responses = serve(count)()
    assert [response.outputs["y"].item() for response in responses] == list(range(5))
    assert packets[-1].kind == golden.FAIL
    assert "RuntimeError: no more" in packets[-1].body.decode()


def test_where_there_is_room_for_one_alone_each_goes_alone(serve: Serve, golden: ModuleType) -> None:
    async def count(requests: list[Request]) -> AsyncIterator[Any]:
        for number in range(100):
            yield [{"y": np.full((1, 100), number, np.float32), "text": np.array([["x" * 500]], object)}]

    packets, responses = serve(count, arena_budget=4096)()
    assert [response.outputs["y"][0, 0] for response in responses[:-1]] == list(range(100))
    assert all(packet.length <= 4096 for packet in packets)
