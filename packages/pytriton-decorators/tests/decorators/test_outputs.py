import collections
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import batch, convert_output
from pytriton.exceptions import PyTritonValidationError
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
