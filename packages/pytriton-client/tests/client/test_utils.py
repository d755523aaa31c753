from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient, utils
from pytriton.client.auth import create_auth_headers
from pytriton.client.exceptions import (
    PyTritonClientInvalidUrlError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
)
from pytriton.client.utils import ModelState


@pytest.fixture
def raw_client(server: Any) -> Iterator[Any]:
    """A client of tritonclient itself."""
    client = utils.create_client_from_url(server.url)
    yield client
    client.close()


def test_model_config(server: Any, raw_client: Any) -> None:
    utils.wait_for_server_ready(raw_client, 5)
    spec = utils.get_model_config(raw_client, "add", "2", timeout_s=300)
    assert (spec.model_name, spec.model_version, spec.max_batch_size) == ("add", 2, 8)
    assert spec.inputs[0].dtype is np.float32
    assert utils.get_model_config(raw_client, "add", utils.LATEST_MODEL_VERSION, timeout_s=300).model_version is None


def test_model_state(server: Any, raw_client: Any) -> None:
    server.token, server.restricted = "secret", {"model-repository"}
    headers = create_auth_headers("secret", server.protocol)
    assert utils.get_model_state(raw_client, "add", headers=headers) is ModelState.READY
    assert utils.get_model_state(raw_client, "add", "2", headers=headers) is ModelState.READY
    assert utils.get_model_state(raw_client, "add", "3", headers=headers) is ModelState.UNAVAILABLE
    assert utils.get_model_state(raw_client, "nowhere", headers=headers) is ModelState.UNAVAILABLE
    server.models["add"].is_ready = False
    assert utils.get_model_state(raw_client, "add", headers=headers) is ModelState.UNAVAILABLE


def test_states_of_all_models(server: Any, raw_client: Any) -> None:
    server.models["add"].is_ready = False
    index = raw_client.get_model_repository_index()
    states = utils.parse_http_response(index) if server.protocol == "http" else utils.parse_grpc_response(index.models)
    assert states[("add", "1")] is states[("add", "2")] is ModelState.UNAVAILABLE
    assert states[("single", "1")] is ModelState.READY
    # What was never loaded has neither a version nor a state.
    assert utils.parse_http_response([{"name": "a"}, {"name": "b", "version": "1", "state": "LOADING"}]) == {
        ("b", "1"): ModelState.LOADING
    }


def test_library(server: Any) -> None:
    with ModelClient(server.url, "add") as client:
        raw = client.create_client_from_url(server.url)
        assert isinstance(raw, client.get_lib().InferenceServerClient)
        assert raw.is_model_ready("add")
        raw.close()


def test_waits_end(server: Any, raw_client: Any) -> None:
    server.is_ready = False
    with pytest.raises(PyTritonClientTimeoutError, match="server"):
        utils.wait_for_server_ready(raw_client, 0.1)
    with pytest.raises(PyTritonClientModelUnavailableError, match="nowhere"):
        utils.wait_for_model_ready(raw_client, "nowhere", timeout_s=0.1)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_server(scheme: str, free_address: str) -> None:
    client = utils.create_client_from_url(f"{scheme}://{free_address}", network_timeout_s=1)
    with pytest.raises(PyTritonClientTimeoutError):
        utils.wait_for_server_ready(client, 0.1)
    client.close()


def test_invalid_url() -> None:
    with pytest.raises(PyTritonClientInvalidUrlError):
        utils.create_client_from_url("ftp://localhost")
