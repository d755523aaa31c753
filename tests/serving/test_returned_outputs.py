"""Outputs that a callable returns under another name, not at all, too many of them, or in another shape."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import ProcessWorker, Triton
from support.serving import local_config, running, short_home
from support.waiting import eventually

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]
Ask = Callable[[int], Outputs]

X = [Tensor((1,), np.int64, "x")]
# What comes back for each value of the input.
RIGHT, MISSPELLED, MISSING, SUPERFLUOUS, WIDE, NOTHING = range(6)
ANSWERS: dict[int, Outputs] = {
    RIGHT: {"y": np.zeros((1, 2)), "z": np.zeros((1, 2))},
    MISSPELLED: {"Y": np.zeros((1, 2)), "Z": np.zeros((1, 2))},
    MISSING: {"y": np.zeros((1, 2))},
    SUPERFLUOUS: {"y": np.zeros((1, 2)), "z": np.zeros((1, 2)), "Z": np.zeros((1, 2))},
    WIDE: {"y": np.zeros((1, 2)), "z": np.zeros((1, 3))},
    NOTHING: {},
}
OUTPUTS = [Tensor((2,), np.float64, "y"), Tensor((2,), np.float64, "z")]
names = (f"m{number}" for number in itertools.count())


def plain(requests: Any) -> list[Outputs]:
    return [ANSWERS[int(request["x"][0, 0])] for request in requests]


@batch
def whole(x: Array) -> Outputs:
    return ANSWERS[int(x[0, 0])]


async def coroutine(requests: Any) -> list[Outputs]:
    return plain(requests)


def generator(requests: Any) -> Iterator[list[Outputs]]:
    yield plain(requests)


CALLABLES = [plain, whole, coroutine, generator]


def make_plain() -> Callable[..., Any]:
    return plain


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[inprocess.Server]:
    with inprocess.Server() as server:
        yield server


@pytest.fixture(params=[*CALLABLES, "process", "in process"], ids=lambda way: getattr(way, "__name__", way))
def ask(request: pytest.FixtureRequest, triton: Triton, server: inprocess.Server) -> Iterator[Ask]:
    """Calls a new model, whose callable answers as the value says; one for each way that results take."""
    name = next(names)
    if request.param == "in process":
        server.bind(name, plain, X, OUTPUTS)

        def infer(value: int) -> Outputs:
            [response] = server.model(name).infer(inputs={"x": np.array([[value]])})
            return {output: np.from_dlpack(tensor) for output, tensor in response.outputs.items()}

        yield infer
        server.unbind(name)
        return
    in_process = ProcessWorker(f"{__file__}:make_plain") if request.param == "process" else request.param
    triton.bind(name, in_process, X, OUTPUTS)
    assert triton.grpc_url is not None
    with ModelClient(triton.grpc_url, name) as client:
        yield lambda value: client.infer_batch(np.array([[value]]))
    triton.unbind(name)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    def wait(count: int) -> list[str]:
        """Waits for so many warnings; those of a worker process come after its answers."""

        def said() -> list[str]:
            return [
                entry.getMessage()
                for entry in caplog.records
                if entry.levelno == logging.WARNING and "This is said once" in entry.getMessage()
            ]

        eventually(lambda: len(said()) >= count)
        return said()

    return wait


@pytest.mark.parametrize("value", [MISSPELLED, NOTHING])
def test_none_of_the_outputs_is_an_error(ask: Ask, value: int) -> None:
    assert ask(RIGHT).keys() == {"y", "z"}
    received = "Y, Z" if value == MISSPELLED else "none"
    text = rf"none of the outputs that are asked for: expected y, z, got {received}"
    with pytest.raises((PyTritonClientInferenceServerError, inprocess.TritonError), match=text):
        ask(value)
    assert ask(RIGHT).keys() == {"y", "z"}


def test_what_goes_on_all_the_same_is_warned_of_once(ask: Ask, warnings: Callable[[int], list[str]]) -> None:
    for _ in range(3):
        ask(RIGHT)
    assert not warnings(0)
    for _ in range(3):
        assert ask(MISSING).keys() == {"y"}
        assert ask(SUPERFLUOUS).keys() == {"y", "z"}
        assert ask(WIDE)["z"].shape == (1, 3)
        assert ask(RIGHT).keys() == {"y", "z"}
    missing, superfluous, shape = warnings(3)
    assert "left out what its callers ask for (z)" in missing
    assert "expected y, z, got y." in missing
    assert "outputs that the model has not (Z), which are dropped: expected y, z, got y, z, Z." in superfluous
    assert "output 'z' has not the declared shape" in shape
    assert re.search(r"expected shape \(batch, 2\), got shape \(1, 3\)\.", shape)


def test_callables_of_one_model_warn_once(triton: Triton, warnings: Callable[[int], list[str]]) -> None:
    name = next(names)
    triton.bind(name, [plain, plain, plain], X, OUTPUTS)
    assert triton.http_url is not None
    with ModelClient(triton.http_url, name) as client:
        # They take turns.
        for _ in range(9):
            client.infer_batch(np.array([[SUPERFLUOUS]]))
    assert len(warnings(1)) == 1
    # A callable that takes the place of another one has warnings of its own.
    triton.rebind(name, plain)
    with ModelClient(triton.http_url, name) as client:
        client.infer_batch(np.array([[SUPERFLUOUS]]))
    assert len(warnings(2)) == 2
    triton.unbind(name)
