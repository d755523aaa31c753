# mypy: disable-error-code="empty-body"
import functools
import json
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import jaxtyping
import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import NotRequired

from pytriton.decorators import ModelOptions, Shape, batch, first_value, get_model_signature, model, sample
from pytriton.decorators.serving import find_signature
from pytriton.decorators.testing import Harness
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

Image = Annotated[NDArray[np.uint8], Shape("height", "width", 3)]
Embeddings = jaxtyping.Float32[np.ndarray, "batch 384"]
UserId = NewType("UserId", int)


def hinted(hint: Any, returns: Any = float, name: str = "x") -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(f"def function({name}): ...", namespace)
    function: Callable[..., Any] = namespace["function"]
    function.__annotations__ = {name: hint, "return": returns}
    return function


def input_of(hint: Any, *, batched: bool = False) -> Tensor:
    returns = list[float] if batched else float
    (tensor,) = get_model_signature(model(batched=batched)(hinted(hint, returns))).inputs
    return tensor


@pytest.mark.parametrize(
    ("hint", "shape", "dtype"),
    [
        (str, (1,), bytes),
        (bytes, (1,), bytes),
        (bool, (1,), np.bool_),
        (int, (1,), np.int64),
        (float, (1,), np.float64),
        (np.float32, (1,), np.float32),
        (UserId, (1,), np.int64),
        (list[str], (-1,), bytes),
        (list[int], (-1,), np.int64),
        (Image, (-1, -1, 3), np.uint8),
        (Annotated[NDArray[np.float32], Shape(-1)], (-1,), np.float32),
        (Annotated[NDArray[np.float32], "ignored", Shape(2, 2), 7], (2, 2), np.float32),
        (Annotated[NDArray[np.float32], Shape()], (1,), np.float32),
        (Annotated[NDArray[np.str_], Shape(2)], (2,), bytes),
        (Annotated[NDArray[np.object_], Shape(2)], (2,), bytes),
        (np.ndarray[tuple[int, int], np.dtype[np.int8]], (-1, -1), np.int8),
        (jaxtyping.Float32[np.ndarray, "n 3"], (-1, 3), np.float32),
        (jaxtyping.Bool[np.ndarray, "rows=4 _ n-1 #m"], (4, -1, -1, -1), np.bool_),
        (jaxtyping.UInt8[np.ndarray, ""], (1,), np.uint8),
    ],
)
def test_a_hint_of_one_sample_is_a_tensor(hint: Any, shape: tuple[int, ...], dtype: Any) -> None:
    assert input_of(hint) == Tensor(shape, dtype, "x")
    assert input_of(hint | None) == Tensor(shape, dtype, "x", True)


@pytest.mark.parametrize(
    ("hint", "shape", "dtype"),
    [
        (list[str], (1,), bytes),
        (list[np.float32], (1,), np.float32),
        (Annotated[NDArray[np.float32], Shape("batch")], (1,), np.float32),
        (Annotated[NDArray[np.float32], Shape("batch", -1, 3)], (-1, 3), np.float32),
        (Annotated[NDArray[np.float32], Shape("n", 3)], (3,), np.float32),
        (np.ndarray[tuple[int, int], np.dtype[np.int8]], (-1,), np.int8),
        (jaxtyping.Float32[np.ndarray, "b 3"], (3,), np.float32),
    ],
)
def test_a_hint_of_a_batch_is_a_tensor_without_the_axis_of_the_batch(
    hint: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    assert input_of(hint, batched=True) == Tensor(shape, dtype, "x")


@pytest.mark.parametrize(
    ("hint", "shown", "why"),
    [
        (set, "set", "not understood"),
        (dict[int, str], "dict[int, str]", "not understood"),
        (Any, "Any", "not understood"),
        (Literal["a"], "Literal['a']", "not understood"),
        (None, "NoneType", "not understood"),
        (list[list[str]], "list[list[str]]", "plain elements"),
        (int | str, "int | str", "only a union with None"),
        (int | str | None, "int | str | None", "only a union with None"),
        (np.ndarray, "np.ndarray", "neither the dtype nor the shape"),
        (NDArray[np.float32], "NDArray[np.float32]", "not say the shape"),
        (NDArray[Any], "NDArray[Any]", "not say the dtype"),
        (Annotated[NDArray[np.floating[Any]], Shape(1)], "floating[Any]], Shape(1)]", "no such element type"),
        (np.complex64, "np.complex64", "no such element type"),
        (Annotated[float, Shape(1)], "Annotated[float, Shape(1)]", "a Shape is for arrays"),
        (Annotated[Image, Shape(1)], "Shape(1)]", "more than one Shape"),
        (Annotated[NDArray[np.int8], Shape("batch", 2)], "Shape('batch', 2)]", "say @model(batched=True)"),
        ("Missing", "'Missing'", "name 'Missing' is not defined"),
        (jaxtyping.Float[np.ndarray, "n"], "Float[ndarray, 'n']", "one dtype"),
        (jaxtyping.Shaped[np.ndarray, "n"], "Shaped[ndarray, 'n']", "one dtype"),
        (jaxtyping.Float32[np.ndarray, "..."], "Float32[ndarray, '...']", "a fixed number of axes"),
        (jaxtyping.Float32[np.ndarray, "*n 3"], "Float32[ndarray, '*n 3']", "a fixed number of axes"),
        (jaxtyping.Float32[list, "n"], "Float32[list, 'n']", "annotate them as np.ndarray"),
    ],
)
def test_a_hint_that_is_not_understood_is_named_with_its_parameter_and_what_is_accepted(
    hint: Any, shown: str, why: str
) -> None:
    with pytest.raises(PyTritonBadParameterError) as caught:
        get_model_signature(model(hinted(hint)))
    text = str(caught.value)
    assert text.startswith("@model: parameter 'x' of function has the hint ")
    assert f"{shown}:" in text
    assert why in text
    assert "Accepted: str, bytes, int" in text
    with pytest.raises(PyTritonBadParameterError, match="the result of function has the hint"):
        get_model_signature(model(hinted(float, hint if hint is not None else set)))


LATER = """
from __future__ import annotations
from typing import TYPE_CHECKING, TypedDict
from pytriton.decorators import get_model_signature, model
if TYPE_CHECKING:
    from collections.abc import Iterator

@model(name="counter")
def count(text: str) -> Counted:
    return {"letters": len(text)}

@model
class Counter:
    def __call__(self, text: str) -> Counted:
        return count(text)

class Bound(Counter):
    pass

@model
def stream(text: str) -> Iterator[str]:
    yield text

@model
def misspelt(text: str, times: Optinal[int]) -> str:
    return text

class Answer(TypedDict):
    size: Size

@model
def measure(text: str) -> Answer:
    return {"size": len(text)}

class Wrong(TypedDict):
    size: Siez

@model
def mistaken(text: str) -> Wrong:
    return {"size": len(text)}

class Holder:
    @model
    def count(text: str) -> Counted:
        return {"letters": len(text)}

Size = int

class Counted(TypedDict):
    letters: int
"""


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(LATER, id="as text"),
        pytest.param(
            LATER.replace("from __future__ import annotations", ""),
            id="lazy",
            marks=pytest.mark.skipif(sys.version_info < (3, 14), reason="lazily read hints came with Python 3.14"),
        ),
    ],
)
def test_a_hint_may_name_what_is_defined_later(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = ModuleType("later")
    # Where a class looks for what its members name.
    monkeypatch.setitem(sys.modules, "later", later)
    module = vars(later)
    exec(source, module)
    for target in (module["count"], module["Counter"], module["Counter"]()):
        signature = get_model_signature(target)
        assert [(it.name, it.dtype) for it in signature.outputs] == [("letters", np.int64)]
        assert get_model_signature(target) is signature
    assert get_model_signature(module["count"]).name == "counter"
    assert [it.dtype for it in get_model_signature(module["measure"]).outputs] == [np.int64]
    assert find_signature(module["Holder"]().count) is find_signature(module["Holder"].count)
    assert list(Harness(module["count"]).infer({"text": ["abc"]})["letters"]) == [3]
    # A class that inherits from a model has hints of its own, before and after those of its base were read.
    assert find_signature(module["Bound"]) is None
    for name, where, missing in (
        ("stream", "the result of stream", "Iterator"),
        ("misspelt", "parameter 'times' of misspelt", "Optinal"),
        ("mistaken", "the result of mistaken", "Siez"),
    ):
        for _ in range(2):
            with pytest.raises(PyTritonBadParameterError) as caught:
                get_model_signature(module[name])
            text = str(caught.value)
            assert text.startswith(f"@model: {where} has the hint ")
            assert f"name '{missing}' is not defined" in text
            assert "TYPE_CHECKING" in text


@pytest.mark.skipif(sys.version_info < (3, 14), reason="lazily read hints came with Python 3.14")
def test_a_lazy_hint_may_name_what_a_function_defines_later() -> None:
    source = """
def make():
    @model
    def count(text: str) -> Counted:
        return {"letters": len(text)}

    class Counted(TypedDict):
        letters: int

    return count
"""
    module: dict[str, Any] = {"model": model, "TypedDict": TypedDict}
    exec(source, module)
    assert [it.name for it in get_model_signature(module["make"]()).outputs] == ["letters"]


@pytest.mark.parametrize(
    ("hint", "value", "wrong"),
    [
        (dict, {"a": [1, None]}, ["[]", "1", "{", "[" * 100_000]),
        (dict[str, Any], {}, ["[{}]"]),
        (list[dict], [{"a": "ü"}, {}], ["{}", "[1]", "[{}, null]"]),  # type: ignore[type-arg]
        (list[dict[str, Any]], [], ['"x"']),
    ],
)
def test_dictionaries_travel_as_json(hint: Any, value: Any, wrong: list[str]) -> None:
    def same(x: Any) -> Any:
        return x

    same.__annotations__ = {"x": hint, "return": hint}
    served = model(same)
    [tensor] = get_model_signature(served).inputs
    assert (tensor.dtype, tensor.shape) == (bytes, (1,))
    harness = Harness(served)
    assert json.loads(harness.infer({"x": [json.dumps(value)]})["output"][0]) == value
    for text in wrong:
        with pytest.raises(
            Exception, match=r"Input 'x': its hint is .*, so expected the text of a JSON (object|array)"
        ):
            harness.infer({"x": [text]})
    with pytest.raises(PyTritonBadParameterError, match="JSON is taken as text"):
        model(batched=True)(same)


@pytest.mark.parametrize("result", [[], "{}", {"a": object()}, {"a": float("nan")}])
def test_what_is_no_json_is_not_sent(result: Any) -> None:
    @model
    def made(x: str) -> dict:  # type: ignore[type-arg]
        return result  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="output 'output': its hint is dict, so expected a dictionary"):
        Harness(made).infer({"x": ["y"]})


@pytest.mark.parametrize("hint", [str, float, Annotated[NDArray[np.int8], Shape(-1, 2)], Image | None])
def test_a_hint_of_one_sample_is_none_of_a_batch(hint: Any) -> None:
    if hint == Image | None:
        assert input_of(hint, batched=True).optional  # its first axis has a name
        return
    with pytest.raises(PyTritonBadParameterError, match=r"batched=True.*(list\[str\]|Shape\(\"batch\", -1\))"):
        input_of(hint, batched=True)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="aliases made with `type` came with Python 3.12")
def test_aliases_stand_for_what_they_name() -> None:
    namespace: dict[str, Any] = {"Annotated": Annotated, "Image": Image, "NDArray": NDArray, "Shape": Shape}
    exec("type Picture = Image\ntype Two[T] = Annotated[NDArray[T], Shape(2)]", namespace)
    assert input_of(namespace["Picture"]) == input_of(Image)
    assert input_of(namespace["Two"][np.int8] | None) == Tensor((2,), np.int8, "x", True)
    with pytest.raises(PyTritonBadParameterError, match=r"the hint Two\[np.complex64\]: Triton has no such element"):
        input_of(namespace["Two"][np.complex64])


@pytest.mark.parametrize("size", [0, -2, True, 1.5, "two words", None])
def test_a_shape_has_sizes_and_names(size: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match="sizes of at least 1"):
        Shape(3, size)
    assert repr(Shape("n", 3)) == "Shape('n', 3)"
    assert Shape(1) == Shape(1) != Shape(2)


class Both(TypedDict):
    label: str
    score: float


class Pair(NamedTuple):
    label: str
    score: float


@dataclass
class Record:
    label: str
    score: float
    kind: typing.ClassVar[str] = "not an output"


class Step(TypedDict):
    token: str
    end: NotRequired[bool]


@pytest.mark.parametrize("returns", [Both, Pair, Record, "Pair"])
def test_several_outputs_have_the_names_of_their_members(returns: Any) -> None:
    function = hinted(float, returns)
    function.__globals__["Pair"] = Pair
    outputs = get_model_signature(model(function)).outputs
    assert outputs == (Tensor((1,), bytes, "label"), Tensor((1,), float, "score"))


def test_the_members_of_steps_of_a_stream_may_be_left_out() -> None:
    signature = get_model_signature(model(hinted(float, Iterator[Step])))
    assert [output.name for output in signature.outputs] == ["token", "end"]
    with pytest.raises(PyTritonBadParameterError, match="'end' of Step, the result of function, has the hint bool: an"):
        model(hinted(float, Step))


def test_outputs_are_hinted_and_never_none() -> None:
    with pytest.raises(PyTritonBadParameterError, match="an output cannot be None"):
        model(hinted(float, float | None))
    for returns in (None, type(None)):
        with pytest.raises(PyTritonBadParameterError, match="the result of function has no hint other than None"):
            model(hinted(float, returns))
    empty: Any = TypedDict("empty", {})
    with pytest.raises(PyTritonBadParameterError, match="has no members"):
        model(hinted(float, empty))
    for several in (tuple, tuple[str, int], tuple[float, ...]):
        with pytest.raises(PyTritonBadParameterError, match="several outputs need names; return a NamedTuple, a data"):
            model(hinted(float, several))


def test_parameters_are_inputs_by_name() -> None:
    def no_hint(x, y: float) -> float: ...  # type: ignore[no-untyped-def]
    def collecting(*xs: float) -> float: ...
    def named(**xs: float) -> float: ...
    def positional(x: float, /) -> float: ...
    def nothing() -> float: ...

    with pytest.raises(PyTritonBadParameterError, match=r"parameter 'x' of .*no_hint has no hint"):
        model(no_hint)
    for function, shown in ((collecting, "'\\*xs'"), (named, "'\\*\\*xs'"), (positional, "'x'")):
        with pytest.raises(PyTritonBadParameterError, match=f"parameter {shown} of .* is no input"):
            model(function)
    assert get_model_signature(model(nothing)).inputs == ()


def test_what_is_no_function_is_no_model() -> None:
    class Empty: ...

    class Method:
        def infer(self, x: float) -> float: ...

    def plain(x: float) -> float: ...

    with pytest.raises(PyTritonBadParameterError, match=r"class .*Empty has no method __call__"):
        model(Empty)
    kinds: tuple[Any, ...] = (staticmethod, classmethod)
    for kind in kinds:
        # Its first parameter would be taken for the object.
        with pytest.raises(PyTritonBadParameterError, match=f"is a {kind.__name__}: leave @{kind.__name__} out"):
            model(type("Bound", (), {"__call__": kind(plain)}))
    with pytest.raises(PyTritonBadParameterError, match="Decorate the class, not its method"):
        model(Method.infer)
    for other in (3, functools.partial(plain), len, Method().infer):
        with pytest.raises(PyTritonBadParameterError, match="is neither"):
            model(other)  # type: ignore[type-var]
    for decorate in (batch, sample):
        with pytest.raises(PyTritonBadParameterError, match=f"@{decorate.__name__} is below it"):
            model(decorate(plain))
    with pytest.raises(PyTritonBadParameterError, match="is no model"):
        get_model_signature(plain)
    # A callable of requests by now, as it would be of any other function.
    assert find_signature(batch(model(plain))) is None
    assert find_signature(model(plain)) is not None


def test_a_decorator_of_arrays_may_be_below() -> None:
    @model(batched=True)
    @first_value("power")
    def raised(x: Annotated[NDArray[np.int64], Shape("batch", 2)], power: list[int]) -> list[int]: ...

    assert str(get_model_signature(raised)).startswith("raised(x: INT64[2], power: list[int] as INT64[1]) -> ")


def test_the_function_is_what_it_was() -> None:
    def double(x: float) -> float:
        return 2 * x

    assert model(double) is double
    assert double(2) == 4

    @functools.wraps(double)
    def logged(*args: Any, **kwargs: Any) -> float:
        return double(*args, **kwargs)

    assert find_signature(logged) is find_signature(double)


def test_a_class_that_inherits_from_a_model_is_none() -> None:
    @model
    class Base:
        def __call__(self, x: float) -> float: ...

    class Derived(Base):
        def __call__(self, x: float) -> float: ...

    assert find_signature(Base) is find_signature(Base()) is not None
    assert find_signature(Derived) is find_signature(Derived()) is None


def test_signatures_can_be_printed() -> None:
    @model(max_batch_size=8, name="scale-2")
    def scale(image: Image, by: float = 2.0) -> Image: ...

    @model
    async def words(text: str) -> AsyncIterator[str]:
        yield text

    @model(batched=True)
    def embed(texts: list[str]) -> Embeddings: ...

    assert [str(get_model_signature(it)) for it in (scale, words, embed)] == [
        "scale-2(image: UINT8[-1, -1, 3], by?: float as FP64[1]) -> output: UINT8[-1, -1, 3]; called for each sample, "
        "max_batch_size=8",
        "words(text: str as BYTES[1]) -> output: str as BYTES[1]; called for each sample, no batching, decoupled",
        "embed(texts: list[str] as BYTES[1]) -> output: FP32[384]; called with whole batches, max_batch_size=4",
    ]


def test_options_are_those_of_the_configuration() -> None:
    follows = {"batching", "decoupled"}
    assert set(ModelOptions.__annotations__) | follows == set(ModelConfig.__dataclass_fields__)

    def plain(x: float) -> float: ...
    def stream(x: float) -> Iterator[float]: ...

    config = get_model_signature(model(max_batch_size=2, send_tracebacks=True)(plain)).config
    assert config == ModelConfig(max_batch_size=2, send_tracebacks=True)
    assert get_model_signature(model(plain)).config == ModelConfig(batching=False)
    assert get_model_signature(model(stream)).config == ModelConfig(batching=False, decoupled=True)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_batch": 2}, "no option 'max_batch'. There are: name, batched, arena_budget_bytes"),
        ({"decoupled": True}, "no option 'decoupled': it follows from the hints"),
        ({"max_batch_size": 0}, "ModelConfig.max_batch_size"),
        ({"batcher": DynamicBatcher(5)}, "batcher needs max_batch_size to join requests"),
    ]
    for options, text in wrong:
        with pytest.raises(PyTritonBadParameterError, match=text):
            model(**options)(plain)
    with pytest.raises(PyTritonBadParameterError, match="not for a generator that is called for each sample"):
        model(max_batch_size=2)(stream)


@pytest.mark.parametrize("bare", [vars(typing)["List"], vars(typing)["Dict"]])
def test_hints_of_typing_that_lack_their_arguments(bare: Any) -> None:
    def takes(x: Any) -> float:
        return 1.0

    takes.__annotations__["x"] = bare
    with pytest.raises(PyTritonBadParameterError, match=r"parameter 'x' of .*takes has the hint"):
        model(takes)

    def gives(x: float) -> Any: ...

    gives.__annotations__["return"] = bare
    with pytest.raises(PyTritonBadParameterError, match=r"the result of .*gives has the hint"):
        model(gives)


@pytest.mark.parametrize("bare", [vars(typing)[name] for name in ("Iterator", "Generator", "AsyncIterator")])
def test_a_bare_iterator_does_not_say_what_it_yields(bare: Any) -> None:
    def gives(x: float) -> Any: ...

    gives.__annotations__["return"] = bare
    with pytest.raises(PyTritonBadParameterError, match="does not say what is yielded"):
        model(gives)


def test_a_generator_is_hinted_as_one() -> None:
    def stream(x: float) -> float:  # type: ignore[misc]
        yield x

    with pytest.raises(PyTritonBadParameterError, match="a generator is hinted as Iterator"):
        model(stream)


def test_callers_know_json_however_its_hint_is_written() -> None:
    @model
    def made(
        a: dict[str, int],
        b: typing.Dict[str, Any],  # noqa: UP006 - as older code has it
        c: typing.List[typing.Dict[str, Any]],  # noqa: UP006
        d: list[dict[str, Any]],
        e: list[str],
    ) -> str:
        return ""

    hints = [tensor.hint for tensor in get_model_signature(made).inputs]
    assert hints == ["dict[str, int]", "dict[str, Any]", "list[dict[str, Any]]", "list[dict[str, Any]]", "list[str]"]
