"""Requests that differ in length, under `@batch` of a model with a `Cost`: padded, packed, and cut back."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import Shape, batch, get_model_signature, group_by_keys, group_by_values, model
from pytriton.decorators._ragged import RaggedBatch
from pytriton.decorators.testing import Harness
from pytriton.exceptions import PyTritonBadParameterError, PyTritonBatchSizeError, PyTritonValidationError
from pytriton.model_config import Cost, ModelConfig, Tensor
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

Array = NDArray[Any]
X = Tensor((-1,), np.int32, "x")
SUM, LONG = Tensor((1,), np.int32, "sum"), Tensor((-1,), np.int32, "long")
COST = Cost("x", limit=100)


def harness(infer: Any, cost: Cost, inputs: list[Tensor] | None = None, outputs: list[Tensor] | None = None) -> Harness:
    config = ModelConfig(max_batch_size=64, cost=cost)
    return Harness(infer, inputs=inputs or [X], outputs=outputs or [LONG, SUM], config=config)


def request(*rows: list[int], name: str = "x") -> dict[str, Any]:
    return {name: np.array(rows, np.int32).reshape(len(rows), -1)}


REQUESTS = [request([1, 2, 3]), request([4], [5]), request([])]


def test_padded() -> None:
    seen: dict[str, Any] = {}

    @batch
    def infer(x: Array, lengths: Array, mask: Array) -> dict[str, Array]:
        seen.update(x=x, lengths=lengths, mask=mask)
        return {"long": x + 1, "sum": x.sum(1, keepdims=True)}

    cost = replace(COST, pad=-7, lengths="lengths", mask="mask", outputs=["long"])
    answers = harness(infer, cost).infer(REQUESTS)
    assert seen["x"].tolist() == [[1, 2, 3], [4, -7, -7], [5, -7, -7], [-7, -7, -7]]
    assert seen["x"].dtype == np.int32
    assert seen["lengths"].dtype == np.int64
    assert seen["lengths"].tolist() == [3, 1, 1, 0]
    assert seen["mask"].tolist() == [[True] * 3, [True, False, False], [True, False, False], [False] * 3]
    assert [answer["long"].tolist() for answer in answers] == [[[2, 3, 4]], [[5], [6]], [[]]]
    assert [answer["sum"].tolist() for answer in answers] == [[[6]], [[-10], [-9]], [[-21]]]


def test_packed() -> None:
    seen: dict[str, Any] = {}

    @batch
    def infer(x: Array, begins: Array) -> dict[str, Array]:
        seen.update(x=x, begins=begins)
        return {"long": x * 2, "sum": np.diff(begins)[:, None].astype(np.int32)}

    cost = replace(COST, layout="packed", offsets="begins", outputs=["long"])
    answers = harness(infer, cost).infer(REQUESTS)
    assert seen["x"].tolist() == [1, 2, 3, 4, 5]
    assert seen["begins"].tolist() == [0, 3, 4, 5, 5]
    assert [answer["long"].tolist() for answer in answers] == [[[2, 4, 6]], [[8], [10]], [[]]]
    assert [answer["sum"].tolist() for answer in answers] == [[[3]], [[1], [1]], [[0]]]


def test_several_free_sizes_and_strings() -> None:
    seen: dict[str, Any] = {}

    @batch
    def infer(image: Array, text: Array, sizes: Array) -> dict[str, Array]:
        seen.update(image=image, text=text, sizes=sizes)
        return {"out": image[:, :, 0]}

    cost = Cost("image", 100, pad={"image": 0.5}, lengths="sizes", outputs=["out"])
    inputs = [Tensor((-1, 2, -1), np.float32, "image"), Tensor((-1,), bytes, "text")]
    ways = [
        {"image": np.full((1, *shape), value, np.float32), "text": np.array([text], object)}
        for shape, value, text in (((1, 2, 3), 1, [b"a", b"b"]), ((3, 2, 1), 2, [b"c"]))
    ]
    answers = harness(infer, cost, inputs, [Tensor((-1, -1), np.float32, "out")]).infer(ways)
    assert seen["sizes"].tolist() == [[1, 3], [3, 1]]
    expected = np.full((2, 3, 2, 3), 0.5)
    expected[0, 0], expected[1, :, :, 0] = 1, 2
    assert seen["image"].tolist() == expected.tolist()
    assert seen["text"].tolist() == [[b"a", b"b"], [b"c", b""]]
    assert [answer["out"].shape for answer in answers] == [(1, 1, 3), (1, 3, 1)]


def test_a_helper_of_the_callable_is_asked_for_what_it_takes() -> None:
    @batch
    def shift(offset: Array) -> dict[str, Array]:
        return {"shifted": offset + 1}

    @batch
    def infer(x: Array, lengths: Array) -> dict[str, Array]:
        (answer,) = shift([{"offset": lengths[:, None]}])
        return {"long": x, "sum": answer["shifted"].astype(np.int32)}

    answers = harness(infer, replace(COST, lengths="lengths", outputs=["long"])).infer(REQUESTS)
    assert [answer["sum"].tolist() for answer in answers] == [[[4]], [[2], [2]], [[1]]]


def test_a_request_may_leave_out_all_that_has_a_length() -> None:
    @batch
    def infer(kind: Array, lengths: Array, x: Array | None = None) -> dict[str, Array]:
        return {"sum": lengths[:, None].astype(np.int32)}

    inputs = [Tensor((-1,), np.int32, "x", optional=True), Tensor((1,), np.int32, "kind")]
    (answer,) = harness(infer, replace(COST, lengths="lengths"), inputs, [SUM]).infer([request([3], name="kind")])
    assert answer["sum"].tolist() == [[0]]


@pytest.mark.parametrize("kind", ["S4", object])
def test_padded_arrays_have_the_dtype_that_holds_all_of_them(kind: Any) -> None:
    config = TritonModelConfig("m", inputs=[TensorSpec("x", (-1,), bytes)], outputs=[], cost=COST)
    joined = RaggedBatch(config, [{"x": np.array([[b"a"]], "S1")}, {"x": np.array([[b"long", b"b"]], kind)}])
    assert joined.inputs["x"].tolist() == [[b"a", b""], [b"long", b"b"]]


def test_below_and_above_it_other_decorators_work() -> None:
    @group_by_keys
    @batch
    @group_by_values("kind")
    def infer(x: Array, kind: Array, lengths: Array, more: Array | None = None) -> dict[str, Array]:
        assert len(set(kind.ravel().tolist())) == 1
        return {"long": x if more is None else x + more, "sum": lengths[:, None].astype(np.int32)}

    inputs = [X, Tensor((1,), np.int32, "kind"), Tensor((-1,), np.int32, "more", optional=True)]
    cost = Cost(["x", "more"], 100, lengths="lengths", outputs=["long"])
    asked = [
        {**request([1, 2]), **request([1], name="kind")},
        {**request([3]), **request([2], name="kind")},
        {**request([4, 5, 6]), **request([1], name="kind"), **request([1, 1, 1], name="more")},
    ]
    answers = harness(infer, cost, inputs).infer(asked)
    assert [answer["long"].tolist() for answer in answers] == [[[1, 2]], [[3]], [[5, 6, 7]]]
    assert [answer["sum"].item() for answer in answers] == [2, 1, 3]


@pytest.mark.parametrize(
    ("outputs", "error", "problem"),
    [
        ({"long": np.zeros((4, 2))}, PyTritonValidationError, r"shape \(4, 2\), expected \[3\] along the free sizes"),
        ({"long": np.zeros((3, 3))}, PyTritonBatchSizeError, "long: 3"),
        ({"sum": np.zeros((5, 1)), "long": np.zeros((4, 3))}, PyTritonBatchSizeError, "Expected batch size: 4"),
    ],
)
def test_outputs_of_a_wrong_size_are_named(outputs: dict[str, Any], error: type[Exception], problem: str) -> None:
    @batch
    def infer(x: Array) -> dict[str, Array]:
        return outputs

    with pytest.raises(error, match=problem):
        harness(infer, replace(COST, outputs=["long"])).infer(REQUESTS)


def test_packed_outputs_of_a_wrong_size_are_named() -> None:
    @batch
    def infer(x: Array, begins: Array) -> dict[str, Array]:
        return {"long": x[1:]}

    cost = replace(COST, layout="packed", offsets="begins", outputs=["long"])
    with pytest.raises(PyTritonValidationError, match="expected 5 along its first axis, the sum of the lengths"):
        harness(infer, cost).infer(REQUESTS)


@pytest.mark.parametrize("value", [None, "text", {"long": 1}, [1, 2], [np.zeros(3), np.zeros(2)], 3, np.float32(3)])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["long", "sum"])
def test_outputs_that_are_no_arrays_are_named(kind: str, name: str, value: Any) -> None:
    costs = {
        "plain": None,
        "padded": replace(COST, outputs=["long"]),
        "packed": replace(COST, layout="packed", offsets="begins", outputs=["long"]),
    }
    right = {"long": np.zeros((5,) if kind == "packed" else (4, 3)), "sum": np.zeros((4, 1))}

    @batch
    def infer(**inputs: Any) -> dict[str, Any]:
        return {**right, name: value}

    config = ModelConfig(max_batch_size=64, cost=costs[kind])
    served = Harness(infer, inputs=[X], outputs=[LONG, SUM], config=config)
    is_packed = kind == "packed" and name == "long"
    asked = REQUESTS if costs[kind] else [request([1], [2], [3], [4])]
    problem = rf"Output '{name}' .*expected a numpy array of shape \({5 if is_packed else 4}, \.\.\.\).*; received "
    problem += type(value).__name__ if type(value) is not np.float32 else "ndarray"
    if not is_packed and isinstance(value, list) and isinstance(value[0], np.ndarray):
        problem = rf"Output '{name}' is ragged: row 0 has the shape \(3,\), row 1 the shape \(2,\)"
    elif is_packed and isinstance(value, np.generic):
        problem = r"Output 'long' .* the shape \(\), expected 5 along its first axis"
    with pytest.raises(PyTritonValidationError, match=problem):
        served.infer(asked)


def test_lengths_that_differ_within_a_request() -> None:
    @batch
    def infer(x: Array, z: Array) -> dict[str, Array]:
        raise AssertionError

    wrong = {**request([1, 2]), **request([1], name="z")}
    inputs = [X, Tensor((-1,), np.int32, "z")]
    with pytest.raises(PyTritonValidationError, match=r"request 1 have different lengths: \{'x': \(2,\), 'z': \(1,\)"):
        harness(infer, Cost(["x", "z"], 9), inputs).infer([{**request([1]), **request([1], name="z")}, wrong])


INPUTS = [TensorSpec("x", (-1,), np.int32), TensorSpec("y", (-1, 3), np.float32), TensorSpec("z", (2,), np.int32)]
OUTPUTS = [
    TensorSpec("long", (-1,), np.int32),
    TensorSpec("sum", (1,), np.int32),
    TensorSpec("square", (-1, -1), np.int32),
]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"limit": 0}, "Cost.limit=0 is not accepted: it must be an integer of at least 1"),
        ({"overhead": 0}, "Cost.overhead=0"),
        ({"layout": "long"}, "Cost.layout='long' is not accepted: it must be 'padded' or 'packed'"),
        ({"oversize": "drop"}, "Cost.oversize='drop' is not accepted: it must be 'refuse' or 'alone'"),
        ({"inputs": "nothing"}, "inputs of the model with a free size"),
        ({"inputs": "z"}, r"The inputs are 'x' \(-1,\), 'y' \(-1, 3\), 'z' \(2,\)"),
        ({"inputs": []}, "the name of an input, or several"),
        ({"inputs": 3}, "names of inputs"),
        ({"outputs": "long"}, "names of outputs"),
        ({"outputs": ["sum"]}, "outputs of the model with a free size"),
        ({"outputs": ["other"]}, "outputs of the model with a free size"),
        ({"outputs": ["square"]}, r"as many free sizes.* 'square' has the shape \(-1, -1\), input 'x' \(-1,\)"),
        ({"pad": "0"}, "a number, or numbers by names of inputs"),
        ({"pad": {"other": 0}}, "numbers by names of inputs of the model"),
        ({"pad": 0.5}, "a value of int32, the dtype of input 'x'"),
        ({"pad": 2**40}, "a value of int32"),
        ({"pad": float("nan")}, "a value of int32"),
        ({"lengths": "x"}, "no name of an input"),
        ({"lengths": "n", "mask": "n"}, "different names of arguments"),
        ({"lengths": "not a name"}, "different names of arguments"),
        ({"offsets": "o"}, "None where inputs are padded"),
        ({"layout": "packed"}, "a name for the offsets"),
        ({"layout": "packed", "offsets": "o", "mask": "m"}, "nothing is padded"),
        ({"layout": "packed", "offsets": "o"}, "input 'y'"),
    ],
)
def test_values_that_break_a_rule(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=problem):
        replace(COST, **fields).validate(INPUTS, OUTPUTS)


def test_values_that_are_right() -> None:
    replace(COST, inputs=["x", "y"], pad={"y": 0.5}, outputs=["long"], overhead=3).validate(INPUTS, OUTPUTS)
    assert COST.fields()["inputs"] == "x"
    assert Cost(**COST.fields()).fields() == COST.fields()
    assert type(replace(COST, pad=np.float32(0.5)).fields()["pad"]) is float


def test_triton_joins_inputs_with_free_sizes() -> None:
    config = TritonModelConfig("m", inputs=INPUTS, outputs=OUTPUTS, cost=COST)
    ragged = [each.get("allow_ragged_batch") for each in ModelConfigGenerator(config).get_config()["input"]]
    assert ragged == [True, True, None]
    assert "allow_ragged_batch: true" in ModelConfigGenerator(config).get_text()


Rows = Annotated[NDArray[np.int32], Shape("batch", "tokens")]


def test_hints() -> None:
    @model(batched=True, cost=Cost("x", 9, lengths="lengths"))
    def double(x: Rows, lengths: Any) -> Rows:
        assert lengths.tolist() == [2, 1]
        return 2 * x

    read = get_model_signature(double)
    assert [tensor.name for tensor in read.inputs] == ["x"]
    answers = Harness(double).infer([request([1, 2]), request([3])])
    assert [answer["output"].tolist() for answer in answers] == [[[2, 4]], [[6]]]


def test_another_cost_than_the_hints_were_read_with() -> None:
    @model(batched=True, cost=Cost("x", 9))
    def double(x: Rows) -> Rows:
        return 2 * x

    @model(batched=True)
    def plain(x: Rows) -> Rows:
        return 2 * x

    def serve(served: Any, cost: Any) -> list[Any]:
        asked = [request([1, 2]), request([3])]
        answers = Harness(served, config=replace(get_model_signature(served).config, cost=cost)).infer(asked)
        return [answer["output"].tolist() for answer in answers]

    own = get_model_signature(double).config.cost
    assert own is not None
    assert serve(double, replace(own, limit=7, pad=1, oversize="alone")) == [[[2, 4]], [[6]]]
    for served, cost in ((double, Cost("x", 9)), (double, replace(own, lengths="n")), (plain, own)):
        # The output would be as long as that of another caller.
        with pytest.raises(PyTritonValidationError, match=r"change no more of it than limit, overhead, oversize"):
            serve(served, cost)


def test_hints_that_do_not_go_with_it() -> None:
    def double(x: Rows) -> Rows:
        return 2 * x

    for problem, options in (
        ("names 'mask', for which there is no parameter among", {"batched": True, "cost": Cost("x", 9, mask="mask")}),
        ("is for batched=True", {"max_batch_size": 4, "cost": Cost("x", 9)}),
        ("packed ones have no batch axis", {"batched": True, "cost": Cost("x", 9, layout="packed", offsets="x")}),
        ("has to be a Cost, or None", {"batched": True, "cost": 9}),
    ):
        with pytest.raises(PyTritonBadParameterError, match=problem):
            model(**options)(double)


Images = Annotated[NDArray[np.int32], Shape("batch", "h", "w")]


@pytest.mark.parametrize(
    ("image", "sizes", "problem"),
    [
        (False, ("tokens", "tokens"), r"which are \(tokens\); it has \(tokens, tokens\)\. Write it so"),
        (False, ("beams", "tokens"), r"it has \(beams, tokens\)"),
        (False, ("tokens", -1), r"it has \(tokens, -1\)"),
        (True, ("w",), r"which are \(h, w\); it has \(w\)"),
        (True, ("w", "h"), r"it has \(w, h\)"),
        (True, ("other",), r"it has \(other\)"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_hints_of_outputs_that_cannot_be_cut(image: bool, sizes: Any, problem: str, listed: bool) -> None:
    hint = Annotated[NDArray[np.int32], Shape("batch", *sizes)]

    def infer(x: Any, z: Annotated[NDArray[np.int32], Shape("batch", "other")]) -> Any:
        raise AssertionError

    infer.__annotations__.update({"x": Images if image else Rows, "return": hint})
    with pytest.raises(PyTritonBadParameterError, match=problem if not listed else "output"):
        model(batched=True, cost=Cost("x", 9, outputs=["output"] if listed else ()))(infer)


def test_hints_of_outputs_that_are_cut() -> None:
    def cost_of(sizes: Any, outputs: Any = ()) -> Any:
        def infer(x: Images) -> Any:
            raise AssertionError

        infer.__annotations__["return"] = Annotated[NDArray[np.int32], Shape("batch", *sizes)]
        cost = get_model_signature(model(batched=True, cost=Cost("x", 9, outputs=outputs))(infer)).config.cost
        return [] if cost is None else list(cost.outputs)

    assert cost_of(("h", 3, "w")) == ["output"]
    assert cost_of(("classes",)) == []
    assert cost_of((-1, -1), ["output"]) == ["output"]


def test_callables_without_the_argument_are_refused_when_they_are_bound() -> None:
    @batch
    def infer(x: Array) -> dict[str, Array]:
        return {"sum": x}

    with pytest.raises(PyTritonValidationError, match="it has no parameter for 'lengths'"):
        harness(infer, replace(COST, lengths="lengths"))


def test_callables_of_requests_are_told_that_nothing_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    harness(lambda requests: [{"sum": each["x"][:, :1]} for each in requests], replace(COST, lengths="lengths"))
    assert "nothing pads or packs the requests" in caplog.text
