"""Texts of users on their way to callers and logs, whatever is in them."""

from __future__ import annotations

from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.runtime import texts
from pytriton.proxy_backend.runtime.texts import error_text, is_utf8, shortened, shown
from pytriton.proxy_backend.wire import layout

ENCODED = 7 << 10
# What gRPC leaves as it is in a header.
PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def encoded_size(raw: bytes) -> int:
    return len(quote_from_bytes(raw, safe=PLAIN))


@given(st.binary(max_size=300))
def test_the_encoded_size_is_that_of_grpc(raw: bytes) -> None:
    assert texts._encoded_size(raw) == encoded_size(raw)
    assert texts._encoded_size(bytes(range(256))) == 94 + 162 * 3


@pytest.mark.parametrize(
    ("character", "most"),
    [("a", min(layout.MAX_TEXT, ENCODED)), ("%", ENCODED // 3), ("\xe9", ENCODED // 6), ("\u20ac", ENCODED // 9)],
)
def test_a_text_is_whole_up_to_what_fits(character: str, most: int) -> None:
    whole = character * most
    assert shortened(whole) == whole
    for more in (1, 2, 3, 100, 10_000):
        cut = shortened("<" + character * (most + more) + ">")
        assert (cut[0], cut[-1]) == ("<", ">")
        begin, _, end = cut.partition(" [...] ")
        assert 2 < len(end) / len(begin) < 4
        raw = cut.encode()
        assert len(raw) <= layout.MAX_TEXT
        assert encoded_size(raw) <= ENCODED
        # Not much shorter than it has to be.
        assert len(raw) > min(layout.MAX_TEXT, most * len(character.encode()), ENCODED // 3) - 20


@given(st.text(st.characters(), max_size=100))
def test_short_texts_stay_as_far_as_utf8_has_them(text: str) -> None:
    kept = shortened(text)
    assert "\0" not in kept
    assert kept == text.encode("utf-8", "replace").decode().replace("\0", "\\0")
    assert is_utf8(text) is (text.encode("utf-8", "replace") == text.encode("utf-8", "surrogatepass"))


def test_the_half_of_a_pair_is_no_text() -> None:
    assert [is_utf8(text) for text in ("", "a", "\xe9", "\U0001f600", "\ud83d", "a\ude00")] == [True] * 4 + [False] * 2


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError

    __repr__ = __str__


def test_a_text_that_cannot_be_told_is_told_of() -> None:
    assert error_text(ValueError("so")) == "so"
    assert error_text(Silent()) == "<its text cannot be told: __str__ raised KeyError>"
    assert shown(Silent()) == "<__repr__ raised KeyError>"


def test_long_values_are_cut() -> None:
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("x" * 199) == repr("x" * 199)[:200] + "..."
