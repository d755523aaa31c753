"""What keeps instances waiting: `rate_limiter` in `config.pbtxt`, and `TritonConfig.rate_limit`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.python_models.pair import Pair, Side, serving_pair
from support.waiting import eventually


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving_pair(tmp_path_factory.mktemp, rate_limit=request.param, rate_limit_resource=["slot:1"]) as pair:
        yield pair


@pytest.mark.parametrize("pair", ["execution_count", "off"], indirect=True)
def test_two_instances_with_one_slot(pair: Pair, request: pytest.FixtureRequest) -> None:
    def ask(side: Side) -> dict[str, Any]:
        log = side.file("held", "log")

        def events() -> list[str]:
            return log.read_text().split() if log.exists() else []

        with ThreadPoolExecutor(1) as pool:
            inputs = [{"INPUT": np.array([number], np.float32)} for number in range(2)]
            answers = pool.submit(side.infer_together, "held", inputs)
            eventually(lambda: events() and (side.pending("held") or len(events()) == 2))
            side.file("held", "go").touch()
            return {"answers": answers.result(), "events": events()}

    with pair.loaded("held"):
        answers = pair.compare(ask)
    one_by_one = ["begin", "end", "begin", "end"]
    assert (answers["events"] == one_by_one) is (request.node.callspec.params["pair"] == "execution_count")
