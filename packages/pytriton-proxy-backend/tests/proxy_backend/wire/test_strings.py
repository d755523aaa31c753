"""Triton's wire form of strings."""

import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend.wire.strings import decode_strings, encode_strings

pytestmark = pytest.mark.usefixtures("both_ways")


def objects(elements: list[Any], shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array if shape is None else array.reshape(shape)


@pytest.mark.parametrize(
    ("array", "payload"),
    [
        (objects([]), b""),
        (objects([b"ab", b""]), b"\2\0\0\0ab\0\0\0\0"),
        (objects(["grüße"]), b"\7\0\0\0" + "grüße".encode()),
        (objects([bytearray(b"\0\xff")]), b"\2\0\0\0\0\xff"),
        (np.array([["a"], ["bc"]]), b"\1\0\0\0a\2\0\0\0bc"),
        (np.array([b"a", b"bc"]), b"\1\0\0\0a\2\0\0\0bc"),
        (np.array([b"xa", b"bc"])[::-1], b"\2\0\0\0bc\2\0\0\0xa"),
        (objects([b"1", b"2", b"3", b"4"], (2, 2)).T, b"\1\0\0\x001\1\0\0\x003\1\0\0\x002\1\0\0\x004"),
        (objects([np.str_("é"), np.bytes_(b"e")]), b"\2\0\0\0\xc3\xa9\1\0\0\0e"),
    ],
)
def test_encode(array: np.ndarray[Any, Any], payload: bytes) -> None:
    assert encode_strings(array) == payload


@pytest.mark.skipif(
    not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="numpy has these strings since 2.0"
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(), max_size=12), st.integers(1, 3))
def test_numpys_own_strings_are_sent_as_the_same_text_in_objects(elements: list[str], step: int) -> None:
    elements = [element for element in elements if element.isprintable() or "\0" in element]
    own = np.array(elements, np.dtypes.StringDType())
    kept = objects([element.encode() for element in own.tolist()])
    for strings, expected in ((own, kept), (own[::step], kept[::step]), (own[::-1, None], kept[::-1, None])):
        assert encode_strings(strings) == encode_strings(expected)
        assert encode_strings(strings.reshape(1, -1).T) == encode_strings(expected.reshape(1, -1).T)


@pytest.mark.parametrize("element", [None, 1, 1.5, ["a"], np.int64(3)])
def test_encode_names_the_element_that_is_no_string(element: object) -> None:
    with pytest.raises(TypeError, match=rf"element 1 .* must be bytes or str, got {type(element).__name__}"):
        encode_strings(objects([b"fine", element]))


def test_decode() -> None:
    array = decode_strings(b"\2\0\0\0ab\0\0\0\0\1\0\0\0c", (3, 1))
    assert array.shape == (3, 1)
    assert array.dtype == object
    assert array.ravel().tolist() == [b"ab", b"", b"c"]
    assert decode_strings(b"", (0, 5)).shape == (0, 5)
    assert decode_strings(b"\1\0\0\0a", ()).item() == b"a"


@pytest.mark.parametrize(
    ("payload", "shape", "reason"),
    [
        (b"", (1,), "string 0 of 1: expected 4 bytes for its length, got 0"),
        (b"\1\0\0\0a", (2,), "string 1 of 2: expected 4 bytes for its length, got 0"),
        (b"\1\0\0\0abcdef", (2,), "string 1 of 2: expected 1701077858 bytes, as its length says, got 1"),
        (b"\4\0\0\0abcdef", (2,), "string 1 of 2: expected 4 bytes for its length, got 2"),
        (b"\5\0\0\0a", (1,), "string 0 of 1: expected 5 bytes, as its length says, got 1"),
        (b"\xff\xff\xff\xff", (1,), "expected 4294967295 bytes, as its length says, got 0"),
        (b"\0\0\0\0a", (1,), "expected nothing behind its 1 strings, got 1 bytes"),
        (b"a", (0,), "expected nothing behind its 0 strings, got 1 bytes"),
        (b"", (1 << 62, 1 << 62), f"string 0 of {1 << 124}: expected 4 bytes"),
    ],
)
def test_decode_refuses_what_does_not_fit_the_shape(payload: bytes, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        decode_strings(payload, shape)
    assert reason in str(caught.value)


@given(st.lists(st.binary(max_size=20), max_size=20))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(elements: list[bytes]) -> None:
    array = objects(elements)
    assert decode_strings(encode_strings(array), array.shape).tolist() == elements


def test_elements_are_kept_no_longer_than_the_array() -> None:
    text, raw = "grüße" * 50, b"x" * 500
    before = sys.getrefcount(text), sys.getrefcount(raw)
    for _ in range(50):
        array = decode_strings(encode_strings(objects([text, raw, b"", "a"] * 10, (8, 5))), (8, 5))
    element, alone = array[0, 0], bytes(bytearray(b"alone"))
    del array
    assert sys.getrefcount(element) == sys.getrefcount(alone)
    assert (sys.getrefcount(text), sys.getrefcount(raw)) == before


@pytest.mark.parametrize("element", ["\ud800", None, 7])
def test_a_mixture_with_what_is_no_text(element: object) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        encode_strings(objects([b"a", "b", bytearray(b"c"), element]))
    assert encode_strings(objects([bytearray(b"c"), "b"])) == b"\1\0\0\0c\1\0\0\0b"


def wire_form(elements: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.slow
@given(
    st.binary(max_size=64) | st.lists(st.binary(max_size=6)).map(wire_form),
    st.lists(st.integers(0, 4) | st.integers(0, (1 << 63) - 1), max_size=4).map(tuple),
)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decode_of_anything(payload: bytes, shape: tuple[int, ...]) -> None:
    try:
        array = decode_strings(payload, shape)
    except ValueError:
        return
    assert array.shape == shape
    assert sum(4 + len(element) for element in array.ravel()) == len(payload)
