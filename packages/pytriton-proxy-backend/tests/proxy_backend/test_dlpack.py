"""Capsules of DLPack in the hands of code in C."""

import ctypes
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.dlpack import end_capsule, python_function, to_capsule


class Owner:
    """An object whose end a test sees."""


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "float16", "float32", "uint64", "float64"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_reader_finds_the_same_memory(shape: tuple[int, ...], dtype: str, writable: bool) -> None:
    array = np.ones(shape, dtype)
    array.flags.writeable = writable

    class Source:
        """What numpy reads."""

        def __dlpack__(self, **_options: Any) -> Any:
            return to_capsule(array)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    read = np.from_dlpack(Source())
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(read, array)
    assert array.size == 0 or read.ctypes.data == array.ctypes.data


def test_a_temporary_capsule_that_is_refused_leaves_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed while the error is on its way, and so is what it holds."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    owner = Owner()
    gone = weakref.ref(owner)
    with pytest.raises(TypeError, match="float"):
        # The capsule is freed by C code, before Python code sees the error.
        float(to_capsule(np.zeros(3, np.float32), owner))
    del owner
    gc.collect()
    assert gone() is None
    assert unraisable == []


def test_a_capsule_that_a_stub_has_renamed_is_freed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    name = ctypes.create_string_buffer(b"used_dlpack")
    capsule = to_capsule(np.zeros(3, np.float32))
    rename = python_function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    rename(capsule, ctypes.addressof(name))
    end_capsule(capsule)
    del capsule
    assert unraisable == []


def test_a_capsule_that_nobody_has_read_is_left_as_it_is() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = to_capsule(np.zeros(3, np.float32), owner)
    end_capsule(capsule)
    del owner, capsule
    gc.collect()
    assert gone() is None
