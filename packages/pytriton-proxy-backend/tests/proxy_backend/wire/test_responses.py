"""Response records from one end to the other: what is written is read again, into whatever memory."""

import mmap
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend import ProtocolError
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, RequestWriter, lay_out_batch
from pytriton.proxy_backend.wire.record import Record, make_tensor
from pytriton.proxy_backend.wire.response import (
    AnswerReader,
    ResponseData,
    ResponseWriter,
    lay_out_columns,
    read_responses,
)


def written(record: Record, *, mapped: bool = False, number: int = 7) -> bytearray:
    length = record.layout.length
    memory = mmap.mmap(-1, 64 + length) if mapped else bytearray(64 + length)
    record.write(memory, 64, number)
    return bytearray(memory[64 : 64 + length])


def read(record: bytearray, count: int = 2, *, decoupled: bool = False) -> list[ResponseData]:
    return read_responses(memoryview(record), 7, count, decoupled=decoupled)


def parse(raw: bytes | bytearray) -> Batch:
    memory = bytes(raw)
    return BatchReader(True).read(np.frombuffer(memory, np.uint8), memory, 0, 7)


def bfloat16(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, pytest.importorskip("ml_dtypes").bfloat16)


ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "contiguous": lambda: np.arange(12, dtype=np.float32).reshape(2, 6),
    "every second": lambda: np.arange(12, dtype=np.int64).reshape(2, 6)[:, ::2],
    "in Fortran's order": lambda: np.asfortranarray(np.arange(12, dtype=np.float64).reshape(2, 6)),
    "read-only": lambda: np.broadcast_to(np.float32(3), (2, 5)),
    "bool": lambda: np.array([[True], [False]]),
    "float16": lambda: np.array([[1.5], [2]], np.float16),
    "bfloat16": lambda: bfloat16([[1.5], [2]]),
    "strings": lambda: np.array([[b"a"], [b"\0\xff"]], object),
    "no elements": lambda: np.empty((2, 0), np.uint8),
    "large": lambda: np.arange(1 << 17, dtype=np.float32).reshape(2, -1),
}


@pytest.mark.parametrize("kind", list(ARRAYS))
@pytest.mark.parametrize("mapped", [False, True], ids=["bytes", "mapping"])
def test_arrays_of_every_kind(kind: str, mapped: bool) -> None:
    array = ARRAYS[kind]()
    pieces = [{"y": array[:1], "n": np.array([[1]])}, {"y": array[1:], "n": np.array([[2]])}]
    writer = ResponseWriter()
    records = [writer.lay_out([ResponseData(0, pieces[0]), ResponseData(1, pieces[1])])]
    if kind != "strings":
        plain = writer.lay_out_results(pieces, ("y", "n"), lambda results, names: True)
        assert plain is not None
        records.append(plain)
        metadata = parse(written(lay_out_batch([RequestData({"x": np.ones((1, 1))})] * 2, batching=True))).metadata
        columns = lay_out_columns(metadata, {"y": array, "n": np.array([[1], [2]])}, ("y", "n"), lambda *_: True)
        assert columns is not None
        records.append(columns)
    raw = [written(record, mapped=mapped) for record in records]
    assert all(record == raw[0] for record in raw)
    assert all(record.payloads == () for record in records)
    for response, piece in zip(read(raw[0]), pieces, strict=True):
        for name, value in piece.items():
            np.testing.assert_array_equal(response.outputs[name], value)


def test_outputs_that_are_large_together_are_not_joined_where_that_costs_a_copy() -> None:
    pieces = [{"y": np.full((1, 100), index, np.uint8)} for index in range(2)]
    apart = ResponseWriter(join_below=200)
    assert apart.lay_out_results(pieces, ("y",), lambda results, names: True) is None
    record = apart.lay_out([ResponseData(index, piece) for index, piece in enumerate(pieces)])
    assert [payload.__class__ for payload in record.payloads] == [np.ndarray, np.ndarray]
    joined = ResponseWriter(join_below=201).lay_out([ResponseData(index, piece) for index, piece in enumerate(pieces)])
    assert len(joined.payloads) == 1
    for one, other in zip(read(written(record)), read(written(joined)), strict=True):
        np.testing.assert_array_equal(one.outputs["y"], other.outputs["y"])


def test_text_that_is_no_utf8_survives_and_zero_bytes_are_spelt_out() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    responses = [ResponseData(0, {"y": np.ones(1)}, {name: name, "zero": "a\0b"}), ResponseData(1, error=name)]
    first, second = read(written(ResponseWriter().lay_out(responses)))
    assert first.parameters == {name: name, "zero": "a\\0b"}
    assert second.error == name


def test_texts_of_requests_are_carried_as_they_are() -> None:
    name = b"caf\xe9\0".decode("utf-8", "surrogateescape")
    raw = written(lay_out_batch([RequestData({}, request_id=name, priority=3, flags=1)], batching=True))
    batch = parse(raw)
    assert batch.load_fields(0) == (name, 3, 0, 0, 1, "")


TENSOR = 64 + 48


@pytest.mark.parametrize(
    ("form", "offset", "value", "reason"),
    [
        ("I", 0, 0x31425450, "expected the record of batch 7, got magic 0x31425450"),
        ("Q", 24, (1 << 30) + 64, "lengths do not nest"),
        ("I", 40, 68, "1 responses at 68 do not lie inside"),
        ("I", 44, TENSOR + 4, "1 tensors at"),
        ("I", 44, 8, "1 tensors at 8"),
        ("I", 64, 2, "response 0 is for request 2 of 2"),
        ("I", 64 + 28, 1 << 31, "parameters at"),
        ("I", TENSOR + 8, 99, "data type number 99"),
        ("I", TENSOR + 12, 65, "65 dimensions"),
        ("I", TENSOR + 16, 1, "belongs to response 1 of 1"),
        ("Q", TENSOR + 24, 0, "lie outside the record's payloads"),
        ("Q", TENSOR + 32, 4, "takes 8 bytes, 4 came"),
    ],
)
def test_malformed(form: str, offset: int, value: int, reason: str) -> None:
    raw = written(ResponseWriter().lay_out([ResponseData(0, {"y": np.ones((1, 2), np.float32)})]))
    struct.pack_into("<" + form, raw, offset, value)
    with pytest.raises(ProtocolError) as caught:
        read(raw)
    assert reason in str(caught.value)


def test_the_limit_of_metadata() -> None:
    """In memory that nobody touches beyond its first page: what is over the limit is not even copied."""
    metadata = (1 << 30) + 64
    memory = mmap.mmap(-1, metadata)
    memory[:64] = struct.pack("<4sIIIQQQIIQQ", b"PTR1", 0, 0, 0, 7, metadata, metadata, 64, 64, 0, 0)
    with pytest.raises(ProtocolError, match="1073741888 bytes of metadata, the protocol allows 1073741824"):
        read_responses(memoryview(memory), 7, 1, decoupled=False)


def test_the_golden_batch_is_read_as_it_is_written(golden: ModuleType) -> None:
    """The proxy in Python and the native one write batches that workers cannot tell apart."""
    text = np.array([b"", b"a", b"\x00\xff", "grüße".encode()], object).reshape(4, 1)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    requests = [
        RequestData(
            {"x": x[:2], "text": text[:2], "opt": np.array([[-1], [1 << 40]])}, ["y", "label"], "first", 1 << 40,
            1_500_000, 77, 1, "00-abc-01", golden.PARAMETERS,
        ),
        RequestData({"x": x[2:3], "text": text[2:3]}, ["y", "label"], "zweite", correlation_id="séance-9"),
        RequestData(
            {"x": x[3:], "text": text[3:], "opt": np.array([[1, 2, 3]])}, ["y"], flags=2, parameters={"last": False}
        ),
    ]  # fmt: skip
    ours = written(
        lay_out_batch(requests, batching=True, received_ns=1_000_000_007, sent_ns=(1 << 40) + 3), mapped=True
    )

    def everything(raw: bytes | bytearray) -> list[Any]:
        batch = parse(raw)
        return [batch.received_ns, batch.sent_ns, batch.rows, batch.uniform_outputs] + [
            (
                {name: (array.dtype, array.tolist()) for name, array in batch.load_inputs(index).items()},
                batch.load_fields(index), batch.load_parameters(index), batch.load_requested_outputs(index),
            )
            for index in range(3)
        ]  # fmt: skip

    assert everything(ours) == everything(golden.golden_batch())


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("batching", "inputs", "owners"),
    [
        (True, [{"x": floats(1, 2)}, {"x": floats(3, 2)}], [layout.WHOLE_BATCH]),
        (True, [{"x": floats(1, 2)}], [layout.WHOLE_BATCH]),
        (True, [{"x": floats(1, 2)}, {"x": np.zeros((1, 2), np.int32)}], [0, 1]),
        (True, [{"x": floats(1, 2)}, {"x": floats(1, 3)}], [0, 1]),
        (True, [{}, {"x": floats(1, 2)}], [1]),
        (True, [{"x": floats(2, 1), "n": floats(1, 1)}], [layout.WHOLE_BATCH, 0]),
        (False, [{"x": floats(3, 2)}], [layout.WHOLE_BATCH]),
        (False, [{"x": floats(3, 2)}, {"x": floats(3, 2)}], [0, 1]),
    ],
)
def test_inputs_are_joined_where_they_are_one_array(
    batching: bool, inputs: list[dict[str, np.ndarray[Any, Any]]], owners: list[int]
) -> None:
    """All requests have it, alike but for their rows, and rows are what the batch is cut by; or a request is alone."""
    raw = bytes(written(lay_out_batch([RequestData(each) for each in inputs], batching=batching)))
    batch = BatchReader(batching).read(np.frombuffer(raw, np.uint8), raw, 0, 7)
    assert [tensor.owner for tensor in batch.metadata.tensors] == owners
    for index, expected in enumerate(inputs):
        found = batch.load_inputs(index)
        assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
            name: (array.dtype, array.shape) for name, array in expected.items()
        }


def test_layouts_of_requests_are_kept_but_not_many_and_not_large_ones() -> None:
    writer = RequestWriter()

    def lay_out(size: int, request_id: str = "") -> object:
        return writer.lay_out(RequestData({"x": floats(size)}, request_id=request_id)).layout

    first = lay_out(1)
    assert lay_out(1) is first
    large = "x" * (1 << 20)
    assert lay_out(1, large) is not lay_out(1, large)
    for size in range(2, 2048):
        lay_out(size)
    assert lay_out(1) is not first


FINAL, ERROR, EMPTY, RESCHEDULE, CONTINUES = layout.ResponseFlag


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("flags", range(32))
def test_what_the_flags_of_a_response_mean(golden: ModuleType, flags: int, decoupled: bool) -> None:
    raw = golden.response_record(7, [golden.Answer(0, flags=flags, error_code=3, error="why")])
    [response] = read_responses(memoryview(raw), 7, 1, decoupled=decoupled)
    assert response.error == ("why" if ERROR & flags else None)
    assert response.code == 3
    assert (response.empty, response.reschedule, response.continues) == (
        bool(EMPTY & flags), bool(RESCHEDULE & flags), bool(CONTINUES & flags)
    )  # fmt: skip
    if not decoupled or FINAL & flags or RESCHEDULE & flags:
        assert response.final is True
    elif ERROR & flags:
        # An error ends a stream, unless it says that more comes.
        assert response.final is not bool(CONTINUES & flags)
    else:
        assert response.final is False
    assert response.has_outputs is not bool(flags & (ERROR | EMPTY | RESCHEDULE))


@st.composite
def response_lists(draw: st.DrawFn) -> list[ResponseData]:
    """Responses to different requests that are alike, but for what is drawn otherwise."""
    made = []
    for request in draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]:
        kind = draw(st.sampled_from(["outputs"] * 8 + ["error", "empty", "reschedule"]))
        outputs = {}
        for name in ("y", "z") if kind == "outputs" else ():
            if name == "y" or draw(st.integers(0, 3)):
                dtype = draw(st.sampled_from([np.float32, np.float32, np.float32, np.int64]))
                width = draw(st.sampled_from([2, 2, 2, 3]))
                outputs[name] = np.full((draw(st.integers(1, 2)), width), draw(st.integers(0, 9)), dtype)
        made.append(
            ResponseData(
                request,
                outputs,
                parameters=draw(st.sampled_from([{}] * 4 + [{"p": 1}, {"p": "text"}])),
                error="why" if kind == "error" else None,
                code=layout.ErrorCode.NOT_FOUND if kind == "error" else layout.ErrorCode.INTERNAL,
                final=kind in ("error", "reschedule") or draw(st.booleans()),
                empty=kind == "empty",
                reschedule=kind == "reschedule",
            )
        )
    return made


def comparable(response: ResponseData) -> list[Any]:
    outputs = {name: (array.dtype, array.tolist()) for name, array in response.outputs.items()}
    return [outputs, dict(response.parameters)] + [
        getattr(response, name) for name in ("request", "error", "code", "final", "empty", "reschedule", "continues")
    ]


@given(st.lists(response_lists(), min_size=1, max_size=4), st.sampled_from([None, 0, 40]))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_responses_are_read_as_they_were_written(lists: list[list[ResponseData]], join_below: int | None) -> None:
    """By one writer, whose layouts may only be used again for what looks the same."""
    writer = ResponseWriter(join_below)
    for responses in [*lists, *lists]:
        record = writer.lay_out(responses)
        raw = written(record)
        assert raw == written(ResponseWriter(join_below).lay_out(responses))
        back = read_responses(memoryview(raw), 7, 3, decoupled=True)
        assert [comparable(each) for each in back] == [comparable(each) for each in responses]
        if join_below == 0:
            assert len(record.layout.places) == sum(len(response.outputs) for response in responses)


@given(st.lists(response_lists(), min_size=1, max_size=4), st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_short_way_writes_the_same(lists: list[list[ResponseData]], batching: bool) -> None:
    """Results by their dictionaries, or over the whole batch: as the general way writes them, or not at all."""
    writer, general = ResponseWriter(batching=batching), ResponseWriter(None if batching else 0)
    names = ("y", "z")
    for responses in [*lists, *lists]:
        results = [response.outputs for response in responses]
        record = writer.lay_out_results(results, names, lambda each, asked: asked == names and all(map(len, each)))
        last = [ResponseData(place, outputs) for place, outputs in enumerate(results)]
        shapes = {tuple((name, array.dtype, array.shape[1:]) for name, array in outputs.items()) for outputs in results}
        rows = {tuple(array.shape[0] for array in outputs.values()) for outputs in results}
        fit = all(outputs.keys() == set(names) for outputs in results) and (
            len(shapes) == 1 and all(len(set(each)) == 1 for each in rows) if batching else len(results) == 1
        )
        assert (record is not None) == fit
        if record is not None:
            short_way, general_way = written(record), written(general.lay_out(last))
            if len(last) > 1 or not batching:
                assert short_way == general_way
            # The general way joins nothing of a single response, whose tensors are its own then.
            assert [comparable(each) for each in read(short_way, 3)] == [
                comparable(each) for each in read(general_way, 3)
            ]


@pytest.mark.parametrize("batching", [True, False])
def test_results_of_one_shape_and_another_dtype_look_different(batching: bool) -> None:
    writer = ResponseWriter(batching=batching)
    for dtype in (np.float32, np.int32, np.float32):
        record = writer.lay_out_results([{"y": np.ones((1, 2), dtype)}], ("y",), lambda results, names: True)
        assert record is not None
        [response] = read(written(record), 1)
        assert (response.outputs["y"].dtype, response.outputs["y"].tolist()) == (dtype, [[1, 1]])


def test_results_are_checked_once_while_they_look_alike() -> None:
    asked = []

    def fits(results: Any, names: Any) -> bool:
        asked.append((results, names))
        return True

    writer = ResponseWriter()
    for value in (1, 2):
        results = [{"y": floats(1, 2) + value, "beside": floats(1)}, {"y": floats(2, 2) + value}]
        assert writer.lay_out_results(results, ("y",), fits) is not None
        assert len(asked) == 1
    assert asked[0][1] == ("y",)
    for other in (
        [{"y": floats(1, 2)}, {"y": floats(2, 2)}],
        [{"y": floats(1, 2), "beside": floats(1)}, {"y": floats(1, 2)}],
    ):
        before = len(asked)
        assert writer.lay_out_results(other, ("y",), fits) is not None
        assert len(asked) == before + 1
        assert asked[-1] == (other, ("y",))
    assert writer.lay_out_results([{"y": floats(1)}], (), fits) is None
    assert writer.lay_out_results([{"y": [1.0]}], ("y",), fits) is None  # type: ignore[dict-item]
    assert writer.lay_out_results([{"y": floats(3)}], ("y",), lambda results, names: False) is None


def test_whole_columns_are_checked_once_while_they_look_alike(golden: ModuleType) -> None:
    metadata = parse(golden.batch_record(7, [golden.Request(rows=2), golden.Request()])).metadata
    asked = []

    def lay_out(outputs: dict[str, Any], *, is_good: bool = True) -> Record | None:
        def fits(given: Any, names: Any) -> bool:
            asked.append((given, names))
            return is_good

        return lay_out_columns(metadata, outputs, ("y",), fits)

    for value in (1, 2):
        record = lay_out({"y": floats(3, 2) + value})
        assert record is not None
        first, second = read(written(record))
        assert (first.outputs["y"].tolist(), second.outputs["y"].tolist()) == ([[value] * 2] * 2, [[value] * 2])
        assert (first.final, second.final, first.request, second.request) == (True, True, 0, 1)
        assert len(asked) == 1
    assert lay_out({"y": floats(3, 2), "z": floats(1)}) is not None
    assert lay_out({"y": np.zeros((3, 2), np.int64)}) is not None
    assert len(asked) == 3
    for wrong in ({"y": floats(2, 2)}, {"y": [1.0] * 3}, {}):
        assert lay_out(wrong) is None
    assert lay_out({"y": floats(3, 5)}, is_good=False) is None
    assert lay_out_columns(metadata, {}, (), lambda given, names: True) is None


@pytest.mark.parametrize(("count", "rows"), [(1, 2), (2, 1), (3, 2)])
def test_further_responses_of_a_stream(golden: ModuleType, count: int, rows: int) -> None:
    writer = ResponseWriter()
    array = np.arange(count * rows * 2, dtype=np.float32).reshape(-1, 2)
    tensor = make_tensor("y", layout.WHOLE_BATCH, [array])
    record = writer.lay_out_alike(count, rows, [tensor])
    answers = [golden.Answer(0, flags=0, rows=rows, error_code=0)] * count
    expected = bytearray(
        golden.response_record(7, answers, [golden.Tensor("y", golden.FP32, array.shape, array.tobytes())])
    )
    for place in range(count):
        # Where no parameters are, their place says nothing.
        struct.pack_into("<I", expected, 64 + 48 * place + 24, 0)
    assert written(record) == expected
    # Those of one response are kept, as others hardly ever repeat.
    again = writer.lay_out_alike(count, rows, [make_tensor("y", layout.WHOLE_BATCH, [array + 1])])
    assert (again.layout is record.layout) is (count == 1)
    other = writer.lay_out_alike(count, rows + 1, [tensor])
    assert other.layout != record.layout


def test_texts_of_errors_are_cut() -> None:
    record = ResponseWriter().lay_out([ResponseData(0, error="x" * ((1 << 20) + 1))])
    [response] = read(written(record), 1)
    assert response.error == "x" * (1 << 20)


def test_layouts_of_responses_are_bounded() -> None:
    writer = ResponseWriter()

    def lay_out(size: int) -> object:
        return writer.lay_out([ResponseData(0, {"y": floats(1, size)})]).layout

    first = lay_out(0)
    for size in range(512):
        lay_out(size)
    assert lay_out(0) is first
    lay_out(512)
    assert lay_out(0) is not first


def test_answers_of_calls_that_look_alike_are_views_of_their_own() -> None:
    reader = AnswerReader()
    for number, value in ((1, 1), (2, 2)):
        record = ResponseWriter().lay_out([ResponseData(0, {"y": floats(2) + value}, final=False)])
        answer = reader.read(memoryview(written(record, number=number)), number)
        assert (answer.request, answer.final, answer.outputs["y"].tolist()) == (0, False, [value] * 2)
    assert len(reader._known) == 1
    wrong = ResponseWriter().lay_out([ResponseData(1, {"y": floats(2)})])
    with pytest.raises(ProtocolError, match="is for request 1 of 1"):
        reader.read(memoryview(written(wrong, number=3)), 3)
