"""The C++ side without a server: units, golden vectors, mutated records, endpoints under load; with sanitizers.

On this machine, and on aarch64 in an emulator.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Longer where somebody looks for more: PYTRITON_FUZZ_S=600 pytest -k fuzz
FUZZ_S = float(os.environ.get("PYTRITON_FUZZ_S", "12"))
GOLDEN = Path(__file__).parents[1] / "golden"
CONNECTION_SOURCES = ["connection.cc", "arena.cc", "packet.cc", "record.cc"]
ENDPOINT_SOURCES = [*CONNECTION_SOURCES, "endpoint.cc", "late_ends.cc"]
CALLS_SOURCES = [*ENDPOINT_SOURCES, "calls.cc", "readiness.cc"]
LIBRARY_SOURCES = ["arena.cc", "control.cc", "record.cc", "settings.cc"]
GUARD_SOURCES = [f"../guard/{name}.cc" for name in ("http_scan", "json_scan", "limits", "shape_check")]
NATIVE = Path(__file__).parents[2] / "native"
ALL_GUARD_SOURCES = sorted(f"../guard/{path.name}" for path in (NATIVE / "guard").glob("*.cc"))

# Compilers are slow on a busy machine.
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native proxy is for Linux"),
    # They compile.
    pytest.mark.slow,
]


@pytest.mark.parametrize("name", ["arena", "segments", "strings", "settings", "control", "sparse"])
def test_unit(name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("unit.cc", LIBRARY_SOURCES, "memory"), name)


def test_golden_vectors(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("golden.cc", ["record.cc"], "memory"), GOLDEN)


def test_traces(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    program = compile_native("traces.cc", CONNECTION_SOURCES, "memory")
    paths = sorted((GOLDEN / "traces").glob("*.trace"))
    played = [path for path in paths if {"link unix", "proxy"} <= {*path.read_text().split("\n"), *_sides(path)}]
    assert int(run_program(program, *paths)) == len(played)


@pytest.mark.parametrize("executes", [1, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_endpoint_with_workers_that_come_and_go(
    executes: int, workers: int, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    program = compile_native("endpoint.cc", ENDPOINT_SOURCES, "threads")
    run_program(program, executes, workers, 1000, timeout_s=600)


def test_calls_of_workers_that_come_and_go(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, "threads")
    run_program(program, "load", 4, 200, timeout_s=600)


def test_models_that_say_whether_they_are_ready(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, "threads")
    run_program(program, "ready", 4, 200, timeout_s=600)


@pytest.mark.timeout(FUZZ_S + 1800)
def test_fuzz_calls(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, "memory")
    seed: Any = os.environ.get("PYTRITON_FUZZ_SEED", "1")
    run_program(program, "fuzz", FUZZ_S / 2, seed, GOLDEN, timeout_s=FUZZ_S + 600)


def _sides(path: Path) -> list[str]:
    return path.read_text().splitlines()[1].split()


@pytest.mark.parametrize("name", ["heads", "chunks", "depth", "splits", "forms", "shapes", "settings"])
def test_guard_scanners(name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_scan.cc", GUARD_SOURCES, "memory"), name)


def test_guard_threads(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    sources = [f"../guard/{name}.cc" for name in ("http_threads", "instance_threads")]
    run_program(compile_native("guard_threads.cc", sources, "memory"))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_guard_poll(sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_poll.cc", ["../guard/http_poll.cc"], sanitizer))


@pytest.mark.parametrize("name", ["frames", "garbage", "writers", "readers"])
def test_guard_of_a_replaced_server(
    name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("guard_goodbye.cc", ALL_GUARD_SOURCES, "memory"), name)


@pytest.mark.timeout(FUZZ_S + 1800)
def test_fuzz_records_and_settings(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    program = compile_native("fuzz.cc", ["record.cc", "settings.cc"], "memory")
    seed: Any = os.environ.get("PYTRITON_FUZZ_SEED", "1")
    run_program(program, FUZZ_S / 2, seed, GOLDEN, timeout_s=FUZZ_S + 600)
