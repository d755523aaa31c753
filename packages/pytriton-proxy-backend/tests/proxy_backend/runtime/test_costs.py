"""`CostRule`: what a batch costs, and how much of it is padding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pytriton.proxy_backend.model import ModelSpec, TensorSpec
from pytriton.proxy_backend.runtime.service import CostRule, Service
from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, lay_out_batch


def model(layout: str, *shapes: tuple[int, ...]) -> ModelSpec:
    tensors = tuple(TensorSpec(name=f"x{n}", dtype=np.dtype("int32"), shape=shape) for n, shape in enumerate(shapes))
    return ModelSpec(
        name="m",
        version=1,
        inputs=tensors,
        outputs=(),
        batching=True,
        max_batch_size=64,
        cost={"inputs": "x0", "layout": layout, "limit": 100},
    )


def batch_of(*shapes: tuple[tuple[int, ...] | None, ...]) -> Batch:
    """Return a batch of requests, each of which has inputs of some shapes, or lacks one."""
    requests = [
        RequestData({f"x{n}": np.zeros(shape, np.int32) for n, shape in enumerate(own) if shape is not None})
        for own in shapes
    ]
    record = lay_out_batch(requests, batching=True)
    memory = bytearray(record.layout.length)
    record.write(memory, 0, 7)
    raw = bytes(memory)
    return BatchReader(True).read(np.frombuffer(raw, np.uint8), raw, 0, 7)


def test_padded_batches_cost_the_rows_times_the_longest() -> None:
    rule = CostRule(model("padded", (-1,)))
    assert rule.of(batch_of(((1, 3),), ((2, 5),))) == (15, 2)
    assert rule.of(batch_of(((2, 5),), ((1, 5),))) == (15, 0)
    # An empty one is padded all the same.
    assert rule.of(batch_of(((1, 0),), ((1, 4),))) == (8, 3)


def test_a_service_counts_what_its_batches_cost() -> None:
    batch = batch_of(((1, 3),), ((2, 5),))
    for own, cost, padding in ((model("padded", (-1,)), 15, 2), (replace(model("padded", (-1,)), cost=None), 0, 0)):
        service = Service(print, own)
        service.count_cost(batch)
        counted = service.counters.snapshot()
        assert (counted.costs.sum, counted.padding) == (cost, padding)


def test_packed_batches_cost_the_sum() -> None:
    assert CostRule(model("packed", (-1,))).of(batch_of(((1, 3),), ((2, 5),))) == (13, 0)


def test_fixed_sizes_do_not_count_and_the_costliest_input_does() -> None:
    rule = CostRule(model("padded", (-1, 80), (-1, -1)))
    assert rule.of(batch_of(((1, 10, 80), (1, 2, 2)), ((1, 4, 80), (1, 1, 1)))) == (20, 6)
    assert rule.of(batch_of(((1, 2, 80), (1, 9, 2)), ((1, 2, 80), (1, 1, 8)))) == (144, 118)


def test_a_request_that_lacks_the_input_takes_its_row_of_padding() -> None:
    rule = CostRule(model("padded", (-1,), (-1,)))
    assert rule.of(batch_of(((1, 4), (1, 1)), (None, (1, 1)))) == (8, 4)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_random_batches(layout: str) -> None:
    """Against the definition, row by row."""
    chance = random.Random(34)
    rule = CostRule(model(layout, (-1, -1)))
    counters = Counters()
    costs = paddings = 0
    for _ in range(200):
        shapes = [((chance.randint(1, 3), chance.randint(0, 4), chance.randint(0, 4)),) for _ in range(5)]
        rows = [(max(a, 1), max(b, 1)) for ((count, a, b),) in shapes for _ in range(count)]
        own = sum(a * b for a, b in rows)
        longest = max(a for a, _ in rows) * max(b for _, b in rows)
        expected = own if layout == "packed" else len(rows) * longest
        found = rule.of(batch_of(*shapes))
        assert found == (expected, expected - own)
        counters.add_cost(*found)
        costs, paddings = costs + expected, paddings + expected - own
    statistics = counters.snapshot()
    assert (statistics.costs.sum, statistics.costs.count, statistics.padding) == (costs, 200, paddings)
