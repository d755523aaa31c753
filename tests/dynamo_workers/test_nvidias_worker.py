"""NVIDIA's own worker, `python -m dynamo.triton`, on `pytriton.inprocess`: the program is not changed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dynamo.triton")

from support.clients.dynamo import front_end, tensor
from support.processes import while_running
from support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=30)

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sums = [[pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "ab"] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("sum", a + b)]) for a, b in sums]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "a" data_type: TYPE_FP32 dims: [4] }, { name: "b" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "sum" data_type: TYPE_FP32 dims: [4] }]
"""


def test_it_loads_a_model_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "add" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    log = tmp_path / "log"
    with front_end(tmp_path) as cell, log.open("w") as written:
        # From this version on it takes Triton's log by `log_callback`.
        environment = {**cell.environment, "NVIDIA_TRITON_SERVER_VERSION": "26.09", "DYN_LOG": "info"}
        command = [sys.executable, "-m", "pytriton.inprocess", "-m", "dynamo.triton"]
        command += ["--model-repository", str(tmp_path / "models")]
        with (
            while_running(command, env=environment, stdout=written, stderr=written) as worker,
            cell.client() as client,
        ):
            eventually(lambda: cell.has(client, "add") or worker.poll() is not None)
            assert worker.poll() is None, log.read_text()
            ones = np.ones((2, 4), np.float32)
            answer = client.infer("add", [tensor("a", ones), tensor("b", 2 * ones)], request_id="one")
            np.testing.assert_array_equal(answer.as_numpy("sum"), 3 * ones)
            assert answer.get_response().id == "one"
    assert "successfully loaded 'add'" in log.read_text()
