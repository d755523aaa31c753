"""Outputs that a callable returns under another name, not at all, too many of them, or in another shape."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.inprocess import Server
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support.serving import local_config, running, short_home
from support.waiting import eventually

# Older numpy has neither it nor its strings.
dtypes: Any = getattr(np, "dtypes", None)

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


STRINGS = ["", "a", "Stra\u00dfe", "x" * 1000]


def text(requests: Any) -> list[Outputs]:
    """Answers with numpy's own strings, as many rows as were sent."""
    strings = np.array([STRINGS], dtypes.StringDType())
    return [{"t": strings.repeat(len(request["x"]), 0)} for request in requests]


@batch
def whole_text(x: Array) -> Outputs:
    [outputs] = text([{"x": x}])
    return outputs


async def coroutine_text(requests: Any) -> list[Outputs]:
    return text(requests)


def generator_text(requests: Any) -> Iterator[list[Outputs]]:
    yield text(requests)


def make_text() -> Callable[..., Any]:
    return text


class Column:
    """An array of another library, as a column of a table is: numpy can read it, and it is none of numpy's."""

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.array(self.elements, dtype=dtype or object)


def texts_of(number: int) -> list[list[str]]:
    """Texts that differ with each number: six of the one sample that is asked for."""
    random = Random(number)
    letters = 'aZ 0\u00df\u20ac\U0001f600\0\n"'
    return [["".join(random.choices(letters, k=random.randrange(40))) for _ in range(6)]]


def kinds(requests: Any) -> list[Any]:
    """Answers with the same texts as objects, as numpy's own strings, and as a column of another library."""
    answers = []
    for request in requests:
        texts = texts_of(int(request["x"][0, 0]))
        own = np.array(texts, dtypes.StringDType() if hasattr(dtypes, "StringDType") else object)
        answers.append({"objects": np.array(texts, object), "own": own, "column": Column(texts)})
    return answers


@batch
def whole_kinds(x: Array) -> Any:
    [outputs] = kinds([{"x": x}])
    return outputs


async def coroutine_kinds(requests: Any) -> list[Any]:
    return kinds(requests)


def generator_kinds(requests: Any) -> Iterator[list[Any]]:
    yield kinds(requests)


def make_kinds() -> Callable[..., Any]:
    return kinds


def changed(requests: Any) -> list[Outputs]:
    """Answers with values that the declared dtypes, int8 and float32, have not."""
    return [{"whole": request["x"] * 257, "real": request["x"] * 1e300} for request in requests]


@batch
def whole_changed(x: Array) -> Outputs:
    [outputs] = changed([{"x": x}])
    return outputs


async def coroutine_changed(requests: Any) -> list[Outputs]:
    return changed(requests)


def generator_changed(requests: Any) -> Iterator[list[Outputs]]:
    yield changed(requests)


def make_changed() -> Callable[..., Any]:
    return changed


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@contextmanager
def asking(
    way: Any,
    plain: Callable[..., Any],
    outputs: list[Tensor],
    triton: Triton,
    server: Server,
    *,
    strict: bool = False,
    config: ModelConfig | None = None,
) -> Iterator[Ask]:
    """Call a new model, served by a callable in this process, by one named `make_...` in another, or in process."""
    name = next(names)
    if way == "in process":
        server.bind(name, plain, X, outputs, strict=strict, config=config)

        def infer(value: int) -> Outputs:
            [response] = server.model(name).infer(inputs={"x": np.array([[value]])})
            return {output: np.asarray(tensor) for output, tensor in response.outputs.items()}

        yield infer
        server.unbind(name)
        return
    assert triton.grpc_url is not None
    with ExitStack() as stack:
        binding: Triton | RemoteTriton = triton
        if way == "remote":
            remote = RemoteTriton(str(triton.http_url), access_token=triton.get_access_token())
            binding, way = stack.enter_context(remote), plain
        elif way == "process":
            way = ProcessWorker(f"{__file__}:make_{plain.__name__}")
        binding.bind(name, way, X, outputs, strict=strict, config=config)
        stack.callback(binding.unbind, name)
        client = stack.enter_context(ModelClient(triton.grpc_url, name))
        yield lambda value: client.infer_batch(np.array([[value]]))


@pytest.fixture(params=[*CALLABLES, "process", "in process"], ids=lambda way: getattr(way, "__name__", way))
def ask(request: pytest.FixtureRequest, triton: Triton, server: Server) -> Iterator[Ask]:
    """Calls a new model, whose callable answers as the value says; one for each way that results take."""
    with asking(request.param, plain, OUTPUTS, triton, server) as ask:
        yield ask


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


@pytest.mark.skipif(not hasattr(dtypes, "StringDType"), reason="numpy has these strings since 2.0")
@pytest.mark.parametrize(
    "way",
    [text, whole_text, coroutine_text, generator_text, "process", "in process"],
    ids=lambda way: getattr(way, "__name__", way),
)
def test_numpys_own_strings_are_strings(way: Any, triton: Triton, server: Server) -> None:
    with asking(way, text, [Tensor((-1,), bytes, "t")], triton, server) as ask:
        assert ask(1)["t"].tolist() == [[element.encode() for element in STRINGS]]


KINDS_OUTPUTS = [Tensor((6,), bytes, name) for name in ("objects", "own", "column")]


@pytest.mark.parametrize(
    "way",
    [kinds, whole_kinds, coroutine_kinds, generator_kinds, "process", "in process", "remote"],
    ids=lambda way: getattr(way, "__name__", way),
)
def test_strings_of_all_kinds_are_the_same_to_callers(way: Any, triton: Triton, server: Server) -> None:
    with asking(way, kinds, KINDS_OUTPUTS, triton, server) as ask:
        for number in range(20):
            answer = ask(number)
            expected = [[text.encode() for text in row] for row in texts_of(number)]
            assert {name: array.tolist() for name, array in answer.items()} == dict.fromkeys(answer, expected)
            assert answer.keys() == {"objects", "own", "column"}


class Refuses:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise TypeError("it lies on a device")


def refused(requests: Any) -> list[Any]:
    return [{"y": Refuses()} for _ in requests]


@pytest.mark.parametrize("way", [refused, "in process"], ids=["threads", "in process"])
def test_what_cannot_be_an_array_is_refused_with_the_reason(way: Any, triton: Triton, server: Server) -> None:
    with (
        asking(way, refused, [Tensor((1,), np.float32, "y")], triton, server) as ask,
        pytest.raises(
            (PyTritonClientInferenceServerError, inprocess.TritonError),
            match=r"and cannot become one \(TypeError: it lies on a device\)",
        ),
    ):
        ask(1)


MASKED = np.ma.array([[1.5], [2.5]], mask=[[False], [True]])


def without_values(requests: Any) -> list[Any]:
    """Return what no tensor can hold to those who ask for it: words as numbers, or a masked value."""
    own = np.array([["1.5"], ["two"]], dtypes.StringDType() if hasattr(dtypes, "StringDType") else object)
    return [{"y": {0: own[:1], 1: own[1:], 2: MASKED[:1], 3: MASKED[1:]}[request["x"].item()]} for request in requests]


@batch
def masked_column(x: Array) -> Outputs:
    return {"y": MASKED[x[:, 0] % 2]}


@pytest.mark.parametrize("way", ["threads", "in process"])
def test_what_is_no_value_fails_its_own_request_with_the_reason(way: str, triton: Triton, server: Server) -> None:
    def ask_all(ask: Ask, answers: dict[int, str | float]) -> None:
        with ThreadPoolExecutor(len(answers)) as pool:
            waiting = {pool.submit(ask, number): answer for number, answer in answers.items()}
            for future, answer in waiting.items():
                if isinstance(answer, float):
                    assert future.result(60)["y"].item() == answer
                else:
                    error = future.exception(60)
                    assert isinstance(error, (PyTritonClientInferenceServerError, inprocess.TritonError))
                    assert re.search(answer, str(error)), error

    no_word, no_mask = r"'y'.*values cannot be cast.*two", r"'y'.*masked values.*filled.*1 masked of 1"
    cases: list[tuple[Any, dict[int, str | float]]] = [
        (without_values, {0: 1.5, 1: no_word, 2: 1.5, 3: no_mask}),
        (masked_column, {2: 1.5, 3: no_mask}),
    ]
    for given, answers in cases:
        callable_: Any = given if way == "threads" else way
        batcher = DynamicBatcher(max_queue_delay_microseconds=200_000)
        config = ModelConfig(max_batch_size=4, batcher=batcher)
        outputs = [Tensor((1,), np.float32, "y")]
        with asking(callable_, given, outputs, triton, server, config=config) as ask:
            for _ in range(3):
                ask_all(ask, answers)


CHANGED_OUTPUTS = [Tensor((1,), np.int8, "whole"), Tensor((1,), np.float32, "real")]
CHANGED_WAYS = [changed, whole_changed, coroutine_changed, generator_changed, "process", "in process", "remote"]


@pytest.mark.parametrize("way", CHANGED_WAYS, ids=lambda way: getattr(way, "__name__", way))
def test_a_cast_that_changes_values_is_warned_of_once_for_each_output(
    way: Any, triton: Triton, server: Server, warnings: Callable[[int], list[str]]
) -> None:
    with asking(way, changed, CHANGED_OUTPUTS, triton, server) as ask:
        for _ in range(3):
            assert {name: array.item() for name, array in ask(1).items()} == {"whole": 1, "real": float("inf")}
        whole, real = warnings(2)
    assert (
        "output 'whole' has values that its dtype has not, which are sent as others: expected values of int8" in whole
    )
    assert "got 257 of dtype int64, which becomes 1." in whole
    assert "got 1e+300 of dtype float64, which becomes inf." in real


@pytest.mark.parametrize("way", CHANGED_WAYS, ids=lambda way: getattr(way, "__name__", way))
def test_a_cast_that_could_change_values_is_an_error_where_it_is_strict(
    way: Any, triton: Triton, server: Server
) -> None:
    harmless = [Tensor((1,), np.float64, "whole"), Tensor((1,), np.float64, "real")]
    with asking(way, changed, harmless, triton, server, strict=True) as ask:
        assert ask(1)["whole"].item() == 257
    error = (PyTritonClientInferenceServerError, inprocess.TritonError)
    with (
        asking(way, changed, CHANGED_OUTPUTS, triton, server, strict=True) as ask,
        pytest.raises(error, match=r"output 'whole'.*dtype int8, or one that it has all values of, got dtype int64"),
    ):
        ask(1)
