"""Protected endpoints and TLS on the real server, asked by its own controller, by our client and by others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import trustme
from tritonclient.utils import InferenceServerException

from pytriton.client import ModelClient, TlsSettings
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.server.settings.security import DEFAULT_PROTECTED_ENDPOINTS, VALID_TRITON_ENDPOINTS
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig, TritonServerError
from support.callables import double
from support.http import call, infer, tensor
from support.servers import has_tracing
from support.serving import local_config, server_pid, short_home
from support.waiting import PATIENCE_S

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}
TOKEN = "a-token-with=signs"
PASSWORD = "hunter=2"
GRPC_HEADER = "triton-grpc-protocol-triton-access-token"


def command_line(triton: Triton) -> str:
    return Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes().decode().replace("\0", " ")


# ---- the token -----------------------------------------------------------------------------------------------------

# One call for each group, and the status of a call that may be made.
CALLS = {
    "health": ("GET", "/v2/health/ready"),
    "metadata": ("GET", "/v2/models/double"),
    "inference": ("POST", "/v2/models/double/infer"),
    "shared-memory": ("GET", "/v2/systemsharedmemory/status"),
    "model-config": ("GET", "/v2/models/double/config"),
    "model-repository": ("POST", "/v2/repository/index"),
    "statistics": ("GET", "/v2/models/stats"),
    "trace": ("GET", "/v2/trace/setting"),
    "logging": ("GET", "/v2/logging"),
}
ANSWERED = dict.fromkeys(CALLS, 200) | ({} if has_tracing() else {"trace": 503})


def body_of(method: str, group: str) -> Any:
    if method == "GET":
        return None
    return {"inputs": [tensor("x", 1)]} if group == "inference" else {}


@pytest.fixture(scope="module")
def closed() -> Iterator[Triton]:
    """A server that answers nothing without the token."""
    with short_home():
        # No cache of Triton's own wants a password, as that of Redis does.
        cache = ["local,size=1048576", f"local,password={PASSWORD}"]
        triton = Triton(
            config=local_config(allow_metrics=True, metrics_port=0, cache_config=cache),
            security_config=TritonSecurityConfig(
                access_token=TOKEN, restricted_endpoints=sorted(VALID_TRITON_ENDPOINTS)
            ),
        )
        triton.bind("double", double, **TENSORS)
        with triton:
            yield triton


def test_there_is_a_call_for_every_group() -> None:
    assert set(CALLS) == VALID_TRITON_ENDPOINTS


@pytest.mark.parametrize("group", sorted(CALLS))
def test_a_protected_group_answers_to_the_token_alone(closed: Triton, group: str) -> None:
    method, path = CALLS[group]
    body = body_of(method, group)
    for headers in ({}, {"triton-access-token": "wrong"}, {GRPC_HEADER: TOKEN}):
        status, answer = call(closed.http_url, method, path, body, headers)
        assert status == 403
        assert "expecting header 'triton-access-token'" in answer["error"]
    assert call(closed.http_url, method, path, body, {"triton-access-token": TOKEN})[0] == ANSWERED[group]


def test_the_controller_passes_where_everything_is_protected(closed: Triton) -> None:
    assert closed.is_alive()
    closed.bind("later", double, **TENSORS)
    assert infer(closed.http_url, "later", 4, triton_access_token=TOKEN) == [8]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_our_client_passes_where_everything_is_protected(closed: Triton, protocol: str) -> None:
    url = closed.http_url if protocol == "http" else closed.grpc_url
    assert url is not None
    with ModelClient(url, "double", access_token=TOKEN) as client:
        assert client.infer_sample(np.ones(1, np.float32))["y"].tolist() == [2]


def test_the_metadata_of_grpc(closed: Triton) -> None:
    assert closed.grpc_url is not None
    with tritonclient.grpc.InferenceServerClient(closed.grpc_url.removeprefix("grpc://")) as client:
        assert client.is_server_live(headers={GRPC_HEADER: TOKEN}, client_timeout=PATIENCE_S)
        for headers in ({}, {"triton-access-token": TOKEN}, {GRPC_HEADER: "wrong"}):
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                client.is_server_live(headers=headers, client_timeout=PATIENCE_S)


def test_metrics_are_open(closed: Triton) -> None:
    assert closed.metrics_url is not None
    assert call(closed.metrics_url.removesuffix("/metrics"), "GET", "/metrics")[0] == 200


def test_the_token_is_nowhere_to_be_seen(closed: Triton) -> None:
    assert TOKEN not in command_line(closed)
    assert "local,password=" in command_line(closed)
    assert PASSWORD not in command_line(closed)
    assert TOKEN not in repr(closed)
    assert PASSWORD not in repr(TritonConfig(http_restricted_api=f"health:key={PASSWORD}"))
    assert TOKEN not in repr(TritonSecurityConfig(access_token=TOKEN))
    assert closed.get_access_token() == TOKEN


def test_without_http_everything_may_be_protected_too(caplog: pytest.LogCaptureFixture) -> None:
    security = TritonSecurityConfig(access_token=TOKEN, restricted_endpoints=sorted(VALID_TRITON_ENDPOINTS))
    with short_home(), caplog.at_level(logging.DEBUG):
        triton = Triton(
            config=local_config(allow_http=False, grpc_restricted_protocol="health:own-key=own-value"),
            security_config=security,
        )
        triton.bind("double", double, **TENSORS)
        with triton:
            assert triton.is_alive()
            triton.bind("later", double, **TENSORS)
    assert TOKEN not in caplog.text
    assert "own-value" not in caplog.text
    assert "Starting " in caplog.text


def test_what_is_protected_by_default() -> None:
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("double", double, **TENSORS)
        with triton:
            token = triton.get_access_token()
            assert token is not None
            assert len(token) >= 32
            for group, (method, path) in CALLS.items():
                body = body_of(method, group)
                expected = 403 if group in DEFAULT_PROTECTED_ENDPOINTS else 200
                assert call(triton.http_url, method, path, body)[0] == expected, group
                with_token = call(triton.http_url, method, path, body, {"triton-access-token": token})
                assert with_token[0] == ANSWERED[group], group


def test_nothing_is_protected_by_an_empty_list() -> None:
    with short_home():
        triton = Triton(
            config=local_config(), security_config=TritonSecurityConfig(access_token=TOKEN, restricted_endpoints=[])
        )
        triton.bind("double", double, **TENSORS)
        with triton:
            assert triton.get_access_token() == TOKEN
            assert "restricted" not in command_line(triton)
            for group, (method, path) in CALLS.items():
                headers = {"triton-access-token": "wrong"}
                found = call(triton.http_url, method, path, body_of(method, group), headers)[0]
                assert found == ANSWERED[group], group


# ---- TLS -----------------------------------------------------------------------------------------------------------


class Certificates:
    """Certificates of one authority, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.root = folder / "root.pem"
        self.authority.cert_pem.write_to_path(str(self.root))
        self.server = self.issue("server", "localhost", "127.0.0.1")
        self.client = self.issue("client", "caller.example")
        self.stranger = self.issue("stranger", "caller.example", authority=trustme.CA())

    def issue(self, name: str, *identities: str, authority: trustme.CA | None = None) -> tuple[Path, Path]:
        issued = (authority or self.authority).issue_cert(*identities)
        chain, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(chain))
        issued.private_key_pem.write_to_path(str(key))
        return chain, key

    def settings(self, mutual: bool) -> dict[str, Any]:
        chain, key = self.server
        mode = {"grpc_use_ssl_mutual": True, "grpc_root_cert": self.root} if mutual else {"grpc_use_ssl": True}
        return {"grpc_server_cert": chain, "grpc_server_key": key, **mode}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def grpc_client(
    triton: Triton, certificates: Certificates, own: tuple[Path, Path] | None = None
) -> tritonclient.grpc.InferenceServerClient:
    assert triton.grpc_url is not None
    chain, key = own or (None, None)
    return tritonclient.grpc.InferenceServerClient(
        triton.grpc_url.rpartition("//")[2],
        ssl=True,
        root_certificates=str(certificates.root),
        private_key=None if key is None else str(key),
        certificate_chain=None if chain is None else str(chain),
    )


def answer_of(client: tritonclient.grpc.InferenceServerClient) -> Any:
    given = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    return client.infer("double", [given], client_timeout=PATIENCE_S).as_numpy("y").tolist()


@pytest.mark.parametrize("allow_http", [True, False])
@pytest.mark.parametrize("mutual", [True, False])
def test_tls(certificates: Certificates, mutual: bool, allow_http: bool) -> None:
    """Without HTTP the server's own controller has to get through TLS, too."""
    with short_home():
        triton = Triton(config=local_config(allow_http=allow_http, **certificates.settings(mutual)))
        triton.bind("double", double, **TENSORS)
        with triton:
            triton.bind("later", double, **TENSORS)
            with grpc_client(triton, certificates, certificates.client if mutual else None) as client:
                assert answer_of(client) == [[2]]
                assert client.is_model_ready("later", client_timeout=PATIENCE_S)
            for own in (None, certificates.stranger) if mutual else ():
                with (
                    grpc_client(triton, certificates, own) as client,
                    pytest.raises(InferenceServerException, match=r"(?i)unavailable|handshake|connect|closed|reset"),
                ):
                    client.is_server_live(client_timeout=PATIENCE_S)


@pytest.mark.parametrize("mutual", [True, False])
def test_our_client_over_tls(certificates: Certificates, mutual: bool) -> None:
    chain, key = certificates.client if mutual else (None, None)
    tls = TlsSettings(ca_file=certificates.root, certificate_file=chain, key_file=key)
    with short_home():
        triton = Triton(config=local_config(**certificates.settings(mutual)))
        triton.bind("double", double, **TENSORS)
        with triton:
            assert triton.grpc_url is not None
            assert triton.grpc_url.startswith("grpcs://127.0.0.1:")
            token = triton.get_access_token()
            with ModelClient(triton.grpc_url, "double", tls=tls, access_token=token) as client:
                assert client.infer_sample(np.ones(1, np.float32))["y"].tolist() == [2]


def test_a_plain_call_gets_no_answer_from_tls(certificates: Certificates) -> None:
    with short_home():
        triton = Triton(config=local_config(**certificates.settings(mutual=False)))
        with triton:
            assert triton.grpc_url is not None
            with (
                tritonclient.grpc.InferenceServerClient(triton.grpc_url.rpartition("//")[2]) as client,
                pytest.raises(InferenceServerException),
            ):
                client.is_server_live(client_timeout=PATIENCE_S)


@pytest.mark.parametrize("mutual", [True, False])
def test_files_that_do_not_fit_are_told_before_the_start(certificates: Certificates, mutual: bool) -> None:
    # tritonserver itself would say that the port is in use.
    settings = certificates.settings(mutual)
    if mutual:
        settings["grpc_root_cert"] = certificates.server[1]
    else:
        settings["grpc_server_key"] = certificates.client[1]
    with short_home():
        triton = Triton(config=local_config(**settings))
        name = "grpc_root_cert" if mutual else "grpc_server_key"
        with pytest.raises(PyTritonValidationError, match=rf"TritonConfig\.{name}='.*'"):
            triton.run()
        assert not triton.is_connected()


def test_a_controller_without_a_certificate_of_its_own_says_what_to_do(
    certificates: Certificates, tmp_path: Path
) -> None:
    # With HTTP off the only certificate that the controller has is the server's.
    root = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(root))
    with short_home():
        triton = Triton(
            config=local_config(allow_http=False, **{**certificates.settings(mutual=True), "grpc_root_cert": root})
        )
        with pytest.raises(TritonServerError, match=r"grpc_root_cert has to vouch for .* Or allow HTTP"):
            triton.run()
        assert not triton.is_connected()
