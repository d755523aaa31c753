"""Models of Triton's own Python backend in the repository of a `Triton`, beside bound callables.

With numpy 1, and with numpy 2 under a stub that was built for 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.server.tritonserver.backends import make_backends
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.triton import Triton
from support.python_models.python_backend import why_no_python_backend
from support.servers import since
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(bool(why_no_python_backend()), reason=why_no_python_backend() or "it can run")

TYPES = {
    "bool": ("BOOL", np.bool_),
    "int8": ("INT8", np.int8),
    "uint64": ("UINT64", np.uint64),
    "half": ("FP16", np.float16),
    "float": ("FP32", np.float32),
    "double": ("FP64", np.float64),
    "text": ("BYTES", np.object_),
}
VALUES: dict[str, Array] = {
    name: np.array([["a", "zażółć"], ["", "x" * 5000]], np.object_)
    if datatype == "BYTES"
    else np.array([[0, 1], [1, 0]]).astype(dtype)
    for name, (datatype, dtype) in TYPES.items()
}
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([echo(tensor) for tensor in request.inputs()]) for request in requests]


def echo(tensor):
    return pb_utils.Tensor(f"{tensor.name()}_out", tensor.as_numpy())
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    repository = tmp_path_factory.mktemp("models")
    (repository / "echo" / "1").mkdir(parents=True)
    (repository / "echo" / "1" / "model.py").write_text(ECHO)
    tensors = "".join(
        f'{side} {{ name: "{name}{end}" data_type: TYPE_{"STRING" if kind == "BYTES" else kind} dims: -1 {more} }}\n'
        for name, (kind, _) in TYPES.items()
        for side, end, more in (("input", "", "optional: true"), ("output", "_out", ""))
    )
    (repository / "echo" / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 8\n{tensors}')

    @batch
    def double(x: Array) -> dict[str, Array]:
        return {"y": x * 2}

    # A stop that does not take the model out of service in order would take longer than a test may.
    server = Triton(config=local_config(model_repository=repository, exit_timeout_secs=3600))
    server.bind("double", double, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
    with short_home(), running(server):
        regions = shared_memory(server)
        assert regions
        yield server
        server.stop()
    assert not [region for region in regions if region.exists()]


def shared_memory(triton: Triton) -> set[Path]:
    """The files in /dev/shm that a server has mapped."""
    maps = Path(f"/proc/{server_pid(triton)}/maps").read_text()
    return {Path(found) for found in re.findall(r"/dev/shm/\S+", maps)}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
def test_tensors_of_every_type_pass_over_http(triton: Triton, binary: bool) -> None:
    assert triton.http_url is not None
    with tritonclient.http.InferenceServerClient(triton.http_url.partition("//")[2]) as client:
        # JSON has no form for FP16.
        values = {name: value for name, value in VALUES.items() if binary or name != "half"}
        inputs = [
            tritonclient.http.InferInput(name, list(value.shape), TYPES[name][0]) for name, value in values.items()
        ]
        for tensor, value in zip(inputs, values.values(), strict=True):
            tensor.set_data_from_numpy(value, binary_data=binary)
        outputs = [tritonclient.http.InferRequestedOutput(f"{name}_out", binary_data=binary) for name in values]
        compare(client.infer("echo", inputs, outputs=outputs), values)


def test_tensors_of_every_type_pass_over_grpc(triton: Triton) -> None:
    assert triton.grpc_url is not None
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url.partition("//")[2]) as client:
        inputs = [
            tritonclient.grpc.InferInput(name, list(value.shape), TYPES[name][0]) for name, value in VALUES.items()
        ]
        for tensor, value in zip(inputs, VALUES.values(), strict=True):
            tensor.set_data_from_numpy(value)
        compare(client.infer("echo", inputs), VALUES)


def compare(result: Any, values: dict[str, Array]) -> None:
    for name, value in values.items():
        found = result.as_numpy(f"{name}_out")
        if value.dtype.kind == "O":
            found = np.array([text if isinstance(text, str) else text.decode() for text in found.ravel()], np.object_)
            found = found.reshape(value.shape)
        np.testing.assert_array_equal(found, value, err_msg=name)
        assert found.dtype == value.dtype


def test_a_bound_callable_answers_beside_it(triton: Triton) -> None:
    assert triton.http_url is not None
    with ModelClient(triton.http_url, "double") as client:
        assert client.infer_sample(np.array([1, 2], np.float32))["y"].tolist() == [2, 4]


def test_an_environment_that_was_packed_for_a_model_keeps_its_python(tmp_path: Path) -> None:
    """Triton activates it before it starts the stub, for which the Python of this process is another one then."""
    (tmp_path / "server" / "python").mkdir(parents=True)
    stub = tmp_path / "server" / "python" / "triton_python_backend_stub"
    stub.write_text('#!/bin/sh\necho "$PATH|$LD_LIBRARY_PATH|$*"\n')
    stub.chmod(0o755)
    binary = find_tritonserver()
    target = tmp_path / "backends"
    target.mkdir()
    make_backends(target, binary, {}, tmp_path / "server")
    script = target / "python" / stub.name

    def started(**environment: str) -> str:
        done = subprocess.run(
            [script, "a b", "c"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout.strip()

    own = {"CONDA_PREFIX": os.environ["CONDA_PREFIX"]} if "CONDA_PREFIX" in os.environ else {}
    packed = started(PATH="/packed/bin:/bin", LD_LIBRARY_PATH="/packed/lib", CONDA_PREFIX="/packed")
    assert packed == "/packed/bin:/bin|/packed/lib|a b c"
    path, libraries, arguments = started(PATH="/bin", LD_LIBRARY_PATH="/more", **own).split("|")
    assert path == f"{Path(sys.executable).parent}:/bin"
    assert libraries.endswith(":/more")
    assert arguments == "a b c"


CRASHING = """
import os

class TritonPythonModel:
    def execute(self, requests):
        os._exit(1)
"""


# An older server does not notice, and the caller waits.
@since(2, 51)
def test_a_model_whose_process_has_died_does_not_hold_up_a_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "crashing" / "1").mkdir(parents=True)
    (tmp_path / "crashing" / "1" / "model.py").write_text(CRASHING)
    (tmp_path / "crashing" / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 '
        'input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }'
    )
    # Longer than this test may take.
    triton = Triton(config=local_config(model_repository=tmp_path, exit_timeout_secs=3600))
    with short_home(), triton:
        regions = shared_memory(triton)
        assert regions
        assert triton.http_url is not None
        with (
            ModelClient(triton.http_url, "crashing") as client,
            pytest.raises(PyTritonClientInferenceServerError, match="not healthy"),
        ):
            client.infer_sample(np.ones(1, np.float32))
    assert "The process of model 'crashing' has died" in caplog.text
    assert not [region for region in regions if region.exists()]


SLOW = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        open(self.folder + "/begun", "w").close()
        while not os.path.exists(self.folder + "/go on"):
            time.sleep(0.01)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""


def test_a_model_whose_process_is_at_a_request_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(SLOW)
    (folder / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 instance_group { name: "worker" kind: KIND_CPU } '
        'input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }'
    )
    with short_home(), Triton(config=local_config(model_repository=tmp_path)) as triton, ThreadPoolExecutor(2) as pool:
        assert triton.http_url is not None
        with ModelClient(triton.http_url, "slow") as client:
            answer = pool.submit(client.infer_sample, np.ones(1, np.float32))
            eventually((folder / "begun").exists)
            stopped = pool.submit(triton.stop)
            # Longer than a model without a process is waited for.
            time.sleep(3.0)
            assert not stopped.done()
            (folder / "go on").touch()
            assert answer.result(PATIENCE_S)["y"].tolist() == [1]
            assert stopped.result(PATIENCE_S)
