from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
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
from pytriton.client.auth import create_auth_headers, extract_access_token_from_headers
from pytriton.client.management import DirectStreamsClient


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ("http", "triton-access-token"),
        ("HTTP", "triton-access-token"),
        ("grpc", "triton-grpc-protocol-triton-access-token"),
        ("gRPC", "triton-grpc-protocol-triton-access-token"),
    ],
)
def test_header_of_each_protocol(protocol: str, name: str) -> None:
    headers = create_auth_headers("secret", protocol)
    assert headers == {name: "secret"}
    assert extract_access_token_from_headers({name.upper(): "secret", "other": "x"}) == "secret"


@pytest.mark.parametrize(("token", "protocol"), [("", "http"), (None, "http"), ("secret", "ftp"), ("secret", None)])
def test_refused(token: str, protocol: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be None or empty|Invalid protocol") as caught:
        create_auth_headers(token, protocol)
    assert "secret" not in str(caught.value)


def test_extract() -> None:
    both = {**create_auth_headers("one", "http"), **create_auth_headers("one", "grpc")}
    assert extract_access_token_from_headers({}) is None
    assert extract_access_token_from_headers(None) is None
    assert extract_access_token_from_headers(both) == "one"
    with pytest.raises(ValueError, match="Conflicting authentication headers"):
        extract_access_token_from_headers({**both, **create_auth_headers("two", "grpc")})


def ask_waiting(client: Any, **call: Any) -> None:
    with client:
        answer = client.infer_sample(np.ones(2, np.float32), **call)
        if isinstance(client, FuturesModelClient):
            answer.result(300)
        elif isinstance(client, DecoupledModelClient):
            list(answer)


def ask_asyncio(client: Any, **call: Any) -> None:
    async def ask() -> None:
        async with client:
            answer = client.infer_sample(np.ones(2, np.float32), **call)
            if asyncio.iscoroutine(answer):
                await answer
            else:
                assert [result async for result in answer]

    asyncio.run(ask())


@pytest.mark.parametrize("change_case", [str.lower, str.upper, str.title])
@pytest.mark.parametrize(
    ("make", "model", "ask"),
    [
        (ModelClient, "add", ask_waiting),
        (FuturesModelClient, "add", ask_waiting),
        (DecoupledModelClient, "stream", ask_waiting),
        (AsyncioModelClient, "add", ask_asyncio),
        (AsyncioDecoupledModelClient, "stream", ask_asyncio),
        # What it needs beside is not there where the client is alone.
        *([(DirectStreamsClient, "stream", ask_asyncio)] if importlib.util.find_spec("hpack") else []),
    ],
)
def test_token_of_a_call_replaces_that_of_the_client(
    server: Any, make: Callable[..., Any], model: str, ask: Callable[..., None], change_case: Callable[[str], str]
) -> None:
    """It does so in all clients, whatever the case of the header, which the server sees once."""
    server.token, server.restricted = "of the call", {"inference"}
    (name,) = create_auth_headers("x", server.protocol)
    ask(make(server.url, model, access_token="of the client"), headers={change_case(name): server.token})
    view = make(server.url, model, access_token="of the client").with_options(
        headers={change_case(name): "of the view"}
    )
    ask(view, headers={name: server.token})
    assert server.last_headers[name] == server.token
