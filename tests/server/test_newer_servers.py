"""What tritonservers after the bundled 2.51 have and do; each test names the version from which on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import AsyncioDecoupledModelClient, DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.callables import double
from support.http import call, infer, tensor
from support.servers import since
from support.serving import local_config, running, server_pid

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}
REGION = {"key": "/nowhere", "offset": 0, "byte_size": 8}


def twice(requests: Any) -> Any:
    for factor in (2, 3):
        yield [{"y": request["x"] * factor} for request in requests]


def served(**settings: object) -> Triton:
    triton = Triton(config=local_config(**settings))
    triton.bind("double", double, **TENSORS)
    return triton


@since(2, 59)
def test_json_above_the_limit_is_refused_and_tensors_are_not() -> None:
    # 1,000 numbers of three characters and a separator each, and the frame around them.
    with running(served(http_max_input_size=2000)) as triton:
        assert infer(triton.http_url, "double", 3) == [6]
        body = {"inputs": [tensor("x", *[1.5] * 1000)]}
        status, answer = call(triton.http_url, "POST", "/v2/models/double/infer", body)
        assert status == 400
        assert "--http-max-input-size" in answer["error"]
        batch = np.ones((1, 100_000), np.float32)
        for url in (triton.http_url, triton.grpc_url):
            with ModelClient(str(url), "double") as client:
                assert client.infer_batch(batch)["y"].sum() == 200_000


@since(2, 59)
def test_a_stream_whose_json_is_above_the_limit_says_what_helps() -> None:
    triton = Triton(config=local_config(http_max_input_size=2000))
    triton.bind("twice", twice, **TENSORS, config=ModelConfig(decoupled=True))
    small, large = np.ones((1, 3), np.float32), np.ones((1, 1000), np.float32)
    advice = r"--http-max-input-size .* Use a grpc:// address, or TritonConfig\(http_max_input_size=\.\.\.\)"
    with running(triton):
        with DecoupledModelClient(str(triton.http_url), "twice") as client:
            assert [answer["y"].sum() for answer in client.infer_batch(small)] == [6, 9]
            with pytest.raises(PyTritonClientInferenceServerError, match=advice) as caught:
                list(client.infer_batch(large))
            assert caught.value.status == "400"
        with DecoupledModelClient(str(triton.grpc_url), "twice") as client:
            assert [answer["y"].sum() for answer in client.infer_batch(large)] == [2000, 3000]

        async def ask() -> None:
            async with AsyncioDecoupledModelClient(str(triton.http_url), "twice") as client:
                async for _ in client.infer_batch(large):
                    raise AssertionError("there is an answer")

        with pytest.raises(PyTritonClientInferenceServerError, match=advice):
            asyncio.run(ask())


@since(2, 68)
@pytest.mark.parametrize(("allowed", "status"), [(None, 501), (False, 501), (True, 500)])
def test_clients_register_shared_memory_where_it_is_allowed(allowed: bool | None, status: int) -> None:
    with running(served(allow_client_shm=allowed)) as triton:
        token = {"triton-access-token": str(triton.get_access_token())}
        path = "/v2/systemsharedmemory/region/r/register"
        assert call(triton.http_url, "POST", path, REGION)[0] == 403
        found, answer = call(triton.http_url, "POST", path, REGION, token)
        # With 500 it has looked for the memory, which is not there.
        assert found == status, answer
        assert ("--allow-client-shm" in answer["error"]) is not allowed


@since(2, 57)
def test_threads_and_queues_of_grpc_are_passed_on() -> None:
    with running(served(grpc_infer_thread_count=4, grpc_max_response_pool_size=7)) as triton:
        command = Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes().decode().split("\0")
        assert {"--grpc-infer-thread-count=4", "--grpc-max-response-pool-size=7"} <= set(command)
        with ModelClient(str(triton.grpc_url), "double") as client:
            assert client.infer_batch(np.ones((1, 2), np.float32))["y"].tolist() == [[2, 2]]
