"""All clients, each asked in its own way, of a server with the models `same` and `count`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.management import DirectStreamsClient
from pytriton.model_config import ModelConfig
from pytriton.triton import Triton
from support.callables import X, Y, identity, thrice
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

ROW = np.array([1.0, 2.0], np.float32)


@contextmanager
def serving_all(**settings: Any) -> Iterator[Triton]:
    """Run a server with a model for each kind of client.

    Args:
        settings: Of `TritonConfig`; `security_config` is the one of `Triton`.
    """
    security = settings.pop("security_config", None)
    with short_home():
        triton = Triton(config=local_config(**settings), security_config=security)
        triton.bind("same", identity, X, Y, config=ModelConfig(batching=False))
        triton.bind("count", thrice, X, Y, config=ModelConfig(batching=False, decoupled=True))
        with running(triton):
            yield triton


def address_of(triton: Triton, protocol: str) -> str:
    return str(triton.http_url if protocol == "http" else triton.grpc_url)


class Kind(NamedTuple):
    """A kind of clients."""

    make: Any  # its class
    model: str  # the model that it asks
    begin: Callable[..., Any]  # makes one call with inputs; returns the arrays that come, or a coroutine that does

    def ask(self, client: Any, x: Any = ROW, run: Callable[..., Any] = asyncio.run) -> list[Any]:
        """Make one call and return the arrays that come, as lists.

        Args:
            client: Of this kind.
            x: The input.
            run: What runs a coroutine.
        """
        begun = self.begin(client, x)
        return [array.tolist() for array in (run(begun) if asyncio.iscoroutine(begun) else begun)]

    def check(self, client: Any, run: Callable[..., Any] = asyncio.run) -> None:
        """Make one call, and check what comes."""
        assert self.ask(client, ROW, run) == [ROW.tolist()] * (3 if self.model == "count" else 1)

    @contextmanager
    def asking(self, url: str, **settings: Any) -> Iterator[Callable[[], None]]:
        """Have a client, and a function that makes one call and checks what comes; no event loop runs in between.

        Args:
            url: The server.
            settings: Of the client.
        """
        client = self.make(url, self.model, **settings)
        loop = asyncio.new_event_loop()
        try:
            yield lambda: self.check(client, loop.run_until_complete)
        finally:
            closing = client.close()
            if asyncio.iscoroutine(closing):
                loop.run_until_complete(closing)
            loop.close()


def _ask(client: Any, *inputs: Any, **named: Any) -> list[Any]:
    return [client.infer_sample(*inputs, **named)["y"]]


def _ask_futures(client: Any, *inputs: Any, **named: Any) -> list[Any]:
    return [client.infer_sample(*inputs, **named).result(PATIENCE_S)["y"]]


def _ask_streams(client: Any, *inputs: Any, **named: Any) -> list[Any]:
    return [result["y"] for result in client.infer_sample(*inputs, **named)]


async def _ask_asyncio(client: Any, *inputs: Any, **named: Any) -> list[Any]:
    return [(await client.infer_sample(*inputs, **named))["y"]]


async def _ask_asyncio_streams(client: Any, *inputs: Any, **named: Any) -> list[Any]:
    return [result["y"] async for result in client.infer_sample(*inputs, **named)]


KINDS = {
    "sync": Kind(ModelClient, "same", _ask),
    "futures": Kind(FuturesModelClient, "same", _ask_futures),
    "streams": Kind(DecoupledModelClient, "count", _ask_streams),
    "asyncio": Kind(AsyncioModelClient, "same", _ask_asyncio),
    "asyncio streams": Kind(AsyncioDecoupledModelClient, "count", _ask_asyncio_streams),
    "direct streams": Kind(DirectStreamsClient, "count", _ask_asyncio_streams),
}


def ask_all(url: str, **settings: Any) -> None:
    """Check one call of a client of each kind.

    Args:
        url: The server.
        settings: Of each client.
    """
    for kind in KINDS.values():
        with kind.asking(url, **settings) as check:
            check()
