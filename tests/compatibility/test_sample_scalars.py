"""A sample's output without another axis than that of the batch is a numpy scalar or `bytes`, as in PyTriton."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

SAMPLE = np.array([1.5, 2.0], np.float32)


def labels(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    rows = len(x)
    return {
        "label": np.array([b"cat"] * rows, object),
        "score": np.full(rows, 0.5, np.float32),
        "count": np.full(rows, 3, np.int64),
        "sure": np.full(rows, True),
        "row": x,
    }


@batch
def classify(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return labels(x)


@batch
def classify_twice(x: np.ndarray[Any, Any]) -> Iterator[dict[str, Any]]:
    yield labels(x)
    yield labels(x)


def tensors() -> list[Tensor]:
    dtypes = {"label": bytes, "score": np.float32, "count": np.int64, "sure": np.bool_, "row": np.float32}
    return [Tensor((-1,), dtype, name) for name, dtype in dtypes.items()]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config())
        inputs = [Tensor((-1,), np.float32, "x")]
        server.bind("once", classify, inputs, tensors())
        server.bind("twice", classify_twice, inputs, tensors(), config=ModelConfig(decoupled=True))
        with running(server):
            yield server


def with_model_client(url: str) -> list[dict[str, Any]]:
    with ModelClient(url, "once") as client:
        return [client.infer_sample(SAMPLE), client.infer_sample(x=SAMPLE)]


def with_futures_client(url: str) -> list[dict[str, Any]]:
    with FuturesModelClient(url, "once") as client:
        return [client.infer_sample(SAMPLE).result(PATIENCE_S), client.infer_sample(x=SAMPLE).result(PATIENCE_S)]


def with_asyncio_client(url: str) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        async with AsyncioModelClient(url, "once") as client:
            return [await client.infer_sample(SAMPLE), await client.infer_sample(x=SAMPLE)]

    return asyncio.run(main())


def with_decoupled_client(url: str) -> list[dict[str, Any]]:
    with DecoupledModelClient(url, "twice") as client:
        return list(client.infer_sample(SAMPLE))


def with_asyncio_decoupled_client(url: str) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        async with AsyncioDecoupledModelClient(url, "twice") as client:
            return [result async for result in client.infer_sample(SAMPLE)]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("scheme", "ask"),
    [
        ("http", with_model_client),
        ("http", with_futures_client),
        ("http", with_asyncio_client),
        ("grpc", with_model_client),
        ("grpc", with_futures_client),
        ("grpc", with_asyncio_client),
        ("grpc", with_decoupled_client),
        ("grpc", with_asyncio_decoupled_client),
    ],
)
def test_scalars_and_bytes(triton: Triton, scheme: str, ask: Callable[[str], list[dict[str, Any]]]) -> None:
    results = ask(str(triton.http_url if scheme == "http" else triton.grpc_url))
    assert len(results) == 2
    for result in results:
        assert type(result["label"]) is bytes
        assert result["label"].decode() == "cat"
        assert {result["label"]: 1} == {b"cat": 1}
        assert isinstance(result["score"], np.floating)
        assert type(result["score"]) is np.float32
        assert f"{result['score']:.2f}" == "0.50"
        assert type(result["count"]) is np.int64
        assert [10, 20, 30, 40][result["count"]] == 40
        assert type(result["sure"]) is np.bool_
        # What has an axis of its own stays an array.
        assert isinstance(result["row"], np.ndarray)
        assert result["row"].tolist() == SAMPLE.tolist()


@pytest.mark.parametrize("ask", [with_decoupled_client, with_asyncio_decoupled_client])
def test_a_stream_over_http_has_the_declared_axes(triton: Triton, ask: Callable[[str], list[dict[str, Any]]]) -> None:
    """Its JSON names no shape, so the client takes the declared one. PyTriton has no such streams."""
    for result in ask(str(triton.http_url)):
        assert result["label"].tolist() == [b"cat"]
        assert result["score"].shape == (1,)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_batch_keeps_its_arrays(triton: Triton, scheme: str) -> None:
    with ModelClient(str(triton.http_url if scheme == "http" else triton.grpc_url), "once") as client:
        result = client.infer_batch(SAMPLE[np.newaxis])
    assert result["label"].tolist() == [b"cat"]
    assert result["score"].shape == (1,)
