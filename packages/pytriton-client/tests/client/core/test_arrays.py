from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.client._core.arrays import to_wire_array
from pytriton.client._core.spec import TensorSpec
from pytriton.client.exceptions import PyTritonClientValueError


class Foreign:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array if dtype is None else self.array.astype(dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ([1, 2], np.float32, [1.0, 2.0]),
        ([True, False], np.bool_, [True, False]),
        ([True, 2], np.int8, [1, 2]),
        ([1.5], np.float16, [1.5]),
        ([0.1], np.float32, [np.float32(0.1)]),
        ([float("nan"), float("inf")], np.float16, [np.nan, np.inf]),
        ([-128, 127], np.int8, [-128, 127]),
        ([2**64 - 1], np.uint64, [2**64 - 1]),
        (((1, 2), (3, 4)), np.uint8, [[1, 2], [3, 4]]),
        ([], np.int32, []),
        ([[], []], np.int32, [[], []]),
        (np.int64(3), np.float32, [3.0]),
        (np.array([1, 2], np.int16), np.int64, [1, 2]),
        (np.array([1, 2], ">f4"), np.float32, [1, 2]),
        (np.array([1, 2], ">i2"), np.float32, [1, 2]),
        (Foreign(np.array([1, 2], np.float32)), np.float64, [1.0, 2.0]),
        ([np.array([1.0], np.float64)], np.float32, [[1.0]]),
    ],
)
def test_numbers(value: Any, dtype: Any, expected: Any) -> None:
    array = to_wire_array(value, TensorSpec("x", (-1,), dtype))
    assert array.dtype == np.dtype(dtype)
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, np.array(expected, dtype))


def test_array_of_the_right_type_is_not_copied() -> None:
    array = np.zeros((2, 3), np.float32).T
    assert to_wire_array(array, TensorSpec("x", (3, 2), np.float32)) is array
    text = np.array([b"a"], dtype=object)
    assert to_wire_array(text, TensorSpec("x", (1,), np.bytes_)) is text


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1.5], np.int32),
        ([300], np.uint8),
        ([-1], np.uint64),
        ([-1], np.uint8),
        ([2**63], np.int64),
        ([2**64], np.uint64),
        ([1e39], np.float32),
        ([1], np.bool_),
        (["1"], np.float32),
        ([b"1"], np.int32),
        ([None], np.float32),
        ([[1], [1, 2]], np.float32),
        ([1 + 2j], np.float64),
        ({"a": 1}, np.float32),
        (np.array([1.0]), np.float32),
        (np.array([1], np.int64), np.int32),
        (np.array([1], np.int64), np.float32),
        (np.array(["a"]), np.float32),
        (np.array([1], object), np.int64),
        (Foreign(np.array([1.0])), np.float32),
    ],
)
def test_numbers_that_do_not_fit(value: Any, dtype: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="Input 'x': expected") as caught:
        to_wire_array(value, TensorSpec("x", (-1,), dtype))
    assert caught.value.input_name == "x"
    assert np.dtype(dtype).name in str(caught.value.expected)
    assert caught.value.received


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (np.array([0.5]), np.float32, [0.5]),
        (np.array([0.1]), np.float16, [0.1]),
        (np.array([np.nan, np.inf]), np.float32, [np.nan, np.inf]),
        (np.array([1, -2]), np.int32, [1, -2]),
        (np.array([1, -2]), np.float32, [1, -2]),
        (np.array([1], np.int8), np.int64, [1]),
        (Foreign(np.array([1.0])), np.float32, [1.0]),
    ],
)
def test_arrays_of_the_same_kind(value: Any, dtype: Any, expected: Any) -> None:
    array = to_wire_array(value, TensorSpec("x", (-1,), dtype), "same_kind")
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, np.array(expected, dtype))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.array([1.0]), np.int64),
        (np.array([1e39]), np.float32),
        (np.array([2**40]), np.int32),
        (np.array([-1]), np.uint8),
        (np.array(["a"]), np.float32),
    ],
)
def test_arrays_of_another_kind_or_range(value: Any, dtype: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="Input 'x': expected"):
        to_wire_array(value, TensorSpec("x", (-1,), dtype), "same_kind")


def test_the_error_names_the_option_where_that_would_help() -> None:
    tensor = TensorSpec("x", (-1,), np.float32)
    option = r"\.astype\(np\.float32\), or call client\.with_options\(casting=\"same_kind\"\)\."
    with pytest.raises(PyTritonClientValueError, match=option):
        to_wire_array(np.array([1.0]), tensor)
    with pytest.raises(PyTritonClientValueError, match=r"\.astype\(np\.float32\)\.$"):
        to_wire_array(np.array([1 + 0j]), tensor)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", b"b"], [b"a", b"b"]),
        ([b"a\0"], [b"a\0"]),
        ("ü", ["ü".encode()]),
        (b"\xff\0", [b"\xff\0"]),
        ([["a"], ["bc"]], [[b"a"], [b"bc"]]),
        ([], []),
        (np.array(["a", "ü"]), [b"a", "ü".encode()]),
        (np.array([["ab", "c"], ["d", "e"]]).T, [[b"ab", b"d"], [b"c", b"e"]]),
        (np.array(["a", b"b\0"], object), [b"a", b"b\0"]),
        (np.zeros((0, 2), object), np.zeros((0, 2))),
        (np.array([b"ab", b"c"]), [b"ab", b"c"]),
        (bytearray(b"a\0"), [b"a\0"]),
        (memoryview(b"ab"), [b"ab"]),
        ([bytearray(b"ab"), bytearray(b"cd")], [b"ab", b"cd"]),
        ([bytearray(b"a"), bytearray(b"bcd")], [b"a", b"bcd"]),
        ([b"a", bytearray(b"b"), memoryview(b"c"), "d"], [b"a", b"b", b"c", b"d"]),
        ([[bytearray(b"a")], [memoryview(b"b")]], [[b"a"], [b"b"]]),
    ],
)
def test_strings(value: Any, expected: Any) -> None:
    array = to_wire_array(value, TensorSpec("x", (-1,), np.bytes_))
    assert array.shape == np.shape(expected)
    assert array.tolist() == (expected if isinstance(expected, list) else expected.tolist())


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no StringDType")
def test_variable_width_strings() -> None:
    array = np.array(["a", "ü" * 40], np.dtype("T"))
    assert to_wire_array(array, TensorSpec("x", (-1,), np.bytes_)).tolist() == [b"a", ("ü" * 40).encode()]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.array([b"a", "b", 3], object), "int 3 as element 2"),
        ([None], "NoneType None as element 0"),
        (["\ud800"], "as element 0"),
        (np.array([1.0]), "an array of float64"),
        ([["a"], ["b", "c"]], ""),
        ([1], "int 1 as element 0"),
        ([[1, 2], [3, 4]], "int 1 as element 0"),
    ],
)
def test_strings_that_are_none(value: Any, where: str) -> None:
    with pytest.raises(PyTritonClientValueError, match="Input 'x': expected") as caught:
        to_wire_array(value, TensorSpec("x", (-1,), np.bytes_))
    assert where in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float64, np.bytes_])
@pytest.mark.parametrize("casting", ["safe", "same_kind"])
def test_a_mask_is_not_dropped(dtype: Any, casting: Any) -> None:
    """numpy.asarray gives what lies below a mask, which nobody wants to be sent."""
    tensor = TensorSpec("x", (-1,), dtype)
    values = np.array([b"1", b"2", b"3"]).astype(dtype)
    with pytest.raises(PyTritonClientValueError, match=r"'x'.*a value in every place.*1 masked.*filled"):
        to_wire_array(np.ma.array(values, mask=[False, True, False]), tensor, casting)
    assert to_wire_array(np.ma.array(values, mask=[False] * 3), tensor, casting).tolist() == values.tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.bytes_])
def test_what_another_library_says_comes_with_the_name_of_the_input(dtype: Any) -> None:
    class OnADevice:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("it lies on a device")

    with pytest.raises(PyTritonClientValueError, match=r"Input 'x': expected.*RuntimeError: it lies on a device"):
        to_wire_array(OnADevice(), TensorSpec("x", (-1,), dtype))


def test_scalar_takes_the_rank_of_the_tensor() -> None:
    assert to_wire_array(1, TensorSpec("x", (1, -1), np.int32)).shape == (1, 1)
    assert to_wire_array("a", TensorSpec("x", (1,), np.bytes_)).shape == (1,)
    # What cannot be one element is left for the server to refuse, and so is an array without axes.
    assert to_wire_array(1, TensorSpec("x", (2,), np.int32)).shape == ()
    assert to_wire_array(np.array(1, np.int32), TensorSpec("x", (1,), np.int32)).shape == ()


def test_advice_names_a_type_that_there_is() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, name in ((np.float32, "np.float32"), (ml_dtypes.bfloat16, "ml_dtypes.bfloat16")):
        with pytest.raises(PyTritonClientValueError) as refused:
            to_wire_array(np.zeros(1, np.complex128), TensorSpec("x", (-1,), dtype))
        assert f".astype({name})" in str(refused.value)


U64, I64 = np.uint64, np.int64


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2**63], U64),
        ([2**64 - 1, 0], U64),
        ([[1, 2**63 - 1], [2**63 + 1, 2**53 + 1]], U64),
        ([np.uint64(2**63), np.int64(1)], U64),
        ((2**64 - 1, True), U64),
        ([2**63 - 1, -(2**63)], I64),
    ],
)
def test_whole_numbers_are_exact(value: Any, dtype: Any) -> None:
    array = to_wire_array(value, TensorSpec("x", (-1,), dtype))
    assert array.dtype == dtype
    assert array.tolist() == [list(map(int, row)) if isinstance(row, list) else int(row) for row in value]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ([1, 2**64], U64, "in the range of uint64"),
        ([-1, 2**63], U64, "in the range of uint64"),
        ([2**63, 1], I64, "in the range of int64"),
        ([2**70], np.int8, "in the range of int8"),
        ([65520], np.float16, "in the range of float16"),
        ([1, 2**63, 0.5], U64, "reads as float64"),
        ([1, 2**70, None], U64, "reads as object"),
    ],
)
def test_whole_numbers_that_do_not_fit(value: Any, dtype: Any, expected: str) -> None:
    with pytest.raises(PyTritonClientValueError, match=expected):
        to_wire_array(value, TensorSpec("x", (-1,), dtype))


@pytest.mark.parametrize(
    ("value", "dtype", "is_advised"),
    [
        (np.array([-1]), np.uint8, False),
        (np.array([256]), np.uint8, False),
        (np.array([255]), np.uint8, True),
        (np.array([1.5]), I64, False),
        (np.array([1e30]), I64, False),
        (np.array([np.nan]), I64, False),
        (np.array([2.0]), I64, True),
        (np.array([1e300]), np.float32, False),
        (np.array([70000]), np.float16, False),
        (np.array([0.1]), np.float32, True),
        (np.array([2**63], U64), I64, False),
        (np.array([1j]), np.float32, False),
        (np.array([2]), np.bool_, False),
        (np.array([1]), np.bool_, True),
        (np.array(["1"]), np.float32, False),
    ],
)
def test_a_conversion_is_advised_where_it_keeps_the_values(value: Any, dtype: Any, is_advised: bool) -> None:
    with pytest.raises(PyTritonClientValueError) as refused:
        to_wire_array(value, TensorSpec("x", (-1,), dtype))
    assert (".astype(" in refused.value.message) is is_advised


@pytest.mark.parametrize(
    ("hint", "value", "texts"),
    [
        ("dict", {"a": [1, "é"]}, ['{"a": [1, "\\u00e9"]}']),
        ("dict[str, Any]", [{"a": 1}, {}], ['{"a": 1}', "{}"]),
        ("dict", '{"a": 1}', ['{"a": 1}']),
        ("list[dict]", [{"a": 1}, {"b": 2}], ['[{"a": 1}, {"b": 2}]']),
        ("list[dict[str, Any]]", [], ["[]"]),
        ("list[dict]", [[{"a": 1}], []], ['[{"a": 1}]', "[]"]),
        ("list[dict]", ["[]", b"[{}]"], ["[]", "[{}]"]),
        ("list[dict]", [["[]"], [b"[{}]"]], ["[]", "[{}]"]),
    ],
)
def test_what_the_author_takes_as_a_dictionary_is_sent_as_json(hint: str, value: Any, texts: list[str]) -> None:
    array = to_wire_array(value, TensorSpec("x", (1,), np.bytes_, hint=hint))
    assert [element.decode() if isinstance(element, bytes) else element for element in array.ravel().tolist()] == texts


@pytest.mark.parametrize(
    ("hint", "value", "told"),
    [
        (
            "dict",
            {"a": {1}},
            "expected what JSON can say (its hint is dict), received dict {'a': {1}} (Object of type set",
        ),
        ("dict", {"a": float("nan")}, "what JSON can say"),
        ("list[dict]", [{"a": object()}], "what JSON can say"),
        ("str", {"a": 1}, "expected bytes or str (its hint is str), received dict {'a': 1}."),
        ("", {"a": 1}, "expected bytes or str, received dict {'a': 1}."),
    ],
)
def test_what_json_cannot_say_is_refused(hint: str, value: Any, told: str) -> None:
    with pytest.raises(PyTritonClientValueError) as caught:
        to_wire_array(value, TensorSpec("x", (1,), np.bytes_, hint=hint))
    assert told in str(caught.value)
