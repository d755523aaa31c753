"""What the front end for gRPC reads and writes, against protobuf's own messages: good requests, bad ones, broken bytes.

Each request is made from the seed and its number alone. `PYTRITON_FUZZ_SEED` and `PYTRITON_FUZZ_REQUESTS` say which,
and how many.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.faults.front_end.bodies import scramble
from support.waiting import PATIENCE_S

# Longer where somebody looks for more: PYTRITON_FUZZ_S=600 pytest -k fuzz
FUZZ_S = float(os.environ.get("PYTRITON_FUZZ_S", "12"))
SEED = int(os.environ.get("PYTRITON_FUZZ_SEED", "1"))
COUNT = int(os.environ.get("PYTRITON_FUZZ_REQUESTS", "3000"))
SOURCES = ["../grpc/inference.cc", "../grpc/request.cc", "../guard/answers/outcomes.cc"]
# What the double of Triton has: it answers with the inputs, or as the name says.
DOUBLES = ["echo", "apart", "error", "stream", "none", "never", "twice", "wrong"]
OK, INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 12, 13

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is for Linux"),
    # They compile.
    pytest.mark.slow,
]

made = pytest.importorskip("support.faults.grpc_requests")
service_pb2 = made.service_pb2
DecodeError = pytest.importorskip("google.protobuf.message").DecodeError


@pytest.fixture(scope="module")
def program(compile_native: Callable[..., Path]) -> Path:
    return compile_native("grpc_inference.cc", SOURCES, "memory")


@pytest.fixture(scope="module")
def messages() -> list[tuple[bytes, bool]]:
    """Make messages, each with whether its bytes are whole."""
    types = list(made.TYPES)
    found = []
    for number in range(COUNT):
        models = {name: types[(number + place) % len(types)] for place, name in enumerate(DOUBLES)}
        content = made.make(SEED, number, models).content
        is_whole = number % 4 != 0
        if not is_whole:
            content = scramble(random.Random(f"{SEED}/{number}"), content)
        found.append((content, is_whole))
    return found


@pytest.fixture(scope="module")
def corpus(messages: Sequence[tuple[bytes, bool]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "messages"
    path.write_text("".join(f"{content.hex()}\n" for content, _ in messages[:500]))
    return path


def ask(program: Path, what: str, lines: Sequence[str]) -> list[str]:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run([program, what], input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def parse(content: bytes) -> Any:
    """Return the request of a message, None if it is none for protobuf."""
    with contextlib.suppress(DecodeError):
        return service_pb2.ModelInferRequest.FromString(content)
    return None


def hexed(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).hex() or "-"


def is_odd(name: str, value: Any) -> bool:
    kind = value.WhichOneof("parameter_choice")
    if name == "sequence_id":
        return kind not in ("int64_param", "string_param")
    if name in ("sequence_start", "sequence_end", "triton_enable_empty_final_response"):
        return bool(kind != "bool_param")
    if name == "priority":
        return kind not in ("int64_param", "uint64_param") or value.int64_param < 0
    if name == "timeout":
        return bool(kind != "int64_param")
    return name.startswith("triton_") or kind not in ("int64_param", "bool_param", "string_param", "double_param")


def typed(tensor: Any) -> bytes | None:
    """Return the elements of a tensor that has them, None where Triton's own front end has something to say of them."""
    fields = [(descriptor.name, values) for descriptor, values in tensor.contents.ListFields()]
    if tensor.datatype not in made.TYPES or [name for name, _ in fields] != [made.TYPES[tensor.datatype][1]]:
        return None
    values = list(fields[0][1])
    count = 1
    for size in tensor.shape:
        count *= size
    if any(size < 0 for size in tensor.shape) or count != len(values):
        return None
    if tensor.datatype == "BYTES":
        return bytes(made.raw("BYTES", values))
    size = made.TYPES[tensor.datatype][0]
    if tensor.datatype in ("FP32", "FP64"):
        return struct.pack(f"<{len(values)}{'f' if size == 4 else 'd'}", *values)
    return b"".join((int(value) & (1 << 8 * size) - 1).to_bytes(size, "little") for value in values)


def is_for_triton(request: Any) -> bool:
    has = [tensor.HasField("contents") for tensor in request.inputs]
    raws = len(request.raw_input_contents)
    are_good = (not any(has) and raws == len(has)) or (all(has) and raws == 0)
    version = request.model_version
    return (
        not are_good
        or any(typed(tensor) is None for tensor, its in zip(request.inputs, has, strict=True) if its)
        or any(is_odd(name, value) for name, value in request.parameters.items())
        or any(tensor.parameters for tensor in [*request.inputs, *request.outputs])
        or not (version == "" or (re.fullmatch("[0-9]+", version) is not None and int(version) < 2**63))
    )


def parameter_line(name: str, value: Any) -> str:
    kind = value.WhichOneof("parameter_choice")
    its: Any = getattr(value, kind) if kind else False
    shown: dict[str | None, Callable[[], str]] = {
        "bool_param": lambda: f"bool {int(its)}",
        "int64_param": lambda: f"int {its}",
        "string_param": lambda: f"string {hexed(its)}",
        "double_param": lambda: f"double {struct.pack('<d', its).hex()}",
        "uint64_param": lambda: f"unsigned {its}",
        None: lambda: "bool 0",
    }
    return f"parameter {hexed(name)} {shown[kind]()}"


def lines_of(request: Any, goes_on: bool) -> list[str]:
    """Return what the program prints of a request that it has read; `goes_on` to Triton's own front end."""
    lines = [
        f"sequence {int('sequence_id' in request.parameters)}",
        f"model {hexed(request.model_name)}",
        f"version {hexed(request.model_version)}",
        f"id {hexed(request.id)}",
    ]
    lines.extend(sorted(parameter_line(name, value) for name, value in request.parameters.items()))
    for tensor in request.inputs:
        lines.append(" ".join([f"input {hexed(tensor.name)} {hexed(tensor.datatype)}", *map(str, tensor.shape)]))
        if tensor.HasField("contents") and not goes_on:
            elements = typed(tensor)
            assert elements is not None
            lines.append(f"elements {hexed(elements)}")
    lines.extend(f"output {hexed(output.name)}" for output in request.outputs)
    return [*lines, *(f"raw {hexed(content)}" for content in request.raw_input_contents)]


def without_parameters(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not line.startswith("parameter")]


def test_reads_what_protobuf_reads(program: Path, messages: Sequence[tuple[bytes, bool]]) -> None:
    printed = iter("\n".join(ask(program, "read", [content.hex() for content, _ in messages])).split("status ")[1:])
    forwarded = 0
    for number, (content, is_whole) in enumerate(messages):
        status, *lines = next(printed).rstrip("\n").split("\n")
        code = int(status.split()[0])
        request = parse(content)
        where = f"seed {SEED}, number {number}, {content[:200]!r}"
        if request is None:
            assert code == INTERNAL, where
            continue
        assert code == OK, where
        goes_on = lines[0] == "triton 1"
        forwarded += goes_on
        # Of a key that comes twice, or contents that do, the first one says too much to some.
        assert goes_on == is_for_triton(request) or (goes_on and not is_whole), where
        expected = lines_of(request, goes_on)
        if not is_whole:
            # An entry of a map that has more than a key and a value is one in C++ and none in Python; and a NaN that
            # signals does no more when Python has had it.
            lines, expected = ([line for line in each if not re.match("parameter|elements|sequence", line)]
                               for each in (lines, expected))  # fmt: skip
        assert sorted(lines[1:]) == sorted(expected), where
        assert without_parameters(lines[1:]) == without_parameters(expected), where
    assert next(printed, None) is None
    assert len(messages) // 10 < forwarded < len(messages) // 1.5


# ---- answers ---------------------------------------------------------------------------------------------------------


def answered(request: Any) -> Any:
    """Return the response of the double that has the inputs as outputs; a number is the code of an error instead."""
    if request.model_name == "error":
        return INVALID_ARGUMENT
    response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="7", id=request.id)
    flags = 0
    for name, value in request.parameters.items():
        if name in ("sequence_start", "sequence_end"):
            flags |= value.bool_param << (name == "sequence_end")
        elif name != "triton_enable_empty_final_response":
            shown = {"sequence_id": "its correlation id", "priority": "its priority", "timeout": "its timeout"}.get(
                name
            )
            its = response.parameters[shown or name]
            its.CopyFrom(value)
            if shown and value.WhichOneof("parameter_choice") != "string_param":
                # As the 64 bits that they are.
                bits = value.uint64_param or value.int64_param
                its.int64_param = bits - (1 << 64 if bits >= 1 << 63 else 0)
    response.parameters["its flags"].int64_param = flags
    asked = {output.name for output in request.outputs}
    contents = (
        [typed(tensor) for tensor in request.inputs] if not request.raw_input_contents else request.raw_input_contents
    )
    for tensor, content in zip(request.inputs, contents, strict=True):
        if asked and tensor.name not in asked:
            continue
        known = tensor.datatype in made.TYPES or tensor.datatype == "BF16"
        expected = made.TYPES.get(tensor.datatype, (2 if known else 0,))[0]
        for size in tensor.shape:
            expected *= size
        if any(size < 0 for size in tensor.shape) and tensor.datatype != "BYTES":
            return INTERNAL
        if tensor.datatype != "BYTES" and expected != len(content) + (request.model_name == "wrong"):
            return INTERNAL
        datatype = tensor.datatype if known else "INVALID"
        response.outputs.add(name=tensor.name, datatype=datatype, shape=tensor.shape)
        response.raw_output_contents.append(content + (b"" if request.model_name != "wrong" else b"?"))
    return response


def expected_of_infer(request: Any) -> Any:
    """Return the response to ModelInfer, or the code of its error."""
    name = request.model_name
    if name in ("none", "stream"):
        return NOT_FOUND if name == "none" else UNIMPLEMENTED
    if len({tensor.name for tensor in request.inputs}) < len(request.inputs):
        return INVALID_ARGUMENT
    return INTERNAL if name in ("never", "twice") else answered(request)


def expected_of_stream(request: Any, stops_at_error: bool) -> tuple[list[tuple[bool, Any]], int]:
    """Return the messages of one request of ModelStreamInfer, each with whether it is an error, and the status."""
    name = request.model_name
    if name == "none" or len({tensor.name for tensor in request.inputs}) < len(request.inputs):
        return [(True, service_pb2.ModelInferResponse(id=request.id))], OK
    count = {"never": 0, "twice": 2}.get(name, 1)
    if name == "stream" and "responses" in request.parameters:
        count = min(max(request.parameters["responses"].int64_param, 0), 8)
    is_apart = name == "apart" or count == 0
    wants_end = name == "stream" and request.parameters["triton_enable_empty_final_response"].bool_param
    known = service_pb2.ModelInferResponse(model_name=name, model_version=request.model_version, id=request.id)
    answer = answered(request)
    is_error = isinstance(answer, int)
    if is_error and stops_at_error and count > 0:
        return [], answer
    found = []
    for index in range(count):
        response = service_pb2.ModelInferResponse()
        response.CopyFrom(known if is_error else answer)
        response.parameters["triton_final_response"].bool_param = not is_apart and index + 1 == count
        found.append((is_error, response))
    if is_apart and wants_end:
        known.parameters["triton_final_response"].bool_param = True
        found.append((False, known))
    return found, OK


def test_writes_what_protobuf_reads(program: Path, messages: Sequence[tuple[bytes, bool]]) -> None:
    requests = [
        (number, request)
        for number, (content, is_whole) in enumerate(messages)
        if is_whole and (request := parse(content)) is not None
    ]
    kinds = [("infer", "stream", "strict")[number % 3] for number, _ in requests]
    asked = [f"{kind} {hexed(messages[number][0])}" for kind, (number, _) in zip(kinds, requests, strict=True)]
    lines = iter(ask(program, "serve", asked))
    served = 0
    for kind, (number, request) in zip(kinds, requests, strict=True):
        where = f"seed {SEED}, number {number}, {kind}: {request}"[:2000]
        found = []
        while (line := next(lines)).startswith("message"):
            content = bytes.fromhex(line.split()[1].removesuffix("-"))
            found.append((service_pb2.ModelInferResponse if kind == "infer" else service_pb2.ModelStreamInferResponse)
                         .FromString(content))  # fmt: skip
        if line == "triton":
            assert is_for_triton(request), where
            continue
        code = int(line.split()[1])
        served += 1
        if kind == "infer":
            expected = expected_of_infer(request)
            assert (code or found[0]) == expected, where
            assert len(found) == (code == OK)
            assert code == OK or line.split()[2] != "-", where
            continue
        responses, status = expected_of_stream(request, kind == "strict")
        assert code == status, where
        assert [(bool(each.error_message), each.infer_response) for each in found] == responses, where
    assert next(lines, None) is None
    assert served > len(requests) // 4


def test_the_same_message_in_other_bytes_is_the_same() -> None:
    for number in range(200):
        rng = random.Random(number)
        datatype = rng.choice(list(made.TYPES))
        request = made.good(rng, "echo", datatype)
        again = service_pb2.ModelInferRequest.FromString(made.rewritten(rng, request))
        again.DiscardUnknownFields()
        assert again == request


@pytest.mark.timeout(FUZZ_S + 1800)
def test_fuzz_requests(program: Path, corpus: Path, run_program: Callable[..., str]) -> None:
    print(run_program(program, "fuzz", FUZZ_S / 2, SEED, corpus, timeout_s=FUZZ_S + 600))
