"""Worker processes that are started again, and have to give the answers to their warm-up that the first one gave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import ProcessWorker, Triton
from support import process_models
from support.callables import X, Y
from support.http import call, infer
from support.python_models import is_asleep
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

IDLE_S = 0.2
WARMUP = [ModelWarmup("random", 2, {"x": WarmupInput(np.float32, (3,), random_data=True)}, count=2)]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    config = local_config(allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1")
    with short_home(), running(Triton(config=config)) as triton:
        yield triton


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_text("2.0")
    return path


def bind(triton: Triton, weights: Path, outputs: Any = Y, *, decoupled: bool = False, **more: Any) -> None:
    options = {"golden": True, "idle_timeout_s": IDLE_S, "max_crashes": 3, "crash_window_s": 600, **more}
    config = ModelConfig(attach_timeout_s=PATIENCE_S, model_warmup=WARMUP, decoupled=decoupled)
    worker = ProcessWorker(process_models.make_from_file, [str(weights)], {"words": decoupled}, **options)
    triton.bind("m", worker, X, outputs, config=config)


def test_a_process_that_does_not_give_its_known_answer_serves_nobody(
    triton: Triton, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    bind(triton, weights)
    eventually(lambda: is_asleep(triton))
    # The tolerance of fractions is 0.001.
    weights.write_text("2.0001")
    assert infer(triton.http_url, "m", 3.0) == [pytest.approx(6.0003)]
    eventually(lambda: is_asleep(triton))
    weights.write_text("2.5")
    answers = str(infer(triton.http_url, "m", 3.0))
    told = "it does not give the known answer to its warm-up: output 'y' (number 1 of the warm-up): expected "
    assert told in caplog.text
    assert "6 of 6 compared elements differ by more than the tolerance 0.001" in caplog.text
    assert "(end 1 of at most 3 within 600 s)" in caplog.text
    # It is bounded as other ends are.
    assert "is given up after 3 ends within 600 s; the last time it does not give the known answer" in answers
    page = call(str(triton.metrics_url).removesuffix("/metrics"), "GET", "/metrics")[1]
    assert 'pytriton_worker_golden_failures_total{model="m",version="1",worker="0"} 3.0' in page
    triton.unbind("m")


@pytest.mark.parametrize("kind", ["process", "parent"])
def test_a_model_that_starts_asleep_says_what_is_wrong_and_is_tried_again(
    triton: Triton, weights: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    weights.unlink()
    bind(triton, weights, starts_asleep=True, sleep=kind, copies=2)
    for _ in range(2):
        told = infer(triton.http_url, "m", 3.0)
        assert "of model 'm' did not come up: its factory failed: FileNotFoundError" in told, told
        assert "The next request tries it again" in told
        eventually(lambda: is_asleep(triton))
    assert "FileNotFoundError" in caplog.text
    # What is recorded is the answer of the first process that comes up.
    weights.write_text("2.0")
    assert infer(triton.http_url, "m", 3.0) == [6.0]
    eventually(lambda: is_asleep(triton))
    weights.write_text("2.5")
    assert "it does not give the known answer to its warm-up" in infer(triton.http_url, "m", 3.0)
    triton.unbind("m")


def test_a_process_whose_successor_gives_the_known_answer_is_replaced_by_it(
    triton: Triton, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bind(triton, weights, max_crashes=1000, crash_window_s=0.1)
    eventually(lambda: is_asleep(triton))
    weights.write_text("7.0")

    def mend() -> bool:
        if "does not give the known answer" in caplog.text:
            weights.write_text("2.0")
            return True
        return False

    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(infer, triton.http_url, "m", 3.0)
        eventually(mend)
        # Nobody has got an answer of the wrong weights.
        assert waiting.result() == [6.0]
    triton.unbind("m")


def test_what_a_stream_of_words_gives_is_compared(
    triton: Triton, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bind(triton, weights, [Tensor(name="y", dtype=bytes, shape=(1,))], decoupled=True, max_crashes=1)
    eventually(lambda: is_asleep(triton))
    weights.write_text("3.0")
    body = {"x": [1.0, 2.0, 3.0]}
    answer = call(triton.http_url, "POST", "/v2/models/m/generate_stream", body)[1]
    assert "expected 'word 0 of 2.0' at [0, 0], got 'word 0 of 3.0'; 1 of 1 compared elements differ" in str(answer)
    triton.unbind("m")


def test_what_cannot_be_compared() -> None:
    triton = Triton(config=local_config())
    worker = ProcessWorker(process_models.make, golden=True)
    for warmup in (None, [ModelWarmup("none", 1, {"x": WarmupInput(np.float32, (1,), zero_data=True)}, count=0)]):
        with pytest.raises(
            PyTritonBadParameterError, match=r"ProcessWorker\.golden compares the answers to its warm-up"
        ):
            triton.bind("m", worker, X, Y, config=ModelConfig(model_warmup=warmup))
    for value in (-0.1, 1.0, float("nan"), "yes", None):
        with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.golden must be True, False, or a number"):
            ProcessWorker(process_models.make, golden=value)  # type: ignore[arg-type]
