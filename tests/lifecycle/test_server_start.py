"""Addresses, and settings that tritonserver would pass over in silence or end at without a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonSecurityConfig, TritonServerStartError
from support.callables import double
from support.http import call, infer
from support.serving import local_config, running, server_pid, short_home
from support.waiting import eventually

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}


def command_line(triton: Triton) -> list[str]:
    return Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


@pytest.fixture
def broken_models(tmp_path: Path) -> Path:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text('backend: "nosuch"')
    return tmp_path


# ---- addresses -----------------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    return Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text().split()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["::1", "[::1]", "ipv6:::1"])
def test_ipv6(address: str) -> None:
    from pytriton.client import ModelClient

    with short_home():
        triton = Triton(config=local_config(http_address=address, grpc_address=address))
        triton.bind("double", double, **TENSORS)
        with running(triton):
            assert triton.http_url is not None
            assert triton.http_url.startswith("http://[::1]:")
            assert infer(triton.http_url, "double", 3) == [6]
            for url in (triton.http_url, triton.grpc_url):
                assert url is not None
                with ModelClient(url, "double") as client:
                    assert client.infer_sample(np.ones(1, np.float32))["y"].tolist() == [2]


def test_names_of_this_machine_are_addresses() -> None:
    # tritonserver itself would bind "localhost" to 255.255.255.255.
    with (
        short_home(),
        running(Triton(config=local_config(http_address="localhost", grpc_address="localhost"))) as triton,
    ):
        assert triton.http_url is not None
        assert triton.http_url.startswith("http://127.0.0.1:")
        assert call(triton.http_url, "GET", "/v2/health/live")[0] == 200


# ---- what the server would pass over in silence, or end without a reason -------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http_address": "unix:/tmp/socket"}, "http_address must be the address of a network interface"),
        ({"grpc_address": "no.such.host.invalid"}, r"'no\.such\.host\.invalid' of TritonConfig\.grpc_address is none"),
        ({"log_file": "/proc/nothing/server.log"}, r"log_file='/proc/nothing/server\.log' must be a file"),
        ({"log_file": "/"}, "log_file='/' must be a file that can be written; it is a folder"),
        ({"model_repository": "/proc/nothing"}, "model_repository='/proc/nothing' must be a folder"),
        ({"grpc_use_ssl": True}, r"grpc_use_ssl needs TritonConfig\.grpc_server_cert"),
        ({"grpc_use_ssl_mutual": True}, r"grpc_use_ssl_mutual needs TritonConfig\.grpc_server_cert"),
        (
            {"grpc_use_ssl": True, "grpc_server_cert": "/proc/nothing", "grpc_server_key": "/proc/nothing"},
            "grpc_server_cert='/proc/nothing' cannot be read: No such file",
        ),
        (
            {"grpc_use_ssl": True, "grpc_server_cert": "/proc/version", "grpc_server_key": "/proc/version"},
            "grpc_server_key='/proc/version' must be a certificate and its key",
        ),
        (
            {"http_restricted_api": "health:triton-access-token=other"},
            "'triton-access-token', which carries the access",
        ),
        ({"allow_vertex_ai": True}, "AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE are not set"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"):
        monkeypatch.delenv(name, raising=False)
    with short_home():
        triton = Triton(config=local_config(**settings))
        with pytest.raises(PyTritonValidationError, match=message):
            triton.run()
        assert not triton.is_connected()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"http_port": 1}}, "config=...) must be a TritonConfig, or None; got dict"),
        ({"security_config": "token"}, "security_config=...) must be a TritonSecurityConfig, or None; got str"),
        ({"triton_lifecycle_policy": True}, "triton_lifecycle_policy=...) must be a TritonLifecyclePolicy, or None"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PyTritonValidationError, match=re.escape(message)):
        Triton(**arguments)


def test_certificates_without_the_switch_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), running(Triton(config=local_config(grpc_server_cert="/proc/version"))):
        pass
    assert "grpc_server_cert is set and TritonConfig.grpc_use_ssl is not: gRPC is not encrypted" in caplog.text


def test_a_cache_that_is_not_there_is_an_error_with_the_reason() -> None:
    with short_home(), pytest.raises(TritonServerStartError, match=r"libtritoncache_nosuch\.so"):
        Triton(config=local_config(cache_config=["nosuch,size=1"])).run()


def test_strict_readiness(broken_models: Path) -> None:
    settings = local_config(model_repository=broken_models, exit_on_error=False, strict_readiness=True)
    with short_home(), running(Triton(config=settings)) as triton:
        assert call(triton.http_url, "GET", "/v2/health/live")[0] == 200
        assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 400


def test_the_token_is_wiped_before_the_server_is_ready() -> None:
    """It must not stay while models load, which may take minutes."""
    with short_home():
        triton = Triton(
            config=local_config(exit_timeout_secs=0), security_config=TritonSecurityConfig(access_token="to-be-wiped")
        )
        with running(triton):
            eventually(lambda: "to-be-wiped" not in " ".join(command_line(triton)))
