"""Triton's own Python backend, for tests of models that it runs."""

from __future__ import annotations

import sys

from pytriton.server.tritonserver.binary import find_tritonserver


def why_no_python_backend() -> str:
    """Return why Triton's Python backend cannot run here; empty if it can."""
    folder = find_tritonserver().backends_dir / "python"
    if not (folder / "libtriton_python.so").is_file():
        return f"this tritonserver has no Python backend ({folder})"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = folder / "stubs"
    if stubs.is_dir() and not (stubs / version).is_dir():
        return f"this tritonserver's Python backend has no stub for Python {version}"
    return ""
