from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient, TlsSettings
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.client.utils import create_client_from_url, wait_for_model_ready

ROW = np.array([1.0, 2.0], dtype=np.float32)


def test_server_with_a_certificate(encrypted_server: Any, certificates: Any) -> None:
    url, tls = encrypted_server.url, TlsSettings(ca_file=certificates.ca)
    with (
        ModelClient(url, "add", tls=tls, init_timeout_s=300) as client,
        ModelClient.from_existing_client(client) as again,
    ):
        for _ in range(3):
            assert client.infer_sample(ROW)["sum"].tolist() == [1.0, 2.0]
        large = np.arange(100_000, dtype=np.float32)
        np.testing.assert_array_equal(again.infer_sample(large)["sum"], large)
    with DecoupledModelClient(url, "count", tls=TlsSettings(str(certificates.ca)), init_timeout_s=300) as decoupled:
        assert [int(result["i"].item()) for result in decoupled.infer_sample([3])] == [0, 1, 2]


@pytest.mark.parametrize("trusts_another", [False, True])
def test_server_that_is_not_trusted(encrypted_server: Any, certificates: Any, trusts_another: bool) -> None:
    tls = TlsSettings(ca_file=certificates.other_ca) if trusts_another else None
    # Waiting would not help, so nobody waits the 300 s that a client has for its server to start.
    with ModelClient(encrypted_server.url, "add", tls=tls) as client:
        for call in (lambda: client.infer_sample(ROW), lambda: client.wait_for_server(300)):
            with pytest.raises(PyTritonClientConnectionError, match=r"tls=TlsSettings\(ca_file=\.\.\.\)"):
                call()
    assert sum(encrypted_server.asked.values()) == 0


def test_server_under_a_name_that_is_not_in_its_certificate(encrypted_server: Any, certificates: Any) -> None:
    url = encrypted_server.url.replace("127.0.0.1", "localhost")
    with (
        ModelClient(url, "add", tls=TlsSettings(ca_file=certificates.ca)) as client,
        pytest.raises(PyTritonClientConnectionError, match="must be for the host of the address"),
    ):
        client.infer_sample(ROW)
    assert sum(encrypted_server.asked.values()) == 0


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_server_without_encryption(http_server: Any, scheme: str) -> None:
    with (
        ModelClient(http_server.url.replace("http", scheme), "add") as client,
        pytest.raises(PyTritonClientConnectionError, match="WRONG_VERSION_NUMBER"),
    ):
        client.infer_sample(ROW)


def test_server_that_asks_for_a_certificate(mutual_server: Any, certificates: Any) -> None:
    own = {"certificate_file": certificates.client, "key_file": certificates.client_key}
    with ModelClient(mutual_server.url, "add", tls=TlsSettings(certificates.ca, **own), init_timeout_s=300) as client:
        assert client.infer_sample(ROW)["sum"].tolist() == [1.0, 2.0]
    asked = sum(mutual_server.asked.values())
    with (
        ModelClient(mutual_server.url, "add", tls=TlsSettings(certificates.ca), init_timeout_s=0.5) as client,
        pytest.raises(PyTritonClientError),
    ):
        client.infer_sample(ROW)
    assert sum(mutual_server.asked.values()) == asked


def test_client_without_encryption(encrypted_server: Any) -> None:
    url = encrypted_server.url.replace("https", "http").replace("grpcs", "grpc")
    with ModelClient(url, "add", init_timeout_s=0.5) as client, pytest.raises(PyTritonClientTimeoutError):
        client.infer_sample(ROW)


def test_client_of_tritonclient(encrypted_server: Any, certificates: Any) -> None:
    tls = TlsSettings(ca_file=certificates.ca)
    raw = create_client_from_url(encrypted_server.url, tls=tls)
    wait_for_model_ready(raw, "add", timeout_s=300)
    raw.close()
    with ModelClient(encrypted_server.url, "add", tls=tls) as client:
        raw = client.create_client_from_url(encrypted_server.url, 30)
        assert raw.is_model_ready("add")
        raw.close()
        assert isinstance(raw, client.get_lib().InferenceServerClient)


def test_files_that_cannot_be_used(certificates: Any, tmp_path: Path) -> None:
    (tmp_path / "nonsense.pem").write_text("nonsense")
    for url in ("https://localhost", "grpcs://localhost"):
        for tls in (
            TlsSettings(ca_file=tmp_path / "missing.pem"),
            TlsSettings(ca_file=tmp_path / "nonsense.pem"),
            TlsSettings(certificate_file=certificates.client),
            TlsSettings(key_file=certificates.client_key),
            TlsSettings(certificate_file=certificates.client, key_file=certificates.ca),
        ):
            with pytest.raises(PyTritonClientValueError, match="Expected tls to be") as caught:
                ModelClient(url, "add", tls=tls)
            assert caught.value.input_name == "tls"
        other: Any = ssl.create_default_context()
        with pytest.raises(PyTritonClientValueError, match="TlsSettings, or None"):
            ModelClient(url, "add", tls=other)


@pytest.mark.parametrize("url", ["localhost", "http://localhost", "grpc://localhost"])
def test_settings_without_encryption(url: str) -> None:
    with pytest.raises(PyTritonClientValueError, match="Use https:// or grpcs://"):
        ModelClient(url, "add", tls=TlsSettings())
    with pytest.raises(PyTritonClientValueError, match="Use https:// or grpcs://"):
        create_client_from_url(url, tls=TlsSettings())
