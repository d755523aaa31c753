from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.client._core.tensors import decode_tensor, encode_tensor

TYPES = {
    "BOOL": np.array([[True], [False]]),
    "INT8": np.array([-128, 127], np.int8),
    "UINT64": np.array([2**64 - 1], np.uint64),
    "FP16": np.array([0.5, np.nan], np.float16),
    "FP64": np.arange(6.0).reshape(2, 3).T,
    "BYTES": np.array([[b"", b"a\0"], ["ü".encode(), b"\xff"]], object),
    "FP32": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("datatype", TYPES)
def test_there_and_back(datatype: str) -> None:
    array: Any = TYPES[datatype]
    again = decode_tensor(encode_tensor(array, datatype), datatype, array.shape)
    np.testing.assert_array_equal(again, array)
    assert again.dtype == array.dtype
    assert again.flags.writeable


def test_byte_strings_of_a_fixed_length() -> None:
    array = np.array([b"ab", b"c"])
    assert decode_tensor(encode_tensor(array, "BYTES"), "BYTES", (2,)).tolist() == [b"ab", b"c"]


@pytest.mark.parametrize(
    ("data", "datatype", "shape"),
    [
        (b"\1\0\0\0a", "BYTES", (2,)),
        (b"\1\0\0\0a\0", "BYTES", (1,)),
        (b"\xff\0\0\0a", "BYTES", (1,)),
        (b"\1\0", "BYTES", (1,)),
        (b"abc", "INT32", (1,)),
        (b"abcd", "INT32", (2,)),
    ],
)
def test_bytes_that_do_not_fit_the_shape(data: bytes, datatype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected|reshape|buffer"):
        decode_tensor(data, datatype, shape)
