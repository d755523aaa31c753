"""What of a bound model the proxy backend is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pytriton.decorators import TritonContext
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.server.models.definition import ModelDefinition
from pytriton.server.models.service import WorkerService
from pytriton.server.settings.response_cache import local_cache_bytes

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
    definition = ModelDefinition(
        name="m",
        infer_func=lambda requests: requests,
        inputs=[Tensor((-1,), np.float32)],
        outputs=[Tensor((-1,), np.float32)],
        version=1,
        config=ModelConfig(batcher=batcher),
        strict=False,
        triton_context=TritonContext(),
    )
    model = WorkerService(definition)
    [(_, text)] = model.side_files(Path("/run/pytriton"))
    assert [found for found in text.splitlines() if found.startswith("max_waiting")] == ([line] if line else [])


@pytest.mark.parametrize(("response_cache", "line"), [(True, ["cache_bytes = 4096"]), (False, [])])
def test_answers_are_kept_as_long_as_they_fit_into_what_the_server_gives(response_cache: bool, line: list[str]) -> None:
    definition = ModelDefinition(
        name="m",
        infer_func=lambda requests: requests,
        inputs=[Tensor((-1,), np.float32)],
        outputs=[Tensor((-1,), np.float32)],
        version=1,
        config=ModelConfig(response_cache=response_cache),
        strict=False,
        triton_context=TritonContext(),
    )
    model = WorkerService(definition)
    [(_, text)] = model.side_files(Path("/run/pytriton"), 4096)
    assert [found for found in text.splitlines() if found.startswith("cache_bytes")] == line
    assert "response_cache" not in definition.config_text


@pytest.mark.parametrize(
    ("items", "size"),
    [
        (None, 0),
        (["redis,host=a"], 0),
        (["local,size=10"], 10),
        (["local,other=1", "local,size=10"], 10),
        (["local,size=ten"], 0),
    ],
)
def test_the_size_of_tritons_local_cache_is_that_of_ours(items: list[str] | None, size: int) -> None:
    assert local_cache_bytes(items) == size
