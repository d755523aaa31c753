"""A model that changes behind clients: what fits the new one is served, and errors speak of the new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientValueError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.clients import KINDS, Kind, address_of
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S


class Form(NamedTuple):
    """What a model is."""

    dtype: Any = np.float32
    shape: tuple[int, ...] = (2,)
    names: tuple[str, ...] = ("x",)
    batching: bool = True


class Change(NamedTuple):
    """What becomes of a model, and a call that fits the new one; `None` for one that fits neither."""

    before: Form
    after: Form
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    error: str | None = None


ONES = np.ones(2, np.float32)
CHANGES = {
    "an input renamed, by name": Change(Form(), Form(names=("image",)), (), {"image": ONES}),
    "an input renamed, by position": Change(Form(), Form(names=("image",)), (ONES,), {}),
    "an input added, by name": Change(Form(), Form(names=("x", "z")), (), {"x": ONES, "z": ONES}),
    "an input added, by position": Change(Form(), Form(names=("x", "z")), (ONES, ONES), {}),
    "an input added, and not given": Change(
        Form(), Form(names=("x", "z")), (ONES,), {}, r"expected 2 inputs 'x', 'z'; received 'x' \(without z\)"
    ),
    "an input taken": Change(Form(names=("x", "z")), Form(), (ONES,), {}),
    "an input taken, and given": Change(
        Form(names=("x", "z")), Form(), (ONES, ONES), {}, "expected the input 'x'; received 2 by position"
    ),
    "another order": Change(Form(names=("x", "z")), Form(names=("z", "x")), (), {"x": ONES, "z": ONES}),
    "float64, arrays": Change(Form(), Form(np.float64), (np.ones(2),), {}),
    "float64, lists": Change(Form(), Form(np.float64), ([1, 1],), {}),
    "int64, lists": Change(Form(), Form(np.int64), ([1, 1],), {}),
    "int64, and floats": Change(Form(), Form(np.int64), ([1.5, 1],), {}, "expected values of int64"),
    "text, lists": Change(Form(), Form(np.bytes_), (["1", "1"],), {}),
    "text, and numbers": Change(Form(), Form(np.bytes_), ([1, 1],), {}, "expected bytes or str"),
    "a longer row": Change(Form(), Form(shape=(3,)), (np.ones(3, np.float32),), {}),
    "one axis more": Change(Form(), Form(shape=(1, 2)), (ONES[None],), {}),
    "batching, then none": Change(Form(), Form(batching=False), (ONES,), {}),
    "none, then batching": Change(Form(batching=False), Form(), (ONES,), {}),
    "batching, then an axis": Change(Form(), Form(shape=(1, 2), batching=False), (ONES[None],), {}),
}


class Changing:
    """A server with the models `same` and `count`, which change."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.is_bound = False

    def become(self, form: Form, *, is_decoupled: bool | None = None) -> None:
        for name in ("same", "count"):
            decoupled = (name == "count") != bool(is_decoupled)
            if self.is_bound:
                self.triton.unbind(name)

            def infer(requests: Any) -> Any:
                return [{"y": next(iter(request.values()))} for request in requests]

            def stream(requests: Any) -> Iterator[Any]:
                for _ in range(3):
                    yield [{"y": next(iter(request.values()))} for request in requests]

            self.triton.bind(
                name,
                stream if decoupled else infer,
                [Tensor(form.shape, form.dtype, one) for one in form.names],
                [Tensor(form.shape, form.dtype, "y")],
                config=ModelConfig(batching=form.batching, decoupled=decoupled),
            )
        self.is_bound = True


@pytest.fixture(scope="module")
def changing() -> Iterator[Changing]:
    with short_home():
        triton = Triton(config=local_config())
        changing = Changing(triton)
        changing.become(Form())
        with running(triton):
            yield changing


class Long:
    """A client that lives long, with a loop for those of asyncio."""

    def __init__(self, kind: Kind, url: str) -> None:
        self.kind = kind
        self.client = kind.make(url, kind.model)
        self.loop = asyncio.new_event_loop()

    def ask(self, *inputs: Any, **named: Any) -> list[Any]:
        begun = self.kind.begin(self.client, *inputs, **named)
        return list(self.loop.run_until_complete(begun) if asyncio.iscoroutine(begun) else begun)

    def close(self) -> None:
        closing = self.client.close()
        if asyncio.iscoroutine(closing):
            self.loop.run_until_complete(closing)
        self.loop.close()


@pytest.fixture
def clients(changing: Changing) -> Iterator[Callable[[], list[Long]]]:
    with ExitStack() as stack:

        def make() -> list[Long]:
            made = [
                Long(kind, address_of(changing.triton, protocol))
                for protocol in ("http", "grpc")
                for kind in KINDS.values()
            ]
            for one in made:
                stack.callback(one.close)
            return made

        yield make


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model(changing: Changing, clients: Callable[[], list[Long]], change: str) -> None:
    before, after, inputs, named, error = CHANGES[change]
    changing.become(before)
    long_lived = clients()
    for one in long_lived:
        one.ask(*[np.ones(before.shape, before.dtype)] * len(before.names))
    changing.become(after)
    for one in long_lived:
        if error is not None:
            with pytest.raises(PyTritonClientValueError, match=error):
                one.ask(*inputs, **named)
            continue
        for _ in range(2):
            for found in one.ask(*inputs, **named):
                assert found.shape == after.shape
                assert found.tolist() == np.ones(after.shape, after.dtype).tolist()


def test_a_model_that_streams_now_or_no_more(changing: Changing, clients: Callable[[], list[Long]]) -> None:
    changing.become(Form())
    long_lived = clients()
    for one in long_lived:
        one.ask(ONES)
    changing.become(Form(names=("image",)), is_decoupled=True)
    for one in long_lived:
        for _ in range(2):
            with pytest.raises(PyTritonClientInferenceServerError, match=r"Model config is (de)?coupled\. Use "):
                one.ask(image=ONES)
    changing.become(Form())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_threads_that_find_it_together(changing: Changing, protocol: str) -> None:
    changing.become(Form())
    with ModelClient(address_of(changing.triton, protocol), "same") as client, ThreadPoolExecutor(8) as threads:
        client.infer_sample(ONES)
        changing.become(Form(np.float64))
        together = threading.Barrier(8)

        def call(_: int) -> Any:
            together.wait(PATIENCE_S)
            return client.infer_sample(np.ones(2))["y"].dtype

        assert list(threads.map(call, range(8))) == [np.dtype(np.float64)] * 8
