import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import Tensor


def test_dtype_is_the_scalar_type() -> None:
    assert Tensor((1,), np.dtype("float32")).dtype is np.float32
    assert Tensor((1,), np.float32).dtype is np.float32
    assert Tensor((1,), "float32").dtype is np.float32
    assert Tensor((1,), int).dtype is np.int64
    assert Tensor((1,), bytes).dtype is bytes
    assert Tensor((1,), object).dtype is object
    assert Tensor((1,), np.bytes_).dtype is np.bytes_


def test_arguments_by_place_and_defaults() -> None:
    tensor = Tensor((-1, 3), np.uint8, "image", True)
    assert (tensor.shape, tensor.dtype, tensor.name, tensor.optional) == ((-1, 3), np.uint8, "image", True)
    assert Tensor(dtype=np.uint8, shape=(1,)) == Tensor((1,), np.uint8, None, False)


def test_it_is_frozen_hashable_and_pickles() -> None:
    tensor = Tensor((1, 2), "int8", "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.name = "y"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(tensor)) == tensor
    assert len({tensor, Tensor((1, 2), np.int8, "x")}) == 1


def test_shapes_of_other_iterables_become_tuples() -> None:
    shape: Any = [np.int64(3), -1]
    tensor = Tensor(shape, np.float32)
    assert tensor.shape == (3, -1)
    assert all(type(size) is int for size in tensor.shape)


@pytest.mark.parametrize("shape", [3, "12", b"12", None, (0,), (-2,), (1.5,), (True,), (1, "2"), (2**63,)])
def test_bad_shapes(shape: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Tensor\.shape=.*at least 1, or -1") as caught:
        Tensor(shape, np.float32)
    assert caught.value.parameter == "Tensor.shape"
    assert caught.value.value == shape


@pytest.mark.parametrize("dtype", [np.complex64, np.datetime64, "float33"])
def test_bad_dtypes_are_refused_at_construction(dtype: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Tensor\.dtype=.*Accepted: .*float32"):
        Tensor((1,), dtype)


@pytest.mark.parametrize("name", ["", 3, "a\0b"])
def test_bad_names(name: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Tensor\.name="):
        Tensor((1,), np.float32, name)


def test_optional_is_yes_or_no() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Tensor\.optional='no'"):
        Tensor((1,), np.float32, optional="no")  # type: ignore[arg-type] # wrong on purpose
    assert Tensor((1,), np.float32, optional=None).optional is None
