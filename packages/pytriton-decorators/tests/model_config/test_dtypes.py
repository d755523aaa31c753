import sys
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError, PyTritonModelConfigError
from pytriton.model_config.dtypes import (
    array_dtype,
    canonical_type,
    config_name,
    is_string,
    type_from_config_name,
    wire_name,
)

NUMERIC = {
    np.bool_: "BOOL",
    np.uint8: "UINT8",
    np.uint16: "UINT16",
    np.uint32: "UINT32",
    np.uint64: "UINT64",
    np.int8: "INT8",
    np.int16: "INT16",
    np.int32: "INT32",
    np.int64: "INT64",
    np.float16: "FP16",
    np.float32: "FP32",
    np.float64: "FP64",
}


@pytest.mark.parametrize(("scalar", "name"), NUMERIC.items())
def test_every_numeric_type_in_every_spelling(scalar: Any, name: str) -> None:
    for declared in (scalar, np.dtype(scalar), np.dtype(scalar).name, np.dtype(scalar).newbyteorder()):
        assert canonical_type(declared) is scalar
        assert wire_name(declared) == name
        assert config_name(declared) == f"TYPE_{name}"
        assert array_dtype(declared) == np.dtype(scalar)
        assert not is_string(declared)
    assert type_from_config_name(name) is scalar
    assert type_from_config_name(f"TYPE_{name}") is scalar


@pytest.mark.parametrize(
    ("declared", "canonical"),
    [(bool, np.bool_), (int, np.int64), (float, np.float64), (np.longlong, np.int64), (np.intc, np.int32)],
)
def test_other_spellings_of_numeric_types(declared: Any, canonical: Any) -> None:
    assert canonical_type(declared) is canonical


@pytest.mark.parametrize(
    ("declared", "canonical"),
    [
        (bytes, bytes),
        (str, bytes),
        (object, object),
        (np.bytes_, np.bytes_),
        (np.object_, np.object_),
        (np.str_, np.bytes_),
        (np.dtype("S5"), np.bytes_),
        (np.dtype("U5"), np.bytes_),
        (np.dtype(object), np.object_),
        ("bytes", np.bytes_),
        ("object", np.object_),
    ],
)
def test_strings(declared: Any, canonical: Any) -> None:
    assert canonical_type(declared) is canonical
    assert is_string(declared)
    assert wire_name(declared) == "BYTES"
    assert config_name(declared) == "TYPE_STRING"
    assert array_dtype(declared) == np.dtype(object)


def test_strings_from_a_configuration() -> None:
    assert type_from_config_name("TYPE_STRING") is np.bytes_
    assert type_from_config_name("BYTES") is np.bytes_


@pytest.mark.parametrize(
    "declared",
    [
        np.complex64,
        "complex128",
        "datetime64[s]",
        np.dtype("timedelta64[ms]"),
        np.dtype([("x", "f4")]),
        np.void,
        np.longdouble if np.dtype(np.longdouble).itemsize > 8 else np.clongdouble,
        np.floating,
        None,
        dict,
        list,
        "no such type",
        "(((",
        7,
    ],
    ids=repr,
)
def test_what_triton_cannot_carry_is_refused_and_the_rest_named(declared: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"Accepted: bool, int8, .*float32.*bytes") as caught:
        canonical_type(declared, parameter="Tensor.dtype")
    assert "Tensor.dtype=" in caught.value.message
    assert caught.value.parameter == "Tensor.dtype"


def test_an_unknown_name_in_a_configuration() -> None:
    with pytest.raises(PyTritonModelConfigError, match=r"'TYPE_COMPLEX'.*TYPE_FP32"):
        type_from_config_name("TYPE_COMPLEX")


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for declared in (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bfloat16"):
        assert canonical_type(declared) is ml_dtypes.bfloat16
        assert wire_name(declared) == "BF16"
        assert config_name(declared) == "TYPE_BF16"
        assert array_dtype(declared) == np.dtype(ml_dtypes.bfloat16)
    assert type_from_config_name("TYPE_BF16") is ml_dtypes.bfloat16
    with pytest.raises(PyTritonBadParameterError):
        canonical_type(ml_dtypes.float8_e4m3fn)


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(PyTritonModelConfigError, match="pip install ml_dtypes"):
        type_from_config_name("TYPE_BF16")
