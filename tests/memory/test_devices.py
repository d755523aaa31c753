"""Tensors that another backend leaves in the memory of a GPU, before a callable and a `model.py` in ensembles.

There is no GPU: a CUDA runtime of ours is loaded before that of the real server, see `support.devices`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton
from support.devices import compile_fake_cuda, write_device_model
from support.paths import ROOT
from support.python_models import HEAD, write
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

pytestmark = [pytest.mark.slow]

TENSORS = {"a": ("TYPE_FP32", np.float32), "b": ("TYPE_FP32", np.float32), "s": ("TYPE_STRING", np.bytes_)}
IO = "".join(
    f'{kind} {{ name: "{name}{suffix}" data_type: {dtype} dims: -1 }}\n'
    for kind, suffix in (("input", ""), ("output", "2"))
    for name, (dtype, _) in TENSORS.items()
)
# Of the inputs of the last step, `a` and `s` lie on devices, `b` does not.
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
%s
ensemble_scheduling {
  step { model_name: "numbers" model_version: -1
    input_map { key: "x" value: "a" } output_map { key: "y" value: "a1" } }
  step { model_name: "texts" model_version: -1
    input_map { key: "x" value: "s" } output_map { key: "y" value: "s1" } }
  step { model_name: "%s" model_version: -1
    input_map { key: "a" value: "a1" } input_map { key: "b" value: "b" } input_map { key: "s" value: "s1" }
    output_map { key: "a2" value: "a2" } output_map { key: "b2" value: "b2" } output_map { key: "s2" value: "s2" } }
}
"""
CHAIN = """platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "z" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step { model_name: "numbers" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  step { model_name: "double" model_version: -1
    input_map { key: "y" value: "between" } output_map { key: "z" value: "z" } }
}
"""
MODEL = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b, s = (pb_utils.get_input_tensor_by_name(request, name) for name in "abs")
        assert a.is_cpu() and s.is_cpu()
        upper = [[text.upper() for text in row] for row in s.as_numpy()]
        outputs = {"a2": 2 * a.as_numpy(), "b2": b.as_numpy() + np.float32(1), "s2": np.array(upper, np.object_)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
"""
)
MODEL_CONFIG = f'backend: "python"\nmax_batch_size: 8\ndynamic_batching {{ max_queue_delay_microseconds: 20000 }}\n{IO}'
sizes: list[int] = []


def bound(requests: list[Request]) -> list[dict[str, Array]]:
    """The model of `MODEL`, as a callable."""
    sizes.append(len(requests))
    return [
        {"a2": 2 * each["a"], "b2": each["b"] + np.float32(1), "s2": np.char.upper(each["s"].astype(bytes))}
        for each in requests
    ]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has servers load the fake CUDA runtime; returns the file to which it writes its calls."""
    monkeypatch.setenv("LD_PRELOAD", str(compile_fake_cuda(tmp_path)))
    monkeypatch.setenv("FAKE_CUDA_LOG", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def served(fake: Path, tmp_path: Path) -> Iterator[Triton]:
    """Serves both ensembles."""
    with serve(tmp_path / "repository") as triton:
        yield triton


def serve(repository: Path) -> Any:
    """Return what runs a server with both ensembles."""
    write_device_model(repository, "numbers", "TYPE_FP32")
    write_device_model(repository, "texts", "TYPE_STRING")
    write(repository, "model_py", MODEL, MODEL_CONFIG)
    for name in ("callable", "model_py"):
        folder = repository / f"to_{name}"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(ENSEMBLE % (IO, name))

    @contextlib.contextmanager
    def run() -> Iterator[Triton]:
        triton = Triton(config=local_config(model_repository=str(repository), python_models="workers"))
        tensors = [[Tensor((-1,), dtype, name + end) for name, (_, dtype) in TENSORS.items()] for end in ("", "2")]
        batcher = DynamicBatcher(max_queue_delay_microseconds=20_000)
        triton.bind("callable", bound, *tensors, config=ModelConfig(max_batch_size=8, batcher=batcher))
        with short_home(), running(triton):
            yield triton

    return run()


def counts(fake: Path) -> dict[str, int]:
    """Return how often each function of the fake was called."""
    return collections.Counter(line.split()[0] for line in fake.read_text().splitlines())


def ask(triton: Triton, name: str, chance: Random) -> None:
    """Send one request with random tensors, and look at what comes back."""
    rows, columns = chance.randint(1, 4), chance.choice((0, 1, 5, 300, 5000))
    a, b = (np.array([[chance.random() for _ in range(columns)] for _ in range(rows)], np.float32) for _ in "ab")
    a, b = a.reshape(rows, columns), b.reshape(rows, columns)
    s = np.array([[b"x" * chance.randrange(40) for _ in range(3)] for _ in range(rows)], np.object_)
    with ModelClient(str(triton.http_url), name, inference_timeout_s=PATIENCE_S) as client:
        answer = client.infer_batch(a=a, b=b, s=s)
    np.testing.assert_array_equal(answer["a2"], 2 * a)
    np.testing.assert_array_equal(answer["b2"], b + np.float32(1))
    assert answer["s2"].tolist() == [[text.upper() for text in row] for row in s.tolist()]


@pytest.mark.parametrize("name", ["to_callable", "to_model_py"])
def test_an_ensemble_from_a_gpu(name: str, served: Triton, fake: Path) -> None:
    chance = Random(7)
    sizes.clear()

    def round_of_requests() -> bool:
        with ThreadPoolExecutor(6) as pool:
            done: Sequence[Any] = [pool.submit(ask, served, name, Random(chance.random())) for _ in range(12)]
            for each in done:
                each.result()
        return name != "to_callable" or max(sizes) > 1

    # Until requests came together.
    eventually(round_of_requests)
    called = counts(fake)
    assert called["cudaMemcpyAsync"] > 0
    assert called["cudaStreamSynchronize"] > 0


def test_a_server_in_process(tmp_path: Path) -> None:
    """A callable in process takes tensors of a GPU; what others hand over on one is waited for."""
    write_device_model(tmp_path / "repository", "numbers", "TYPE_FP32")
    folder = tmp_path / "repository/both"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CHAIN)
    library = compile_fake_cuda(tmp_path, replaces=True)
    done = subprocess.run(
        [sys.executable, "-m", "support.devices.in_process", str(library), str(tmp_path / "repository")],
        env={**os.environ, "FAKE_CUDA_FAIL": str(tmp_path / "failing")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT / "tests",
    )
    assert done.returncode == 0, done.stderr
    refused, served = done.stdout.splitlines()[-2:]
    assert "cannot be waited for: cudaStreamSynchronize failed with cudaErrorIllegalAddress (700)" in refused
    assert served == "served"


@pytest.mark.parametrize("name", ["to_callable", "to_model_py"])
def test_a_gpu_that_fails(name: str, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have an error that says what failed, the server lives, and who needs no device is served."""
    failing = tmp_path / "failing"
    monkeypatch.setenv("FAKE_CUDA_FAIL", str(failing))
    expected = (
        r"input '[as]': \d+ bytes could not be copied from GPU [01] to the host: cudaStreamCreate failed with "
        r"cudaErrorIllegalAddress \(700\): an illegal memory access was encountered"
    )
    with serve(tmp_path / "repository") as triton:
        failing.write_text("cudaStreamCreate 700")
        for seed in range(3):
            with pytest.raises(PyTritonClientInferenceServerError, match=expected):
                ask(triton, name, Random(seed))
            ask(triton, name.removeprefix("to_"), Random(seed))
        failing.unlink()
        ask(triton, name, Random(3))
