"""Calls that fail take no memory for good: in tritonserver, for workers that call, and in process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.inprocess import InternalError, Server
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from support.python_models import HEAD, TENSORS, served, write
from support.serving import server_pid
from support.waiting import PATIENCE_S

# Kept errors would take this for each call, and more.
TEXT = "e" * 3000
CALLS = 4000
LIMIT_BYTES = CALLS * len(TEXT) // 2
FAILING = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("e" * 3000)) for _ in requests]
"""
)
# Calls the other one so often as `x` says, and answers how often that failed with its text.
CALLING = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        failed = 0
        for _ in range(int(x.as_numpy()[0])):
            call = pb_utils.InferenceRequest(model_name="failing", inputs=[x], requested_output_names=["y"])
            failed += "e" * 3000 in call.exec().error().message()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.float32([failed]))])
"""
)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_flat(pid: int, fail: Callable[[int], None]) -> None:
    """Check that a process is not larger after many failures than after a quarter of them."""
    fail(CALLS // 4)
    before = resident_bytes(pid)
    fail(CALLS)
    assert resident_bytes(pid) - before < LIMIT_BYTES


def test_calls_of_a_python_model(tmp_path: Path) -> None:
    write(tmp_path, "failing", FAILING)
    write(tmp_path, "calling", CALLING, f'backend: "python"\n{TENSORS}')
    with (
        served(tmp_path) as triton,
        ModelClient(str(triton.http_url), "calling", inference_timeout_s=PATIENCE_S) as client,
    ):

        def fail(count: int) -> None:
            assert client.infer_sample(x=np.array([count], np.float32))["y"].tolist() == [count]

        check_flat(server_pid(triton), fail)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Keep the records of failures from pytest, which collects them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
def test_calls_in_process() -> None:
    def failing(_: list[Request]) -> None:
        raise ValueError(TEXT)

    tensor = Tensor(name="x", dtype=np.float32, shape=(-1,))
    with Server() as server:
        server.bind("failing", failing, [tensor], [tensor], config=ModelConfig(batching=False))
        model = server.model("failing")

        def fail(count: int) -> None:
            for _ in range(count):
                with pytest.raises(InternalError, match=TEXT[:20]):
                    list(model.infer(inputs={"x": np.zeros(1, np.float32)}))

        check_flat(os.getpid(), fail)
