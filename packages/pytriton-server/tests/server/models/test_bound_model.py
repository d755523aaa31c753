"""What of a bound model the proxy backend is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pytriton.decorators import TritonContext
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.server.models.bound_model import BoundModel

LIMITED, UNLIMITED = QueuePolicy(max_queue_size=5), QueuePolicy()


@pytest.mark.parametrize(
    ("batcher", "line"),
    [
        (DynamicBatcher(default_queue_policy=LIMITED), "max_waiting = 5"),
        (DynamicBatcher(), ""),
        (None, ""),
        (
            DynamicBatcher(
                priority_levels=2,
                default_priority_level=1,
                default_queue_policy=LIMITED,
                priority_queue_policy={1: QueuePolicy(max_queue_size=9)},
            ),
            "max_waiting = 9",
        ),
        (
            DynamicBatcher(
                priority_levels=2,
                default_priority_level=1,
                default_queue_policy=LIMITED,
                priority_queue_policy={1: UNLIMITED},
            ),
            "",
        ),
    ],
)
def test_the_limit_of_a_queue_holds_for_what_waits_for_a_worker(batcher: DynamicBatcher | None, line: str) -> None:
    model = BoundModel(
        name="m",
        infer_func=lambda requests: requests,
        inputs=[Tensor((-1,), np.float32)],
        outputs=[Tensor((-1,), np.float32)],
        version=1,
        config=ModelConfig(batcher=batcher),
        strict=False,
        triton_context=TritonContext(),
    )
    [(_, text)] = model.side_files(Path("/run/pytriton"))
    assert [found for found in text.splitlines() if found.startswith("max_waiting")] == ([line] if line else [])
