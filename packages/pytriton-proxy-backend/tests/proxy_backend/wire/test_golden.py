"""The golden vectors from Python: every packet, the batch record in, the response records out."""

import dataclasses
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.types import make_requests
from pytriton.proxy_backend import VersionMismatchError
from pytriton.proxy_backend.errors import AttachError, ProtocolError
from pytriton.proxy_backend.transport.arena import PeerArena
from pytriton.proxy_backend.wire import layout, messages
from pytriton.proxy_backend.wire.batch import BatchReader, RequestData, RequestWriter, lay_out_batch
from pytriton.proxy_backend.wire.greetings import GreetingError, Hello, Welcome, parse_answer, parse_hello
from pytriton.proxy_backend.wire.layout import CAPABILITIES, Capability
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import AnswerReader, ResponseData, ResponseWriter, read_responses

GOLDEN = Path(__file__).parents[2] / "golden"


def read(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


def test_files_are_what_the_generator_makes(golden: ModuleType) -> None:
    assert list(golden.stale()) == []
    assert {path.name for path in GOLDEN.glob("*.bin")} == set(golden.vectors())


def test_both_languages_are_held_to_every_message() -> None:
    """Records are written by one side alone, and so are greetings of other versions."""
    messages = {path.stem for path in GOLDEN.glob("*.bin") if not re.search("record|major|minor", path.stem)}
    for program in (Path(__file__), GOLDEN.parents[1] / "native" / "tests" / "golden.cc"):
        compared = set(re.findall(r'"(\w+)"', program.read_text(encoding="utf-8")))
        assert messages - compared == set(), f"{program.name} compares no such message"


@pytest.mark.parametrize(
    ("name", "packet"),
    [
        ("segment", lambda: messages.pack_segment(2, 1 << 33)),
        ("segment_close", lambda: messages.pack_segment_close(2)),
        ("batch", lambda: messages.pack_batch(7, 2, (1 << 32) + 128, 1 << 32, consumed=5)),
        (
            "response",
            lambda: messages.pack_response(7, 1, 1 << 33, 4096, messages.INPUT_RELEASED | messages.BATCH_DONE),
        ),
        ("fail", lambda: messages.pack_fail(7, layout.ErrorCode.INVALID_ARG, "größer")),
        ("release_acknowledge", lambda: messages.pack_acknowledge(6)),
        ("release_block", lambda: messages.pack_release(2, (1 << 32) + 128)),
        ("cancel", lambda: messages.pack_cancel(7, 2)),
        ("responses", lambda: messages.pack_responses(1, 1 << 33, 8192)),
        ("pause", lambda: messages.pack_pause(7, 2)),
        ("resume", lambda: messages.pack_resume(7, 2)),
        ("wake", lambda: messages.pack_wake()),
        ("detach", lambda: messages.pack_detach()),
        ("activity_ask", lambda: messages.pack_activity()),
        ("activity", lambda: messages.pack_activity(taken=9, in_flight=3)),
    ],
)
def test_messages(name: str, packet: Callable[[], bytes]) -> None:
    assert packet() == read(name)


def without_sender(packet: bytes) -> bytes:
    """Return a greeting without the process and the user that it is from."""
    at = layout.MESSAGE.size + layout.GREETING_VERSION.size
    return packet[:at] + bytes(8) + packet[at + 8 :]


def test_hello(golden: ModuleType) -> None:
    hello = Hello(
        name="classify", model_name="model", model_version=1, tensors_digest=golden.DIGEST, max_in_flight=64, pid=4242
    )
    assert parse_hello(read("hello"), decoupled=True) == hello
    assert without_sender(hello.pack()) == without_sender(read("hello"))
    # Of what it can do, the Python proxy knows these.
    known = CAPABILITIES | Capability.STANDS_IN
    assert parse_hello(read("hello_minor_9"), decoupled=True) == Hello(
        name="classify", pid=4242, version=(1, 9), capabilities=known
    )
    with pytest.raises(GreetingError, match=r"protocol 2\.5, this proxy 1\.0"):
        parse_hello(read("hello_major_2_short"), decoupled=False)


def test_the_name_of_a_worker_makes_way_for_its_model() -> None:
    hello = Hello(name="n" * 5000, model_name="model", tensors_digest="d", memory_token=b"t" * 16)
    packet = hello.pack()
    assert len(packet) == layout.MAX_PACKET
    read_back = parse_hello(packet, decoupled=False)
    assert (read_back.model_name, read_back.tensors_digest, read_back.memory_token) == ("model", "d", b"t" * 16)


def test_welcome() -> None:
    assert parse_answer(read("welcome")) == Welcome(
        model_name="digits",
        model_version=3,
        batching=True,
        decoupled=False,
        capabilities=Capability.DECOUPLED | Capability.CANCEL,
        arena_budget=1 << 32,
        arena_idle_s=10.0,
        execution_timeout_s=2.5,
    )
    assert without_sender(parse_answer(read("welcome")).pack()) == without_sender(read("welcome"))
    plain = parse_answer(read("welcome_decoupled_no_capabilities"))
    assert (plain.model_name, plain.batching, plain.decoupled, plain.capabilities) == ("tokens", True, True, 0)


def test_a_later_minor_is_read_as_far_as_it_is_known() -> None:
    later = parse_answer(read("welcome_minor_9"))
    assert later == dataclasses.replace(parse_answer(read("welcome")), capabilities=Capability(sum(Capability)))


def test_refusal_carries_its_reason() -> None:
    with pytest.raises(AttachError, match="refused this worker: it runs as user 7") as caught:
        parse_answer(read("refuse"))
    assert not isinstance(caught.value, VersionMismatchError)


@pytest.mark.parametrize(("name", "theirs"), [("refuse_major_2", (2, 0)), ("refuse_major_2_short", (2, 5))])
def test_another_major_names_both_versions(name: str, theirs: tuple[int, int]) -> None:
    with pytest.raises(
        VersionMismatchError, match=rf"protocol 1\.0, the proxy backend {theirs[0]}\.{theirs[1]}"
    ) as caught:
        parse_answer(read(name))
    assert (caught.value.ours, caught.value.theirs) == ((1, 0), theirs)


def strings(array: np.ndarray[Any, Any]) -> list[bytes]:
    return list(array.ravel())


def test_batch_record() -> None:
    raw = read("record_batch")
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[64 : 64 + len(raw)] = raw
    arena = PeerArena()
    arena._segments[2] = memory
    block, _ = arena.block(2, 64, len(raw))
    batch = BatchReader(True).read(block, memory, 64, 7)
    assert batch.rows == [2, 1, 1]
    assert not batch.uniform_outputs
    first, second, third = make_requests(batch, 3)

    np.testing.assert_array_equal(first["x"], np.arange(4, dtype=np.float32).reshape(2, 2))
    np.testing.assert_array_equal(second["x"], np.array([[4, 5]], np.float32))
    np.testing.assert_array_equal(third["x"], np.array([[6, 7]], np.float32))
    assert [request["text"].shape for request in (first, second, third)] == [(2, 1), (1, 1), (1, 1)]
    assert [strings(request["text"]) for request in (first, second, third)] == [
        [b"", b"a"],
        [b"\x00\xff"],
        ["grüße".encode()],
    ]
    assert first["opt"].tolist() == [[-1], [1 << 40]]
    assert first["opt"].dtype == np.int64
    assert "opt" not in second
    assert third["opt"].tolist() == [[1, 2, 3]]

    assert first.parameters == {"text": "grüße", "empty": "", "count": -(1 << 62), "flag": True, "rate": 0.25}
    assert type(first.parameters["flag"]) is bool
    assert second.parameters == {}
    assert third.parameters == {"last": False}
    assert [request.requested_output_names for request in (first, second, third)] == [["y", "label"]] * 2 + [["y"]]
    assert (first.request_id, first.priority, first.timeout_us, first.correlation_id) == (
        "first",
        1 << 40,
        1_500_000,
        77,
    )
    assert (first.trace_context, first.sequence_start, first.sequence_end) == ("00-abc-01", True, False)
    assert (second.request_id, second.correlation_id, second.trace_context) == ("zweite", "séance-9", "")
    assert (third.request_id, third.priority, third.correlation_id, third.sequence_end) == ("", 0, 0, True)
    # The cancellation byte is the only one that may change while the batch is in flight.
    assert not third.is_cancelled()
    memory[64 + 64 + 2 * 80 + 72] = 1
    assert [request.is_cancelled() for request in (first, second, third)] == [False, False, True]


def written(record: Record, number: int = 7) -> bytes:
    """Write a record behind something else."""
    memory = bytearray(64 + record.layout.length)
    record.write(memory, 64, number)
    assert 0 < record.layout.payload_bytes < record.layout.length
    return bytes(memory[64:])


Y = np.arange(8, dtype=np.float32).reshape(4, 2) / 2
LABELS = np.array([b"null", b"", b"eins", b"\x00"], dtype=object)


def test_response_record_of_columns() -> None:
    pieces = [{"y": Y[a:b], "label": LABELS[a:b]} for a, b in ((0, 2), (2, 3), (3, 4))]
    expected = read("record_response_columns")
    writer = ResponseWriter()
    for _ in range(2):  # the second time from its cached metadata
        assert written(writer.lay_out([ResponseData(i, piece) for i, piece in enumerate(pieces)])) == expected


def test_response_record_of_numbers() -> None:
    y = np.arange(6, dtype=np.float32).reshape(3, 2)
    n = np.array([-1, 0, 1 << 40])
    pieces = [{"y": y[:1], "n": n[:1]}, {"y": y[1:], "n": n[1:]}]
    expected = read("record_response_plain")
    writer = ResponseWriter()
    for _ in range(2):
        assert written(writer.lay_out([ResponseData(i, piece) for i, piece in enumerate(pieces)])) == expected
        # The short way for what looks as it did before; the second time from what was laid out then.
        record = writer.lay_out_results(pieces, ("y", "n"), lambda results, names: True)
        assert record is not None
        assert written(record) == expected


def test_response_record_of_inputs() -> None:
    outputs = {"y": np.arange(6, dtype=np.float32).reshape(3, 2), "n": np.array([-1, 0, 1 << 40])}
    pieces = [{name: array[rows] for name, array in outputs.items()} for rows in (slice(1), slice(1, 3))]
    record = ResponseWriter().lay_out_results(pieces, ("y", "n"), lambda results, names: True)
    assert record is not None
    memory = bytearray(4096)
    length = record.write_reference(memory, 64, 7, 576)
    assert bytes(memory[64 : 64 + length]) == read("record_response_references")
    assert not any(memory[64 + length :])


def test_response_record_of_everything_else(golden: ModuleType) -> None:
    answers = [
        ResponseData(
            0,
            {"y": np.array([[1, 2], [3, 4]], np.float32), "label": np.empty((2, 0), object)},
            golden.PARAMETERS,
            final=False,
        ),
        ResponseData(1, error="no such label: größer", code=layout.ErrorCode.INVALID_ARG),
        ResponseData(2, empty=True),
    ]
    assert written(ResponseWriter().lay_out(answers)) == read("record_response_mixed")


def test_response_record_that_gives_a_request_back() -> None:
    y = np.array([[1], [2]], np.float32)
    answers = [ResponseData(0, {"y": y[:1]}), ResponseData(1, reschedule=True), ResponseData(2, {"y": y[1:]})]
    raw = read("record_response_rescheduled")
    given_back = read_responses(memoryview(raw), 7, 3, decoupled=False)
    assert [response.reschedule for response in given_back] == [False, True, False]
    assert [response.outputs.keys() for response in given_back] == [{"y"}, set(), {"y"}]
    # Written response by response, not as one tensor: what is read is the same.
    again = read_responses(memoryview(written(ResponseWriter().lay_out(answers))), 7, 3, decoupled=False)
    assert [response.reschedule for response in again] == [False, True, False]
    assert again[2].outputs["y"].tolist() == [[2]]


def test_call() -> None:
    assert without_sender(Hello(name="classify", capabilities=7).pack(layout.MessageType.CALLER)) == without_sender(
        read("caller")
    )
    infer = messages.pack_call(
        9, layout.Operation.INFER, (2, (1 << 32) + 128, 1 << 32), text="größer", subject=-1, parent=(7, 2),
        flags=messages.STREAM,
    )  # fmt: skip
    assert infer == read("call_infer")
    assert messages.pack_call(10, layout.Operation.METRIC_SET, (0, 0, 0), subject=3, value=0.25) == read("call_metric")
    kind, flags, _, number, *_, value = messages.read_header(read("result"), len(read("result")))
    assert (kind, flags, number, messages.as_float(value)) == (messages.RESULT, messages.BATCH_DONE, 10, 2.0)
    assert messages.pack_executed(7) == read("executed")
    with pytest.raises(ValueError, match="a name of 5000 bytes is too long"):
        messages.pack_call(1, layout.Operation.INFER, (1, 0, 64), text="n" * 5000)


def test_record_of_a_call(golden: ModuleType) -> None:
    strings_of_two = np.array([b"", "grüße".encode()], object)
    request = RequestData(
        {"x": np.array([[1, 2], [3, 4]], np.float32), "text": strings_of_two}, ["y", "label"], "call", 2, 1_500_000,
        77, 3, parameters=golden.PARAMETERS,
    )  # fmt: skip
    raw = read("record_call")
    written_by_us = written(lay_out_batch([request], batching=False), 9)
    for record in (raw, written_by_us):
        batch = BatchReader(False).read(np.frombuffer(record, np.uint8), record, 0, 9)
        assert batch.load_fields(0) == ("call", 2, 1_500_000, 77, 3, "")
        assert batch.load_parameters(0) == golden.PARAMETERS
        assert batch.load_requested_outputs(0) == ["y", "label"]
        assert batch.columns["x"].tolist() == [[1, 2], [3, 4]]
        assert strings(batch.columns["text"]) == [b"", "grüße".encode()]


def test_answer_to_a_call(golden: ModuleType) -> None:
    [answer] = read_responses(memoryview(read("record_call_answer")), 9, 1, decoupled=True)
    assert (answer.parameters, answer.error) == (golden.PARAMETERS, None)
    assert answer.outputs["y"].tolist() == [[1, 2], [3, 4]]
    assert strings(answer.outputs["label"]) == [b"", b"eins"]


def test_records_of_calls_that_look_alike() -> None:
    """What was laid out, or read, is used again for what looks the same, and for nothing else."""
    writer = RequestWriter()
    requests = [
        RequestData({"x": np.full(shape, value, dtype)}, outputs, correlation_id=correlation, parameters=parameters)
        for shape in ((3,), (3, 1))
        for dtype in (np.float32, np.int32)
        for outputs in (["y"], ["y", "z"])
        for correlation in (1, "1")
        for parameters in ({}, {"a": 1}, {"a": True})
        for value in (1, 2)
    ]
    requests += [RequestData({"x": np.array([text], object)}) for text in (b"", b"a", b"bcd", b"bcde")]
    for _ in range(2):
        for request in requests:
            assert written(writer.lay_out(request)) == written(lay_out_batch([request], batching=False))
    reader = AnswerReader()
    y = np.arange(4, dtype=np.float32)
    answers = [
        ResponseData(0, {"y": y}), ResponseData(0, {"y": y + 1}), ResponseData(0, {"y": y.reshape(2, 2)}),
        ResponseData(0, {"z": y}), ResponseData(0, {"y": y}, {"a": 1}), ResponseData(0, {"y": y}, {"a": 2}),
        ResponseData(0, error="no"), ResponseData(0, {"t": np.array([b"a", b"bc"], object)}),
        ResponseData(0, {"t": np.array([b"ab", b"c"], object)}), ResponseData(0, empty=True),
    ]  # fmt: skip
    for number in (1, 2):
        for answer in answers:
            record = ResponseWriter().lay_out([answer])
            memory = bytearray(record.layout.length)
            record.write(memory, 0, number)
            read_back = reader.read(memoryview(memory), number)
            assert {name: array.tolist() for name, array in read_back.outputs.items()} == {
                name: array.tolist() for name, array in answer.outputs.items()
            }
            assert (read_back.parameters, read_back.error) == (answer.parameters, answer.error)
            with pytest.raises(ProtocolError, match=f"expected the record of batch {number + 1}"):
                reader.read(memoryview(memory), number + 1)
            with pytest.raises(ProtocolError):
                reader.read(memoryview(memory)[:-1], number)


def test_magics_are_readable() -> None:
    assert struct.pack("<I", layout.BATCH_MAGIC) == b"PTB1"
    assert struct.pack("<I", layout.RESPONSE_MAGIC) == b"PTR1"
