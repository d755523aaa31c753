from collections.abc import Callable
from contextvars import copy_context
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import batch, fill_optionals, get_requests, group_by_keys, sample
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

INPUTS = [
    TensorSpec("x", (1,), np.float32),
    TensorSpec("t", (1,), np.float32, optional=True),
    TensorSpec("wide", (2, -1), np.int64, optional=True),
    TensorSpec("text", (1,), np.bytes_, optional=True),
]


def served(infer: Any, *, batching: bool = True, inputs: Any = INPUTS) -> Callable[..., Any]:
    context = copy_context()
    context.run(set_served_model, infer, TritonModelConfig("filled", batching=batching, inputs=inputs))
    return lambda *args, **kwargs: context.run(infer, *args, **kwargs)


def x(*values: float) -> Any:
    return np.array([[value] for value in values], np.float32)


T = np.array([7], np.float32)


def test_only_what_is_missing_is_filled_in() -> None:
    infer = served(fill_optionals(t=T)(batch(lambda x, t: {"y": x, "t": t})))
    results = infer([{"x": x(1, 2)}, {"x": x(3), "t": x(9)}, {"x": x(4)}])
    assert [result["t"].tolist() for result in results] == [[[7], [7]], [[9]], [[7]]]
    assert results[0]["t"].dtype == np.float32


def test_several_defaults_of_several_shapes() -> None:
    wide = np.array([[1, 2, 3], [4, 5, 6]])
    infer = served(fill_optionals(t=T, wide=wide)(batch(lambda **inputs: inputs)))
    (result,) = infer([{"x": x(1, 2)}])
    assert result["wide"].tolist() == [wide.tolist()] * 2
    assert result["t"].tolist() == [[7], [7]]
    results = infer([{"x": x(1), "t": x(1)}, {"x": x(2), "wide": wide[None]}, {"x": x(3)}])
    assert [result["t"].item() for result in results] == [1, 7, 7]
    assert [result["wide"].shape for result in results] == [(1, 2, 3)] * 3


@pytest.mark.parametrize("text", [np.array([b"a"]), np.array(["a"]), np.array([b"a"], object), np.array(["a"], object)])
def test_strings_come_as_the_server_sends_them(text: Any) -> None:
    infer = served(fill_optionals(text=text)(batch(lambda x, text: {"text": text})))
    result = infer([{"x": x(1, 2)}])[0]["text"]
    assert result.dtype == object
    assert result.tolist() == [[b"a"], [b"a"]]


def test_the_requests_are_not_changed(request_type: Any) -> None:
    bare, data, read_only = {"x": x(1)}, {"x": x(2)}, MappingProxyType({"x": x(3)})
    requests = [bare, request_type(data, {"name": "b"}), read_only, {"x": x(4), "t": x(8)}]
    seen: list[Any] = []

    def infer(requests: Any) -> Any:
        seen.extend(requests)
        assert get_requests() is requests
        return [one["t"].item() for one in requests]

    assert served(fill_optionals(t=T)(infer))(requests) == [7, 7, 7, 8]
    assert [sorted(one) for one in (bare, data, read_only)] == [["x"]] * 3
    # What else a request has comes along; one that has all inputs is the request itself.
    assert seen[1].parameters == {"name": "b"}
    assert isinstance(seen[1], request_type)
    assert seen[3] is requests[3]


def test_a_dictionary_with_more_than_its_items() -> None:
    class Request(dict[str, Any]):
        parameters: Any = None

    one = Request(x=x(1))
    one.parameters = {"name": "a"}
    (seen,) = served(fill_optionals(t=T)(lambda requests: requests))([one])
    assert (type(seen), seen.parameters, sorted(seen)) == (Request, {"name": "a"}, ["t", "x"])
    assert sorted(one) == ["x"]


def test_a_request_that_keeps_its_attributes_in_slots() -> None:
    class Request:
        __slots__ = ("data", "parameters")

        def __init__(self, data: Any, parameters: Any) -> None:
            self.data = data
            self.parameters = parameters

    one = Request({"x": x(1)}, {"name": "a"})
    (seen,) = served(fill_optionals(t=T)(lambda requests: requests))([one])
    assert (type(seen), seen.parameters, sorted(seen.data)) == (Request, {"name": "a"}, ["t", "x"])
    assert sorted(one.data) == ["x"]


def test_callables_may_write_into_what_was_filled_in() -> None:
    def infer(requests: Any) -> Any:
        for one in requests:
            one["t"] += 1
        return [one["t"].tolist() for one in requests]

    decorated = served(fill_optionals(t=T)(infer))
    for _ in range(2):
        assert decorated([{"x": x(1)}, {"x": x(2, 3)}]) == [[[8]], [[8], [8]]]
    assert T.tolist() == [7]


def test_without_batching_there_is_no_batch_axis() -> None:
    infer = served(fill_optionals(t=T)(sample(lambda x, t: {"t": t})), batching=False)
    assert infer([{"x": np.zeros(1, np.float32)}])[0]["t"].tolist() == [7]


def test_a_request_without_inputs_is_one_row() -> None:
    assert served(fill_optionals(t=T)(batch(lambda t: {"t": t})))([{}, {}])[1]["t"].tolist() == [[7]]


def test_under_group_by_keys_and_above_it() -> None:
    def infer(x: Any, t: Any, wide: Any = None) -> Any:
        return {"y": x * 0 + (0 if wide is None else 1), "t": t}

    for decorated in (
        group_by_keys(fill_optionals(t=T)(batch(infer))),
        fill_optionals(t=T)(group_by_keys(batch(infer))),
    ):
        wide = np.zeros((1, 2, 1), np.int64)
        results = served(decorated)([{"x": x(1)}, {"x": x(2), "wide": wide}, {"x": x(3), "t": x(3)}])
        assert [(result["y"].item(), result["t"].item()) for result in results] == [(0, 7), (1, 7), (0, 3)]


def test_below_batch_where_all_lack_it() -> None:
    infer = served(batch(fill_optionals(t=T)(lambda x, t: {"t": t})))
    assert infer([{"x": x(1, 2)}, {"x": x(3)}])[0]["t"].tolist() == [[7], [7]]
    assert infer([{"x": x(1), "t": x(5)}])[0]["t"].tolist() == [[5]]
    infer = served(sample(fill_optionals(t=T)(lambda x, t: {"t": t})), batching=False)
    assert infer([{"x": np.zeros(1)}])[0]["t"].tolist() == [7]


def test_a_server_that_has_the_batch_in_one_piece(request_type: Any) -> None:
    @fill_optionals(t=T)
    @batch
    def infer(x: Any, t: Any) -> Any:
        return {"t": t + len(get_requests()), "seen": np.array([sorted(one) for one in get_requests()])[:, :1]}

    made: list[Any] = [request_type({"x": x(1)}), request_type({"x": x(2, 3)})]
    context = copy_context()
    context.run(set_served_model, infer, TritonModelConfig("filled", inputs=INPUTS))

    def call(**inputs: Any) -> Any:
        return context.run(infer.__pytriton_whole__, inputs, [1, 1], lambda: made)  # type: ignore[attr-defined] # not for users

    whole = call(x=x(1, 2))
    assert type(whole) is dict
    assert whole["t"].tolist() == [[9], [9]]
    assert whole["seen"].tolist() == [["t"], ["t"]]
    assert call(x=x(1, 2), t=x(3, 4))["t"].tolist() == [[5], [6]]
    assert sorted(made[0]) == ["x"]


class TestErrors:
    @pytest.mark.parametrize(
        ("defaults", "message"),
        [
            ({"typo": T}, r"'typo' has to be for an input of model 'filled', which has \['t'.*'x'\]; received one for"),
            ({"t": 7.0}, r"'t' has to be a numpy array of shape \(1,\); received a float 7\.0"),
            ({"t": np.float32(7)}, r"'t' has to be a numpy array"),
            ({"t": [7.0]}, r"received a list \[7\.0\]"),
            ({"t": np.array([7.0])}, r"'t' has to be of dtype float32; received one of dtype float64"),
            ({"t": np.array([[7]], np.float32)}, r"shape \(1,\), without a batch axis; received one of shape \(1, 1\)"),
            ({"t": np.array([7, 8], np.float32)}, r"received one of shape \(2,\)"),
            ({"wide": np.zeros((3, 1), np.int64)}, r"shape \(2, -1\)"),
            ({"text": np.array([1])}, r"array of strings"),
            ({"text": np.array([1], object)}, r"'text' has to be an array of strings \(bytes\)"),
        ],
        ids=repr,
    )
    def test_a_default_that_does_not_fit(self, defaults: Any, message: str) -> None:
        # The decorator cannot know before the callable is bound.
        decorated = fill_optionals(**defaults)(batch(lambda x, **_: {"y": x}))
        with pytest.raises(PyTritonBadParameterError, match=message) as caught:
            served(decorated)([{"x": x(1)}])
        assert caught.value.parameter == next(iter(defaults))

    def test_another_model_is_checked_again(self) -> None:
        decorated = fill_optionals(t=T)(batch(lambda x, t: {"y": t}))
        assert served(decorated)([{"x": x(1)}])[0]["y"].item() == 7
        with pytest.raises(PyTritonBadParameterError, match="float16"):
            served(decorated, inputs=[TensorSpec("t", (1,), np.float16)])([{"x": x(1)}])

    def test_not_bound(self) -> None:
        with pytest.raises(PyTritonValidationError, match=r"not bound.*pytriton\.decorators\.testing"):
            fill_optionals(t=T)(batch(lambda x, t: {"y": t}))([{"x": x(1)}])

    def test_no_defaults(self) -> None:
        with pytest.raises(PyTritonBadParameterError, match="expected defaults by input name"):
            fill_optionals()

    def test_no_list_of_requests(self) -> None:
        with pytest.raises(PyTritonValidationError, match="@fill_optionals expected a list"):
            served(fill_optionals(t=T)(batch(lambda x, t: {"y": t})))({"x": x(1)})
