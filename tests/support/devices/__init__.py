"""A server that believes it has GPUs: the fake CUDA runtime before its own, and models of a backend that uses it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytriton.server.tritonserver.binary import find_tritonserver
from support.paths import ROOT

NATIVE = ROOT / "packages/pytriton-proxy-backend/native"


def compile_fake_cuda(folder: Path, *, replaces: bool = False) -> Path:
    """Compile the CUDA runtime that is to be loaded before that of a server, or, with its name, in its place.

    Skips the test where nothing compiles it, or where the server has none.
    """
    if not any(b"cudaMemcpyAsync" in library.read_bytes() for library in _libraries()):
        pytest.skip("tritonserver is built without CUDA")
    if not replaces:
        library = folder / "libfakecuda.so"
        _compile([NATIVE / "tests/fake_cuda.cc", "-o", library])
        return library
    own = next(path for place in find_tritonserver().library_dirs for path in place.glob("libcudart*.so*"))
    library = folder / own.name
    _compile([NATIVE / "tests/fake_cuda.cc", f"-Wl,-soname,{own.name}", "-o", library])
    return library


def write_device_model(repository: Path, name: str, dtype: str) -> None:
    """Write a model whose output `y` is its input `x`, of one free dimension, in the memory of a GPU."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(
        f"""backend: "device"
max_batch_size: 8
input {{ name: "x" data_type: {dtype} dims: -1 }}
output {{ name: "y" data_type: {dtype} dims: -1 }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
    )
    library = _libraries()[0]
    source = Path(__file__).with_name("device_backend.cc")
    _compile([f"-I{NATIVE / 'proxy'}", source, library, "-o", folder / "libtriton_device.so"])


def _libraries() -> list[Path]:
    places = find_tritonserver().library_dirs
    return [path for place in places for path in place.glob("libtritonserver*.so*")]


def _compile(arguments: Sequence[str | Path]) -> None:
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [found for found in map(shutil.which, ("c++", "g++", "clang++")) if found][:1]
    )
    if not compiler:
        pytest.skip("there is no C++ compiler on this machine (set CXX)")
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,--allow-shlib-undefined")
    subprocess.run([*compiler, *flags, "-static-libstdc++", "-static-libgcc", *map(str, arguments)], check=True)
