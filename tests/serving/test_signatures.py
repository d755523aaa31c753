"""What does not fit together is refused where it is bound or loaded; a model without inputs fits."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientValueError
from pytriton.decorators import batch, sample
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import ProcessWorker, RemoteTriton, Triton, TritonModelLoadError
from support.paths import TESTS
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

IMG = [Tensor(name="img", dtype=np.float32, shape=(-1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(2,))]
HERE = Path(__file__)
VALUES = np.array([1, 2], np.float32)


@batch
def takes_x(x: Any) -> Any:
    return {"y": x}


def make_taker_of_x() -> Any:
    return takes_x


@batch
def nothing_in() -> Any:
    return {"y": VALUES[np.newaxis]}


@sample
def nothing_in_one() -> Any:
    return [VALUES]


def nothing_in_requests(requests: Any) -> Any:
    return [{"y": VALUES[np.newaxis]} for _ in requests]


def nothing_in_stream(requests: Any) -> Iterator[Any]:
    for factor in (1, 2):
        yield [{"y": factor * VALUES[np.newaxis]} for _ in requests]


def make_nothing_in() -> Any:
    return nothing_in


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("batch", nothing_in, [], Y)
        triton.bind("sample", nothing_in_one, [], Y, config=ModelConfig(batching=False))
        triton.bind("requests", nothing_in_requests, [], Y)
        triton.bind("process", ProcessWorker(f"{HERE}:make_nothing_in"), [], Y)
        triton.bind("stream", nothing_in_stream, [], Y, config=ModelConfig(decoupled=True))
        with running(triton):
            yield triton


# ---- a model without inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["batch", "sample", "requests", "process"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_without_inputs_is_asked_by_every_client(triton: Triton, model: str, protocol: str) -> None:
    url = triton.http_url if protocol == "http" else triton.grpc_url
    assert url is not None

    async def ask() -> Any:
        async with AsyncioModelClient(url, model) as client:
            return await client.infer_sample()

    with ModelClient(url, model) as client:
        np.testing.assert_array_equal(client.infer_sample()["y"], VALUES)
        if model != "sample":
            np.testing.assert_array_equal(client.infer_batch()["y"], VALUES[np.newaxis])
        with pytest.raises(PyTritonClientValueError, match="expected no inputs; received 1 by position"):
            client.infer_sample([1])
    with FuturesModelClient(url, model) as futures:
        np.testing.assert_array_equal(futures.infer_sample().result(PATIENCE_S)["y"], VALUES)
    np.testing.assert_array_equal(asyncio.run(ask())["y"], VALUES)


def test_a_stream_without_inputs_is_asked_by_both_clients(triton: Triton) -> None:
    url = triton.grpc_url
    assert url is not None

    async def ask() -> list[Any]:
        async with AsyncioDecoupledModelClient(url, "stream") as client:
            return [part["y"].tolist() async for part in client.infer_sample()]

    with DecoupledModelClient(url, "stream") as client:
        assert [part["y"].tolist() for part in client.infer_sample()] == [[1, 2], [2, 4]]
    assert asyncio.run(ask()) == [[1, 2], [2, 4]]


def test_a_model_without_inputs_in_process() -> None:
    with inprocess.Server() as server:
        model = server.bind("batch", nothing_in, [], Y)
        (response,) = model.infer()
        np.testing.assert_array_equal(np.from_dlpack(response.outputs["y"]), VALUES[np.newaxis])


# ---- a callable that cannot take the inputs ------------------------------------------------------------------------

REFUSAL = r"takes_x\(x\) cannot take the inputs of the model, which @batch hands over by name: .*'img'"


def test_bind_and_rebind_refuse_a_callable_that_cannot_take_the_inputs(triton: Triton) -> None:
    with pytest.raises(PyTritonValidationError, match=f"Model 'refused': {REFUSAL}"):
        triton.bind("refused", takes_x, IMG, Y)
    triton.bind("refused", lambda requests: requests, IMG, Y)
    with pytest.raises(PyTritonValidationError, match=REFUSAL):
        triton.rebind("refused", [lambda requests: requests, takes_x])
    triton.unbind("refused")
    # Before anything is asked of the server.
    with pytest.raises(PyTritonValidationError, match=REFUSAL):
        RemoteTriton("http://127.0.0.1:1").bind("refused", takes_x, IMG, Y)
    with pytest.raises(PyTritonValidationError, match=REFUSAL):
        inprocess.Server().bind("refused", takes_x, IMG, Y)


def test_a_process_worker_refuses_it_when_it_has_loaded_it(triton: Triton) -> None:
    with pytest.raises(TritonModelLoadError, match=REFUSAL):
        triton.bind("refused", ProcessWorker(f"{HERE}:make_taker_of_x", max_crashes=1), IMG, Y)


def test_a_worker_from_a_shell_refuses_it_when_it_knows_the_model(tmp_path: Path) -> None:
    arguments = ["add", f"--model-repository={tmp_path}", "--name=net", f"--endpoint={tmp_path}"]
    command = [sys.executable, "-m", "pytriton.proxy_backend"]
    subprocess.run(
        [*command, *arguments, "--input=img:float32:-1", "--output=y:float32:2"], check=True, timeout=PATIENCE_S
    )
    done = subprocess.run(
        [*command, "worker", f"{HERE}:takes_x", f"--endpoint={tmp_path}", "--model=net"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert re.search(rf"error: Model 'net': {REFUSAL}", done.stderr)
    assert "Traceback" not in done.stderr
