from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytriton.client._core.spec import ModelSpec, TensorSpec, parse_model_config, to_model_spec
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientValueError

TYPES = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "STRING": np.bytes_,
}  # fmt: skip


def config(data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": "m", "input": [{"name": "x", "data_type": data_type, "dims": [-1, 4]}], **more}


@pytest.mark.parametrize(("name", "dtype"), TYPES.items())
def test_every_data_type(name: str, dtype: type[np.generic]) -> None:
    tensor = parse_model_config(config(f"TYPE_{name}"), None).inputs[0]
    assert tensor == TensorSpec("x", (-1, 4), dtype)
    assert tensor.datatype == ("BYTES" if name == "STRING" else name)


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = parse_model_config(config("TYPE_BF16"), None).inputs[0]
    assert tensor.dtype is ml_dtypes.bfloat16
    assert tensor.datatype == "BF16"


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(PyTritonClientError, match="Install the ml_dtypes package"):
        parse_model_config(config("TYPE_BF16"), None)


def test_whole_configuration() -> None:
    spec = parse_model_config(
        {
            "name": "m",
            "max_batch_size": 3,
            "input": [{"name": "x", "data_type": "TYPE_INT8", "dims": ["5"], "optional": True}],
            "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}],
            "model_transaction_policy": {"decoupled": True},
        },
        "2",
    )
    tensors = ((TensorSpec("x", (5,), np.int8, True),), (TensorSpec("y", (1,), np.bytes_),))
    assert spec == ModelSpec("m", 2, 3, True, True, *tensors)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.model_name = "n"  # type: ignore[misc]


def test_defaults_that_protobuf_leaves_out() -> None:
    assert parse_model_config({"name": "m"}, None) == ModelSpec("m", None, 0, False, False, (), ())


@pytest.mark.parametrize(
    "broken", [{}, {"name": "m", "input": [{"name": "x"}]}, config("TYPE_FP99"), config(max_batch_size="x"), []]
)
def test_configuration_that_cannot_be_read(broken: Any) -> None:
    with pytest.raises(PyTritonClientError, match="Expected"):
        parse_model_config(broken, None)


def test_configuration_of_the_server_library() -> None:
    brought = SimpleNamespace(
        model_name="m",
        model_version=1,
        max_batch_size=4,
        batching=False,
        decoupled=False,
        inputs=[SimpleNamespace(name="x", shape=(1,), dtype=object, optional=False)],
        outputs=[SimpleNamespace(name="y", shape=(1,), dtype=np.dtype("bool"), optional=None)],
    )
    tensors = ((TensorSpec("x", (1,), np.bytes_),), (TensorSpec("y", (1,), np.bool_),))
    assert to_model_spec(brought) == ModelSpec("m", 1, 0, False, False, *tensors)


@pytest.mark.parametrize("brought", [{}, SimpleNamespace(model_name="m"), "m"])
def test_configuration_of_another_kind(brought: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="Expected model_config to be an object with model_name"):
        to_model_spec(brought)


def test_type_that_the_protocol_does_not_know() -> None:
    with pytest.raises(PyTritonClientValueError, match="complex64"):
        _ = TensorSpec("x", (1,), np.complex64).datatype


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (json.dumps({"inputs": {"x": "list[str]"}, "outputs": {"x": "int"}}), "list[str]"),
        (json.dumps({"inputs": {"x": "a" * 1000}}), "a" * 400),
        (json.dumps({"inputs": {"y": "str"}}), ""),
        (json.dumps({"inputs": {"x": ["str"]}}), ""),
        (json.dumps({"inputs": "x"}), ""),
        ("[" * 100_000, ""),
        ("nothing", ""),
        (5, ""),
    ],
)
def test_what_the_author_calls_a_type(text: object, hint: str) -> None:
    spec = parse_model_config(config(parameters={"pytriton_hints": {"string_value": text}}), None)
    assert spec.inputs[0].hint == hint
    assert to_model_spec(SimpleNamespace(**vars(spec))) == spec
