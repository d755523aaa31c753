"""Warm-up: as a request would be served, before the model is ready, and its failure fails the load."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.decorators import TritonContext, batch, fill_optionals, pad_batch, sample, triton_context
from pytriton.exceptions import PyTritonBadParameterError, PyTritonUnrecoverableError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.proxy.types import Request
from pytriton.server.errors import TritonModelLoadError, TritonServerStartError
from pytriton.triton import Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

X = [Tensor((2,), np.float32, "x")]
Y = [Tensor((2,), np.float32, "y")]
ONE = np.ones(2, np.float32)
names = (f"m{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        yield server


@pytest.fixture
def name(triton: Triton) -> Iterator[str]:
    """The name for the one model of a test, which is gone after it."""
    name = next(names)
    yield name
    if name in {model["name"] for model in repository(triton) if model.get("state") == "READY"}:
        triton.unbind(name)


def repository(triton: Triton) -> list[dict[str, str]]:
    request = urllib.request.Request(
        f"{triton.http_url}/v2/repository/index",
        data=b"{}",
        headers={"triton-access-token": str(triton.get_access_token())},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        models: list[dict[str, str]] = json.load(answer)
    return models


def is_ready(triton: Triton, name: str) -> bool:
    try:
        with urllib.request.urlopen(f"{triton.http_url}/v2/models/{name}/ready", timeout=PATIENCE_S):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def url(triton: Triton) -> str:
    if triton.http_url is None:
        raise AssertionError("the server is not running")
    return triton.http_url


def warmup(count: int = 1, rows: int = 3, **data: Any) -> list[ModelWarmup]:
    return [ModelWarmup("w", rows, {"x": WarmupInput(np.float32, (2,), **(data or {"random_data": True}))}, count)]


def configured(warmups: list[ModelWarmup] | None = None, **fields: Any) -> ModelConfig:
    return ModelConfig(model_warmup=warmup() if warmups is None else warmups, **fields)


def wait_gone(name: str) -> None:
    """Waits until no worker of a model is left."""
    eventually(lambda: not any(thread.name == f"pytriton-{name}" for thread in threading.enumerate()))


# ---- every kind of callable ----------------------------------------------------------------------------------------


class Calls:
    """Callables of every kind, which note what they get."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.finished = 0
        self.loops: set[int] = set()

    def note(self, x: Array) -> Array:
        self.shapes.append(x.shape)
        return x * 2

    def function(self, requests: Sequence[Request]) -> list[dict[str, Array]]:
        answers = [{"y": self.note(request["x"])} for request in requests]
        self.finished += 1
        return answers

    async def coroutine(self, requests: Sequence[Request]) -> list[dict[str, Array]]:
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return self.function(requests)

    def generator(self, requests: Sequence[Request]) -> Iterator[list[dict[str, Array]]]:
        yield self.function(requests)

    async def async_generator(self, requests: Sequence[Request]) -> AsyncIterator[list[dict[str, Array]]]:
        yield await self.coroutine(requests)

    def stream(self, requests: Sequence[Request]) -> Iterator[list[dict[str, Array]]]:
        for _ in range(2):
            yield [{"y": request["x"]} for request in requests]
        # Only who reads to the end gets here.
        self.function(requests)

    async def async_stream(self, requests: Sequence[Request]) -> AsyncIterator[list[dict[str, Array]]]:
        for _ in range(2):
            yield [{"y": request["x"]} for request in requests]
        await self.coroutine(requests)

    @batch
    def batched(self, x: Array) -> list[Array]:
        self.finished += 1
        return [self.note(x)]

    @batch
    async def batched_coroutine(self, x: Array) -> dict[str, Array]:
        self.loops.add(id(asyncio.get_running_loop()))
        self.finished += 1
        return {"y": self.note(x)}

    @batch
    def batched_stream(self, x: Array) -> Iterator[dict[str, Array]]:
        yield {"y": x}
        self.finished += 1
        self.note(x)


COUPLED = ["function", "coroutine", "generator", "async_generator", "batched", "batched_coroutine"]
DECOUPLED = ["function", "coroutine", "stream", "async_stream", "batched_stream"]


@pytest.mark.parametrize(
    ("kind", "decoupled"), [(kind, False) for kind in COUPLED] + [(kind, True) for kind in DECOUPLED]
)
def test_every_kind_of_callable_is_called_to_its_end(triton: Triton, name: str, kind: str, decoupled: bool) -> None:
    calls = Calls()
    two = [*warmup(count=2), ModelWarmup("other", 1, {"x": WarmupInput(np.float32, (2,), zero_data=True)}, 1)]
    triton.bind(name, getattr(calls, kind), X, Y, config=configured(two, decoupled=decoupled))
    assert calls.shapes == [(3, 2), (3, 2), (1, 2)]
    assert calls.finished == 3
    if not decoupled:
        with ModelClient(url(triton), name) as client:
            assert client.infer_sample(ONE)["y"].tolist() == [2, 2]
    else:
        with DecoupledModelClient(str(triton.grpc_url), name) as streaming:
            assert list(streaming.infer_sample(ONE))
    # An asynchronous callable is warmed up on the loop on which it then serves.
    assert len(calls.loops) == ("coroutine" in kind or "async" in kind)


def test_without_batching_there_is_no_batch_axis(triton: Triton, name: str) -> None:
    shapes: list[tuple[int, ...]] = []

    @sample
    def callable_(x: Array) -> dict[str, Array]:
        shapes.append(x.shape)
        return {"y": x}

    triton.bind(name, callable_, X, Y, config=configured(batching=False))
    assert shapes == [(2,)]


def test_decorators_and_context_work(triton: Triton, name: str) -> None:
    seen: list[Any] = []

    @fill_optionals(z=np.array([7], np.int64))
    @batch
    @pad_batch
    @triton_context
    def callable_(triton_context: TritonContext, x: Array, z: Array) -> list[Array]:
        seen.append((x.shape, z.ravel().tolist(), triton_context.model_configs is not None))
        return [x]

    inputs = [*X, Tensor((1,), np.int64, "z", optional=True)]
    config = configured(batcher=DynamicBatcher(preferred_batch_size=[4]))
    triton.bind(name, callable_, inputs, Y, config=config)
    assert seen == [((4, 2), [7, 7, 7, 7], True)]


@pytest.mark.parametrize("given", [["x"], ["z"], []])
def test_some_of_the_inputs_are_passed_on(triton: Triton, name: str, given: list[str]) -> None:
    seen: list[list[str]] = []

    def callable_(requests: Sequence[Request]) -> list[dict[str, Array]]:
        seen.extend(sorted(request) for request in requests)
        return [{"y": np.zeros((3, 2), np.float32)} for _ in requests]

    inputs = {tensor: WarmupInput(np.float32, (2,), zero_data=True) for tensor in given}
    config = configured([ModelWarmup("some", 3, inputs, 2)])
    triton.bind(name, callable_, [*X, Tensor((2,), np.float32, "z")], Y, config=config)
    assert seen == [given, given]


def test_of_some_of_the_inputs_there_may_be_some_of_the_outputs(triton: Triton, name: str) -> None:
    @batch
    def echo(**inputs: Array) -> dict[str, Array]:
        return {f"out_{tensor}": value for tensor, value in inputs.items()}

    z, out = Tensor((2,), np.float32, "z"), [Tensor((2,), np.float32, f"out_{tensor}") for tensor in "xz"]
    triton.bind(name, echo, [*X, z], out, config=configured(), strict=True)
    # With all of its inputs it is held to them.
    triton.unbind(name)
    optional = Tensor((2,), np.float32, "z", optional=True)
    with pytest.raises(TritonModelLoadError, match="missing: out_z"):
        triton.bind(name, echo, [*X, optional], out, config=configured(), strict=True)


def test_every_callable_of_a_model_is_warmed_up_in_its_own_thread(triton: Triton, name: str) -> None:
    threads: dict[int, list[int]] = {1: [], 2: []}
    both = threading.Barrier(2)

    def make(number: int) -> Callable[[Sequence[Request]], list[dict[str, Array]]]:
        def callable_(requests: Sequence[Request]) -> list[dict[str, Array]]:
            threads[number].append(threading.get_ident())
            if len(threads[number]) == 1:
                both.wait(PATIENCE_S)  # they do not wait for each other
            return [{"y": request["x"]} for request in requests]

        return callable_

    triton.bind(name, [make(1), make(2)], X, Y, config=configured(warmup(count=2)))
    assert [len(calls) for calls in threads.values()] == [2, 2]
    assert len(set(threads[1])) == len(set(threads[2])) == 1
    assert set(threads[1]) != set(threads[2])


def test_what_a_warmup_request_looks_like(triton: Triton, name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]], np.float32))
    np.save(tmp_path / "text.npy", np.array(["a", "ż"]))
    seen: list[Request] = []

    def callable_(requests: Sequence[Request]) -> list[dict[str, Array]]:
        seen.extend(requests)
        for request in requests:
            request["x"][:] += 1  # it may be written to, and the next one is new
        return [{"y": request["x"]} for request in requests]

    warmups = [
        ModelWarmup(
            "from files",
            3,
            {
                "x": WarmupInput(np.float32, (2,), input_data_file=str(tmp_path / "x.npy")),
                "text": WarmupInput(str, (1,), input_data_file=str(tmp_path / "text.npy")),
            },
            2,
        )
    ]
    np.save(tmp_path / "text.npy", np.array([["a"], ["ż"]]))
    triton.bind(name, callable_, [*X, Tensor((1,), str, "text")], Y, config=configured(warmups))
    assert len(seen) == 2
    for request in seen:
        assert request["x"].tolist() == [[2, 3], [4, 5], [2, 3]]
        assert request["text"].tolist() == [[b"a"], ["ż".encode()], [b"a"]]
        assert request.parameters == {}
        assert request.requested_output_names == ["y"]
        assert not request.is_cancelled()
    assert [request.request_id for request in seen] == ["warmup-from files-0", "warmup-from files-1"]


# ---- ready means warm ----------------------------------------------------------------------------------------------


def test_a_model_is_not_ready_before_it_is_warm(triton: Triton, name: str) -> None:
    ready: list[bool] = []

    @batch
    def callable_(x: Array) -> dict[str, Array]:
        ready.append(is_ready(triton, name))
        return {"y": x}

    triton.bind(name, callable_, X, Y, config=configured(warmup(count=3)))
    assert ready == [False] * 3
    assert is_ready(triton, name)
    with ModelClient(url(triton), name) as client:
        client.infer_sample(ONE)
    assert ready == [False] * 3 + [True]


def test_a_server_is_not_there_before_its_models_are_warm() -> None:
    connected: list[bool] = []
    with short_home():
        triton = Triton(config=local_config())

        @batch
        def callable_(x: Array) -> dict[str, Array]:
            connected.append(triton.is_connected())
            return {"y": x}

        triton.bind("model", callable_, X, Y, config=configured(warmup(count=2)))
        assert connected == []
        for _ in range(2):  # once for each start
            with triton:
                assert connected == [False, False]
                with ModelClient(url(triton), "model") as client:
                    client.infer_sample(ONE)
            assert connected.pop()
            connected.clear()


def test_a_callable_that_follows_another_one_is_warm_before_it_serves(triton: Triton, name: str) -> None:
    old, new = Calls(), Calls()
    triton.bind(name, old.function, X, Y, config=configured())
    triton.rebind(name, new.function)
    assert new.shapes == [(3, 2)]

    def fail(requests: Sequence[Request]) -> Any:
        raise ValueError("not today")

    with pytest.raises(TritonModelLoadError, match="not today"):
        triton.rebind(name, fail)
    with ModelClient(url(triton), name) as client:
        assert client.infer_sample(ONE)["y"].tolist() == [2, 2]
    assert new.shapes == [(3, 2), (1, 2)]


# ---- failures ------------------------------------------------------------------------------------------------------


def fail_sync(requests: Sequence[Request]) -> Any:
    raise KeyError("no such weight")


async def fail_async(requests: Sequence[Request]) -> Any:
    await asyncio.sleep(0)
    raise KeyError("no such weight")


def fail_late(requests: Sequence[Request]) -> Iterator[Any]:
    yield [{"y": request["x"]} for request in requests]
    raise KeyError("no such weight")


async def fail_late_async(requests: Sequence[Request]) -> AsyncIterator[Any]:
    yield [{"y": request["x"]} for request in requests]
    raise KeyError("no such weight")


def fail_for_one(requests: Sequence[Request]) -> Any:
    return [KeyError("no such weight") for _ in requests]


def fail_for_good(requests: Sequence[Request]) -> Any:
    raise PyTritonUnrecoverableError("no such weight")


@pytest.mark.parametrize(
    ("callable_", "decoupled"),
    [
        (fail_sync, False),
        (fail_async, False),
        (fail_late, True),
        (fail_late_async, True),
        (fail_for_one, False),
        (batch(lambda x: fail_sync([])), False),
    ],
)
def test_the_error_of_a_warmup_fails_the_load(
    triton: Triton, name: str, callable_: Callable[..., Any], decoupled: bool
) -> None:
    with pytest.raises(TritonModelLoadError, match=r"warm-up.*no such weight.*request 1 of 1, of ModelWarmup 'w'") as e:
        triton.bind(name, callable_, X, Y, config=configured(decoupled=decoupled))
    assert isinstance(e.value.__cause__, KeyError)
    assert (e.value.model_name, e.value.model_version) == (name, 1)
    assert triton.is_alive()
    assert not is_ready(triton, name)
    # Nothing of it stays: the name is free.
    wait_gone(name)
    triton.bind(name, Calls().function, X, Y, config=configured())
    with ModelClient(url(triton), name) as client:
        assert client.infer_sample(ONE)["y"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([{"y": np.zeros((3, 2), complex)}], "dtype"),
        ([], "one element per request"),
        (None, "one element per request"),
        ([{"y": np.zeros((3, 3), np.float32)}], "shape"),
    ],
)
def test_what_a_warmup_returns_is_checked(triton: Triton, name: str, returned: Any, message: str) -> None:
    with pytest.raises(TritonModelLoadError, match=message):
        triton.bind(name, lambda requests: returned, X, Y, config=configured(), strict=True)


def test_the_third_request_of_a_warmup_fails(triton: Triton, name: str) -> None:
    calls = itertools.count(1)

    @batch
    def callable_(x: Array) -> dict[str, Array]:
        if next(calls) == 3:
            raise MemoryError("of the device")
        return {"y": x}

    with pytest.raises(TritonModelLoadError, match=r"of the device \(request 3 of 5, of ModelWarmup 'w'\)"):
        triton.bind(name, callable_, X, Y, config=configured(warmup(count=5)))


def test_a_failing_warmup_ends_the_start_of_a_server() -> None:
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("good", Calls().function, X, Y, config=configured())
        triton.bind("bad", fail_sync, X, Y, config=configured())
        with pytest.raises(TritonModelLoadError, match=r"'bad'.*no such weight"):
            triton.run()
        assert not triton.is_connected()
        assert not triton.stop()


def test_an_unrecoverable_error_in_a_warmup_is_told_like_any_other() -> None:
    with short_home(), Triton(config=local_config()) as triton:
        with pytest.raises(TritonModelLoadError, match="no such weight"):
            triton.bind("bad", fail_for_good, X, Y, config=configured())
        assert triton.is_alive()


def test_a_warmup_that_takes_too_long(triton: Triton, name: str) -> None:
    @batch
    def callable_(x: Array) -> dict[str, Array]:
        time.sleep(0.2)
        return {"y": x}

    # As a whole it would take a day.
    config = configured(warmup(count=432_000), warmup_timeout_s=0.5)
    with pytest.raises(TritonModelLoadError, match=r"not over after 0\.5 s: .* 432000.*warmup_timeout_s"):
        triton.bind(name, callable_, X, Y, config=config)
    # The rest of the warm-up is left out.
    wait_gone(name)


def test_a_stop_ends_a_long_warmup() -> None:
    called = threading.Event()

    @batch
    def callable_(x: Array) -> dict[str, Array]:
        called.set()
        return {"y": x}

    errors: list[BaseException] = []
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("model", callable_, X, Y, config=configured(warmup(count=10**9)))

        def start() -> None:
            try:
                triton.run()
            except TritonServerStartError as error:
                errors.append(error)

        starter = threading.Thread(target=start)
        starter.start()
        assert called.wait(PATIENCE_S)
        triton.stop()
        starter.join(PATIENCE_S)
        assert not starter.is_alive()
        assert len(errors) == 1
        wait_gone("model")


# ---- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmups", "message"),
    [
        (warmup(rows=5), r"ModelConfig\.model_warmup\[0\]\.batch_size=5 .* from 1 to 4"),
        (
            [ModelWarmup("w", 1, {"z": WarmupInput(np.float32, (2,), True)}, 1)],
            r"model_warmup\[0\]\.inputs=\['z'\].*inputs of the model",
        ),
        (
            [ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (3,), True)}, 1)],
            r"model_warmup\[0\]\.inputs\['x'\]\.shape=\(3,\) .*\(2,\)",
        ),
        (
            [ModelWarmup("w", 1, {"x": WarmupInput(np.int32, (2,), True)}, 1)],
            r"model_warmup\[0\]\.inputs\['x'\]\.dtype=.*int32",
        ),
        (warmup(input_data_file="/no/such/file.npy"), r"input_data_file='/no/such/file\.npy'.*No such file"),
    ],
)
def test_a_warmup_that_does_not_fit_its_model_is_refused_at_once(warmups: list[ModelWarmup], message: str) -> None:
    triton = Triton(config=local_config())
    with pytest.raises(PyTritonBadParameterError, match=message):
        triton.bind("model", fail_sync, X, Y, config=configured(warmups))
