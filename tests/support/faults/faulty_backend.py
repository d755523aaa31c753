"""A model of a backend whose outputs have another size than their shape says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pytriton.server.tritonserver.binary import find_tritonserver
from support.paths import ROOT

CONFIG = """backend: "faulty"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
"""
# Elements of the shape and bytes that the backend writes; the first pair goes together.
RIGHT = (3, 12)
WRONG = [(3, 8), (3, 16), (3, 0), (0, 4), (1 << 20, 4), (1, 1 << 20)]


def write_faulty(repository: Path, name: str = "faulty") -> None:
    """Write a model that takes `x`, elements and bytes, and gives `y`; skip the test where nothing compiles it."""
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [found for found in map(shutil.which, ("c++", "g++", "clang++")) if found][:1]
    )
    if not compiler:
        pytest.skip("there is no C++ compiler on this machine (set CXX)")
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    source = Path(__file__).with_suffix(".cc")
    # In a process that keeps Triton's symbols to itself, they are found through the name of its library.
    library = next(path for place in find_tritonserver().library_dirs for path in place.glob("libtritonserver*.so*"))
    headers = ROOT / "packages/pytriton-proxy-backend/native/proxy/triton"
    subprocess.run(
        [
            *(*compiler, "-std=c++17", "-shared", "-fPIC", f"-I{headers}", str(source), str(library)),
            *("-Wl,--allow-shlib-undefined", "-static-libstdc++", "-static-libgcc"),
            *("-o", str(folder / "libtriton_faulty.so")),
        ],
        check=True,
    )
