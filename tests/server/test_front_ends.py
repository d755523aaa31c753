"""The endpoints that tritonserver has for Vertex AI and for SageMaker, on free ports, with the real server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.triton import (
    DefaultTritonLifecyclePolicy,
    PortInUseError,
    Triton,
    TritonConfig,
    TritonSecurityConfig,
    TritonServerError,
    VertextAILifecyclePolicy,
)
from support.callables import double
from support.http import call, infer, tensor
from support.servers import before, since
from support.serving import local_config, server_pid, short_home

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}
REQUEST = {"inputs": [tensor("x", 1, 2)]}


def negate(requests: Any) -> Any:
    return [{"y": -request["x"]} for request in requests]


def values(answer: tuple[int, Any]) -> Any:
    status, content = answer
    assert status == 200, content
    return content["outputs"][0]["data"]


@pytest.fixture
def vertex_ai(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AIP_MODE", "AIP_HTTP_PORT", "AIP_STORAGE_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/1:predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/healthy")
    return monkeypatch


@pytest.fixture
def sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "double")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- Vertex AI -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vertex_ai")
def test_vertex_ai_predicts_with_the_one_model() -> None:
    with short_home():
        triton = Triton(
            config=local_config(allow_vertex_ai=True, vertex_ai_port=0),
            triton_lifecycle_policy=VertextAILifecyclePolicy,
        )
        with triton:
            # The policy leaves the start to `run`, when all models are there: the front end chooses then.
            assert not triton.is_connected()
            assert triton.vertex_ai_url is None
            triton.bind("double", double, **TENSORS)
            triton.run()
            assert call(triton.vertex_ai_url, "GET", "/healthy")[0] == 200
            assert values(call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", REQUEST)) == [2, 4]
            assert infer(triton.http_url, "double", 3) == [6]


@pytest.mark.parametrize("switch", ["config", "variable", "AIP_MODE"])
def test_vertex_ai_brings_its_policy(vertex_ai: pytest.MonkeyPatch, switch: str) -> None:
    settings: dict[str, object] = {"allow_vertex_ai": True} if switch == "config" else {}
    if switch == "variable":
        vertex_ai.setenv("PYTRITON_TRITON_CONFIG_ALLOW_VERTEX_AI", "true")
    elif switch == "AIP_MODE":
        vertex_ai.setenv("AIP_MODE", "PREDICTION")
    with short_home(), Triton(config=local_config(vertex_ai_port=0, **settings)) as triton:
        assert not triton.is_connected()
        triton.bind("double", double, **TENSORS)
        triton.run()
        assert values(call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", REQUEST)) == [2, 4]


@pytest.mark.usefixtures("vertex_ai")
def test_a_policy_that_is_named_counts_with_vertex_ai() -> None:
    config = local_config(allow_vertex_ai=True, vertex_ai_port=0)
    with short_home():
        triton = Triton(config=config, triton_lifecycle_policy=DefaultTritonLifecyclePolicy)
        with pytest.raises(TritonServerError, match="only a single model"), triton:
            pass


@pytest.mark.usefixtures("vertex_ai")
def test_vertex_ai_with_several_models() -> None:
    with short_home():
        triton = Triton(
            config=local_config(allow_vertex_ai=True, vertex_ai_port=0, vertex_ai_default_model="negate"),
            triton_lifecycle_policy=VertextAILifecyclePolicy,
        )
        triton.bind("double", double, **TENSORS)
        triton.bind("negate", negate, **TENSORS)
        with triton:
            triton.run()
            predict = "/v1/endpoints/1:predict"
            assert values(call(triton.vertex_ai_url, "POST", predict, REQUEST)) == [-1, -2]
            redirect = {"X-Vertex-Ai-Triton-Redirect": "v2/models/double/infer"}
            assert values(call(triton.vertex_ai_url, "POST", predict, REQUEST, redirect)) == [2, 4]


@pytest.mark.usefixtures("vertex_ai")
def test_vertex_ai_without_a_model_ends_with_its_reason() -> None:
    with short_home():
        triton = Triton(config=local_config(allow_vertex_ai=True, vertex_ai_port=0))
        with pytest.raises(TritonServerError, match="Expect the model repository contains only a single model"):
            triton.run()
        assert not triton.is_connected()


def test_the_environment_of_vertex_ai_switches_it_on(vertex_ai: pytest.MonkeyPatch) -> None:
    # Left alone, tritonserver would serve neither HTTP nor gRPC then, and could not be asked for anything.
    port = free_port()
    vertex_ai.setenv("AIP_MODE", "PREDICTION")
    vertex_ai.setenv("AIP_HTTP_PORT", str(port))
    with short_home():
        triton = Triton(config=local_config(), triton_lifecycle_policy=VertextAILifecyclePolicy)
        triton.bind("double", double, **TENSORS)
        with triton:
            triton.run()
            assert triton.vertex_ai_url == f"http://127.0.0.1:{port}"
            assert call(triton.vertex_ai_url, "GET", "/healthy")[0] == 200
            assert infer(triton.http_url, "double", 3) == [6]
            assert triton.grpc_url is not None


def test_vertex_ai_can_be_switched_off_in_its_environment(vertex_ai: pytest.MonkeyPatch) -> None:
    vertex_ai.setenv("AIP_MODE", "PREDICTION")
    vertex_ai.delenv("AIP_PREDICT_ROUTE")
    with short_home(), Triton(config=local_config(allow_vertex_ai=False)) as triton:
        assert triton.vertex_ai_url is None
        assert triton.http_url is not None
        assert triton.grpc_url is not None


@pytest.mark.parametrize("missing", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
def test_a_missing_route_is_told(vertex_ai: pytest.MonkeyPatch, missing: str) -> None:
    vertex_ai.delenv(missing)
    with short_home():
        triton = Triton(config=local_config(allow_vertex_ai=True, vertex_ai_port=0))
        with pytest.raises(PyTritonValidationError, match=rf"; {missing} is not set"):
            triton.run()


@pytest.mark.parametrize("text", ["http", "0", "70000"])
def test_a_wrong_port_in_the_environment_is_told(vertex_ai: pytest.MonkeyPatch, text: str) -> None:
    vertex_ai.setenv("AIP_HTTP_PORT", text)
    with short_home():
        triton = Triton(config=local_config(allow_vertex_ai=True))
        with pytest.raises(PyTritonValidationError, match="AIP_HTTP_PORT must be a port"):
            triton.run()


# ---- SageMaker -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sagemaker")
def test_sagemaker_pings_and_invokes() -> None:
    with short_home():
        triton = Triton(config=local_config(allow_sagemaker=True, sagemaker_port=0))
        triton.bind("double", double, **TENSORS)
        with triton:
            assert call(triton.sagemaker_url, "GET", "/ping")[0] == 200
            assert values(call(triton.sagemaker_url, "POST", "/invocations", REQUEST)) == [2, 4]
            assert infer(triton.http_url, "double", 3) == [6]


@pytest.mark.usefixtures("sagemaker")
def test_free_ports_are_picked_from_the_safe_range() -> None:
    first = 10000 + free_port() % 9000
    settings = local_config(allow_sagemaker=True, sagemaker_port=0, sagemaker_safe_port_range=f"{first}-{first + 99}")
    with short_home(), Triton(config=settings) as triton:
        ports = [int(str(url).rpartition(":")[2]) for url in (triton.http_url, triton.grpc_url)]
        assert all(first <= port <= first + 99 for port in ports)
        assert call(triton.sagemaker_url, "GET", "/ping")[0] == 200
        command = Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes().decode().split("\0")
        assert f"--sagemaker-safe-port-range={first}-{first + 99}" in command


def test_a_port_outside_of_the_safe_range_is_refused() -> None:
    # tritonserver checks the services at SageMaker's own address only.
    settings = local_config(
        allow_sagemaker=True,
        sagemaker_port=0,
        sagemaker_safe_port_range="40000-40001",
        http_address="0.0.0.0",
        http_port=39999,
    )
    message = r"http_port=39999 is outside of .*=40000-40001"
    with short_home(), pytest.raises(PyTritonValidationError, match=message):
        Triton(config=settings).run()


def test_a_safe_range_without_a_free_port_is_told() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        settings = local_config(allow_sagemaker=True, sagemaker_port=0, sagemaker_safe_port_range=f"{port}-{port}")
        with (
            short_home(),
            pytest.raises(PortInUseError, match=rf"sagemaker_safe_port_range={port}-{port} is free for .*http_port"),
        ):
            Triton(config=settings).run()


# ---- side by side --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vertex_ai", "sagemaker")
def test_two_servers_with_both() -> None:
    settings = TritonConfig(
        allow_vertex_ai=True, vertex_ai_port=0, allow_sagemaker=True, sagemaker_port=0, vertex_ai_default_model="double"
    ).merged_over(local_config())
    with short_home():
        servers = [Triton(config=settings, triton_lifecycle_policy=VertextAILifecyclePolicy) for _ in range(2)]
        try:
            for triton, infer_func in zip(servers, (double, negate), strict=True):
                triton.bind("double", infer_func, **TENSORS)
                triton.run()
            for triton, expected in zip(servers, ([2, 4], [-1, -2]), strict=True):
                assert values(call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", REQUEST)) == expected
                assert values(call(triton.sagemaker_url, "POST", "/invocations", REQUEST)) == expected
        finally:
            for triton in servers:
                triton.stop()


# ---- the access token ----------------------------------------------------------------------------------------------


@before(2, 67)
@pytest.mark.usefixtures("vertex_ai")
def test_front_ends_of_older_servers_do_not_ask_for_the_token() -> None:
    with short_home():
        triton = Triton(
            config=local_config(allow_vertex_ai=True, vertex_ai_port=0),
            triton_lifecycle_policy=VertextAILifecyclePolicy,
        )
        triton.bind("double", double, **TENSORS)
        with triton:
            triton.run()
            redirect = {"X-Vertex-Ai-Triton-Redirect": "v2/repository/index"}
            assert call(triton.http_url, "POST", "/v2/repository/index", {})[0] == 403
            assert call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", {}, redirect)[0] == 200


@since(2, 67)
@pytest.mark.usefixtures("vertex_ai", "sagemaker")
def test_front_ends_ask_for_the_token_where_their_group_is_protected() -> None:
    config = local_config(allow_vertex_ai=True, vertex_ai_port=0, allow_sagemaker=True, sagemaker_port=0)
    security = TritonSecurityConfig(access_token="open-sesame", restricted_endpoints=["inference", "health"])
    triton = Triton(config=config, triton_lifecycle_policy=VertextAILifecyclePolicy, security_config=security)
    triton.bind("double", double, **TENSORS)
    token = {"triton-access-token": "open-sesame"}
    with short_home(), triton:
        triton.run()
        for url, health, predict in (
            (triton.vertex_ai_url, "/healthy", "/v1/endpoints/1:predict"),
            (triton.sagemaker_url, "/ping", "/invocations"),
        ):
            assert call(url, "GET", health)[0] == 403
            assert call(url, "GET", health, headers=token)[0] == 200
            status, answer = call(url, "POST", predict, REQUEST)
            assert status == 403
            assert "restricted, expecting header 'triton-access-token'" in answer["error"]
            assert values(call(url, "POST", predict, REQUEST, token)) == [2, 4]


@since(2, 67)
@pytest.mark.usefixtures("vertex_ai", "sagemaker")
def test_front_ends_of_newer_servers_predict_without_the_token_by_default() -> None:
    config = local_config(allow_vertex_ai=True, vertex_ai_port=0, allow_sagemaker=True, sagemaker_port=0)
    triton = Triton(config=config, triton_lifecycle_policy=VertextAILifecyclePolicy)
    triton.bind("double", double, **TENSORS)
    with short_home(), triton:
        triton.run()
        assert values(call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", REQUEST)) == [2, 4]
        assert values(call(triton.sagemaker_url, "POST", "/invocations", REQUEST)) == [2, 4]
        redirect = {"X-Vertex-Ai-Triton-Redirect": "v2/repository/index"}
        assert call(triton.vertex_ai_url, "POST", "/v1/endpoints/1:predict", {}, redirect)[0] != 200
