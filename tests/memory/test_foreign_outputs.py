"""Outputs of another backend that have not the size of their shape and type: everybody who reads them says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.inprocess import InternalError, Server
from pytriton.triton import Triton
from support.faults.faulty_backend import RIGHT, WRONG, write_faulty
from support.python_models import HEAD, write
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

CALLING = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        response = pb_utils.InferenceRequest(
            model_name="faulty", inputs=request.inputs(), requested_output_names=["y"]
        ).exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(response.error().message()))
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "y")])
"""
)
TENSORS = """backend: "python"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: 2 }
output { name: "z" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step {
    model_name: "faulty" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" }
  }
  step {
    model_name: "double" model_version: -1
    input_map { key: "y" value: "between" } output_map { key: "z" value: "z" }
  }
}
"""

DOUBLE = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "y").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("z", 2 * array)]) for array in arrays]
"""
)
DOUBLE_TENSORS = """backend: "python"
max_batch_size: 0
input { name: "y" data_type: TYPE_FP32 dims: -1 }
output { name: "z" data_type: TYPE_FP32 dims: -1 }
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    repository = tmp_path_factory.mktemp("models")
    write_faulty(repository)
    write(repository, "calling", CALLING, TENSORS)
    write(repository, "double", DOUBLE, DOUBLE_TENSORS)
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(ENSEMBLE)
    config = local_config(model_repository=repository, python_models="workers")
    with short_home(), running(Triton(config=config)) as triton:
        yield triton


def check(failure: BaseException, pair: tuple[int, int]) -> None:
    """Check that an error has the size of the shape, and the one of the output."""
    assert re.search(rf"expected {4 * pair[0]}\b.* (received|got) {pair[1]}\b", str(failure).lower())


@pytest.mark.parametrize("model", ["faulty", "calling", "chain"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_whoever_gets_them_from_tritonserver(served: Triton, model: str, protocol: str) -> None:
    url = str(served.http_url if protocol == "http" else served.grpc_url)
    with ModelClient(url, model, inference_timeout_s=PATIENCE_S) as client:
        for pair in WRONG:
            with pytest.raises(PyTritonClientInferenceServerError) as failure:
                client.infer_sample(x=np.array(pair, np.int64))
            check(failure.value, pair)
        (values,) = client.infer_sample(x=np.array(RIGHT, np.int64)).values()
        assert values.tolist() == [0, 0, 0]


def test_whoever_gets_them_in_process(tmp_path: Path) -> None:
    write_faulty(tmp_path)
    with Server(model_repository=str(tmp_path)) as server:
        model = server.model("faulty")
        for pair in WRONG:
            with pytest.raises(InternalError) as failure:
                list(model.infer(inputs={"x": np.array(pair, np.int64)}))
            check(failure.value, pair)
        (response,) = model.infer(inputs={"x": np.array(RIGHT, np.int64)})
        assert np.from_dlpack(response.outputs["y"]).tolist() == [0, 0, 0]
