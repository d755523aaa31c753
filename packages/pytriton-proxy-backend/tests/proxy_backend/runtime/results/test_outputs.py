"""What a callable may return, and what is said about the rest."""

import re
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import Request, Response
from pytriton.proxy_backend import ModelSpec, OutputError, TensorSpec
from pytriton.proxy_backend.runtime.results.outputs import OutputChecker

F4 = np.dtype("float32")


def checker(*, strict: bool = False, batching: bool = True, decoupled: bool = False) -> OutputChecker:
    return OutputChecker(
        ModelSpec(
            name="m",
            version=1,
            inputs=(),
            outputs=(
                TensorSpec(name="y", dtype=F4, shape=(2,)),
                TensorSpec(name="label", dtype=np.dtype(object), shape=(-1,)),
            ),
            batching=batching,
            max_batch_size=8,
            strict=strict,
            decoupled=decoupled,
        )
    )


Y = np.array([[1, 2]], F4)
LABEL = np.array([[b"a"]], object)
RAGGED = np.array([np.zeros(3, F4), np.zeros(5, F4)], object)
LISTS = np.array([[1.0, 2.0], [1.0, 2.0, 3.0]], object)
ALIKE = np.frompyfunc(lambda _: np.zeros(2, F4), 1, 1)(np.zeros(2))
BOTH = [True, False]


@pytest.mark.parametrize("strict", BOTH)
def test_arrays_as_declared_pass_as_they_are(strict: bool) -> None:
    for result in ({"y": Y, "label": LABEL}, Response({"y": Y, "label": LABEL}), [Y, LABEL], (Y, LABEL)):
        outputs, parameters = checker(strict=strict).one(result, 0, None)
        assert outputs["y"] is Y
        assert outputs["label"] is LABEL
        assert parameters == {}
    request = Request({"y": Y, "label": LABEL})
    assert checker(strict=strict).one(request, 0, None)[0]["y"] is Y


@pytest.mark.parametrize("strict", BOTH)
def test_only_what_is_wanted_is_sent(strict: bool) -> None:
    assert checker(strict=strict).one({"y": Y, "label": LABEL}, 0, ["label"])[0].keys() == {"label"}
    assert checker(strict=strict).one({"y": Y, "label": LABEL}, 0, [])[0] == {}


@pytest.mark.parametrize("strict", BOTH)
def test_what_nobody_wants_may_be_left_out(strict: bool) -> None:
    for given in ({"y": Y}, {"label": LABEL}):
        assert checker(strict=strict).one(given, 0, list(given))[0].keys() == given.keys()


def test_arrays_of_other_libraries_give_their_elements_to_numpy() -> None:
    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return Y

    np.testing.assert_array_equal(checker(strict=True).one({"y": Array()}, 0, ["y"])[0]["y"], Y)


@pytest.mark.parametrize("strict", BOTH)
@pytest.mark.parametrize("label", [np.array([["a"]]), np.array([[b"a"]]), np.array([["a"]], object)])
def test_strings_of_any_kind(strict: bool, label: np.ndarray[Any, Any]) -> None:
    assert checker(strict=strict).one({"y": Y, "label": label}, 0, None)[0]["label"] is label


def test_cast_where_it_is_not_strict() -> None:
    for value in (Y.astype("f8"), Y.astype(int), Y.astype(">f4"), np.array([["1", "2"]]), Y == Y):
        output = checker().one({"y": value}, 0, None)[0]["y"]
        assert output.dtype == F4
        assert output.dtype.isnative
        assert output.shape == (1, 2)


@pytest.mark.parametrize("strict", BOTH)
def test_another_byte_order_is_the_same_type(strict: bool) -> None:
    output = checker(strict=strict).one({"y": Y.astype(">f4"), "label": LABEL}, 0, None)[0]["y"]
    assert output.dtype == F4
    assert output.dtype.isnative
    np.testing.assert_array_equal(output, Y)


@pytest.mark.parametrize("value", [np.array([[10**400]], object), np.array([[object()]], object)])
def test_objects_that_are_no_numbers(value: np.ndarray[Any, Any]) -> None:
    assert "its values cannot be cast" in str(failure({"y": value, "label": LABEL}, strict=False))


def test_not_strict_takes_shapes_and_names_as_they_come() -> None:
    outputs = checker().one({"y": np.zeros((3, 7), F4), "unknown": 5}, 0, None)[0]
    assert outputs.keys() == {"y"}
    assert outputs["y"].shape == (3, 7)


def failure(result: object, *, strict: bool, batching: bool = True) -> OutputError:
    with pytest.raises(OutputError) as caught:
        checker(strict=strict, batching=batching).one(result, 3, None)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.model_name == "m"
    assert error.request_index == 3
    for part in ("model 'm'", "request 3 of the batch", error.expected, error.received):
        assert part in str(error)
    assert error.expected
    assert error.received
    return error


@pytest.mark.parametrize(
    ("result", "stricts", "output", "expected", "received"),
    [
        (None, BOTH, None, "a dictionary, a Response", "NoneType"),
        (Y, BOTH, None, "a dictionary, a Response", "ndarray"),
        ([Y], BOTH, None, "2 (y, label)", "1"),
        ({1: Y, "label": LABEL}, [False], None, "str", "1"),
        ({"y": Y, "label": np.array([["\ud800"]], object)}, BOTH, "label", "text", "'\\ud800'"),
        ({"y": Y, "label": np.array([["\ud800"]])}, BOTH, "label", "text", "'\\ud800'"),
        (Response({"y": Y, "label": LABEL}, {"a": "\ud800"}), BOTH, None, "text", "'\\ud800'"),
        ({"y": None, "label": LABEL}, BOTH, "y", "a numpy array", "None"),
        ({"y": [[1, 2]], "label": LABEL}, BOTH, "y", "a numpy array", "list: [[1, 2]]"),
        ({"y": "x" * 500, "label": LABEL}, BOTH, "y", "a numpy array", "..."),
        ({"y": Y, "label": np.array([[1]])}, BOTH, "label", "strings", "int64"),
        ({"y": Y, "label": np.array([[None]], object)}, BOTH, "label", "bytes or str", "NoneType: None"),
        ({"y": np.float32(1), "label": LABEL}, BOTH, "y", "shape (batch, 2)", "shape ()"),
        ({"y": np.array([["no"]]), "label": LABEL}, [False], "y", "float32", "<U2"),
        ({"y": RAGGED, "label": LABEL}, [False], "y", "one array of dtype float32", "shapes (3,), (5,)"),
        ({"y": LISTS, "label": LABEL}, [False], "y", "one array of dtype float32", "lists of the shapes (2,), (3,)"),
        ({"y": ALIKE, "label": LABEL}, [False], "y", "one array of dtype float32", "arrays of the shape (2,)"),
        ({"y": np.array([[1j]]), "label": LABEL}, BOTH, "y", "float32", "complex128"),
        ({"y": Y.astype("f8"), "label": LABEL}, [True], "y", "float32", "float64"),
        ({"y": Y}, [True], None, "y, label", "y"),
        ({"y": Y, "label": LABEL, "z": Y}, [True], None, "y, label", "y, label, z"),
        ({"y": np.zeros((1, 3), F4), "label": LABEL}, [True], "y", "shape (batch, 2)", "shape (1, 3)"),
        ({"y": np.zeros(2, F4), "label": LABEL}, [True], "y", "shape (batch, 2)", "shape (2,)"),
    ],
)
def test_each_error_says_what_and_where(
    result: object, stricts: list[bool], output: str | None, expected: str, received: str
) -> None:
    for strict in stricts:
        error = failure(result, strict=strict)
        assert error.output_name == output
        assert expected in error.expected
        assert received in error.received
        if output is not None:
            assert f"output '{output}'" in str(error)


def test_without_batching_a_scalar_is_fine() -> None:
    assert checker(batching=False).one({"y": np.float32(1)}, 0, None)[0]["y"].shape == ()
    assert "shape (2)" in failure({"y": Y, "label": LABEL}, strict=True, batching=False).expected


@pytest.mark.parametrize("results", [[{}], [{}] * 3, (), None, {"y": Y}, iter([{}, {}]), Y])
def test_the_whole_result_must_be_a_list_of_the_right_length(results: object) -> None:
    with pytest.raises(OutputError, match="one element per request: expected a list of 2, got") as caught:
        checker().results(results, 2)
    assert caught.value.request_index is None


def test_lists_and_tuples_of_results() -> None:
    results = [{"y": Y}, {"y": Y}]
    assert checker().results(results, 2) is results
    assert list(checker().results(tuple(results), 2)) == results


def test_response_parameters() -> None:
    good: dict[str, Any] = {"a": "x", "b": True, "c": -(1 << 63), "d": 0.5, "e": (1 << 63) - 1}
    assert checker().one(Response({"y": Y}, good), 0, None)[1] == good
    scalars: dict[str, Any] = {"a": np.int64(7), "b": np.bool_(True), "c": np.float32(0.5), "d": np.str_("x")}
    found = checker().one(Response({"y": Y}, scalars), 0, None)[1]
    assert found == {"a": 7, "b": True, "c": 0.5, "d": "x"}
    assert [type(value) for value in found.values()] == [int, bool, float, str]
    bad: Any
    for bad in (None, [1], np.zeros(1), b"raw", 1 << 63, -(1 << 63) - 1):
        with pytest.raises(OutputError, match="response parameter 'bad'"):
            checker().one(Response({"y": Y}, {"bad": bad}), 0, None)
    with pytest.raises(OutputError, match="response parameter 7"):
        checker().one(Response({"y": Y}, {7: "x"}), 0, None)  # type: ignore[dict-item]


# ---- what is sent, and is likely not what was meant ------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("given", "requested", "expected", "received"),
    [
        ({"Y": Y, "LABEL": LABEL}, None, "y, label", "Y, LABEL"),
        ({}, ["y", "label"], "y, label", "none"),
        ({"y": Y}, ["label"], "label", "y"),
        (Response({}, {"score": 1}), None, "y, label", "none"),
    ],
)
def test_none_of_the_wanted_outputs_is_an_error(given: Any, requested: Any, expected: str, received: str) -> None:
    with pytest.raises(OutputError, match="none of the outputs that are asked for") as caught:
        checker().one(given, 0, requested)
    assert (caught.value.expected, caught.value.received) == (expected, received)


def test_one_missing_output_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    made = checker()
    for _ in range(3):
        assert made.one({"y": Y}, 0, None)[0].keys() == {"y"}
    [text] = warnings(caplog)
    assert text.startswith("model 'm': the callable left out what its callers ask for (label), ")
    assert "expected y, label, got y. This is said once" in text
    made.one({"y": Y}, 0, ["y"])
    assert not warnings(caplog)


def test_superfluous_outputs_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    made = checker()
    extra = {"y": Y, "label": LABEL, "z": Y, "a": Y}
    for _ in range(3):
        assert made.one(extra, 0, None)[0].keys() == {"y", "label"}
    [text] = warnings(caplog)
    assert text.startswith("model 'm': the callable returned outputs that the model has not (z, a), which are dropped")
    assert "expected y, label, got y, label, z, a." in text


def test_another_shape_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    made = checker()
    for _ in range(3):
        assert made.one({"y": np.zeros((1, 3), F4), "label": LABEL}, 0, None)[0]["y"].shape == (1, 3)
    [text] = warnings(caplog)
    assert text.startswith("model 'm': output 'y' has not the declared shape, and is sent as it is: ")
    assert "expected shape (batch, 2), got shape (1, 3)." in text


def cast_checker(dtype: str, *, strict: bool = False) -> OutputChecker:
    output = TensorSpec(name="y", dtype=np.dtype(dtype), shape=(-1,))
    other = TensorSpec(name="z", dtype=np.dtype(np.uint8), shape=(-1,))
    return OutputChecker(
        ModelSpec(
            name="m",
            version=1,
            inputs=(),
            outputs=(output, other),
            batching=False,
            max_batch_size=0,
            strict=strict,
            decoupled=False,
        )
    )


of_numpy_2 = pytest.mark.skipif(
    np.__version__.startswith("1."), reason="numpy 1 makes a number of a text before it makes a bool of that"
)


@pytest.mark.parametrize(
    ("value", "dtype", "before", "after"),
    [
        (np.array([1, 257]), "uint8", "257", "1"),
        (np.array([-1]), "uint64", "-1", str(2**64 - 1)),
        (np.array([2**63], np.uint64), "int64", str(2**63), str(-(2**63))),
        (np.array([2**32 + 5]), "int32", str(2**32 + 5), "5"),
        (np.array([0, 2]), "bool", "2", "True"),
        (np.array([2.5]), "int32", "2.5", "2"),
        (np.array([0.0, 1e300]), "int64", "1e+300", ""),
        (np.array([np.nan]), "int64", "nan", ""),
        (np.array([1, 1e300]), "float32", "1e+300", "inf"),
        (np.array([70_000]), "float16", "70000", "inf"),
        (np.array([1e300], object), "float32", "1e+300", "inf"),
        (np.array([2.5], object), "int32", "2.5", "2"),
        pytest.param(np.array(["True", "False"]), "bool", "'False'", "True", marks=of_numpy_2),
        pytest.param(np.array([b"0"]), "bool", "b'0'", "True", marks=of_numpy_2),
        (np.array(["False"], object), "bool", "'False'", "True"),
        (np.array(["1e300"]), "float32", "'1e300'", "inf"),
    ],
)
def test_a_cast_that_changes_a_value_is_warned_of_once_for_each_output(
    value: np.ndarray[Any, Any], dtype: str, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = cast_checker(dtype)
    for _ in range(3):
        assert made.one({"y": value, "z": np.array([1], np.uint8)}, 0, None)[0]["y"].dtype == np.dtype(dtype)
    [text] = warnings(caplog)
    assert text.startswith(
        "model 'm': output 'y' has values that its dtype has not, which are sent as others: expected "
    )
    assert f"values of {dtype}, got {before} of dtype {value.dtype}, which becomes {after}" in text
    assert "with strict=True it is an error" in text
    made.one({"y": value, "z": np.array([300])}, 0, None)
    [text] = warnings(caplog)
    assert "output 'z'" in text
    with pytest.raises(OutputError, match="the dtype is not the declared one"):
        cast_checker(dtype, strict=True).one({"y": value, "z": np.array([1], np.uint8)}, 0, None)


@pytest.mark.parametrize(
    ("value", "dtype", "may_be_strict"),
    [
        (np.array([2**31 - 1], np.int32), "int64", True),
        (np.array([True]), "int32", True),
        (np.array([1e30, np.inf], np.float32), "float64", True),
        (np.array([255], np.uint8), "float16", True),
        (np.array([-128, 127]), "int8", False),
        (np.array([2**63], np.uint64), "float32", False),
        (np.array([3.0, -4.0]), "int32", False),
        (np.array([0.1, np.inf, -np.inf, np.nan, 1e-300]), "float32", False),
        (np.array([0, 1, 1.0]), "bool", False),
        pytest.param(np.array(["True", "1", ""]), "bool", False, marks=of_numpy_2),
        (np.array(["-3", "4"]), "int8", False),
        (np.array(["0.1", "inf"], object), "float32", False),
        (np.array([7, 8.0], object), "int64", False),
        (np.zeros(0), "int8", False),
    ],
)
def test_a_cast_that_changes_no_value_is_passed_over(
    value: np.ndarray[Any, Any], dtype: str, may_be_strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    result = {"y": value, "z": np.array([1], np.uint8)}
    assert cast_checker(dtype).one(result, 0, None)[0]["y"].dtype == np.dtype(dtype)
    if may_be_strict:
        assert cast_checker(dtype, strict=True).one(result, 0, None)[0]["y"].dtype == np.dtype(dtype)
    else:
        with pytest.raises(OutputError, match="or one that it has all values of, got dtype"):
            cast_checker(dtype, strict=True).one(result, 0, None)
    assert not warnings(caplog)


def test_each_kind_is_told_of_and_the_workers_of_a_model_tell_once(caplog: pytest.LogCaptureFixture) -> None:
    first = checker()
    second = OutputChecker(first._model)
    for made in (first, second):
        made.one({"y": np.zeros((1, 3), F4), "z": Y}, 0, None)
    assert len(warnings(caplog)) == 3
    # Another model, or the same bound anew, is another matter.
    checker().one({"y": np.zeros((1, 3), F4), "z": Y}, 0, None)
    assert len(warnings(caplog)) == 3


def test_a_response_of_a_stream_may_leave_out_what_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    made = checker(decoupled=True)
    assert made.one({"y": Y}, 0, None)[0].keys() == {"y"}
    assert made.one({"y": Y}, 0, ["label"])[0] == {}
    assert made.one(Response({}, {"progress": 0.5}), 0, None) == ({}, {"progress": 0.5})
    assert not warnings(caplog)
    with pytest.raises(OutputError, match="none of the outputs"):
        made.one({"Y": Y}, 0, None)
    made.one({"y": np.zeros((1, 3), F4), "z": Y}, 0, None)
    assert len(warnings(caplog)) == 2


def test_where_it_is_strict_there_are_errors_and_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    made = checker(strict=True)
    for result in ({"y": Y}, {"y": Y, "label": LABEL, "z": Y}, {"y": np.zeros((1, 3), F4), "label": LABEL}):
        with pytest.raises(OutputError):
            made.one(result, 0, None)
    assert not made.fits(np.zeros((1, 3), F4), "y")
    assert not warnings(caplog)


# ---- what needs no further look ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", BOTH)
def test_only_numbers_exactly_as_declared_are_sent_unseen(strict: bool) -> None:
    fits = checker(strict=strict).fits
    assert fits(Y, "y")
    assert not fits(Y.astype("f8"), "y")
    assert not fits(Y.astype(">f4"), "y")
    assert not fits(LABEL, "label")
    assert not fits(Y, "label")
    assert fits(np.zeros((1, 3), F4), "y") is not strict


def test_errors_are_of_a_bearable_length() -> None:
    error = failure({"y": ["x"] * 100_000, "label": LABEL}, strict=False)
    assert len(str(error)) < 1000
    assert re.search(r"got list: \['x', ", str(error))
