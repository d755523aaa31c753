"""Shared memory of clients whose server was started again, and has forgotten it."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client._core.startup import Ask, Question
from pytriton.client.exceptions import PyTritonClientConnectionError, PyTritonClientError
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig
from pytriton.proxy.types import Request
from pytriton.triton import RestartPolicy, Triton, TritonSecurityConfig
from support.callables import X, Y
from support.serving import local_config, running, server_pid, short_home
from support.waiting import eventually

TOKEN = "a-token"
LARGE = np.arange(1 << 18, dtype=np.float32)

calls: list[str] = []


@batch
def double(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    calls.append("double")
    return {"y": 2 * x}


def first_elements(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    calls.append("first_elements")
    for number in range(3):
        yield [{"y": requests[0]["x"][:, :number]}]


@pytest.mark.parametrize("mode", [True, "auto"])
def test_each_request_is_carried_out_once(mode: Any) -> None:
    security = TritonSecurityConfig(access_token=TOKEN)
    with short_home():
        server = Triton(config=local_config(), security_config=security, restart=RestartPolicy())
        server.bind("double", double, X, Y, config=ModelConfig(max_batch_size=8))
        server.bind("stream", first_elements, X, Y, config=ModelConfig(decoupled=True, max_batch_size=1))
        with running(server):
            use_before_and_after(server, mode)


def use_before_and_after(server: Triton, mode: Any) -> None:
    urls = [str(server.http_url), str(server.grpc_url)]
    clients = [ModelClient(url, "double", access_token=TOKEN, shared_memory=mode) for url in urls]
    streams = DecoupledModelClient(urls[1], "stream", access_token=TOKEN, shared_memory=mode)
    for client in clients:
        for _ in range(3):
            kept = client.infer_sample(LARGE)["y"]
    assert len(list(streams.infer_sample(LARGE))) == 3
    first = server_pid(server)
    os.kill(first, signal.SIGKILL)
    with ModelClient(urls[0], "double", access_token=TOKEN) as plain:
        eventually(lambda: is_back(plain, server, first))
        calls.clear()
        for client in clients:
            eventually(functools.partial(is_answered, client))
            assert np.array_equal(client.infer_sample(LARGE + 1)["y"], 2 * (LARGE + 1))
        assert len(list(streams.infer_sample(LARGE))) == 3
        assert calls == ["double"] * 4 + ["first_elements"]
        assert np.array_equal(kept, 2 * LARGE)
        assert plain._transport.ask(Ask(Question.LIST_REGIONS, 60), plain._target)
        for client in (*clients, streams):
            client.close()
        assert plain._transport.ask(Ask(Question.LIST_REGIONS, 60), plain._target) == []


def is_back(client: ModelClient, server: Triton, first: int) -> bool:
    try:
        client.wait_for_model(1)
        return server_pid(server) != first
    except (PyTritonClientError, AssertionError):
        return False


def is_answered(client: ModelClient) -> bool:
    """Ask; a connection of the server that is gone may be the reason for an error, the regions may not."""
    try:
        return bool(np.array_equal(client.infer_sample(LARGE)["y"], 2 * LARGE))
    except PyTritonClientConnectionError:
        return False
