"""Scripts written for PyTriton look for these texts in its errors; here they are in errors of the same classes.

Only the short texts themselves are the same: what follows them says more. What changed is in `docs/migrating.md`.
"""

from __future__ import annotations

import asyncio
import threading
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
from pytriton.client.auth import create_auth_headers, extract_access_token_from_headers
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientInferenceServerError,
    PyTritonClientInputError,
    PyTritonClientInvalidUrlError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
from support.callables import X, Y
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

ROW = np.ones(1, np.float32)
BATCH = np.ones((9, 1), np.float32)
NOBODY = "http://localhost:1"

go_on = threading.Event()


@batch
def echo(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": x}


@batch
def echo_stream(x: np.ndarray[Any, Any]) -> Iterator[dict[str, Any]]:
    yield {"y": x}


def fail(requests: list[Request]) -> Any:
    return 1 // 0


def wait(requests: list[Request]) -> list[dict[str, Any]]:
    go_on.wait(PATIENCE_S)
    return [{"y": request["x"]} for request in requests]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config())
        server.bind("echo", echo, X, Y)
        server.bind("one", echo_stream, X, Y, config=ModelConfig(decoupled=True))
        server.bind("single", fail, X, Y, config=ModelConfig(batching=False))
        server.bind("fail", fail, X, Y)
        server.bind("wait", wait, X, Y)
        server.bind("wrong_rows", batch(lambda x: {"y": BATCH}), X, Y)
        server.bind("wrong_number", batch(lambda x: [x, x]), X, Y)
        server.bind("wrong_type", batch(lambda x: 3), X, Y)
        with running(server):
            yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> Iterator[str]:
    go_on.clear()
    yield str(triton.http_url if request.param == "http" else triton.grpc_url)
    go_on.set()


def check(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


# ---- the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: TritonConfig(1),  # type: ignore[arg-type, call-arg] # which is the point
            TypeError,
            "TritonConfig initialization can't be used with positional arguments",
        ),
        (
            lambda: TritonConfig(allow_http=False, allow_grpc=False),
            PyTritonValidationError,
            "The `http` or `grpc` endpoint has to be allowed.",
        ),
        (
            lambda: TritonSecurityConfig(restricted_endpoints=["bad-endpoint"]),
            PyTritonValidationError,
            "Invalid endpoint names: bad-endpoint. Valid endpoints are: health, inference, logging, metadata, ",
        ),
        (lambda: create_auth_headers("", "http"), ValueError, "access_token cannot be None or empty"),
        (lambda: create_auth_headers("t", "ftp"), ValueError, "Invalid protocol 'ftp'. Must be 'http' or 'grpc'"),
        (
            lambda: extract_access_token_from_headers(
                {**create_auth_headers("one", "http"), **create_auth_headers("two", "grpc")}
            ),
            ValueError,
            "Conflicting authentication headers found: 'triton-access-token' and "
            "'triton-grpc-protocol-triton-access-token' contain different tokens.",
        ),
    ],
)
def test_settings(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    check(call, kind, text)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"model_name": ""}, PyTritonValidationError, "Model name cannot be empty"),
        (
            {"model_name": "a b"},
            PyTritonValidationError,
            "Model name can only contain alphanumeric characters, dots, underscores and dashes",
        ),
        ({"model_name": "echo"}, PyTritonInvalidOperationError, "Cannot add model with the same name twice."),
        (
            {"outputs": [Tensor((1,), np.float32, "y", optional=True)]},
            PyTritonValidationError,
            "Output tensors cannot be optional.",
        ),
        ({"trace_config": ["mode=triton"]}, ValueError, "Only opentelemetry mode is supported"),
    ],
)
def test_bind(triton: Triton, arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    check(
        lambda: triton.bind(**{"model_name": "m", "infer_func": echo, "inputs": X, "outputs": Y, **arguments}),
        kind,
        text,
    )


# ---- the clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x": ROW, "parameters": 3}, "Parameters and headers must be a dictionary"),
        ({"x": ROW, "parameters": {1: 2}}, "Parameter/header key must be a string"),
        ({"x": ROW, "parameters": {"a": None}}, "Parameter/header value must be a string, integer or boolean"),
        ({"x": ROW, "headers": {"a": 1.5}}, "Parameter/header value must be a string, integer or boolean"),
    ],
)
def test_arguments_of_a_call(arguments: dict[str, Any], text: str) -> None:
    with ModelClient(NOBODY, "echo") as client:
        named = dict(arguments)
        positional = named.pop("inputs", [])
        check(lambda: client.infer_sample(*positional, **named), PyTritonClientValueError, text)


def test_addresses_sizes_and_clients_that_are_closed() -> None:
    check(lambda: ModelClient("ftp://host", "m"), PyTritonClientInvalidUrlError, "Invalid url")
    check(lambda: FuturesModelClient(NOBODY, "m", max_workers=0), ValueError, "max_workers must be greater than 0")
    check(
        lambda: FuturesModelClient(NOBODY, "m", max_queue_size=0), ValueError, "max_queue_size must be greater than 0"
    )
    client = ModelClient(NOBODY, "echo")
    client.close()
    for call in (lambda: client.infer_sample(ROW), lambda: client.wait_for_model(1), lambda: client.model_config):
        check(call, PyTritonClientClosedError, "ModelClient is closed")


@pytest.mark.parametrize(
    "inputs",
    [
        {"other": BATCH},
        {"x": BATCH, "other": BATCH},
        {"x": np.array(["a"])},
        {"x": np.ones(3, np.float64)[:, np.newaxis, np.newaxis]},
        {"x": np.float32(1)},
    ],
)
def test_inputs_that_are_not_those_of_the_model(url: str, inputs: dict[str, Any]) -> None:
    """There, the server refuses them; here, the client does, with an error that scripts catch as the server's."""
    with ModelClient(url, "echo") as client, pytest.raises(PyTritonClientInferenceServerError) as caught:
        client.infer_batch(**inputs)
    assert isinstance(caught.value, PyTritonClientInputError)
    assert (caught.value.status, caught.value.server_message) == (None, None)


def test_waiting_clients(url: str) -> None:
    def ask(model: str, **options: Any) -> object:
        with ModelClient(url, model, **options) as client:
            return client.infer_sample(ROW)

    def ask_batch(model: str) -> object:
        with ModelClient(url, model) as client:
            return client.infer_batch(BATCH)

    def ask_stream(model: str) -> object:
        with DecoupledModelClient(url, model) as client:
            return list(client.infer_sample(ROW))

    def ask_nothing() -> object:
        with ModelClient(url, "echo") as client:
            return client.infer_sample()

    server = PyTritonClientInferenceServerError
    check(ask_nothing, PyTritonClientValueError, "Provide input data")
    check(lambda: ask("fail"), server, "Error occurred during inference request. Message: ")
    check(lambda: ask("fail"), server, "division")
    check(lambda: ask("wrong_rows"), server, "Received output tensors with different batch sizes")
    check(lambda: ask("wrong_number"), server, "Outputs length different than config outputs length")
    check(lambda: ask("wrong_type"), server, "Unsupported output type <class 'int'>")
    check(lambda: ask("one"), server, "Model config is decoupled. Use DecoupledModelClient instead.")
    check(lambda: ask_stream("echo"), server, "Model config is coupled. Use ModelClient instead.")
    check(lambda: ask_batch("echo"), server, "inference request batch-size must be <= 4 for 'echo'")
    check(
        lambda: ask_batch("single"),
        PyTritonClientModelDoesntSupportBatchingError,
        "Model single doesn't support batching - use infer_sample method instead",
    )
    check(
        lambda: ask("wait", inference_timeout_s=0.3),
        PyTritonClientTimeoutError,
        "Timeout occurred during inference request. Timeout: 0.3 s",
    )
    check(
        lambda: ask("nobody", init_timeout_s=0.3),
        PyTritonClientTimeoutError,
        "Waiting for model nobody/<latest> to be ready timed out.",
    )


def test_asyncio_clients(url: str) -> None:
    def ask(model: str, **options: Any) -> object:
        async def main() -> object:
            async with AsyncioModelClient(url, model, **options) as client:
                return await client.infer_sample(ROW)

        return asyncio.run(main())

    def ask_stream(model: str) -> object:
        async def main() -> object:
            async with AsyncioDecoupledModelClient(url, model) as client:
                return [result async for result in client.infer_sample(ROW)]

        return asyncio.run(main())

    server = PyTritonClientInferenceServerError
    check(lambda: ask("fail"), server, "division")
    check(lambda: ask("one"), server, "Model config is decoupled. Use AsyncioDecoupledModelClient instead.")
    check(lambda: ask_stream("echo"), server, "Model config is coupled. Use AsyncioModelClient instead.")
    check(
        lambda: ask("nobody", init_timeout_s=0.3),
        PyTritonClientTimeoutError,
        "Timeout while waiting for model nobody to be ready",
    )


def test_waiting_for_a_server() -> None:
    def wait_for_server() -> None:
        with ModelClient(NOBODY, "m") as client:
            client.wait_for_server(0.3)

    check(wait_for_server, PyTritonClientTimeoutError, "Waiting for server to be ready timed out.")
