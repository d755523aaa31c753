"""Response records from one end to the other: what is written is read again, into whatever memory."""

import mmap
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend import ProtocolError
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, RequestWriter, lay_out_batch
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter, lay_out_columns, read_responses


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
