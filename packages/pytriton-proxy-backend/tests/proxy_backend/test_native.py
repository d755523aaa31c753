"""The C++ side without a server: units, golden vectors, mutated records, endpoints under load; with sanitizers.

On this machine, and on aarch64 in an emulator.
"""

import ctypes
import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytriton.proxy_backend.system.escapes import escaped
from support.isolation.reference import Sizes, cost, cut

# Longer where somebody looks for more: PYTRITON_FUZZ_S=600 pytest -k fuzz
FUZZ_S = float(os.environ.get("PYTRITON_FUZZ_S", "12"))
FUZZ_SEED = int(os.environ.get("PYTRITON_FUZZ_SEED", "1"))
# The sizes of an input that a request lacks.
ABSENT = 2**64 - 1
GOLDEN = Path(__file__).parents[1] / "golden"
CONNECTION_SOURCES = ["link/connection.cc", "wire/arena.cc", "link/packet.cc", "wire/record.cc", "batch/stream_pace.cc"]
ENDPOINT_SOURCES = [
    *CONNECTION_SOURCES,
    "batch/cost.cc",
    "link/endpoint.cc",
    "triton/late_ends.cc",
    "cache/response_cache.cc",
]
CALLS_SOURCES = [
    *ENDPOINT_SOURCES,
    *("calls/calls.cc", "triton/readiness.cc"),
    *(f"calls/{name}.cc" for name in ("caller", "inference", "metrics", "models")),
]
BATCH_SOURCES = [
    *(f"batch/{name}.cc" for name in ("batch", "cost", "input_ranks", "stream_pace")),
    *("cache/response_cache.cc", "text/json_reader.cc", "triton/devices.cc", "triton/late_ends.cc"),
    *("wire/arena.cc", "wire/record.cc"),
]
LIBRARY_SOURCES = ["wire/arena.cc", "control.cc", "wire/record.cc", "wire/settings.cc"]
GUARD_SOURCES = [
    "../guard/limits.cc",
    *(f"../guard/refuse/{name}.cc" for name in ("http_scan", "json_scan", "request_text", "shape_check")),
]
GENERATE_SOURCES = [
    "../guard/answers/generate_errors.cc",
    "../guard/refuse/request_text.cc",
    "text/json_reader.cc",
]
RESPONSE_SOURCES = [f"../guard/answers/{name}.cc" for name in ("generate_answer", "http_response")]
NATIVE = Path(__file__).parents[2] / "native"
ALL_GUARD_SOURCES = [
    "text/json_reader.cc",
    *sorted(
        f"../{path.relative_to(NATIVE)}" for folder in ("guard", "grpc") for path in (NATIVE / folder).rglob("*.cc")
    ),
]

# Compilers are slow on a busy machine.
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native proxy is for Linux"),
    # They compile.
    pytest.mark.slow,
]


@pytest.mark.parametrize("name", ["arena", "segments", "strings", "settings", "control", "sparse"])
def test_unit(name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("unit.cc", LIBRARY_SOURCES, "memory"), name)


def test_each_request_is_read_alone(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("isolation.cc", BATCH_SOURCES, "memory"), FUZZ_SEED, 20_000)


@pytest.mark.parametrize(
    ("sanitizer", "arguments"),
    [
        ("memory", ("batches", FUZZ_SEED, 3000)),
        ("memory", ("failures",)),
        ("threads", ("threads", 300)),
        ("memory", ("waits",)),
        ("memory", ("ends",)),
    ],
    ids=["batches", "failures", "threads", "waits", "ends"],
)
def test_tensors_in_the_memory_of_devices(
    sanitizer: str,
    arguments: tuple[object, ...],
    compile_native: Callable[..., Path],
    run_program: Callable[..., str],
) -> None:
    program = compile_native("devices.cc", [*BATCH_SOURCES, "../tests/fake_cuda.cc"], sanitizer)
    run_program(program, *arguments, timeout_s=600)


def test_batches_by_cost(compile_native: Callable[..., Path], run_program: Callable[..., str], tmp_path: Path) -> None:
    """What is cut is what the reference of the protocol says, and a limit is never exceeded."""
    chance = random.Random(FUZZ_SEED)
    cases = [_costs(chance, number % 40) for number in range(600)]
    path = tmp_path / "cases"
    path.write_text("".join(f"{_case_text(case)}\n" for case in cases))
    lines = run_program(compile_native("cost.cc", ["batch/cost.cc"], "memory"), path).splitlines()
    for (limit, overhead, packed, _, requests), line in zip(cases, lines, strict=True):
        found = [[int(place) for place in batch.split()] for batch in line.split(";")[:-1]]
        assert found == cut(requests, limit, overhead, packed=packed)
        assert sorted(itertools.chain(*found)) == list(range(len(requests)))
        for batch in found:
            together = [requests[place] for place in batch]
            assert len(batch) == 1 or cost(together, packed=packed) <= limit


def test_sizes_that_no_number_holds_cost_more_than_any_limit(
    compile_native: Callable[..., Path], run_program: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "cases"
    path.write_text(f"{1 << 62} 1 0 1 2 3  1 {1 << 40} {1 << 40}  4294967295 {1 << 63} 3  1 1 1\n")
    assert run_program(compile_native("cost.cc", ["batch/cost.cc"], "memory"), path).split() == [
        "0",
        ";",
        "1",
        ";",
        "2",
        ";",
    ]


def test_the_other_sizes_of_an_empty_input_count(
    compile_native: Callable[..., Path], run_program: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "cases"
    path.write_text(f"200 100 0 1 2 3  1 0 90  1 0 90000  1 {ABSENT} {ABSENT}\n")
    assert cut([Sizes(1, ((0, 90),)), Sizes(1, ((0, 90_000),)), Sizes(1, (None,))], 200, 100) == [[0, 2], [1]]
    assert run_program(compile_native("cost.cc", ["batch/cost.cc"], "memory"), path).split() == [
        "0",
        "2",
        ";",
        "1",
        ";",
    ]


def _costs(chance: random.Random, count: int) -> tuple[int, int, bool, list[int], list[Sizes]]:
    axes = [chance.choice((1, 1, 2)) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    longest = chance.choice((3, 30, 600))
    requests = [
        Sizes(
            chance.choice((1, 1, 1, 2, 5)),
            tuple(
                None if chance.random() < 0.05 else tuple(chance.randrange(longest) for _ in range(size))
                for size in axes
            ),
        )
        for _ in range(count)
    ]
    return chance.choice((1, 50, 2000, 40_000)), chance.choice((1, 20, 500)), chance.random() < 0.25, axes, requests


def _case_text(case: tuple[int, int, bool, list[int], list[Sizes]]) -> str:
    limit, overhead, packed, axes, requests = case
    numbers = [limit, overhead, int(packed), len(axes), *axes, len(requests)]
    for request in requests:
        sizes = [(ABSENT,) * count if own is None else own for own, count in zip(request.free, axes, strict=True)]
        numbers += [request.rows, *itertools.chain(*sizes)]
    return " ".join(map(str, numbers))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_answers_that_are_kept(
    sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("response_cache.cc", ["cache/response_cache.cc"], sanitizer), FUZZ_SEED, 20_000)


def test_golden_vectors(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("golden.cc", ["wire/record.cc"], "memory"), GOLDEN)


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


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_calls_of_workers_that_come_and_go(
    sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, sanitizer)
    run_program(program, "load", 4, 200, timeout_s=600)


def test_calls_with_every_type_of_input(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("calls.cc", CALLS_SOURCES, "memory"), "types", 50, FUZZ_SEED, timeout_s=600)


def test_batches_where_any_function_of_triton_fails(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    sources = [
        *("batch/batch.cc", "batch/cost.cc", "batch/stream_pace.cc", "cache/response_cache.cc"),
        *("triton/devices.cc", "triton/late_ends.cc", "wire/record.cc"),
    ]
    run_program(compile_native("batch.cc", sources, "memory"))


def test_requests_in_process_where_any_function_of_triton_fails(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("requests.cc", ["../inprocess/requests.cc", "wire/record.cc"], "memory"))


def test_models_that_say_whether_they_are_ready(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, "threads")
    run_program(program, "ready", 4, 200, timeout_s=600)


@pytest.mark.timeout(FUZZ_S + 1800)
def test_fuzz_calls(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    program = compile_native("calls.cc", CALLS_SOURCES, "memory")
    run_program(program, "fuzz", FUZZ_S / 2, FUZZ_SEED, GOLDEN, timeout_s=FUZZ_S + 600)


def _sides(path: Path) -> list[str]:
    return path.read_text().splitlines()[1].split()


@pytest.mark.parametrize(
    "name", ["heads", "chunks", "depth", "splits", "forms", "kept", "names", "traces", "shapes", "settings"]
)
def test_guard_scanners(name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_scan.cc", GUARD_SOURCES, "memory"), name)


def test_texts_of_others_are_escaped_as_in_python(
    tmp_path: Path, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    text, path = "".join(map(chr, range(0x110000))), tmp_path / "text"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    made = run_program(compile_native("guard_scan.cc", GUARD_SOURCES, "memory"), "printable", path)
    assert made == escaped(text)


@pytest.mark.parametrize("arguments", [("texts",), ("fuzz", FUZZ_SEED, 20_000)])
def test_errors_of_generate(
    arguments: tuple[object, ...], compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("generate_errors.cc", GENERATE_SOURCES, "memory"), *arguments)


def test_guard_page(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(
        compile_native("guard_page.cc", ["../guard/answers/page.cc", "text/json_reader.cc"], "memory"), FUZZ_SEED
    )


def test_guard_answers(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_answers.cc", ["../guard/answers/http_answers.cc"], "memory"))


def test_guard_threads(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    sources = [
        f"../guard/{name}.cc" for name in ("frontend/http_threads", "refuse/memory", "workarounds/instance_threads")
    ]
    run_program(compile_native("guard_threads.cc", sources, "memory"))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_guard_deferrals(sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_deferrals.cc", ["../guard/workarounds/http_deferrals.cc"], sanitizer))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_guard_backlog(sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_backlog.cc", ["../guard/answers/stream_backlog.cc"], sanitizer))


def test_stream_pace(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("stream_pace.cc", ["batch/stream_pace.cc"], "memory"))


def test_guard_ends_an_orphan_that_heeds_no_signal(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("guard_orphan.cc", ["../guard/workarounds/orphans.cc"], "memory"), timeout_s=600)


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_guard_outcomes(sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_outcomes.cc", ["../guard/answers/outcomes.cc"], sanitizer))


def test_guard_responses(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_response.cc", RESPONSE_SOURCES, "memory"))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_guard_poll(sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    run_program(compile_native("guard_poll.cc", ["../guard/frontend/http_poll.cc"], sanitizer))


@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
def test_clock_of_the_front_end_for_grpc(
    sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("grpc_loop.cc", ["../grpc/loop.cc"], sanitizer))


def has_nghttp2() -> bool:
    try:
        ctypes.CDLL("libnghttp2.so.14")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_nghttp2(), reason="connections of HTTP/2 cannot be made here without libnghttp2")
@pytest.mark.parametrize("sanitizer", ["memory", "threads"])
@pytest.mark.parametrize("machine", ["here"], indirect=True)
def test_connection_to_the_front_end_of_triton(
    sanitizer: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    # On one machine: the C libraries of the others, as they are installed for compilers, have no libnghttp2.
    sources = [f"../grpc/{name}.cc" for name in ("inner", "http2", "loop", "nghttp2", "tls", "framing")]
    sources.append("../guard/answers/stream_backlog.cc")
    run_program(compile_native("grpc_inner.cc", sources, sanitizer))


@pytest.mark.parametrize("name", ["frames", "garbage", "writers", "readers"])
def test_guard_of_a_replaced_server(
    name: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("guard_goodbye.cc", ALL_GUARD_SOURCES, "memory"), name)


@pytest.mark.parametrize("machine", ["here"], indirect=True)
def test_guard_looks_nothing_up_when_it_is_called(
    compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    # Without sanitizers, which look up functions of their own. On one machine: the guard's sources are the same on all.
    run_program(compile_native("guard_hooks.cc", ALL_GUARD_SOURCES, "as shipped"))


@pytest.mark.parametrize("kind", ["fork", "vfork", "clone"])
def test_guard_leaves_children_alone(
    kind: str, compile_native: Callable[..., Path], run_program: Callable[..., str]
) -> None:
    run_program(compile_native("guard_children.cc", ALL_GUARD_SOURCES, "memory"), kind)


@pytest.mark.timeout(FUZZ_S + 1800)
def test_fuzz_records_and_settings(compile_native: Callable[..., Path], run_program: Callable[..., str]) -> None:
    program = compile_native("fuzz.cc", ["wire/record.cc", "wire/settings.cc"], "memory")
    run_program(program, FUZZ_S / 2, FUZZ_SEED, GOLDEN, timeout_s=FUZZ_S + 600)
