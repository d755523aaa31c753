"""Makes the golden vectors of protocol 1.0: `python generate.py` writes the `.bin` files beside it.

It was written from the byte tables in `docs/protocol.md` with nothing but `struct`, and imports nothing of the
distribution, so that a slip in the code cannot hide in the vectors. Both sides are held against them: see
`test_golden.py` and `native/tests/golden.cc`. Once a protocol version is out its vectors never change; `--check` says
whether the files are what this script makes.

The protocol leaves the order of tables and texts inside a record to its writer. The vectors have the order of the
writers here: the C++ one for the batch record, the Python one for the response records.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

HELLO, WELCOME, REFUSE, SEGMENT, SEGMENT_CLOSE, BATCH, RESPONSE, FAIL, RELEASE, CANCEL, DETACH, ACTIVITY = range(1, 13)
CALLER, CALL, RESULT, EXECUTED, PAUSE, RESUME, WAKE, RESPONSES = range(13, 21)
# Of an input "x" and an output "y", both FP32 of one free dimension.
DIGEST = "07e15f480f14f849abbf0cefca44dce9"
INPUT_RELEASED, BATCH_DONE, STREAM = 1, 2, 4
FINAL, ERROR, EMPTY, RESCHEDULE = 1, 2, 4, 8
INFER, METRIC_SET = 1, 8
STRING, INT, BOOL, DOUBLE = range(4)
INT64, FP32, BYTES = 9, 11, 13
WHOLE_BATCH = 0xFFFFFFFF
BATCH_MAGIC = b"PTB1"
RESPONSE_MAGIC = b"PTR1"

Value = str | int | bool | float


def message(
    kind: int,
    *,
    flags: int = 0,
    batch: int = 0,
    consumed: int = 0,
    segment: int = 0,
    index: int = 0,
    offset: int = 0,
    length: int = 0,
    body: bytes = b"",
) -> bytes:
    """One packet: the header of 48 bytes and what follows it."""
    head = struct.pack("<HHIQQIIQQ", kind, flags, 48 + len(body), batch, consumed, segment, index, offset, length)
    return head + body


def greeting(
    kind: int,
    text: str,
    *,
    magic: bytes = b"PYTRITON",
    major: int = 1,
    minor: int = 0,
    pid: int = 4242,
    uid: int = 1000,
    max_in_flight: int = 1,
    capabilities: int = 3,
    model_flags: int = 0,
    model_version: int = 0,
    arena_budget: int = 0,
    arena_idle_ms: int = 0,
    execution_timeout_ms: int = 0,
    tail: bytes = b"",
) -> bytes:
    """HELLO, WELCOME or REFUSE; `tail` is what a later minor version adds behind the text."""
    raw = text.encode()
    body = struct.pack(
        "<8sHHIIIQIIQQQQ", magic, major, minor, pid, uid, max_in_flight, capabilities, model_flags, len(raw),
        model_version, arena_budget, arena_idle_ms, execution_timeout_ms,
    )  # fmt: skip
    return message(kind, body=body + raw + tail)


def strings(*elements: bytes) -> bytes:
    """The payload of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def align(value: int, alignment: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // alignment) * alignment


def parameter_bits(value: Value) -> tuple[int, int]:
    """Type and 64 bits of a parameter that is no string."""
    if isinstance(value, bool):
        return BOOL, int(value)
    if isinstance(value, int):
        return INT, int.from_bytes(struct.pack("<q", value), "little")
    return DOUBLE, int.from_bytes(struct.pack("<d", value), "little")


@dataclass
class Tensor:
    """One tensor of a record; its payload lies at `place` in the record of the batch, if that is given."""

    name: str
    dtype: int
    shape: Sequence[int]
    payload: bytes
    owner: int = WHOLE_BATCH
    place: int | None = None


@dataclass
class Request:
    """One request of a batch record."""

    rows: int = 1
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    correlation_id: int = 0
    id: str = ""
    correlation_string: str = ""
    trace_context: str = ""
    parameters: dict[str, Value] = field(default_factory=dict)
    outputs: Sequence[str] = ()


@dataclass
class Answer:
    """One response of a response record."""

    request: int
    flags: int = FINAL
    rows: int = 0
    error_code: int = 1
    error: str | None = None
    parameters: dict[str, Value] = field(default_factory=dict)


def call_body(subject: int, text: str, value: float = 0.0, parent: tuple[int, int] = (0, 0)) -> bytes:
    """What follows the header of CALL."""
    return struct.pack("<qdQI4x", subject, value, *parent) + text.encode()


class Texts:
    """Strings behind each other, each with a zero byte at its end."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.raw = b""

    def add(self, text: str) -> tuple[int, int]:
        """Returns offset and length."""
        raw = text.encode("utf-8", "surrogateescape")
        place = (self.offset + len(self.raw), len(raw))
        self.raw += raw + b"\0"
        return place


def _tensor_table(tensors: Sequence[Tensor], names: Sequence[tuple[int, int]], dims_offset: int, payload: int) -> bytes:
    table = b""
    for tensor, name in zip(tensors, names, strict=True):
        table += struct.pack(
            "<IIIIIIQQQ", *name, tensor.dtype, len(tensor.shape), tensor.owner, dims_offset,
            payload if tensor.place is None else tensor.place, len(tensor.payload), int(tensor.place is not None),
        )  # fmt: skip
        dims_offset += 8 * len(tensor.shape)
        if tensor.place is None:
            payload = align(payload + len(tensor.payload), 64)
    return table


def _record(
    magic: bytes,
    batch: int,
    entries: bytes,
    count: int,
    rest: bytes,
    tensors: Sequence[Tensor],
    stamps: tuple[int, int] = (0, 0),
) -> bytes:
    own = [tensor.payload for tensor in tensors if tensor.place is None]
    payloads = b"".join(payload.ljust(align(len(payload), 64), b"\0") for payload in own)
    length = align(64 + len(entries) + len(rest), 64)
    header = struct.pack(
        "<4sIIIQQQIIQQ",
        magic,
        count,
        len(tensors),
        0,
        batch,
        length,
        length + len(payloads),
        64,
        64 + len(entries),
        *stamps,
    )
    return (header + entries + rest).ljust(length, b"\0") + payloads


def batch_record(
    batch: int, requests: Sequence[Request], tensors: Sequence[Tensor] = (), stamps: tuple[int, int] = (0, 0)
) -> bytes:
    """A batch record as the proxy backend writes it: outputs that are the same as the first request's, once.

    `stamps` are the times when it got the batch and when it sent it.
    """
    outputs: list[str] = []
    firsts: list[int] = []
    for request in requests:
        shared = bool(firsts) and list(request.outputs) == list(requests[0].outputs)
        firsts.append(firsts[0] if shared else len(outputs))
        outputs += [] if shared else request.outputs
    parameters = [pair for request in requests for pair in request.parameters.items()]
    tensors_offset = 64 + 80 * len(requests)
    dims_offset = tensors_offset + 48 * len(tensors)
    parameters_offset = dims_offset + 8 * sum(len(tensor.shape) for tensor in tensors)
    outputs_offset = parameters_offset + 24 * len(parameters)
    texts = Texts(outputs_offset + 8 * len(outputs))

    outputs_table = b"".join(struct.pack("<II", *texts.add(name)) for name in outputs)
    parameters_table = b""
    for key, value in parameters:
        place = texts.add(key)
        text = texts.add(value if isinstance(value, str) else "")
        kind, bits = (STRING, text[0]) if isinstance(value, str) else parameter_bits(value)
        parameters_table += struct.pack("<IIIIQ", *place, kind, text[1], bits)
    entries = b""
    at = parameters_offset
    for request, first in zip(requests, firsts, strict=True):
        refs = [texts.add(text) for text in (request.id, request.correlation_string, request.trace_context)]
        entries += struct.pack(
            "<IIQQQIIIIIIIIIIB7x", request.rows, request.flags, request.priority, request.timeout_us,
            request.correlation_id, *refs[0], *refs[1], *refs[2], at, len(request.parameters),
            outputs_offset + 8 * first, len(request.outputs), 0,
        )  # fmt: skip
        at += 24 * len(request.parameters)
    names = [texts.add(tensor.name) for tensor in tensors]
    dims = b"".join(struct.pack("<q", dim) for tensor in tensors for dim in tensor.shape)
    metadata_length = align(texts.offset + len(texts.raw), 64)
    table = _tensor_table(tensors, names, dims_offset, metadata_length)
    rest = table + dims + parameters_table + outputs_table + texts.raw
    return _record(BATCH_MAGIC, batch, entries, len(requests), rest, tensors, stamps)


def response_record(batch: int, answers: Sequence[Answer], tensors: Sequence[Tensor] = ()) -> bytes:
    """A response record as the worker writes it."""
    tensors_offset = 64 + 48 * len(answers)
    dims_offset = tensors_offset + 48 * len(tensors)
    at = dims_offset + 8 * sum(len(tensor.shape) for tensor in tensors)
    texts = Texts(at + 24 * sum(len(answer.parameters) for answer in answers))

    entries = b""
    parameters_table = b""
    for answer in answers:
        error = (0, 0) if answer.error is None else texts.add(answer.error)
        for key, value in answer.parameters.items():
            place = texts.add(key)
            if isinstance(value, str):
                offset, length = texts.add(value)
                parameters_table += struct.pack("<IIIIQ", *place, STRING, length, offset)
            else:
                kind, bits = parameter_bits(value)
                parameters_table += struct.pack("<IIIIQ", *place, kind, 0, bits)
        entries += struct.pack(
            "<IIIIIIII16x", answer.request, answer.flags, answer.rows, answer.error_code, *error, at,
            len(answer.parameters),
        )  # fmt: skip
        at += 24 * len(answer.parameters)
    names = [texts.add(tensor.name) for tensor in tensors]
    dims = b"".join(struct.pack("<q", dim) for tensor in tensors for dim in tensor.shape)
    metadata_length = align(texts.offset + len(texts.raw), 64)
    table = _tensor_table(tensors, names, dims_offset, metadata_length)
    return _record(RESPONSE_MAGIC, batch, entries, len(answers), table + dims + parameters_table + texts.raw, tensors)


def answer_record(call: int, answer: Answer, tensors: Sequence[Tensor] = ()) -> bytes:
    """The answer to a call as the proxy backend writes it, with a text for whatever may have one."""
    dims_offset = 64 + 48 + 48 * len(tensors)
    parameters_offset = dims_offset + 8 * sum(len(tensor.shape) for tensor in tensors)
    texts = Texts(parameters_offset + 24 * len(answer.parameters))
    error = texts.add(answer.error or "")
    parameters_table = b""
    for key, value in answer.parameters.items():
        place = texts.add(key)
        text = texts.add(value if isinstance(value, str) else "")
        kind, bits = (STRING, text[0]) if isinstance(value, str) else parameter_bits(value)
        parameters_table += struct.pack("<IIIIQ", *place, kind, text[1], bits)
    entry = struct.pack(
        "<IIIIIIII16x", 0, answer.flags, 0, answer.error_code, *error, parameters_offset, len(answer.parameters)
    )
    names = [texts.add(tensor.name) for tensor in tensors]
    dims = b"".join(struct.pack("<q", dim) for tensor in tensors for dim in tensor.shape)
    metadata_length = align(texts.offset + len(texts.raw), 64)
    table = _tensor_table(tensors, names, dims_offset, metadata_length)
    return _record(RESPONSE_MAGIC, call, entry, 1, table + dims + parameters_table + texts.raw, tensors)


# ---- the vectors ---------------------------------------------------------------------------------------------------

PARAMETERS: dict[str, Value] = {"text": "grüße", "empty": "", "count": -(1 << 62), "flag": True, "rate": 0.25}


def golden_batch() -> bytes:
    """Three requests of 2, 1 and 1 rows; numbers and strings for all; `opt` only for the first and the last."""
    requests = [
        Request(
            rows=2, flags=1, priority=1 << 40, timeout_us=1_500_000, correlation_id=77, id="first",
            trace_context="00-abc-01", parameters=PARAMETERS, outputs=["y", "label"],
        ),
        Request(rows=1, correlation_string="séance-9", id="zweite", outputs=["y", "label"]),
        Request(rows=1, flags=2, parameters={"last": False}, outputs=["y"]),
    ]  # fmt: skip
    tensors = [
        Tensor("x", FP32, [4, 2], struct.pack("<8f", *range(8))),
        Tensor("text", BYTES, [4, 1], strings(b"", b"a", b"\x00\xff", "grüße".encode())),
        Tensor("opt", INT64, [2, 1], struct.pack("<2q", -1, 1 << 40), owner=0),
        Tensor("opt", INT64, [1, 3], struct.pack("<3q", 1, 2, 3), owner=2),
    ]
    return batch_record(7, requests, tensors, stamps=(1_000_000_007, (1 << 40) + 3))


def golden_columns() -> bytes:
    """Last answers to three requests, as tensors over the whole batch."""
    answers = [Answer(0, rows=2), Answer(1, rows=1), Answer(2, rows=1)]
    tensors = [
        Tensor("y", FP32, [4, 2], struct.pack("<8f", *(0.5 * i for i in range(8)))),
        Tensor("label", BYTES, [4], strings(b"null", b"", b"eins", b"\x00")),
    ]
    return response_record(7, answers, tensors)


def golden_plain() -> bytes:
    """Last answers to two requests, numbers only."""
    tensors = [
        Tensor("y", FP32, [3, 2], struct.pack("<6f", *range(6))),
        Tensor("n", INT64, [3], struct.pack("<3q", -1, 0, 1 << 40)),
    ]
    return response_record(7, [Answer(0, rows=1), Answer(1, rows=2)], tensors)


def golden_reference(*places: int | None) -> bytes:
    """Last answers to two requests, whose tensors are inputs where they have a place among these."""
    tensors = [
        Tensor("y", FP32, [3, 2], struct.pack("<6f", *range(6)), place=places[0]),
        Tensor("n", INT64, [3], struct.pack("<3q", -1, 0, 1 << 40), place=places[1]),
    ]
    return response_record(7, [Answer(0, rows=1), Answer(1, rows=2)], tensors)


def golden_mixed() -> bytes:
    """Tensors of single responses, parameters of every type, an error, and the end of a stream."""
    answers = [
        Answer(0, flags=0, parameters=PARAMETERS),
        Answer(1, flags=FINAL | ERROR, error_code=3, error="no such label: größer"),
        Answer(2, flags=FINAL | EMPTY),
    ]
    tensors = [
        Tensor("y", FP32, [2, 2], struct.pack("<4f", 1, 2, 3, 4), owner=0),
        Tensor("label", BYTES, [2, 0], b"", owner=0),
    ]
    return response_record(7, answers, tensors)


def golden_rescheduled() -> bytes:
    """A request that goes back to the scheduler, between two that are answered."""
    tensors = [Tensor("y", FP32, [2, 1], struct.pack("<2f", 1, 2))]
    answers = [Answer(0, rows=1), Answer(1, flags=FINAL | RESCHEDULE), Answer(2, rows=1)]
    return response_record(7, answers, tensors)


def golden_call() -> bytes:
    """The request of a call, with all that one may have."""
    request = Request(
        rows=1, flags=3, priority=2, timeout_us=1_500_000, correlation_id=77, id="call", parameters=PARAMETERS,
        outputs=["y", "label"],
    )  # fmt: skip
    tensors = [
        Tensor("x", FP32, [2, 2], struct.pack("<4f", 1, 2, 3, 4)),
        Tensor("text", BYTES, [2], strings(b"", "grüße".encode())),
    ]
    return batch_record(9, [request], tensors)


def golden_call_answer() -> bytes:
    """Outputs and parameters that a model gave."""
    tensors = [
        Tensor("y", FP32, [2, 2], struct.pack("<4f", 1, 2, 3, 4), owner=0),
        Tensor("label", BYTES, [2], strings(b"", b"eins"), owner=0),
    ]
    return answer_record(9, Answer(0, flags=0, error_code=0, parameters=PARAMETERS), tensors)


def vectors() -> dict[str, bytes]:
    """Every vector by the name of its file."""
    welcome: dict[str, Any] = {
        "model_flags": 1, "model_version": 3, "arena_budget": 1 << 32, "arena_idle_ms": 10_000, "max_in_flight": 1,
        "execution_timeout_ms": 2500,
    }  # fmt: skip
    made = {
        "hello": greeting(HELLO, f"classify\nmodel\n{DIGEST}", max_in_flight=64, model_version=1),
        "welcome": greeting(WELCOME, "digits", **welcome),
        "welcome_decoupled_no_capabilities": greeting(
            WELCOME, "tokens", **{**welcome, "model_flags": 3, "capabilities": 0}
        ),
        "welcome_minor_9": greeting(
            WELCOME, "digits", **{**welcome, "capabilities": (1 << 64) - 1}, minor=9, tail=b"later fields" * 3
        ),
        "hello_minor_9": greeting(HELLO, "classify", minor=9, capabilities=(1 << 64) - 1, tail=b"later fields" * 3),
        "refuse": greeting(REFUSE, "it runs as user 7, the server as user 0: both must be the same user"),
        "refuse_major_2": greeting(REFUSE, "speak 2.0", major=2),
        # All that later major versions promise: magic, major, minor.
        "refuse_major_2_short": message(REFUSE, body=struct.pack("<8sHH", b"PYTRITON", 2, 5)),
        "hello_major_2_short": message(HELLO, body=struct.pack("<8sHH", b"PYTRITON", 2, 5)),
        "segment": message(SEGMENT, segment=2, length=1 << 33),
        "segment_close": message(SEGMENT_CLOSE, segment=2),
        "batch": message(BATCH, batch=7, consumed=5, segment=2, offset=(1 << 32) + 128, length=1 << 32),
        "response": message(
            RESPONSE, flags=INPUT_RELEASED | BATCH_DONE, batch=7, segment=1, offset=1 << 33, length=4096
        ),
        "responses": message(RESPONSES, segment=1, offset=1 << 33, length=8192),
        "fail": message(FAIL, flags=BATCH_DONE, batch=7, index=3, body="größer".encode()),
        "release_acknowledge": message(RELEASE, consumed=6),
        "release_block": message(RELEASE, segment=2, offset=(1 << 32) + 128),
        "cancel": message(CANCEL, batch=7, index=2),
        "detach": message(DETACH),
        "executed": message(EXECUTED, batch=7),
        "pause": message(PAUSE, batch=7, index=2),
        "resume": message(RESUME, batch=7, index=2),
        "wake": message(WAKE),
        "activity_ask": message(ACTIVITY),
        "activity": message(ACTIVITY, batch=9, length=3),
        "caller": greeting(CALLER, "classify", capabilities=7),
        "call_infer": message(
            CALL,
            flags=STREAM,
            batch=9,
            segment=2,
            index=INFER,
            offset=(1 << 32) + 128,
            length=1 << 32,
            body=call_body(-1, "größer", parent=(7, 2)),
        ),
        "call_metric": message(CALL, batch=10, index=METRIC_SET, body=call_body(3, "", 0.25)),
        "result": message(RESULT, flags=BATCH_DONE, batch=10, length=1 << 62),
        "record_batch": golden_batch(),
        "record_response_columns": golden_columns(),
        "record_response_plain": golden_plain(),
        "record_response_mixed": golden_mixed(),
        "record_response_reference": golden_reference(576, None),
        "record_response_references": golden_reference(576, 640),
        "record_response_rescheduled": golden_rescheduled(),
        "record_call": golden_call(),
        "record_call_answer": golden_call_answer(),
    }
    return {f"{name}.bin": raw for name, raw in made.items()}


def stale() -> Iterator[str]:
    """The names of files that are not what this script makes."""
    for name, raw in vectors().items():
        path = FOLDER / name
        if not path.is_file() or path.read_bytes() != raw:
            yield name


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(f"not as generated: {', '.join(names)}" if (names := list(stale())) else 0)
    for file_name, content in vectors().items():
        (FOLDER / file_name).write_bytes(content)
