"""Triton's data types and numpy's."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.wire.dtypes import code_of, dtype_of

PAIRS = {
    1: "bool", 2: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 6: "int8", 7: "int16", 8: "int32", 9: "int64",
    10: "float16", 11: "float32", 12: "float64", 13: "object",
}  # fmt: skip


@pytest.mark.parametrize(("code", "name"), PAIRS.items())
def test_both_ways(code: int, name: str) -> None:
    assert dtype_of(code) == np.dtype(name)
    assert code_of(np.dtype(name)) == code


@pytest.mark.parametrize("text", ["S", "S7", "U", "U3", "<U1"])
def test_every_string_is_bytes(text: str) -> None:
    assert code_of(np.dtype(text)) == 13


@pytest.mark.parametrize("code", [0, 15, 99, -1])
def test_unknown_code(code: int) -> None:
    with pytest.raises(TypeError, match=f"data type number {code} has no numpy type"):
        dtype_of(code)


@pytest.mark.parametrize("name", ["complex64", "datetime64[s]", "V4", "longdouble"])
def test_unknown_dtype(name: str) -> None:
    dtype: np.dtype[Any] = np.dtype(name)
    with pytest.raises(TypeError, match="has no counterpart among Triton's data types"):
        code_of(dtype)


@pytest.mark.parametrize("name", [">f4", ">i2", ">u8"])
def test_another_byte_order_is_not_taken_for_ours(name: str) -> None:
    with pytest.raises(TypeError, match="has not this machine's byte order"):
        code_of(np.dtype(name))


def test_bf16_with_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtype_of(14) == np.dtype(ml_dtypes.bfloat16)
    assert code_of(np.dtype(ml_dtypes.bfloat16)) == 14
    assert dtype_of(14).itemsize == 2


def test_bf16_without_ml_dtypes_says_what_to_install() -> None:
    # A process of its own, in which an import of the package fails as it does where it is not installed.
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ml_dtypes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from pytriton.proxy_backend.wire.dtypes import dtype_of
try:
    dtype_of(14)
except TypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert "pip install ml_dtypes" in done.stdout
