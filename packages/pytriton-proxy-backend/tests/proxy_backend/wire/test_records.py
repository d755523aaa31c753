"""Batch records as the worker reads them: odd but good ones, malformed ones, and mutated ones."""

import dataclasses
import gc
import mmap
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytriton.proxy.types import Request, make_requests
from pytriton.proxy_backend import ProtocolError
from pytriton.proxy_backend.transport.arena import PeerArena
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, RequestWriter, lay_out_batch
from pytriton.proxy_backend.wire.limits import COMPARED_BYTES
from pytriton.proxy_backend.wire.record import Record

NUMBERS = [
    0,
    1,
    2,
    8,
    13,
    14,
    63,
    64,
    65,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
]


def parse(raw: bytes, number: int = 7, *, batching: bool = True, reader: BatchReader | None = None) -> Batch:
    """Reads a record from memory that ends where it does."""
    memory = mmap.mmap(-1, 64 + max(len(raw), 1))
    memory[64 : 64 + len(raw)] = raw
    arena = PeerArena()
    arena._segments[1] = memory
    block, _ = arena.block(1, 64, len(raw))
    return (reader or BatchReader(batching)).read(block, memory, 64, number)


def requests_of(batch: Batch) -> list[Request]:
    return make_requests(batch, len(batch.rows))


def test_the_limit_of_metadata() -> None:
    """In memory that nobody touches beyond its first page: what is over the limit is not even copied."""
    metadata = (1 << 30) + 64
    memory = mmap.mmap(-1, metadata + 64)
    memory[:64] = struct.pack("<4sIIIQQQIIQQ", b"PTB1", 1, 0, 0, 7, metadata, metadata + 64, 64, 144, 0, 0)
    arena = PeerArena()
    arena._segments[1] = memory
    block, _ = arena.block(1, 0, metadata + 64)
    with pytest.raises(ProtocolError, match="1073741888 bytes of metadata, the protocol allows 1073741824"):
        BatchReader(True).read(block, memory, 0, 7)


def use(batch: Batch) -> None:
    """Asks for everything that a callable may ask for."""
    requests = requests_of(batch)
    for request in requests:
        for array in request.values():
            array.tobytes() if array.dtype.kind != "O" else array.ravel().tolist()
        dict(request.parameters)
        list(request.requested_output_names or [])
        repr((request.request_id, request.correlation_id, request.trace_context, request.priority))
        request.is_cancelled()
        repr(request)
    requests[0].__pytriton_batch__(requests)


def patched(raw: bytes, *fields: tuple[str, int, int]) -> bytes:
    """A copy with (format, offset, value) put in."""
    copy = bytearray(raw)
    for form, offset, value in fields:
        struct.pack_into("<" + form, copy, offset, value)
    return bytes(copy)


@pytest.fixture
def plain(golden: ModuleType) -> bytes:
    """Two requests of 1 row with an input x of 2 float32: entries at 64, the tensor at 224."""
    tensor = golden.Tensor("x", golden.FP32, [2, 2], struct.pack("<4f", 1, 2, 3, 4))
    return bytes(golden.batch_record(7, [golden.Request(outputs=["y"])] * 2, [tensor]))


def test_the_whole_batch_without_a_copy(plain: bytes) -> None:
    batch = parse(plain)
    requests = requests_of(batch)
    assert len(batch.rows) == 2
    whole = requests[0].__pytriton_batch__(requests)
    assert whole is not None
    columns, rows = whole
    assert rows == [1, 1]
    assert columns["x"].tolist() == [[1, 2], [3, 4]]
    assert np.shares_memory(columns["x"], requests[1]["x"])
    # Inputs that were looked at are still the batch; another list, order or data is not.
    assert requests[0].__pytriton_batch__(requests) is not None
    for other in (
        requests[::-1],
        requests[:1],
        [requests[0], requests[0]],
        [requests[0], Request({"x": columns["x"]})],
    ):
        assert requests[0].__pytriton_batch__(other) is None
    requests[1]["x"] = requests[1]["x"].copy()
    assert requests[0].__pytriton_batch__(requests) is None


@pytest.mark.parametrize("change", ["extra", "removed", "replaced"])
def test_changed_data_are_not_the_whole_batch(plain: bytes, change: str) -> None:
    requests = requests_of(parse(plain))
    if change == "extra":
        requests[1]["z"] = np.zeros(1)
    elif change == "removed":
        del requests[1]["x"]
    else:
        requests[1].data = {"x": requests[1]["x"]}
    assert requests[0].__pytriton_batch__(requests) is None


def test_an_input_of_some_requests_only(golden: ModuleType) -> None:
    tensor = golden.Tensor("x", golden.INT64, [1, 1], struct.pack("<q", 5), owner=1)
    requests = requests_of(parse(golden.batch_record(7, [golden.Request(), golden.Request()], [tensor])))
    assert requests[0].data == {}
    assert requests[1]["x"].tolist() == [[5]]
    assert requests[0].__pytriton_batch__(requests) is None


def test_without_a_batch_axis(golden: ModuleType) -> None:
    tensors = [
        golden.Tensor("s", golden.FP32, [], struct.pack("<f", 2)),
        golden.Tensor("x", golden.FP32, [3], struct.pack("<3f", 1, 2, 3)),
    ]
    [request] = requests_of(parse(golden.batch_record(7, [golden.Request()], tensors), batching=False))
    assert request["s"].shape == ()
    assert request["x"].tolist() == [1, 2, 3]
    whole = request.__pytriton_batch__([request])
    assert whole is not None
    assert whole[0]["x"].shape == (3,)


@pytest.mark.parametrize(
    ("batching", "count", "owners", "is_uniform", "is_whole"),
    [
        (True, 2, [None], True, True),
        (True, 1, [None], True, True),
        (True, 2, [], True, True),
        (True, 2, [None, 1], False, False),
        (True, 1, [0], False, False),
        (False, 1, [None], False, True),
        (False, 1, [0], False, False),
        (False, 2, [0, 1], False, False),
        (False, 2, [], False, False),
    ],
)
def test_which_batches_are_in_one_piece(
    golden: ModuleType, batching: bool, count: int, owners: list[int | None], is_uniform: bool, is_whole: bool
) -> None:
    """Those alone whose inputs lie together, and have an axis along which requests lie; or whose request is alone."""
    tensors = []
    for number, owner in enumerate(owners):
        rows = count if owner is None else 1
        more = {} if owner is None else {"owner": owner}
        tensors.append(golden.Tensor(f"x{number}", 2, [rows, 1], bytes(range(rows)), **more))
    batch = parse(golden.batch_record(7, [golden.Request()] * count, tensors), batching=batching)
    assert batch.is_uniform is is_uniform
    assert batch.whole_batch() == ((batch.columns, [1] * count) if is_whole else None)
    for index in range(count):
        expected = {
            f"x{number}": [[index if owner is None else 0]]
            for number, owner in enumerate(owners)
            if owner in (None, index)
        }
        assert {name: array.tolist() for name, array in batch.load_inputs(index).items()} == expected
    # The inputs of one request are those of the batch, and not views of them.
    if count == 1 and owners == [None]:
        assert batch.load_inputs(0)["x0"] is batch.columns["x0"]


def test_a_trace_is_found_in_every_place(golden: ModuleType) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for request, has_trace in (
        (golden.Request(trace_context=trace), True),
        (golden.Request(parameters={"Traceparent": trace}), True),
        (golden.Request(parameters={"tracestate": trace}), False),
        (golden.Request(id=trace), False),
    ):
        batch = parse(golden.batch_record(7, [golden.Request(), request]))
        assert batch.metadata.has_trace() is has_trace


def test_tensors_without_elements(golden: ModuleType) -> None:
    tensors = [
        golden.Tensor("x", golden.FP32, [2, 0, 3], b""),
        golden.Tensor("s", golden.BYTES, [2, 0], b""),
        golden.Tensor("none", golden.INT64, [0, 2], b"", owner=0),
    ]
    first, second = requests_of(parse(golden.batch_record(7, [golden.Request()] * 2, tensors)))
    assert [first[name].shape for name in ("x", "s", "none")] == [(1, 0, 3), (1, 0), (0, 2)]
    assert second["x"].dtype == np.float32


def test_requests_of_no_rows_and_of_many(golden: ModuleType) -> None:
    tensor = golden.Tensor("x", 2, [5], b"abcde")
    requests = requests_of(parse(golden.batch_record(7, [golden.Request(rows=rows) for rows in (0, 4, 1)], [tensor])))
    assert [request["x"].tobytes() for request in requests] == [b"", b"abcd", b"e"]


def test_outputs_that_differ_in_number_only(golden: ModuleType) -> None:
    """The first request wants nothing, so that its list of outputs begins where the second's does."""
    requests = [golden.Request(outputs=[]), golden.Request(outputs=["y", "z"])]
    batch = parse(golden.batch_record(7, requests))
    assert batch.uniform_outputs is None
    assert [request.requested_output_names for request in requests_of(batch)] == [[], ["y", "z"]]


def test_text_that_is_no_utf8_survives(golden: ModuleType) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    [request] = requests_of(parse(golden.batch_record(7, [golden.Request(id=name, parameters={name: name})])))
    assert request.request_id == name
    assert request.parameters == {name: name}


def test_bf16(golden: ModuleType) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = golden.Tensor("x", 14, [1, 2], np.array([1.5, -2], ml_dtypes.bfloat16).tobytes())
    [request] = requests_of(parse(golden.batch_record(7, [golden.Request()], [tensor])))
    assert request["x"].dtype == ml_dtypes.bfloat16
    assert request["x"].astype(float).tolist() == [[1.5, -2]]


def test_batches_that_look_alike_share_what_was_read(golden: ModuleType) -> None:
    reader = BatchReader(True)
    for number in range(1, 4):
        payload = struct.pack("<4f", *[number] * 4)
        raw = golden.batch_record(
            number, [golden.Request(rows=2, id="a")], [golden.Tensor("x", golden.FP32, [2, 2], payload)]
        )
        batch = parse(raw, number, reader=reader)
        assert batch.metadata is parse(raw, number, reader=reader).metadata
        [request] = requests_of(batch)
        assert request["x"].tolist() == [[number] * 2] * 2
        assert request.request_id == "a"
    assert len(reader._known) == 1
    other = golden.batch_record(9, [golden.Request(rows=2, id="b")], [golden.Tensor("x", golden.FP32, [2, 2], payload)])
    assert requests_of(parse(other, 9, reader=reader))[0].request_id == "b"
    # A flood of different ones does not fill the memory.
    for number in range(1000):
        use(parse(golden.batch_record(number, [golden.Request(id=str(number))]), number, reader=reader))
    assert len(reader._known) <= 256


def test_views_keep_the_block_and_requests_do_not_keep_each_other(golden: ModuleType) -> None:
    arena = PeerArena()
    raw = golden.batch_record(7, [golden.Request()] * 2, [golden.Tensor("x", 2, [2], b"ab")])
    memory = mmap.mmap(-1, 4096)
    memory[: len(raw)] = raw
    arena._segments[1] = memory
    block, _ = arena.block(1, 0, len(raw))
    requests = requests_of(BatchReader(True).read(block, memory, 0, 7))
    del block
    kept = requests[1]["x"]
    del requests
    gc.collect()
    assert not arena.released
    del kept
    gc.collect()
    assert list(arena.released) == [(1, 0)]


TENSOR = 64 + 2 * 80


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw[:63], "shorter than its header"),
        (lambda raw: b"", "shorter than its header"),
        (lambda raw: raw[:-1], "lengths do not nest"),
        (lambda raw: patched(raw, ("I", 0, 0x31525450)), "expected the record of batch 7"),
        (lambda raw: patched(raw, ("Q", 16, 8)), "got magic 0x31425450 and batch 8"),
        (lambda raw: patched(raw, ("Q", 24, 63)), "metadata 63,"),
        (lambda raw: patched(raw, ("Q", 24, 1 << 62)), "lengths do not nest"),
        (lambda raw: patched(raw, ("Q", 24, (1 << 30) + 64), ("Q", 32, 1 << 31)), "lengths do not nest"),
        (lambda raw: patched(raw, ("Q", 32, len(raw) + 1)), "lengths do not nest"),
        (lambda raw: patched(raw, ("I", 4, 0)), "0 requests"),
        (lambda raw: patched(raw, ("I", 4, 1 << 31)), "requests at 64 do not lie inside"),
        (lambda raw: patched(raw, ("I", 40, 32)), "2 requests at 32"),
        (lambda raw: patched(raw, ("I", 8, 1 << 31)), "tensors at"),
        (lambda raw: patched(raw, ("I", 44, (1 << 32) - 1)), "tensors at"),
        (lambda raw: patched(raw, ("I", TENSOR, 1 << 31)), "a text of 1 bytes at"),
        (lambda raw: patched(raw, ("I", TENSOR + 4, 1 << 31)), "a text of"),
        (lambda raw: patched(raw, ("I", TENSOR + 12, 65)), "65 dimensions"),
        (lambda raw: patched(raw, ("I", TENSOR + 20, 1 << 20)), "2 dimensions of input 'x' at"),
        (lambda raw: patched(raw, ("I", TENSOR + 16, 2)), "belongs to request 2 of 2"),
        (lambda raw: patched(raw, ("Q", TENSOR + 24, 0)), "lie outside the record's payloads"),
        (lambda raw: patched(raw, ("Q", TENSOR + 24, 1 << 63)), "lie outside the record's payloads"),
        (lambda raw: patched(raw, ("Q", TENSOR + 32, 1 << 63)), "lie outside the record's payloads"),
        (lambda raw: patched(raw, ("Q", TENSOR + 32, 12)), "takes 16 bytes, 12 came"),
        (lambda raw: patched(raw, ("I", TENSOR + 8, 13)), "input 'x'"),
        (lambda raw: patched(raw, ("q", TENSOR + 48, -2), ("q", TENSOR + 56, -2)), "negative dimension"),
        (lambda raw: patched(raw, ("q", TENSOR + 48, 1), ("q", TENSOR + 56, 4)), "for a batch of 2 rows"),
        (lambda raw: patched(raw, ("I", 64, 2)), "for a batch of 3 rows"),
        # No elements, so its 0 bytes are right, and still no shape that numpy can have.
        (
            lambda raw: patched(
                raw, ("q", TENSOR + 48, 1 << 62), ("q", TENSOR + 56, 0), ("Q", TENSOR + 32, 0), ("I", TENSOR + 16, 0)
            ),
            "input 'x'",
        ),
        (lambda raw: patched(raw, ("I", 64 + 64, 1 << 31), ("I", 144 + 64, 1 << 31)), "names of outputs at"),
    ],
)
def test_malformed(plain: bytes, change: Callable[[bytes], bytes], reason: str) -> None:
    use(parse(plain))
    with pytest.raises(ProtocolError) as caught:
        parse(change(plain))
    assert reason in str(caught.value)


def test_more_dimensions_than_numpy_has(golden: ModuleType) -> None:
    """64 dimensions are fine for numpy 2 and too many for numpy 1."""
    raw = golden.batch_record(7, [golden.Request()], [golden.Tensor("x", 2, [1] * 64, b"a")])
    if int(np.__version__.partition(".")[0]) >= 2:
        assert requests_of(parse(raw))[0]["x"].ndim == 64
    else:
        with pytest.raises(ProtocolError, match="dimension"):
            parse(raw)


@pytest.mark.parametrize("code", [0, 15, 1 << 31])
def test_an_unknown_dtype(plain: bytes, code: int) -> None:
    with pytest.raises(TypeError, match=f"data type number {code}"):
        parse(patched(plain, ("I", TENSOR + 8, code)))


@pytest.mark.parametrize(
    ("offset", "value", "ask"),
    [
        (64 + 56, 1 << 31, lambda request: request.parameters),
        (64 + 60, 1 << 31, lambda request: request.parameters),
        (64 + 36, 1 << 31, lambda request: request.request_id),
        (64 + 44, 1 << 31, lambda request: request.correlation_id),
        (64 + 52, 1 << 31, lambda request: request.trace_context),
        (64 + 68, 1 << 31, lambda request: request.requested_output_names),
    ],
)
def test_what_is_read_late_is_checked_as_well(
    golden: ModuleType, offset: int, value: int, ask: Callable[[Request], Any]
) -> None:
    raw = golden.batch_record(7, [golden.Request(parameters={"a": "b"}, outputs=["y"]), golden.Request(outputs=["z"])])
    with pytest.raises(ProtocolError, match=r"outside the metadata|not lie inside"):
        ask(requests_of(parse(patched(raw, ("I", offset, value))))[0])


def test_an_unknown_type_of_parameter(golden: ModuleType) -> None:
    raw = golden.batch_record(7, [golden.Request(parameters={"a": 1})])
    with pytest.raises(ProtocolError, match="parameter 'a' has the unknown type 9"):
        requests_of(parse(patched(raw, ("I", 64 + 80 + 8, 9))))[0].parameters  # noqa: B018


# One change: where (as a share of the record), how wide, what. Aligned, so that it hits whole fields.
CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from(NUMBERS) | st.integers(0, (1 << 64) - 1),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(changes=CHANGES, cut=st.none() | st.floats(0, 1), batching=st.booleans(), share=st.booleans())
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_records(
    golden: ModuleType, changes: list[tuple[float, int, int]], cut: float | None, batching: bool, share: bool
) -> None:
    good = golden.golden_batch()
    # Most of it is about the metadata, the first 896 bytes.
    raw = bytearray(good)
    for place, width, value in changes:
        at = int(place * 960) // width * width
        raw[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    if cut is not None:
        del raw[int(cut * len(raw)) :]
    reader = BatchReader(batching) if share else None
    if share and batching:
        parse(good, reader=reader)
    try:
        use(parse(bytes(raw), batching=batching, reader=reader))
    except (ProtocolError, TypeError) as error:
        assert str(error)  # noqa: PT017


# ---- what is written, and read again -------------------------------------------------------------------------------


def written(record: Record) -> bytes:
    memory = mmap.mmap(-1, max(record.layout.length, 1))
    record.write(memory, 0, 7)
    return memory[: record.layout.length]


def array_of(kind: str, shape: tuple[int, ...], first: int) -> np.ndarray[Any, Any]:
    numbers = np.arange(first, first + int(np.prod(shape))).reshape(shape)
    if kind != "O":
        return numbers.astype(kind)
    made = np.empty(shape, object)
    made[...] = np.vectorize(lambda number: b"%d" % number, otypes=[object])(numbers) if numbers.size else numbers
    return made


@st.composite
def request_lists(draw: st.DrawFn, batching: bool) -> list[RequestData]:
    """Requests that are alike, but for what is drawn otherwise: an input that lacks, another type, another shape."""
    made = []
    for number in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 3)) if batching else 1
        inputs = {}
        for name in ("a", "b"):
            kind = draw(st.sampled_from(["i4", "i4", "i4", "f8", "O"]))
            width = draw(st.sampled_from([2, 2, 2, 3]))
            if name == "a" or draw(st.integers(0, 3)):
                inputs[name] = array_of(kind, (rows, width), number)
        made.append(
            RequestData(
                inputs,
                outputs=draw(st.sampled_from([(), ("y",), ("y", "z")])),
                request_id=draw(st.sampled_from(["", "r"])),
                priority=draw(st.integers(0, 1)),
                timeout_us=draw(st.integers(0, 1)),
                correlation_id=draw(st.sampled_from([0, 5]) | st.just("text")),
                flags=draw(st.integers(0, 1)),
                trace_context=draw(st.sampled_from(["", "trace"])),
                parameters=draw(st.sampled_from([{}, {"p": 1}, {"p": "other", "q": True}])),
            )
        )
    return made


def assert_read(batch: Batch, requests: list[RequestData], *, batching: bool) -> None:
    """Hold every request of a batch against what was written."""
    assert len(batch.rows) == len(requests)
    for index, request in enumerate(requests):
        inputs = batch.load_inputs(index)
        assert inputs.keys() == request.inputs.keys()
        for name, array in request.inputs.items():
            assert inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(inputs[name], array)
        fields = (request.request_id, request.priority, request.timeout_us, request.correlation_id, request.flags)
        assert batch.load_fields(index) == (*fields, request.trace_context)
        assert batch.load_parameters(index) == dict(request.parameters)
        assert batch.load_requested_outputs(index) == list(request.outputs)
    alike = all(
        request.inputs.keys() == requests[0].inputs.keys()
        and all(
            array.dtype == requests[0].inputs[name].dtype and array.shape[1:] == requests[0].inputs[name].shape[1:]
            for name, array in request.inputs.items()
        )
        for request in requests
    )
    assert (batch.whole_batch() is not None) == (alike and (batching or len(requests) == 1))


@given(data=st.data(), batching=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_requests_are_read_as_they_were_written(data: st.DataObject, batching: bool) -> None:
    requests = data.draw(request_lists(batching))
    raw = written(lay_out_batch(requests, batching=batching))
    assert_read(parse(raw, batching=batching), requests, batching=batching)


@given(requests=st.lists(request_lists(False), min_size=2, max_size=6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_layout_is_kept_for_requests_that_look_alike_only(requests: list[list[RequestData]]) -> None:
    writer = RequestWriter()
    for [drawn, *_] in requests:
        # What looks alike but for one field, one after the other.
        bare = dataclasses.replace(drawn, parameters={}, trace_context="")
        for request in (
            bare,
            dataclasses.replace(bare, parameters=drawn.parameters),
            dataclasses.replace(bare, trace_context=drawn.trace_context),
            dataclasses.replace(bare, priority=drawn.priority + 1),
            drawn,
            bare,
        ):
            assert written(writer.lay_out(request)) == written(lay_out_batch([request], batching=False))


# Triton's numbers of data types, as docs/protocol.md has them.
CODES = {"int32": 8, "float64": 12, "object": 13}


@given(data=st.data(), batching=st.booleans(), stamps=st.tuples(st.integers(0, 9), st.integers(0, 9)))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_records_are_those_of_the_golden_generator(
    golden: ModuleType, data: st.DataObject, batching: bool, stamps: tuple[int, int]
) -> None:
    """Byte by byte. Its texts have another order where there are parameters, so there are none."""
    requests = [
        dataclasses.replace(each, parameters={}, outputs=("y", "z")) for each in data.draw(request_lists(batching))
    ]
    record = lay_out_batch(requests, batching=batching, received_ns=stamps[0], sent_ns=stamps[1])
    raw = written(record)
    read = parse(raw, batching=batching).metadata.tensors
    expected = golden.batch_record(
        7,
        [
            golden.Request(
                len(each.inputs["a"]) if batching else 1, each.flags, each.priority, each.timeout_us,
                0 if isinstance(each.correlation_id, str) else each.correlation_id, each.request_id,
                each.correlation_id if isinstance(each.correlation_id, str) else "", each.trace_context,
                outputs=each.outputs,
            )
            for each in requests
        ],
        [
            golden.Tensor(
                tensor.name, CODES[tensor.dtype.name],
                tensor.shape, raw[tensor.offset : tensor.offset + tensor.length], tensor.owner,
            )
            for tensor in read
        ],
        stamps,
    )  # fmt: skip
    assert raw == expected
    assert record.layout.payload_bytes == sum(tensor.length for tensor in read)
    if read:
        assert record.layout.span == read[-1].offset + read[-1].length - read[0].offset


# ---- batches that look alike, which the accelerator compares by `BatchMetadata.fixed` -------------------------------


@pytest.fixture
def alike(golden: ModuleType) -> bytes:
    """Two requests with everything that a request may have, and inputs of both and of one."""
    requests = [
        golden.Request(
            1, 1, 2, 3, 4, "id", "sequence", "", {"text": "value", "number": 1, "flag": True, "rate": 0.5}, ["y", "z"]
        ),
        golden.Request(2, parameters={"number": 2}, outputs=["z"]),
    ]
    tensors = [
        golden.Tensor("x", golden.FP32, [3, 2], bytes(24)),
        golden.Tensor("own", golden.INT64, [2, 1], bytes(16), owner=1),
    ]
    return bytes(golden.batch_record(7, requests, tensors))


def is_alike(metadata: Any, raw: bytes) -> bool:
    """Compare what `fixed` says that has to be compared."""

    def text(record: bytes, at: int) -> bytes:
        offset, length = struct.unpack_from("<II", record, at)
        return record[offset : offset + length]

    fixed, texts = metadata.fixed()
    return all(raw[at : at + length] == metadata.raw[at : at + length] for at, length in fixed) and all(
        text(raw, at) == text(metadata.raw, at) for at in texts
    )


def shape_of(metadata: Any) -> list[Any]:
    """Return what batches that look alike have in common, as somebody who reads the metadata sees it."""
    entries = [metadata.entry(index) for index in range(metadata.size[0])]
    # Values of parameters are read, and checked, when somebody asks for them.
    parameters = [
        struct.unpack_from("<III", metadata.raw, at + 24 * i) for *_, at, n, _, _, _ in entries for i in range(n)
    ]
    return [
        [entry[10] for entry in entries],
        metadata.uniform_outputs,
        [metadata.requested_outputs(index) for index in range(len(entries))],
        [(metadata.text(offset, length), kind) for offset, length, kind in parameters],
        [(tensor.name, tensor.dtype, len(tensor.shape), tensor.owner) for tensor in metadata.tensors],
    ]


def test_what_looks_alike_means_the_same(alike: bytes) -> None:
    """Whatever byte of the metadata changes: either the comparison sees it, or nothing that is kept changes."""
    metadata = parse(alike).metadata
    expected = shape_of(metadata)
    unseen = set()
    for at in range(64, len(metadata.raw)):
        for change in (1, 0x80):
            raw = bytearray(metadata.raw)
            raw[at] ^= change
            if is_alike(metadata, bytes(raw)):
                unseen.add(at)
                assert shape_of(metadata.for_record(bytes(raw), resized=False)) == expected
    entries, tensors = (64, 144), (224, 272)
    for entry in entries:
        # Rows, flags, priority, timeout, sequence, and the places of the texts that are read when they are asked for.
        assert unseen >= set(range(entry, entry + 52))
        # The length of the trace context; parameters and outputs.
        assert not unseen & set(range(entry + 52, entry + 80))
    for tensor in tensors:
        assert not unseen & set(range(tensor + 8, tensor + 24))
        assert unseen >= set(range(tensor + 24, tensor + 40))
        assert not unseen & set(range(tensor + 40, tensor + 48))


@pytest.mark.parametrize("rows", [(1, 2), (4, 1)])
def test_the_sizes_of_what_looks_alike_are_its_own(alike: bytes, rows: tuple[int, int]) -> None:
    whole = sum(rows)
    known = parse(alike).metadata
    known.layouts["kept",] = lay_out_batch([RequestData({})], batching=True).layout
    raw = patched(
        alike, ("I", 64, rows[0]), ("I", 144, rows[1]), ("Q", 224 + 32, whole * 8), ("Q", 272 + 32, rows[1] * 8),
        ("q", 320, whole), ("q", 336, rows[1]),
    )  # fmt: skip
    raw = raw[: len(known.raw)]
    made = known.for_record(raw, resized=True)
    assert made.raw == raw
    assert (made.rows, made.starts) == (list(rows), [0, rows[0], whole])
    assert made.size == (2, whole, whole * 8 + rows[1] * 8)
    assert made.layouts == {}
    assert not hasattr(made, "tensors")
    assert not hasattr(made, "columns")
    same = known.for_record(raw, resized=False)
    assert same.raw == raw
    assert (same.rows, same.starts, same.size) == (known.rows, known.starts, known.size)
    assert (same.layouts, same.tensors, same.columns) == (known.layouts, known.tensors, known.columns)


def test_what_is_kept_of_batches_is_bounded_by_size(golden: ModuleType) -> None:
    """Metadata of up to `COMPARED_BYTES` are kept, larger ones are not."""
    for size, is_kept in ((COMPARED_BYTES, True), (COMPARED_BYTES + 64, False)):
        empty = len(parse(golden.batch_record(7, [golden.Request()])).metadata.raw)
        request = golden.Request(id="i" * (size - empty))
        reader = BatchReader(True)
        first = parse(golden.batch_record(7, [request]), reader=reader).metadata
        assert len(first.raw) == size
        assert (parse(golden.batch_record(7, [request]), reader=reader).metadata is first) is is_kept
