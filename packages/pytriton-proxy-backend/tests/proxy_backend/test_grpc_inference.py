"""Inference over gRPC without a network: a double of Triton that fails anywhere, and callers that cancel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = ["../grpc/inference.cc", "../grpc/request.cc", "../guard/answers/outcomes.cc"]

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is for Linux"),
    # They compile.
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def program(compile_native: Callable[..., Path]) -> Path:
    return compile_native("grpc_inference.cc", SOURCES, "memory")


def test_any_function_of_triton_fails(program: Path, run_program: Callable[..., str]) -> None:
    run_program(program, "failures", timeout_s=600)


def test_cancelled_while_they_are_answered(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("grpc_inference.cc", SOURCES, "threads"), "threads", 1000, timeout_s=600)
