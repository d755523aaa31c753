from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from pytriton.client.asyncio_utils import (
    asyncio_get_model_config,
    asyncio_get_model_state,
    asyncio_wait_for_model_ready,
    asyncio_wait_for_model_status_loaded,
    asyncio_wait_for_server_ready,
)
from pytriton.client.exceptions import PyTritonClientModelUnavailableError, PyTritonClientTimeoutError
from pytriton.client.utils import ModelState


@asynccontextmanager
async def tritonclient(protocol: str, address: str) -> AsyncIterator[Any]:
    client = importlib.import_module(f"tritonclient.{protocol}.aio").InferenceServerClient(address)
    try:
        yield client
    finally:
        await client.close()


def test_ready_model(server: Any) -> None:
    async def main() -> None:
        async with tritonclient(server.protocol, server.url.partition("://")[2]) as client:
            await asyncio_wait_for_server_ready(client, 0.01)
            await asyncio_wait_for_model_ready(client, "add")
            await asyncio_wait_for_model_status_loaded(client, "add", 0.01)
            config = await asyncio_get_model_config(client, "add", "2", timeout_s=300)
            assert (config.model_name, config.model_version, config.max_batch_size) == ("add", 2, 8)
            assert config.inputs[0].dtype is np.float32
            assert (await asyncio_get_model_config(client, "add", "<latest>")).model_version is None
            assert await asyncio_get_model_state(client, "add") is ModelState.READY
            assert await asyncio_get_model_state(client, "add", "2") is ModelState.READY
            assert await asyncio_get_model_state(client, "add", "9") is ModelState.UNAVAILABLE
            assert await asyncio_get_model_state(client, "nowhere") is ModelState.UNAVAILABLE

    asyncio.run(main())


def test_headers(server: Any) -> None:
    header = {"http": "triton-access-token", "grpc": "triton-grpc-protocol-triton-access-token"}[server.protocol]
    server.token, server.restricted = "secret", {"health", "model-ready", "model-config", "model-repository"}

    async def main() -> None:
        async with tritonclient(server.protocol, server.url.partition("://")[2]) as client:
            headers = {header: "secret"}
            await asyncio_wait_for_server_ready(client, 0.01, headers=headers)
            await asyncio_wait_for_model_ready(client, "add", headers=headers)
            await asyncio_wait_for_model_status_loaded(client, "add", 0.01, headers=headers)
            assert (await asyncio_get_model_config(client, "add", headers=headers)).model_name == "add"

    asyncio.run(main())


def test_missing_model(server: Any) -> None:
    async def main() -> None:
        async with tritonclient(server.protocol, server.url.partition("://")[2]) as client:
            for wait in (
                asyncio_wait_for_model_ready(client, "nowhere", timeout_s=0.2),
                asyncio_wait_for_model_status_loaded(client, "nowhere", 0.05, timeout_s=0.2),
                asyncio_get_model_config(client, "nowhere", timeout_s=0.2),
            ):
                with pytest.raises(
                    PyTritonClientModelUnavailableError,
                    match=r"nowhere/<latest> .* for model nowhere to be ready: 0\.2 s",
                ):
                    await wait
            server.is_ready = False
            with pytest.raises(PyTritonClientTimeoutError, match="server to be ready"):
                await asyncio_wait_for_server_ready(client, 0.05, timeout_s=0.2)

    asyncio.run(main())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_server_that_does_not_answer(protocol: str, frozen_address: str, free_address: str) -> None:
    async def main() -> None:
        for address in (frozen_address, free_address):
            async with tritonclient(protocol, address) as client:
                with pytest.raises(PyTritonClientTimeoutError):
                    await asyncio_wait_for_server_ready(client, 0.05, timeout_s=0.3)
                with pytest.raises(PyTritonClientModelUnavailableError):
                    await asyncio_wait_for_model_ready(client, "add", timeout_s=0.3)
                with pytest.raises(PyTritonClientModelUnavailableError):
                    await asyncio_get_model_config(client, "add", timeout_s=0.3)

    asyncio.run(main())
