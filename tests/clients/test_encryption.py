"""Clients and servers that encrypt what they say, and a server whose models come and go."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from pytriton.client import DecoupledModelClient, ModelClient, TlsSettings
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
)
from pytriton.client.utils import ModelState, create_client_from_url, get_model_state
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonSecurityConfig
from support.callables import X, Y
from support.faults.relay import Relay
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

TOKEN = "a-token"
ROW = np.array([1.0, 2.0], np.float32)

N = [Tensor((1,), np.int64, "n")]
I = [Tensor((1,), np.int64, "i")]  # noqa: E741 - short like the others
STREAMING = ModelConfig(decoupled=True)


@batch
def double(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": 2 * x}


def count(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    for number in range(int(requests[0]["n"].max())):
        yield [{"i": np.array([[number]])} for _ in requests]


def numbers(results: Any) -> list[int]:
    return [int(result["i"].item()) for result in results]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, dict[str, Path]]:
    """An authority and the files of what it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client.example")
    blobs = {
        "ca": authority.cert_pem,
        "server": server.cert_chain_pems[0],
        "server_key": server.private_key_pem,
        "client": client.cert_chain_pems[0],
        "client_key": client.private_key_pem,
    }
    for name, blob in blobs.items():
        blob.write_to_path(folder / f"{name}.pem")
    return authority, {name: folder / f"{name}.pem" for name in blobs}


@pytest.mark.parametrize("is_mutual", [False, True])
def test_grpc_with_certificates(certificates: tuple[trustme.CA, dict[str, Path]], is_mutual: bool) -> None:
    _, files = certificates
    config = local_config(
        grpc_use_ssl=not is_mutual,
        grpc_use_ssl_mutual=is_mutual,
        grpc_server_cert=files["server"],
        grpc_server_key=files["server_key"],
        grpc_root_cert=files["ca"],
    )
    own = TlsSettings(files["ca"], files["client"], files["client_key"]) if is_mutual else TlsSettings(files["ca"])
    with short_home():
        server = Triton(config=config)
        server.bind("double", double, X, Y)
        server.bind("count", count, N, I, config=STREAMING)
        with running(server):
            url = f"grpcs://{str(server.grpc_url).partition('://')[2]}"
            with (
                ModelClient(url, "double", tls=own, init_timeout_s=PATIENCE_S) as client,
                ModelClient.from_existing_client(client) as again,
                DecoupledModelClient(url, "count", tls=own, init_timeout_s=PATIENCE_S) as decoupled,
            ):
                assert client.infer_sample(ROW)["y"].tolist() == [2.0, 4.0]
                assert again.infer_sample(ROW)["y"].tolist() == [2.0, 4.0]
                assert numbers(decoupled.infer_sample([2])) == [0, 1]
            with (
                ModelClient(url, "double") as client,
                pytest.raises(PyTritonClientConnectionError, match=r"tls=TlsSettings\(ca_file"),
            ):
                client.infer_sample(ROW)
            if is_mutual:
                with (
                    ModelClient(url, "double", tls=TlsSettings(files["ca"]), init_timeout_s=0.5) as client,
                    pytest.raises(PyTritonClientTimeoutError),
                ):
                    client.infer_sample(ROW)


def test_https_through_a_proxy(certificates: tuple[trustme.CA, dict[str, Path]]) -> None:
    authority, files = certificates
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["server"], files["server_key"])
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    own = TlsSettings(files["ca"], files["client"], files["client_key"])
    with short_home():
        server = Triton(config=local_config())
        server.bind("double", double, X, Y)
        server.bind("count", count, N, I, config=STREAMING)
        with running(server), Relay(str(server.http_url), context) as relay:
            url = f"https://127.0.0.1:{relay.port}"
            with (
                ModelClient(url, "double", tls=own) as client,
                DecoupledModelClient(url, "count", tls=own) as decoupled,
            ):
                large = np.arange(300_000, dtype=np.float32)
                np.testing.assert_array_equal(client.infer_sample(large)["y"], 2 * large)
                assert numbers(decoupled.infer_sample([3])) == [0, 1, 2]
                results = decoupled.infer_sample([3])
                next(results)
                results.close()
            with (
                ModelClient(url, "double") as client,
                pytest.raises(PyTritonClientConnectionError, match="certificate"),
            ):
                client.infer_sample(ROW)


def test_repository() -> None:
    """Loads what cannot be loaded, and unloads what was bound."""
    with short_home():
        server = Triton(config=local_config(), security_config=TritonSecurityConfig(access_token=TOKEN))
        server.bind("double", double, X, Y)
        with running(server):
            for url in (server.http_url, server.grpc_url):
                with ModelClient(str(url), "nowhere", access_token=TOKEN) as client:
                    with pytest.raises(PyTritonClientInferenceServerError, match="failed to load 'nowhere'"):
                        client.load_model()
                    with pytest.raises(PyTritonClientInferenceServerError):
                        client.load_model(config="{no json", files={"file:1/x": b""})
                raw = create_client_from_url(str(url))
                headers = {"triton-access-token": TOKEN, "triton-grpc-protocol-triton-access-token": TOKEN}
                state = get_model_state(raw, "double", headers=headers)
                raw.close()
                assert state is (ModelState.READY if url == server.http_url else ModelState.UNAVAILABLE)
                if state is ModelState.READY:
                    with ModelClient(str(url), "double", access_token=TOKEN) as client:
                        client.infer_sample(ROW)
                        client.unload_model()
                        with pytest.raises(PyTritonClientModelUnavailableError):
                            client.with_options(timeout_s=0.5).infer_sample(ROW)
