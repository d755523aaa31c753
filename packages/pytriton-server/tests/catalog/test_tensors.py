"""Inputs and outputs as the command line writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.catalog.tensors import describe_signature, parse_inputs, result_as_json, result_as_text
from pytriton.client import ModelResult, ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientValueError


def spec(dtype: type[np.generic], *shape: int) -> ModelSpec:
    return ModelSpec("m", max_batch_size=8, batching=True, inputs=(TensorSpec("x", shape, dtype),))


def parse(text: str, dtype: type[np.generic], *shape: int, is_batch: bool = False) -> Any:
    return parse_inputs(spec(dtype, *shape), {"x": text}, {}, is_batch=is_batch)["x"]


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "wanted"),
    [
        ("1,2,3", np.float32, (-1,), [1.0, 2.0, 3.0]),
        ("-1.5, nan", np.float64, (2,), [-1.5, np.nan]),
        ("7", np.int64, (1,), [7]),
        ("7", np.int64, (-1, 1), [[7]]),
        ("7", np.int64, (), 7),
        ("18446744073709551615", np.uint64, (1,), [2**64 - 1]),
        ("true,0,False", np.bool_, (-1,), [True, False, False]),
        ("1,2,3,4,5,6", np.int32, (2, 3), [[1, 2, 3], [4, 5, 6]]),
        ("1,2,3,4,5,6", np.int32, (-1, 2), [[1, 2], [3, 4], [5, 6]]),
        ("[[1,2],[3,4]]", np.float32, (2, 2), [[1, 2], [3, 4]]),
        ("hello, you", np.bytes_, (1,), ["hello, you"]),
        ("", np.bytes_, (-1,), [""]),
        ('["a", "b"]', np.bytes_, (-1,), ["a", "b"]),
        ("a=b", np.bytes_, (1, 1), [["a=b"]]),
    ],
)
def test_values(text: str, dtype: type[np.generic], shape: tuple[int, ...], wanted: object) -> None:
    assert repr(parse(text, dtype, *shape)) == repr(wanted)


def test_what_does_not_fit_is_left_to_the_client() -> None:
    assert parse("1,2,3", np.float32, 2, 2) == [1, 2, 3]
    assert parse("1,2,3,4", np.float32, -1, -1) == [1, 2, 3, 4]
    assert parse("1", np.float32, 2) == 1
    assert parse("[[1,2],[3]]", np.float32, -1, -1) == [[1, 2], [3]]


def test_a_batch_has_one_more_axis() -> None:
    assert parse("1,2,3", np.int32, 1, is_batch=True) == [[1], [2], [3]]
    assert parse("[[1,2]]", np.int32, -1, is_batch=True) == [[1, 2]]
    assert parse("1", np.int32, 1, is_batch=True) == [[1]]


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "message"),
    [
        ("1,two", np.float32, (2,), "expected FP32 (numbers with commas), received 'two'"),
        ("1.0", np.int32, (1,), "expected INT32 (numbers with commas), received '1.0'"),
        ("", np.int32, (-1,), "expected INT32 (numbers with commas), received ''"),
        ("perhaps", np.bool_, (1,), "expected BOOL (true or false), received 'perhaps'"),
        ("[1,", np.float32, (-1,), "expected JSON behind [, received '[1,'"),
        ("[hello]", np.bytes_, (1,), "Text that begins with [ goes into --json."),
        ("@/no/such/file", np.bytes_, (1,), "expected a file, received /no/such/file (No such file or directory)"),
    ],
)
def test_what_is_no_value(text: str, dtype: type[np.generic], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PyTritonClientValueError, match=re.escape(message)) as raised:
        parse(text, dtype, *shape)
    assert raised.value.message.startswith("Input 'x': ")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8\0")
    assert parse(f"@{tmp_path}/cat.jpg", np.bytes_, 1) == [b"\xff\xd8\0"]
    np.save(tmp_path / "array.npy", np.ones((2, 3)))
    assert parse(f"@{tmp_path}/array.npy", np.float32, -1, 3).dtype == np.float64  # which the client converts
    np.save(tmp_path / "scalar.npy", np.float32(5))
    assert parse(f"@{tmp_path}/scalar.npy", np.float32, 1, 1).shape == (1, 1)
    with pytest.raises(PyTritonClientValueError, match=r"expected an array of FP32 in a \.npy file, received .*cat"):
        parse(f"@{tmp_path}/cat.jpg", np.float32, 1)
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(PyTritonClientValueError, match=r"in a \.npy file"):
        parse(f"@{tmp_path}/objects.npy", np.float32, 1)


def test_files_that_were_handed_in() -> None:
    given = {"cat.jpg": b"\xff\xd8"}
    assert parse_inputs(spec(np.bytes_, 1), {"x": "@cat.jpg"}, {}, is_batch=False, files=given) == {"x": [b"\xff\xd8"]}
    with pytest.raises(PyTritonClientValueError, match="expected a file that was handed in, received '/etc/hostname'"):
        parse_inputs(spec(np.bytes_, 1), {"x": "@/etc/hostname"}, {}, is_batch=False, files=given)


MODEL = ModelSpec(
    "m",
    max_batch_size=4,
    batching=True,
    decoupled=True,
    inputs=(TensorSpec("a", (2,), np.float32), TensorSpec("b", (-1, 3), np.bytes_, optional=True)),
    outputs=(TensorSpec("y", (1,), np.bool_),),
)


def test_signatures() -> None:
    assert describe_signature(MODEL) == "a: FP32[2], b?: BYTES[-1, 3] -> y: BOOL[1]; max_batch_size=4, decoupled"
    assert describe_signature(ModelSpec("none")) == "nothing -> nothing; no batching"


def test_names_are_those_of_the_model() -> None:
    assert parse_inputs(MODEL, {}, {"a": [1, 2]}, is_batch=False) == {"a": [1, 2]}
    message = "Model m has no input 'c' and needs 'a'. Its inputs: a: FP32[2], b?: BYTES[-1, 3]."
    with pytest.raises(PyTritonClientValueError, match=re.escape(message)):
        parse_inputs(MODEL, {"b": "x"}, {"c": 1}, is_batch=False)


def result(**outputs: Any) -> ModelResult:
    return ModelResult(outputs, model_name="m", model_version="1")


def test_results_as_json() -> None:
    outputs = {
        "numbers": np.array([1.5, np.nan, -np.inf], np.float32),
        "texts": np.array([["ü".encode(), b"\xff"]], object),
        "number": np.int64(3),
        "text": b"one",
    }
    assert json.loads(result_as_json(result(**outputs))) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": {
            "numbers": [1.5, "NaN", "-Infinity"],
            "texts": [["ü", {"base64": "/w=="}]],
            "number": 3,
            "text": "one",
        },
        "parameters": {},
    }


def test_results_as_text() -> None:
    answer = result(y=np.arange(4.0).reshape(2, 2), text=np.array([b"to\nbe"], object), label=b"cat", n=np.int64(3))
    answer.parameters["tokens"] = 7
    wanted = 'y: [[0., 1.],\n    [2., 3.]]\ntext: to\nbe\nlabel: cat\nn: 3\nparameters: {"tokens": 7}'
    assert result_as_text(answer, one_line=False) == wanted
    wanted = 'y: [[0., 1.], [2., 3.]]  text: "to\\nbe"  label: cat  n: 3  parameters: {"tokens": 7}'
    assert result_as_text(answer, one_line=True) == wanted


def test_a_single_number_has_no_brackets() -> None:
    answer = result(score=np.array([2.0], np.float32), tenth=np.array([[0.1]], np.float32), yes=np.array([True]))
    assert result_as_text(answer, one_line=False) == "score: 2.0\ntenth: 0.1\nyes: True"


def test_long_results_are_cut_and_say_their_size() -> None:
    assert result_as_text(result(y=np.zeros(2000)), one_line=True) == "y (shape [2000]): [0., 0., 0., ..., 0., 0., 0.]"


def test_no_text_reaches_the_terminal_as_a_command() -> None:
    for text in (b"\x1b[2J", "\x9b2J".encode(), b"a\rb"):
        assert result_as_text(result(y=np.array([text], object)), one_line=False).isprintable()
    assert result_as_text(result(y=np.array([b"a", b"\x1b"], object)), one_line=False) == 'y: ["a", "\\u001b"]'
