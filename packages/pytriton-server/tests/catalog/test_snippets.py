"""Calls of a model as people write them. tests/server/test_console.py makes them."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import numpy as np
import pytest

from pytriton.catalog.snippets import asks_for_file, describe_calls, describe_type, example_text, python_type
from pytriton.catalog.tensors import parse_inputs
from pytriton.client import ModelSpec, TensorSpec

URL = "http://localhost:8000"


def calls(spec: ModelSpec, *, is_batch: bool = False, **inputs: Any) -> dict[str, str]:
    return describe_calls(URL, spec, inputs, is_batch=is_batch)


def body(curl: str) -> tuple[str, Any]:
    words = shlex.split(curl)
    return words[2], json.loads(words[-1])


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        (np.float32, (-1,), "1.0"),
        (np.int8, (3,), "1, 1, 1"),
        (np.bool_, (1,), "true"),
        (np.bytes_, (1,), "hello"),
        (np.bytes_, (2,), '["hello", "hello"]'),
        (np.float32, (224, 224), ""),
        (np.int64, (), "1"),
    ],
)
def test_examples_can_be_read(dtype: type[np.generic], shape: tuple[int, ...], text: str) -> None:
    tensor = TensorSpec("x", shape, dtype)
    assert example_text(tensor) == text
    if text:
        assert parse_inputs(ModelSpec("m", inputs=(tensor,)), {"x": text}, {}, is_batch=False)


def test_values_by_name_where_the_server_knows_the_shape() -> None:
    spec = ModelSpec("a b", batching=True, max_batch_size=4, inputs=(TensorSpec("x", (-1,), np.float32),))
    url, sent = body(calls(spec, x=[1.0, 2.0])["curl"])
    assert url == f"{URL}/v2/models/a%20b/generate"
    assert sent == {"x": [1.0, 2.0]}
    url, sent = body(calls(spec, x=[[1.0], [2.0]], is_batch=True)["curl"])
    assert url.endswith("/infer")
    assert sent["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1.0, 2.0]}]


def test_tensors_with_shapes_elsewhere() -> None:
    spec = ModelSpec("m", batching=True, max_batch_size=4, inputs=(TensorSpec("x", (-1, 2), np.int32),))
    _, sent = body(calls(spec, x=[[1, 2]])["curl"])
    assert sent["inputs"] == [{"name": "x", "datatype": "INT32", "shape": [1, 1, 2], "data": [1, 2]}]


def test_what_json_cannot_hold_is_told() -> None:
    half = ModelSpec("m", inputs=(TensorSpec("x", (1,), np.float16),))
    assert calls(half, x=[1.0])["curl"] == "# 'x' is FP16, which Triton does not have in JSON"
    single = ModelSpec("m", inputs=(TensorSpec("x", (1,), np.float32),))
    found = calls(single, x=[float("nan")])
    assert found["JavaScript"] == "// JSON has finite numbers only: see Python"
    assert "np.array([np.nan], dtype=np.float32)" in found["Python"]
    found = describe_calls(URL, single, {"x": np.ones(1)}, is_batch=False, files=["x"])
    assert found["curl"] == "# Several files, and files of numbers, are written by Python"
    assert 'x=np.load("FILE.npy")' in found["Python"]
    stream = ModelSpec("m", decoupled=True, inputs=(TensorSpec("file", (1,), np.bytes_),))
    found = describe_calls(URL, stream, {"file": [b"abc"]}, is_batch=False, files=["file"])
    assert found["curl"] == "# A stream over HTTP is JSON, which holds no files: see Python"


def test_a_file_goes_beside_the_json() -> None:
    alone = ModelSpec("m", inputs=(TensorSpec("image", (1,), np.bytes_),))
    found = describe_calls(URL, alone, {"image": [b"abc"]}, is_batch=False, files=["image"])
    assert found["curl"] == (
        f"curl -s {URL}/v2/models/m/infer --data-binary @FILE -H 'Inference-Header-Content-Length: 0' --output -"
    )
    two = ModelSpec(
        "m", batching=True, inputs=(TensorSpec("image", (1,), np.bytes_), TensorSpec("top", (1,), np.int64))
    )
    found = describe_calls(URL, two, {"image": [b"a" * 300], "top": [3]}, is_batch=False, files=["image"])
    head = re.search(r"printf %s '(.*?)'", found["curl"])
    assert head is not None
    assert json.loads(head[1])["inputs"] == [
        {"name": "image", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 304}},
        {"name": "top", "datatype": "INT64", "shape": [1, 1], "data": [3]},
    ]
    assert r"printf '\054\001\000\000'; cat FILE" in found["curl"]
    assert f"Inference-Header-Content-Length: {len(head[1])}" in found["curl"]
    assert '"binary_data_size": file.size + 4' in found["JavaScript"]
    found = describe_calls(URL, two, {"image": [b""], "top": [3]}, is_batch=False, files=["image"])
    assert found["curl"].startswith("# Choose a file")


@pytest.mark.parametrize(
    ("tensor", "kind", "is_file"),
    [
        (TensorSpec("text", (1,), np.bytes_), "str", False),
        (TensorSpec("image", (1,), np.bytes_), "bytes", True),
        (TensorSpec("input_image", (1,), np.bytes_), "bytes", True),
        (TensorSpec("AUDIO", (-1,), np.bytes_), "list[bytes]", True),
        (TensorSpec("profile", (1,), np.bytes_), "str", False),
        (TensorSpec("image", (2, 2), np.bytes_), "array", False),
        (TensorSpec("image", (-1,), np.float32), "list[float]", False),
        (TensorSpec("x", (1,), np.int8), "int", False),
        (TensorSpec("x", (), np.bool_), "bool", False),
    ],
)
def test_what_an_input_is_in_python(tensor: TensorSpec, kind: str, is_file: bool) -> None:
    assert python_type(tensor) == kind
    assert asks_for_file(tensor) is is_file
    assert not is_file or example_text(tensor) == ""


def test_names_and_texts_do_not_end_what_they_stand_in() -> None:
    name = "a'; rm -rf / #\n</script>"
    text = 'it\'s "quoted"\n`$(reboot)`'
    spec = ModelSpec(name, inputs=(TensorSpec("x", (1,), np.bytes_), TensorSpec("1 y", (1,), np.bytes_, optional=True)))
    found = calls(spec, x=[text])
    url, sent = body(found["curl"])
    assert url.startswith(f"{URL}/v2/models/a%27%3B%20rm")
    assert sent == {"x": text}
    compile(found["Python"], "snippet", "exec")
    assert repr(name) in found["Python"]
    assert "</script>" not in found["JavaScript"]
    only = ModelSpec("m", inputs=(TensorSpec("1 y", (1,), np.bytes_), TensorSpec("z", (1,), np.bytes_, optional=True)))
    assert "**{'1 y': np.array(['t'])}" in describe_calls(URL, only, {"1 y": ["t"]}, is_batch=False)["Python"]


@pytest.mark.parametrize("given", [["a\0"], ["a\0", "b"], np.array([["", "\0"]], object)])
def test_zeros_at_the_ends_of_texts_are_kept(given: Any) -> None:
    found = calls(ModelSpec("m", inputs=(TensorSpec("x", (-1, -1), np.bytes_),)), x=given)["Python"]
    (array,) = re.findall(r"infer_sample\(x=(.*)\)$", found, re.MULTILINE)
    assert eval(array, {"np": np}).tolist() == np.array(given, object).tolist()


def test_streams() -> None:
    spec = ModelSpec("m", decoupled=True, inputs=(TensorSpec("x", (1,), np.bytes_),))
    found = calls(spec, x=["t"])
    assert found["curl"].startswith(f"curl -sN {URL}/v2/models/m/generate_stream ")
    assert "for result in client.infer_sample(x=np.array(['t'])):" in found["Python"]
    assert "for await" in found["JavaScript"]


@pytest.mark.parametrize(
    ("name", "hint", "dtype", "shape", "shown", "example", "is_file"),
    [
        ("text", "str", np.bytes_, (1,), "str  BYTES[1]", "hello", False),
        ("image", "str", np.bytes_, (1,), "str  BYTES[1]", "hello", False),
        ("image", "", np.bytes_, (1,), "bytes  BYTES[1]", "", True),
        ("data", "bytes", np.bytes_, (1,), "bytes  BYTES[1]", "", True),
        ("data", "list[bytes]", np.bytes_, (1,), "bytes, in batches list[bytes]  BYTES[1]", "", True),
        ("texts", "list[str]", np.bytes_, (1,), "str, in batches list[str]  BYTES[1]", "hello", False),
        ("texts", "list[str]", np.bytes_, (-1,), "list[str]  BYTES[any]", "hello", False),
        ("options", "dict", np.bytes_, (1,), "dict  BYTES[1]", "{}", False),
        ("items", "list[dict]", np.bytes_, (1,), "list[dict]  BYTES[1]", "[]", False),
        ("x", "np.float32", np.float32, (1,), "np.float32  FP32[1]", "1.0", False),
    ],
)
def test_types_are_those_of_the_author(
    name: str, hint: str, dtype: type[np.generic], shape: tuple[int, ...], shown: str, example: str, is_file: bool
) -> None:
    tensor = TensorSpec(name, shape, dtype, hint=hint)
    assert (describe_type(tensor), example_text(tensor), asks_for_file(tensor)) == (shown, example, is_file)
