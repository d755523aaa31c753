"""Interpreters and versions of numpy that the native libraries do not know are not touched by them."""

import importlib
import subprocess
import sys

import pytest

from pytriton.proxy_backend.wire import accelerator

# In a process of its own, as a library looks at numpy once.
_UNKNOWN_NUMPY = """
import ctypes, sys, types
from pytriton.proxy_backend.system.native import inprocess_library_path

version = ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: 0x3000000)
table = (ctypes.c_void_p * 300)(ctypes.cast(version, ctypes.c_void_p).value)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p] * 3
numpy = sys.modules["numpy._core._multiarray_umath"] = types.ModuleType("numpy")
numpy._ARRAY_API = new_capsule(ctypes.addressof(table), None, None)
"""
_LOAD = {
    "accelerator": "import pytriton.proxy_backend._accelerator",
    "inprocess": "ctypes.PyDLL(str(inprocess_library_path())).pytriton_inprocess_open_requests(None, None, None)",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native libraries are for Linux")
@pytest.mark.parametrize("library", _LOAD)
def test_a_numpy_of_an_unknown_abi_is_refused(library: str) -> None:
    script = f"""{_UNKNOWN_NUMPY}
try:
    {_LOAD[library]}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "numpy has the ABI 3000000, which is not known here\n"


def test_the_accelerator_is_not_looked_for_where_objects_have_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a free-threaded interpreter: the file is there, and not even imported."""

    def load(name: str) -> object:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(accelerator, "OBJECT_BYTES", object.__basicsize__ - 1)
    monkeypatch.setattr(importlib, "import_module", load)
    assert accelerator._load.__wrapped__() is None
    monkeypatch.undo()
    assert object.__basicsize__ == accelerator.OBJECT_BYTES
