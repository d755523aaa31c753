import collections
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import ConstantPadder, Shape, batch, convert_output, group_by_values, model
from pytriton.decorators.testing import Harness
from pytriton.exceptions import PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.model_config.triton_model_config import TritonModelConfig


def test_a_dictionary_passes_through() -> None:
    outputs = {"x": np.zeros(1)}
    assert convert_output(outputs) is outputs


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_or_tuple_is_named(kind: Any, model_config: TritonModelConfig) -> None:
    outputs = kind((np.zeros(1), np.ones(1)))
    converted = convert_output(outputs, model_config=model_config)
    assert list(converted) == ["total", "difference"]
    assert converted["difference"] is outputs[1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number(count: int, model_config: TritonModelConfig) -> None:
    with pytest.raises(
        PyTritonValidationError, match=rf"Outputs length different than config outputs length.*{count} arrays.*'adder'"
    ) as caught:
        convert_output([np.zeros(1)] * count, model_config=model_config)
    assert caught.value.expected == ["total", "difference"]
    assert caught.value.received == count


def test_names_are_needed_and_the_callable_is_not_bound() -> None:
    with pytest.raises(PyTritonValidationError, match="not bound"):
        convert_output([np.zeros(1)], wrapped=print)


@pytest.mark.parametrize("outputs", [None, 1, np.zeros(1), {1, 2}], ids=repr)
def test_other_types(outputs: Any, model_config: TritonModelConfig) -> None:
    with pytest.raises(PyTritonValidationError, match="Unsupported output type <class") as caught:
        convert_output(outputs, model_config=model_config)
    assert caught.value.received is type(outputs)


class Column:
    """An array of another library: numpy can read it, and its rows are not split as those of numpy."""

    def __init__(self, elements: list[int]) -> None:
        self.elements = elements

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.elements, dtype)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
def test_arrays_of_other_libraries_are_split_in_any_mapping(kind: Any) -> None:
    @batch
    def made(x: Any) -> Any:
        return kind({"y": Column(list(range(len(x))))})

    first, second = made([{"x": np.zeros((2, 1))}, {"x": np.zeros((1, 1))}])
    assert [each["y"].tolist() for each in (first, second)] == [[0, 1], [2]]


Rows = Annotated[NDArray[np.float64], Shape("batch", 1)]


class TestMasks:
    """A mask reaches whoever refuses it: numpy.asarray gives what lies below, which nobody wants to be sent."""

    @staticmethod
    def requests(count: int = 2) -> list[Any]:
        return [{"x": [[number]]} for number in range(count)]

    @staticmethod
    def masked(x: Any) -> Any:
        return {"y": np.ma.array(x + 0.5, mask=x == 1)}

    @pytest.mark.parametrize("decorators", [[batch], [batch, group_by_values("x")]])
    def test_in_an_answer(self, decorators: Any) -> None:
        infer: Any = self.masked
        for decorator in reversed(decorators):
            infer = decorator(infer)
        harness = Harness(infer, [Tensor((1,), np.int64, "x")], [Tensor((1,), np.float64, "y")])
        assert harness.infer(self.requests(1))[0]["y"].tolist() == [[0.5]]
        with pytest.raises(PyTritonValidationError, match=r"'y' of request 1.*masked"):
            harness.infer(self.requests())

    def test_in_a_group_that_is_padded(self) -> None:
        harness = Harness(batch(group_by_values("x", pad_fn=ConstantPadder())(self.masked)))
        with pytest.raises(PyTritonRuntimeError, match=r"'y'.*masked values"):
            harness.infer(self.requests())

    def test_in_a_request(self) -> None:
        with pytest.raises(PyTritonValidationError, match=r"'x' of request 0.*masked"):
            Harness(batch(self.masked)).infer([{"x": np.ma.array([[1]], mask=[[True]])}])

    def test_under_hints(self) -> None:
        @model(batched=True)
        def hinted(x: Rows) -> Rows:
            return np.ma.array(x, mask=x == 1)

        assert Harness(hinted).infer([{"x": [[0.0]]}])[0]["output"].tolist() == [[0.0]]
        with pytest.raises(PyTritonValidationError, match="masked"):
            Harness(hinted).infer([{"x": [[1.0]]}])

    def test_in_text_that_no_client_could_read(self) -> None:
        with pytest.raises(PyTritonValidationError, match=r"'y' of request 0 has no form in UTF-8 at place 0"):
            Harness(batch(lambda x: {"y": np.array([["\ud800"]], object)})).infer(self.requests(1))


def test_strings_in_lists_reach_the_callable_whole() -> None:
    """numpy cuts zero bytes at the end of bytes and text in lists, and cannot mix the two; a client does both."""
    texts = [[b"a\0"], ["b\0"], [b"\xff"], ["é"], [b""]]
    harness = Harness(batch(lambda x: {"y": x}), [Tensor((1,), bytes, "x")], [Tensor((1,), bytes, "y")])
    assert harness.infer([{"x": texts}])[0]["y"].tolist() == [[b"a\0"], [b"b\0"], [b"\xff"], ["é".encode()], [b""]]
    with pytest.raises(PyTritonValidationError, match="a int at place 1, expected bytes or str"):
        harness.infer([{"x": [["a"], [1]]}])
