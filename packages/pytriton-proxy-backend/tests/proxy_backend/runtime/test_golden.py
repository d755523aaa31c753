"""The answers to a warm-up that a process gave, and those of the processes that follow it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.errors import GoldenError
from pytriton.proxy_backend.runtime.results.golden import Golden


def record(*responses: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a process records, through JSON."""
    found: list[dict[str, Any]] = []
    golden = Golden(1e-3, None, found.append)
    for outputs in responses:
        golden.take(outputs)
    golden.finish()
    answers: list[dict[str, Any]] = json.loads(json.dumps(found))
    return answers


def compare(known: list[dict[str, Any]], *responses: dict[str, Any], tolerance: float = 1e-3) -> None:
    golden = Golden(tolerance, known, lambda _: pytest.fail("nothing is recorded"))
    for outputs in responses:
        golden.take(outputs)
    golden.finish()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(7.5, np.float16),
        np.array([np.nan, np.inf, 1.0]),
        np.zeros((0, 4), np.int64),
        np.array([[True], [False]]),
        np.array([b"one", b"\xff\x00", b"x" * 1000], object),
        np.arange(100_000, dtype=np.uint8).reshape(10, -1),
        np.array([b"%d" % number for number in range(2000)], object),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    ],
)
def test_the_same_answer_is_known(value: Any) -> None:
    compare(record({"y": value}), {"y": value.copy()})


def test_fractions_may_be_apart_by_the_tolerance() -> None:
    known = record({"y": np.array([1.0, 1000.0, 0.0], np.float32)})
    compare(known, {"y": np.array([1.0009, 1000.9, 0.0009], np.float32)})
    compare(known, {"y": np.array([1.0, 1400.0, 0.0], np.float32)}, tolerance=0.5)
    # However large the others are.
    with pytest.raises(GoldenError, match=r"expected 0\.0 at \[2\], got 0\.0015.*; 1 of 3 .*"):
        compare(known, {"y": np.array([1.0, 1000.0, 0.0015], np.float32)})
    with pytest.raises(GoldenError, match=r"expected 1000\.0 at \[1\], got 1002\.0; 1 of 3 .* the tolerance 0\.001"):
        compare(known, {"y": np.array([1.0, 1002.0, 0.0], np.float32)})


def test_what_is_small_may_be_apart_by_little() -> None:
    """Shares of many classes are all far below the tolerance."""
    shares = np.random.default_rng(7).dirichlet(np.ones(4000)).astype(np.float32)
    known = record({"y": shares, "z": np.zeros(3)})
    compare(known, {"y": shares * np.float32(1.0005), "z": np.zeros(3)})
    with pytest.raises(GoldenError, match=r"output 'y'.* of 4000 compared elements differ by more than the tolerance"):
        compare(known, {"y": np.roll(shares, 1), "z": np.zeros(3)})
    with pytest.raises(GoldenError, match=r"output 'z'.*expected 0\.0 at \[0\], got 0\.0001; 3 of 3"):
        compare(known, {"y": shares, "z": np.full(3, 1e-4)})


def test_texts_are_compared_whatever_array_has_them() -> None:
    texts = ["cat", "a text that is longer than what fits into the element of an array of such texts", "dog"]
    arrays = [np.array(texts), np.array([each.encode() for each in texts])]
    if hasattr(np.dtypes, "StringDType"):
        arrays.append(np.array(texts, np.dtypes.StringDType()))
    for array in arrays:
        known = record({"y": array})
        assert known == record({"y": np.array([each.encode() for each in texts], object)})
        compare(known, {"y": array.copy()})
        other = array.copy()
        other[1] = other[0]
        with pytest.raises(GoldenError, match=r"expected 'a text that .*' at \[1\], got 'cat'; 1 of 3"):
            compare(known, {"y": other})


def test_a_type_that_numpy_has_not_is_compared_by_its_values() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    known = record({"y": np.array([1.0, 1000.0], bfloat16)})
    compare(known, {"y": np.array([1.0, 1004.0], bfloat16)}, tolerance=0.01)
    with pytest.raises(GoldenError, match=r"expected 1000\.0 at \[1\], got 1200\.0"):
        compare(known, {"y": np.array([1.0, 1200.0], bfloat16)}, tolerance=0.01)


@pytest.mark.parametrize(
    ("value", "other", "told"),
    [
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [5, 5]]), r"expected 3 at \[1, 0\], got 5; 2 of 4 compared"),
        (np.array([[1.0]]), np.array([[1.0, 2.0]]), r"expected shape \[1, 1\], got \[1, 2\]"),
        (np.array([1.0]), np.array([1.0], np.float32), "expected dtype 'float64', got 'float32'"),
        (np.array([1.0]), np.array([np.nan]), r"expected 1\.0 at \[0\], got nan"),
        (np.array([b"cat"], object), np.array([b"dog"], object), r"expected 'cat' at \[0\], got 'dog'; 1 of 1"),
        (np.array([b"x" * 99], object), np.array([b"x" * 98 + b"y"], object), r"expected 'x{40}\.\.\.' at \[0\]"),
        (np.array(3), np.array(4), r"expected 3 at \[\], got 4"),
        (np.array([np.inf], np.float16), np.array([1.0], np.float16), r"expected inf at \[0\], got 1\.0"),
    ],
)
def test_another_answer_is_told(value: Any, other: Any, told: str) -> None:
    with pytest.raises(GoldenError, match=rf"^output 'y' \(number 2 of the warm-up\): {told}"):
        compare(record({"x": np.ones(1), "y": value}), {"x": np.ones(1), "y": other})


def test_an_element_of_a_large_output_is_named_by_its_place() -> None:
    value = np.arange(1_000_000, dtype=np.int64).reshape(1000, 1000)
    known = record({"y": value})
    assert len(json.dumps(known)) < 60_000
    value[-1, -1] = 0
    with pytest.raises(GoldenError, match=r"expected 999999 at \[999, 999\], got 0; 1 of 4096 compared"):
        compare(known, {"y": value})
    value[-1, -1], value[0, 0] = 999999, 7
    with pytest.raises(GoldenError, match=r"expected 0 at \[0, 0\], got 7; 1 of 4096 compared"):
        compare(known, {"y": value})
    texts = np.array([b"%d" % number for number in range(10_000)], object).reshape(100, 100)
    known = record({"y": texts})
    texts[-1, -1] = b"other"
    with pytest.raises(GoldenError, match=r"expected '9999' at \[99, 99\], got 'other'; 1 of 512 compared"):
        compare(known, {"y": texts})


def test_numbers_beside_those_that_are_none() -> None:
    known = record({"y": np.array([np.nan, np.inf, 1.0])})
    compare(known, {"y": np.array([np.nan, np.inf, 1.0005])})
    with pytest.raises(GoldenError, match=r"expected 1\.0 at \[2\], got 1\.5; 1 of 3"):
        compare(known, {"y": np.array([np.nan, np.inf, 1.5])})


def test_records_of_earlier_releases_are_known() -> None:
    known = [
        {
            "output": "label",
            "dtype": "bytes",
            "shape": [2],
            "data": [["77af778b51abd4a3", "cat"], ["bd913ff68243d41b", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"]],
        },
        {"output": "y", "dtype": "float32", "shape": [1, 2], "data": "AACAPwAAAEA="},
    ]
    answer = {"label": np.array([b"cat", b"x" * 40], object), "y": np.array([[1, 2]], np.float32)}
    assert record(answer) == known
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert record({"y": np.array([[1, 2]], bfloat16)}) == known[1:]


def test_other_outputs_and_other_numbers_of_them() -> None:
    known = record({"y": np.ones(1)}, {"y": np.ones(1)})
    with pytest.raises(GoldenError, match="expected output 'y', got 'z'"):
        compare(known, {"y": np.ones(1)}, {"z": np.ones(1)})
    with pytest.raises(GoldenError, match="expected 2 outputs in all warm-up requests, got 1"):
        compare(known, {"y": np.ones(1)})
    with pytest.raises(GoldenError, match="expected 2 outputs in all warm-up requests, got 3"):
        compare(known, *[{"y": np.ones(1)}] * 3)


def test_no_more_than_a_number_of_outputs_is_recorded() -> None:
    many = [{"y": np.full(1, number)} for number in range(100)]
    known = record(*many)
    assert len(known) == 64
    compare(known, *many)
    with pytest.raises(GoldenError, match="expected 64 outputs"):
        compare(known, *many[:63])
