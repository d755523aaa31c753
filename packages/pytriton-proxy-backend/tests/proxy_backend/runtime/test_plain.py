"""What the accelerator asks Python: which batches and results are plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.model import ModelSpec, TensorSpec
from pytriton.proxy_backend.runtime.plain import PlainBatches
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.batch import BatchReader, Head, RequestData, lay_out_batch
from pytriton.proxy_backend.wire.limits import ACCELERATED_DIMS
from pytriton.proxy_backend.wire.record import read_header

F4 = np.dtype("float32")


class Whole:
    """A callable over the whole batch, as `@batch` makes it."""

    def __pytriton_whole__(self, columns: Any, rows: Any, requests: Any) -> Any:
        """Nobody calls it here."""


def service(*, batching: bool = True, strict: bool = False, dims: int = 1, infer: Any = print) -> Service:
    tensors = {
        name: TensorSpec(name=name, dtype=np.dtype(dtype), shape=(-1,) * dims)
        for name, dtype in (("x", "f4"), ("y", "f4"), ("z", "i4"))
    }
    return Service(
        infer,
        ModelSpec(
            name="model",
            version=1,
            inputs=(tensors["x"],),
            outputs=(tensors["y"], tensors["z"]),
            batching=batching,
            max_batch_size=8 if batching else 0,
            strict=strict,
        ),
    )


def record_of(*requests: RequestData, batching: bool = True) -> tuple[bytes, Head]:
    """Return the metadata of a batch as the accelerator hands them over, and what their header says."""
    record = lay_out_batch(requests, batching=batching)
    memory = bytearray(record.layout.length)
    record.write(memory, 0, 7)
    _, count, tensors, _, metadata_length, length, *places, _, _ = read_header(
        memory, 0, len(memory), layout.BATCH_MAGIC, 7
    )
    return bytes(memory[:metadata_length]), (count, tensors, length, places[0], places[1])


def request(*shape: int, name: str = "x", **fields: Any) -> RequestData:
    return RequestData({name: np.ones(shape, F4)}, **{"outputs": ["y", "z"], **fields})


def described(plain: PlainBatches, raw: bytes, head: Head) -> tuple[Any, ...] | None:
    """Return what is said of a batch whose like came before."""
    assert plain.describe(raw, head) is None
    return plain.describe(raw, head)


def plain_of(own: Service, **limits: int) -> PlainBatches:
    return PlainBatches(own, BatchReader(own.model.batching), **limits)


def test_a_batch_is_described_when_its_like_comes_again() -> None:
    plain = plain_of(service())
    raw, head = record_of(request(1, 2), request(3, 2))
    found = described(plain, raw, head)
    assert found is not None
    metadata, inputs, fixed, texts, is_batching, record_limit = found
    assert metadata.rows == [1, 3]
    assert inputs == (("x", (4, 2), F4, 4),)
    assert (fixed, texts) == metadata.fixed()
    assert (is_batching, record_limit) == (1, 0)
    assert plain.metadata_of(metadata, None, 0) is metadata
    # Other names and other wanted outputs make it another.
    assert plain.describe(*record_of(request(1, 2, name="w"), request(3, 2, name="w"))) is None
    assert plain.describe(*record_of(request(1, 2, outputs=["y"]), request(3, 2, outputs=["y"]))) is None


def test_kinds_without_end_take_no_memory_without_end() -> None:
    plain = plain_of(service())
    for number in range(3000):
        plain.describe(*record_of(request(1, 2, name=f"x{number}")))
    assert len(plain._seen) <= 1024


@pytest.mark.parametrize(
    "requests",
    [
        # Different inputs, different outputs, a trace, no elements, more dimensions and inputs than it takes.
        [request(1, 2), request(1, 3)],
        [request(1, 2), request(1, 2, outputs=["y"])],
        [request(1, 2, parameters={"traceparent": "so"})],
        [request(1, 0)],
        [request(1, *[1] * ACCELERATED_DIMS)],
        [RequestData({f"x{number}": np.ones((1, 1), F4) for number in range(33)}, ["y"])],
    ],
)
def test_what_is_not_plain_is_python_business(requests: list[RequestData]) -> None:
    plain = plain_of(service())
    raw, head = record_of(*requests)
    assert [plain.describe(raw, head) for _ in range(3)] == [None] * 3


def test_what_is_just_plain() -> None:
    for requests in (
        [request(1, *[1] * (ACCELERATED_DIMS - 1))],
        [RequestData({f"x{number}": np.ones((1, 1), F4) for number in range(32)}, ["y"])],
    ):
        assert described(plain_of(service()), *record_of(*requests)) is not None
    raw, head = record_of(request(2, 2), batching=False)
    found = described(plain_of(service(batching=False)), raw, head)
    assert found is not None
    assert found[4] == 0


def test_a_record_that_cannot_be_read_is_python_business() -> None:
    raw, head = record_of(request(1, 2))
    plain = plain_of(service())
    assert [plain.describe(raw, (*head[:4], head[4] + 4)) for _ in range(3)] == [None] * 3


def test_large_records_are_python_business() -> None:
    raw, head = record_of(request(1, 2))
    for more, is_plain in ((0, False), (1, True)):
        found = described(plain_of(service(), record_limit=head[2] + more), raw, head)
        assert (found is not None) is is_plain
        assert found is None or found[5] == head[2] + 1


def results(*rows: int) -> list[dict[str, Any]]:
    return [{"y": np.ones((count, 2), F4), "z": np.ones((count, 3), np.int32)} for count in rows]


def lay_out(own: Service, result: Any, **limits: int) -> tuple[Any, ...] | None:
    plain = plain_of(own, **limits)
    requests = [request(1, 2), request(3, 2)] if own.model.batching else [request(4, 2)]
    found = described(plain, *record_of(*requests, batching=own.model.batching))
    assert found is not None
    return plain.lay_out(found[0], None, 0, result)


def test_results_of_each_request_are_laid_out() -> None:
    found = lay_out(service(), results(1, 3))
    assert found is not None
    head, length, payload_bytes, is_list, sizes, pieces, shapes, limit = found
    assert len(head) <= length
    assert payload_bytes == 4 * 4 * 5
    assert (is_list, sizes, limit) == (True, (2, 2), 0)
    assert shapes == ((-1, -1), (-1, -1))
    y, z = pieces[0][4], pieces[1][4]
    assert (y % 64, z % 64) == (0, 0)
    assert pieces == (
        (0, "y", (1, 2), F4, y, 8), (0, "z", (1, 3), np.dtype("i4"), z, 12),
        (1, "y", (3, 2), F4, y + 8, 24), (1, "z", (3, 3), np.dtype("i4"), z + 12, 36),
    )  # fmt: skip


def test_results_over_the_whole_batch_are_laid_out() -> None:
    [whole] = results(4)
    found = lay_out(service(infer=Whole()), whole)
    assert found is not None
    assert found[3:5] == (False, (2,))
    assert [piece[:4] for piece in found[5]] == [(0, "y", (4, 2), F4), (0, "z", (4, 3), np.dtype("i4"))]
    assert found[6] == ((-1, -1), (-1, -1))
    # Who is called with requests returns a list.
    assert lay_out(service(), whole) is None


def test_results_of_a_model_that_does_not_batch() -> None:
    found = lay_out(service(batching=False, dims=2), results(4))
    assert found is not None
    assert (found[4], found[6]) == ((2,), ((-1, -1), (-1, -1)))


def test_results_that_are_not_plain_are_python_business() -> None:
    own = service()
    good = results(1, 3)
    assert lay_out(own, good) is not None
    for bad in (
        None,
        tuple(good),
        good[:1],
        [{**good[0], "y": [1.0]}, good[1]],
        [good[0], {**good[1], "y": np.ones((2, 3), F4).T}],
        [{**each, "z": each["z"][:, :0]} for each in good],
        [{**each, "y": each["y"].astype("f8")} for each in good],
    ):
        assert lay_out(own, bad) is None


def test_large_results_are_python_business() -> None:
    assert lay_out(service(), results(1, 3), payload_limit=80) is None
    found = lay_out(service(), results(1, 3), payload_limit=81)
    assert found is not None
    assert found[7] == 81


def test_shapes_that_are_not_the_declared_ones_hold_for_no_others() -> None:
    more = [{**each, "y": each["y"][:, None]} for each in results(1, 3)]
    found = lay_out(service(), more)
    assert found is not None
    assert found[6] is None
    assert lay_out(service(strict=True), more) is None
    assert lay_out(service(strict=True), results(1, 3)) is not None
    deep = (1,) * ACCELERATED_DIMS
    assert lay_out(service(), [{"y": np.ones((n, *deep), F4), "z": np.ones((n, 1), "i4")} for n in (1, 3)]) is None
    just = deep[1:]
    assert lay_out(service(), [{"y": np.ones((n, *just), F4), "z": np.ones((n, 1), "i4")} for n in (1, 3)]) is not None
