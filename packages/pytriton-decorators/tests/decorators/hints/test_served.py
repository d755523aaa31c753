from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import NotRequired

from pytriton.decorators import (
    Shape,
    first_value,
    get_model_config,
    get_model_signature,
    get_requests,
    get_row_requests,
    model,
)
from pytriton.decorators.serving import load_infer_func
from pytriton.decorators.testing import Harness, make_request
from pytriton.exceptions import PyTritonUnrecoverableError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor

Vector = Annotated[NDArray[np.float32], Shape("n")]
Rows = Annotated[NDArray[np.float32], Shape("batch", -1)]


@model(max_batch_size=64)
def softmax(logits: Vector) -> Vector:
    assert logits.ndim == 1
    exponents = np.exp(logits)
    exponents /= exponents.sum()
    return exponents


@model(batched=True, max_batch_size=64)
def softmax_batch(logits: Rows) -> Rows:
    assert logits.ndim == 2
    exponents = np.exp(logits)
    exponents /= exponents.sum(axis=1, keepdims=True)
    return exponents


@pytest.mark.parametrize("function", [softmax, softmax_batch])
def test_a_function_of_samples_and_one_of_batches_answer_the_same(function: Callable[..., Any]) -> None:
    harness = Harness(function)
    assert harness.model_config.model_name == function.__name__
    first, second = harness.infer([{"logits": [[0, 0], [1, 1]]}, {"logits": [[3, 3]]}])
    assert first["output"].dtype == np.float32
    assert first["output"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert second["output"].tolist() == [[0.5, 0.5]]


def test_a_batch_is_one_call_and_samples_are_a_call_each() -> None:
    calls: list[Any] = []

    @model(max_batch_size=8)
    def each(x: float) -> float:
        calls.append(x)
        return x + 1

    @model(batched=True)
    def whole(x: list[float]) -> list[float]:
        calls.append(x)
        return [value + 1 for value in x]

    for function, expected in ((each, [1.0, 2.0, 3.0]), (whole, [[1.0, 2.0, 3.0]])):
        calls.clear()
        results = Harness(function).infer([{"x": [[1], [2]]}, {"x": [[3]]}])
        assert calls == expected
        assert [result["output"].tolist() for result in results] == [[[2.0], [3.0]], [[4.0]]]


def test_a_batch_that_the_server_laid_out_is_called_at_once() -> None:
    infer: Any = load_infer_func(softmax_batch)
    outputs = infer.__pytriton_whole__({"logits": np.zeros((3, 2), np.float32)}, [1, 2], list)
    assert outputs["output"].tolist() == [[0.5, 0.5]] * 3


class Answer(TypedDict):
    text: str
    raw: bytes
    count: int
    share: float
    known: bool
    small: np.uint8
    words: list[str]


@model
def scalars(text: str, raw: bytes, count: int, share: float, known: bool, small: np.uint8, words: list[str]) -> Answer:
    kinds = [type(it) for it in (text, raw, count, share, known, small)]
    assert kinds == [str, bytes, int, float, bool, np.uint8]
    assert all(type(word) is str for word in words)
    return {
        "text": text + "!", "raw": raw + b"!", "count": count + 1, "share": share, "known": not known,
        "small": np.uint8(small + 1), "words": words[::-1],
    }  # fmt: skip


def test_scalars_arrive_as_what_they_are() -> None:
    result = Harness(scalars).infer(
        {
            "text": ["Grüße"], "raw": np.array([b"\xff\0"], object), "count": [1 << 62], "share": [0.1],
            "known": [True], "small": [7],
            "words": ["a", "b", "c"],
        }
    )  # fmt: skip
    found = {name: array.tolist() for name, array in result.items()}
    assert found == {
        "text": ["Grüße!".encode()], "raw": [b"\xff\0!"], "count": [(1 << 62) + 1], "share": [0.1], "known": [False],
        "small": [8], "words": [b"c", b"b", b"a"],
    }  # fmt: skip
    assert {name: array.dtype.name for name, array in result.items()} == {
        "text": "object", "raw": "object", "count": "int64", "share": "float64", "known": "bool", "small": "uint8",
        "words": "object",
    }  # fmt: skip


def test_bytes_that_are_no_text_are_refused_for_a_str() -> None:
    @model(max_batch_size=4)
    def upper(text: str) -> str:
        return text.upper()

    good, bad = Harness(upper).infer([{"text": [["a"]]}, {"text": [[b"\xff"]]}], return_exceptions=True)
    assert not isinstance(good, BaseException)
    assert good["output"].tolist() == [[b"A"]]
    assert "Input 'text': its hint is str, received bytes that are not UTF-8" in str(bad)


def test_arrays_of_strings_are_objects() -> None:
    @model
    def lengths(
        texts: Annotated[NDArray[np.str_], Shape(-1, 2)], raws: Annotated[NDArray[np.bytes_], Shape(-1)]
    ) -> Annotated[NDArray[np.str_], Shape(-1)]:
        assert {texts.dtype.kind, raws.dtype.kind} == {"O"}
        return np.array([f"{text}{raw!r}" for text, raw in zip(texts[:, 0], raws, strict=True)])

    result = Harness(lengths).infer({"texts": [["ä", "b"], ["c", "d"]], "raws": np.array([b"x\0", b""], object)})
    assert [it.decode() for it in result["output"].tolist()] == ["äb'x\\x00'", "cb''"]


def test_arrays_without_axes_travel_with_one() -> None:
    Scalar = Annotated[NDArray[np.float32], Shape()]  # noqa: N806

    def square(x):  # type: ignore[no-untyped-def]
        assert x.shape == ()
        return np.float32(x * x)

    square.__annotations__ = {"x": Scalar, "return": Scalar}
    assert Harness(model(square)).infer({"x": [3]})["output"].tolist() == [9.0]

    def squares(x):  # type: ignore[no-untyped-def]
        assert x.shape == (2,)
        return x * x

    squares.__annotations__ = dict.fromkeys(("x", "return"), Annotated[NDArray[np.float32], Shape("batch")])
    assert Harness(model(batched=True)(squares)).infer({"x": [[3], [4]]})["output"].tolist() == [[9.0], [16.0]]


@pytest.mark.parametrize("batched", [False, True])
def test_inputs_that_are_left_out_have_their_default_or_none(batched: bool) -> None:
    @model(batched=True)
    def whole(x: list[int], power: list[int] | None, offset: list[int] | None = None) -> list[str]:
        return [f"{value} {power} {offset}" for value in x]

    @model(max_batch_size=4)
    def each(x: int, power: int | None, offset: int = 7) -> str:
        return f"{x} {power} {offset}"

    infer: Any = whole if batched else each
    assert [tensor.optional for tensor in get_model_signature(infer).inputs] == [False, True, True]
    results = Harness(infer).infer(
        [{"x": [[1]]}, {"x": [[2]], "power": [[3]]}, {"x": [[4]], "power": [[5]], "offset": [[6]]}]
    )
    texts = [result["output"].item().decode() for result in results]
    if batched:
        assert texts == ["1 None None", "2 [3] None", "4 [5] [6]"]
    else:
        assert texts == ["1 None 7", "2 3 7", "4 5 6"]


class Pair(NamedTuple):
    label: str
    scores: Vector


@dataclass
class Record:
    label: str
    scores: Vector


@pytest.mark.parametrize("kind", [Pair, Record])
def test_several_outputs_are_the_members_of_an_object(kind: Any) -> None:
    def infer(x: float) -> Any:
        return kind("a", np.array([x, 1], np.float32))

    infer.__annotations__["return"] = kind
    result = Harness(model(infer)).infer({"x": [0.5]})
    assert {name: array.tolist() for name, array in result.items()} == {"label": [b"a"], "scores": [0.5, 1.0]}


@model
def count(up_to: int) -> Iterator[int]:
    yield from range(up_to)


@model
async def count_async(up_to: int) -> AsyncIterator[int]:
    for number in range(up_to):
        await asyncio.sleep(0)
        yield number


@model(batched=True)
def count_rows(up_to: list[int]) -> Iterator[list[int]]:
    for number in range(max(up_to)):
        yield [number for _ in up_to]


@pytest.mark.parametrize("function", [count, count_async])
def test_generators_are_decoupled_models(function: Callable[..., Any]) -> None:
    harness = Harness(function)
    assert harness.model_config.decoupled
    assert [result["output"].tolist() for result in harness.stream({"up_to": [3]})] == [[0], [1], [2]]


class Step(TypedDict):
    token: str
    end: NotRequired[bool]


@model
def speak(text: str) -> Iterator[Step]:
    yield {"token": text}
    yield {"token": "", "end": True}


def test_steps_may_leave_out_what_is_not_required() -> None:
    steps = [{name: array.tolist() for name, array in it.items()} for it in Harness(speak).stream({"text": ["a"]})]
    assert steps == [{"token": [b"a"]}, {"token": [b""], "end": [True]}]


def test_a_generator_of_batches_yields_for_all_samples() -> None:
    steps = list(Harness(count_rows).stream([{"up_to": [[2], [1]]}, {"up_to": [[1]]}]))
    found = [
        [None if it is None or isinstance(it, BaseException) else it["output"].tolist() for it in s] for s in steps
    ]
    assert found == [[[[0], [0]], [[0]]], [[[1], [1]], [[1]]]]


def test_coroutines_of_samples_run_at_the_same_time_and_know_their_requests() -> None:
    started: list[float] = []
    all_started = asyncio.Event()

    @model(max_batch_size=4)
    async def look_up(key: float) -> str:
        started.append(key)
        if len(started) == 3:
            all_started.set()
        await all_started.wait()
        (request,) = get_row_requests()
        assert get_requests() == [request]
        return f"{key} {request.parameters['who']}"

    async def ask() -> list[Any]:
        requests = [make_request({"key": [[1.0], [2.0]]}, {"who": "a"}), make_request({"key": [[3.0]]}, {"who": "b"})]
        return await Harness(look_up).infer_async(requests)

    results = asyncio.run(ask())
    assert [result["output"].ravel().tolist() for result in results] == [[b"1.0 a", b"2.0 a"], [b"3.0 b"]]


def test_samples_know_their_request_and_their_model() -> None:
    @model(max_batch_size=4)
    def who(x: float) -> str:
        assert get_model_config(who).model_name == "who"
        (request,) = get_requests()
        return str(request.parameters["who"])

    requests = [make_request({"x": [[1.0], [2.0]]}, {"who": "a"}), make_request({"x": [[3.0]]}, {"who": "b"})]
    assert [result["output"].ravel().tolist() for result in Harness(who).infer(requests)] == [[b"a", b"a"], [b"b"]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_of_a_sample_is_that_of_its_request(asynchronous: bool) -> None:
    def root(x: float) -> float:
        if x < 0:
            raise ValueError("below 0")
        if x > 100:
            raise PyTritonUnrecoverableError("the device is lost")
        return float(x**0.5)

    @functools.wraps(root)
    async def root_async(x: float) -> float:
        return root(x)

    harness = Harness(model(max_batch_size=4)(root_async if asynchronous else root))
    good, bad = harness.infer([{"x": [[4]]}, {"x": [[9], [-1]]}], return_exceptions=True)
    assert not isinstance(good, BaseException)
    assert good["output"].tolist() == [[2.0]]
    assert isinstance(bad, ValueError)
    with pytest.raises(ValueError, match="below 0"):
        harness.infer({"x": [[-1]]})
    with pytest.raises(PyTritonUnrecoverableError):
        harness.infer([{"x": [[4]]}, {"x": [[101]]}], return_exceptions=True)


def test_samples_of_one_request_have_outputs_of_one_shape() -> None:
    @model(max_batch_size=4)
    def split(text: str) -> list[str]:
        return text.split()

    harness = Harness(split)
    first, second = harness.infer([{"text": [["a b"], ["c d"]]}, {"text": [["e"]]}])
    assert first["output"].tolist() == [[b"a", b"b"], [b"c", b"d"]]
    assert second["output"].tolist() == [[b"e"]]
    with pytest.raises(PyTritonValidationError, match=r"Output 'output' of request 0 is ragged.* \(1,\) and \(2,\)"):
        harness.infer({"text": [["a"], ["b c"]]})


@model(max_batch_size=4)
class Scaler:
    loaded = 0

    def __init__(self, factor: float = 2.0) -> None:
        type(self).loaded += 1
        self.factor = factor

    def __call__(self, x: float) -> float:
        return x * self.factor


@model(batched=True)
class AsyncScaler:
    async def __call__(self, x: list[float]) -> list[float]:
        return [2 * value for value in x]


def test_a_class_is_loaded_once_and_its_objects_are_called() -> None:
    before = Scaler.loaded
    harness = Harness(Scaler)
    for _ in range(2):
        assert harness.infer({"x": [[3]]})["output"].tolist() == [[6.0]]
    assert Scaler.loaded == before + 1
    assert Harness(Scaler(10.0)).infer({"x": [[3]]})["output"].tolist() == [[30.0]]
    assert load_infer_func(Scaler, 4.0)([{"x": np.array([[2.0]])}])[0]["output"].tolist() == [[8.0]]
    assert load_infer_func(Scaler, factor=4.0)([{"x": np.array([[2.0]])}])[0]["output"].tolist() == [[8.0]]
    assert Harness(AsyncScaler).infer({"x": [[3]]})["output"].tolist() == [[6.0]]
    with pytest.raises(TypeError, match="takes no arguments"):
        load_infer_func(softmax, 1)


def test_decorators_of_arrays_work_below() -> None:
    @model(batched=True)
    @first_value("power")
    def raised(
        x: Annotated[NDArray[np.int64], Shape("batch", 2)], power: Annotated[NDArray[np.int64], Shape("batch")]
    ) -> Annotated[NDArray[np.int64], Shape("batch", 2)]:
        result: NDArray[np.int64] = x**power
        return result

    assert Harness(raised).infer({"x": [[2, 3]], "power": [[2]]})["output"].tolist() == [[4, 9]]


def test_a_wrapper_is_served_with_the_hints_of_what_it_wraps() -> None:
    seen: list[Any] = []

    @functools.wraps(softmax)
    def logged(**arguments: Any) -> Any:
        seen.append(arguments)
        return softmax(**arguments)

    Harness(logged).infer({"logits": [[0, 0]]})
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("hint", "result", "text"),
    [
        (float, "a", "output 'output': its hint is float, so expected a number; the function returned str 'a'"),
        (float, None, "expected a number; the function returned NoneType None"),
        (float, True, "expected a number; the function returned bool True"),
        (float, [1.0], "expected a number; the function returned list"),
        (int, 1.5, "expected an int; the function returned float 1.5"),
        (float, 10**400, "expected a number of at most 1.8e+308; the function returned int 1000"),
        (list[float], [1, -(10**400)], "the function returned element 1, int -1000"),
        (int, 1 << 63, "expected a number from -9223372036854775808 to"),
        (np.uint8, 256, "its hint is np.uint8, so expected a number from 0 to 255"),
        (bool, 1, "expected a bool; the function returned int 1"),
        (str, b"a", "expected str; the function returned bytes"),
        (bytes, "a", "expected bytes; the function returned str"),
        (list[float], np.zeros(2), "expected a list (.tolist() makes a list); the function returned ndarray"),
        (list[int], [1, "b"], "the function returned element 1, str 'b'"),
        (Vector, [1.0], "its hint is Annotated[NDArray[np.float32], Shape('n')], so expected a numpy array"),
        (Vector, np.zeros((2, 2), np.float32), "expected shape (n,); the function returned an array of shape (2, 2)"),
        (Vector, np.array(["a"]), "expected float32, or a dtype that can be cast to it by casting='same_kind'"),
        (Vector, np.zeros(2, np.complex64), "returned an array of complex64"),
        (Annotated[NDArray[np.int8], Shape(2)], np.zeros(3, np.int8), "expected shape (2,)"),
        (Annotated[NDArray[np.int8], Shape(2)], np.zeros(2), "returned an array of float64"),
        (Annotated[NDArray[np.str_], Shape(2)], np.zeros(2), "expected strings"),
        (Pair, ("a", np.zeros(1, np.float32)), "by its hint, the function returns a Pair; it returned tuple"),
        (
            Answer,
            {"text": "a"},
            "a Answer with the keys text, raw, count, share, known, small, words; it returned list",
        ),
        (Answer, "a", "a Answer, which is a dictionary; it returned str"),
    ],
)
def test_what_the_function_returns_is_held_against_its_hint(hint: Any, result: Any, text: str) -> None:
    def infer(x: float) -> Any:
        return result

    infer.__annotations__["return"] = hint
    with pytest.raises(PyTritonValidationError) as caught:
        Harness(model(infer)).infer({"x": [1]})
    assert str(caught.value).startswith("Model 'infer'")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "result", "expected"),
    [
        (float, 1, [1.0]),
        (float, np.float32(1.5), [1.5]),
        (float, np.array(1.5), [1.5]),
        (int, np.int8(3), [3]),
        (bool, np.True_, [True]),
        (list[float], (1, 2.5), [1.0, 2.5]),
        (list[str], [], []),
        (Vector, np.array([1.5, 2.5]), [1.5, 2.5]),
        (Vector, np.array([1, 2]), [1.0, 2.0]),
    ],
)
def test_what_can_be_cast_by_the_same_kind_is_cast(hint: Any, result: Any, expected: list[Any]) -> None:
    def infer(x: float) -> Any:
        return result

    infer.__annotations__["return"] = hint
    assert Harness(model(infer)).infer({"x": [1]})["output"].tolist() == expected


@pytest.mark.parametrize(
    ("hint", "result"),
    [
        (Annotated[NDArray[np.int8], Shape(1)], np.array([257])),
        (Annotated[NDArray[np.float32], Shape(1)], np.array([1e300])),
        (Annotated[np.float32, "a scalar"], 1e300),
        (list[np.float16], [1.0, 1e5]),
    ],
)
def test_a_value_that_the_cast_changes_is_told_of(hint: Any, result: Any) -> None:
    def infer(x: float) -> Any:
        return result

    infer.__annotations__["return"] = hint
    with pytest.warns(UserWarning, match="has values of .* has not, which a server sends as others"):
        Harness(model(infer)).infer({"x": [1]})


def test_a_batch_has_an_output_for_each_sample() -> None:
    @model(batched=True)
    def short(x: list[float]) -> list[float]:
        return x[1:]

    with pytest.raises(PyTritonValidationError, match="output"):
        Harness(short).infer({"x": [[1], [2]]})


def test_a_description_may_be_given_again_but_not_another_one() -> None:
    signature = get_model_signature(softmax)
    assert Harness(softmax, signature.inputs, signature.outputs, ModelConfig(max_batch_size=2), model_name="other")
    with pytest.raises(PyTritonValidationError, match=r"its inputs are logits: FP32\[-1\]; given were x: FP32\[-1\]"):
        Harness(softmax, [Tensor((-1,), np.float32, "x")])
    with pytest.raises(PyTritonValidationError, match="its outputs are"):
        Harness(softmax, outputs=[Tensor((2,), np.float32, "output")])
    with pytest.raises(PyTritonValidationError, match=r"served with batching=True; the given configuration says batch"):
        Harness(softmax, config=ModelConfig(batching=False))
    with pytest.raises(PyTritonValidationError, match="decoupled=False"):
        Harness(softmax, config=ModelConfig(decoupled=True))
