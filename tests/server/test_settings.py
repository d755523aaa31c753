"""Every setting of `TritonConfig` on the real server: its effect where one can be seen, and its option."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
from support.http import call, infer
from support.servers import has_tracing, needs_tracing
from support.serving import running, server_pid, short_home
from support.waiting import PATIENCE_S

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}

# What tells nothing about itself from outside: that the server takes it has to do.
PLAIN: dict[str, Any] = {
    "allow_http": True,
    "http_thread_count": 3,
    "allow_grpc": True,
    "grpc_infer_allocation_pool_size": 5,
    "grpc_infer_response_compression_level": "low",
    "grpc_keepalive_time": 60000,
    "grpc_keepalive_timeout": 10000,
    "grpc_keepalive_permit_without_calls": True,
    "grpc_http2_max_pings_without_data": 3,
    "grpc_http2_min_recv_ping_interval_without_data": 1000,
    "grpc_http2_max_ping_strikes": 4,
    "allow_gpu_metrics": False,
    "metrics_interval_ms": 100,
    "sagemaker_thread_count": 2,
    "vertex_ai_thread_count": 2,
    "buffer_manager_thread_count": 1,
    "exit_timeout_secs": 20,
    "model_load_thread_count": 2,
    "model_load_retry_count": 1,
    "rate_limit": "execution_count",
    "rate_limit_resource": ["licence:2", "slot:1:0"],
    "backend_config": ["python,shm-region-prefix-name=settings"],
    "host_policy": ["nowhere,numa-node=0"],
    "pinned_memory_pool_byte_size": 0,
    "cuda_memory_pool_byte_size": ["0:0"],
    "grpc_max_connection_age": 3600000,
    "grpc_max_connection_age_grace": 60000,
}
# What a test below sees the effect of, in the server that has all settings at once.
SEEN: dict[str, Any] = {
    "id": "my server",
    "log_verbose": 1,
    "exit_on_error": False,
    "strict_readiness": False,
    "http_address": "127.0.0.1",
    "http_port": 0,
    "http_header_forward_pattern": "x-(one|two)",
    "http_restricted_api": "metadata:my-key=my=value",
    "grpc_address": "127.0.0.1",
    "grpc_port": 0,
    "grpc_header_forward_pattern": "x-.*",
    "grpc_restricted_protocol": "health:my-key=other",
    "allow_metrics": True,
    "allow_cpu_metrics": False,
    "metrics_port": 0,
    "metrics_address": "127.0.0.1",
    "metrics_config": ["summary_latencies=true", "summary_quantiles=0.5:0.05"],
    "trace_config": ["level=TIMESTAMPS", "rate=77"],
    "cache_config": ["local,size=1048576"],
    "allow_sagemaker": True,
    "sagemaker_port": 0,
    "allow_vertex_ai": True,
    "vertex_ai_port": 0,
    "vertex_ai_default_model": "double",
}
# Paths, which the test makes.
FILES = {"model_repository", "log_file", "cache_directory"}
# In tests of their own: what excludes the rest.
ELSEWHERE = {
    "grpc_use_ssl": "test_security.py",
    "grpc_use_ssl_mutual": "test_security.py",
    "grpc_server_cert": "test_security.py",
    "grpc_server_key": "test_security.py",
    "grpc_root_cert": "test_security.py",
    "sagemaker_safe_port_range": "test_front_ends.py",
    "cors_origins": "test_cors.py",
    "python_models": "test_hosts.py",
    "python_models_idle": "test_sleeping_hosts.py",
    "model_control_mode": "test_hosts.py",
    "repository_poll_secs": "test_hosts.py",
    "load_model": "test_hosts.py",
    "http_max_input_size": "test_newer_servers.py",
    "grpc_infer_thread_count": "test_newer_servers.py",
    "grpc_max_response_pool_size": "test_newer_servers.py",
    "allow_client_shm": "test_newer_servers.py",
}

ENSEMBLE = """
name: "chain"
platform: "ensemble"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "double" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "once" } },
    { model_name: "double" model_version: -1 input_map { key: "x" value: "once" } output_map { key: "y" value: "y" } }
  ]
}
"""

calls: list[int] = []
parameters: list[Any] = []


def double(requests: Any) -> Any:
    parameters.extend(dict(request.parameters or {}) for request in requests)
    return [{"y": request["x"] * 2} for request in requests]


def counted(requests: Any) -> Any:
    calls.append(len(requests))
    return [{"y": request["x"]} for request in requests]


def command_line(triton: Triton) -> list[str]:
    return Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def option(name: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"--{name.replace('_', '-')}={text}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings with spaces")
    for name, text in (("chain", ENSEMBLE), ("broken", 'backend: "nosuch"')):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> TritonConfig:
    return TritonConfig(
        **PLAIN,
        **{name: value for name, value in SEEN.items() if name != "trace_config" or has_tracing()},
        model_repository=folder / "models",
        log_file=folder / "server.log",
        cache_directory=str(find_tritonserver().caches_dir),
    )


@pytest.fixture(scope="module")
def server(config: TritonConfig) -> Iterator[Triton]:
    before = dict(os.environ)
    os.environ.update(AIP_PREDICT_ROUTE="/predict", AIP_HEALTH_ROUTE="/health")
    try:
        with short_home():
            triton = Triton(config=config, security_config=TritonSecurityConfig(access_token="the-token"))
            triton.bind("double", double, **TENSORS)
            triton.bind("cached", counted, **TENSORS, config=ModelConfig(response_cache=True))
            with running(triton):
                yield triton
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_every_field_is_in_one_of_the_tables() -> None:
    tables = [set(PLAIN), set(SEEN), FILES, set(ELSEWHERE)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set().union(*tables) == {field.name for field in dataclasses.fields(TritonConfig)}


def test_every_setting_is_on_the_command_line(server: Triton, config: TritonConfig) -> None:
    made = command_line(server)
    # Where they are is settled at the start; the tokens are wiped out; the bound models' repository comes first.
    settled = {name for name in config.to_dict() if name.endswith("_port")} | {"metrics_address"}
    settled |= {"http_restricted_api", "grpc_restricted_protocol"}
    expected = []
    for name, value in config.to_dict().items():
        if value is not None and name not in settled:
            expected += [option(name, item) for item in (value if isinstance(value, list) else [value])]
    assert [item for item in expected if item not in made] == []
    assert len(expected) > 35
    for name in settled:
        assert [part for part in made if part.startswith(option(name, ""))], name


def test_no_token_stays_on_the_command_line(server: Triton) -> None:
    text = " ".join(command_line(server))
    assert "the-token" not in text
    assert "my=value" not in text
    assert "other" not in text
    # A mark where the guard is active, and stars where it is not.
    hidden = r"(\*+|\{secret-[^}]+\})( |$)"
    assert re.search(r"--http-restricted-api=metadata:my-key=" + hidden, text)
    assert re.search(r"trace,logging:triton-access-token=" + hidden, text)


def test_id(server: Triton) -> None:
    status, metadata = call(server.http_url, "GET", "/v2", headers={"my-key": "my=value"})
    assert (status, metadata["name"]) == (200, "my server")


def test_settings_of_the_user_protect_next_to_the_token(server: Triton) -> None:
    assert call(server.http_url, "GET", "/v2")[0] == 403
    assert call(server.http_url, "GET", "/v2", headers={"triton-access-token": "the-token"})[0] == 403
    assert call(server.http_url, "GET", "/v2/models/stats")[0] == 403
    assert call(server.http_url, "GET", "/v2/models/stats", headers={"my-key": "my=value"})[0] == 403
    assert call(server.http_url, "GET", "/v2/models/stats", headers={"triton-access-token": "the-token"})[0] == 200


def test_a_protected_protocol_of_grpc(server: Triton) -> None:
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    assert server.grpc_url is not None
    with grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        assert client.is_server_live(headers={"triton-grpc-protocol-my-key": "other"}, client_timeout=PATIENCE_S)
        with pytest.raises(InferenceServerException, match="restricted"):
            client.is_server_live(client_timeout=PATIENCE_S)


def test_logs(server: Triton, folder: Path) -> None:
    status, settings = call(server.http_url, "GET", "/v2/logging", headers={"triton-access-token": "the-token"})
    assert status == 200
    assert settings["log_verbose_level"] == 1
    assert settings["log_file"] == str(folder / "server.log")
    assert "Started HTTPService" in (folder / "server.log").read_text()


def test_readiness_in_spite_of_a_broken_model(server: Triton) -> None:
    assert call(server.http_url, "GET", "/v2/models/broken/ready")[0] != 200
    assert call(server.http_url, "GET", "/v2/health/ready")[0] == 200


def test_foreign_models_use_bound_ones(server: Triton) -> None:
    assert infer(server.http_url, "chain", 1, 2.5) == [4, 10]


@needs_tracing()
def test_trace_settings(server: Triton) -> None:
    token = {"triton-access-token": "the-token"}
    status, settings = call(server.http_url, "GET", "/v2/trace/setting", headers=token)
    assert status == 200
    assert settings["trace_rate"] == "77"
    assert settings["trace_level"] == ["TIMESTAMPS"]


def test_the_cache_answers_what_was_asked_before(server: Triton) -> None:
    calls.clear()
    assert [infer(server.http_url, "cached", 7) for _ in range(10)] == [[7]] * 10
    assert calls == [1]


def test_metrics_are_configured(server: Triton) -> None:
    infer(server.http_url, "double", 1)
    assert server.metrics_url is not None
    status, page = call(server.metrics_url.removesuffix("/metrics"), "GET", "/metrics")
    assert status == 200
    # Off by default, and on by default.
    assert 'nv_inference_request_summary_us{model="double",version="1",quantile="0.5"}' in page
    assert "nv_cpu_utilization" not in page
    assert "nv_gpu" not in page


def test_headers_become_parameters_over_http(server: Triton) -> None:
    parameters.clear()
    infer(server.http_url, "double", 1, X_One="eins", x_two="zwei", x_three="drei")
    assert [{name.lower(): value for name, value in given.items()} for given in parameters] == [
        {"x-one": "eins", "x-two": "zwei"}
    ]


def test_headers_become_parameters_over_grpc(server: Triton) -> None:
    from pytriton.client import ModelClient

    assert server.grpc_url is not None
    parameters.clear()
    # The health protocol is kept from clients without the user's header: the configuration is told instead.
    with ModelClient(server.grpc_url, "double", ensure_model_is_ready=False) as client:
        client.infer_batch(
            np.ones((1, 1), np.float32), headers={"x-three": "drei", "y": "no"}, parameters={"mine": 4, "yes": True}
        )
    assert parameters == [{"x-three": "drei", "mine": 4, "yes": True}]


def test_two_servers_with_all_services_side_by_side(config: TritonConfig, server: Triton, folder: Path) -> None:
    settings = dataclasses.replace(config, log_file=folder / "second.log", id="second")
    with pytest.MonkeyPatch.context() as patch, short_home():
        patch.setenv("AIP_PREDICT_ROUTE", "/predict")
        patch.setenv("AIP_HEALTH_ROUTE", "/health")
        second = Triton(config=settings, security_config=TritonSecurityConfig(access_token="second"))
        second.bind("double", double, **TENSORS)
        second.run()
        try:
            key = {"my-key": "my=value"}
            names = [call(each.http_url, "GET", "/v2", headers=key)[1]["name"] for each in (server, second)]
            assert names == ["my server", "second"]
            assert server.metrics_url != second.metrics_url
        finally:
            second.stop()


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({"http_max_input_size": 1000}, {}),
        ({"cors_origins": ["https://app.example"]}, {"PYTRITON_GUARD": "off"}),
        ({"allow_sagemaker": True, "sagemaker_safe_port_range": "9000-9100"}, {}),
        ({"http_port": 9000, "grpc_port": 9000}, {}),
        ({"http_address": "no address"}, {}),
        ({"grpc_use_ssl": True}, {}),
        ({"log_file": "/nowhere/at/all.log"}, {}),
        ({"model_repository": "/nowhere/at/all"}, {}),
        ({"allow_vertex_ai": True}, {}),
        ({}, {"PYTRITON_TRITONSERVER_DIR": "/nowhere/at/all"}),
    ],
)
def test_a_check_says_what_a_start_would(
    settings: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = []
    for begin in (Triton.check, Triton.run):
        with short_home(), pytest.raises(PyTritonError) as error:
            begin(Triton(config=TritonConfig(**settings)))
        told.append((type(error.value), str(error.value)))
    assert told[0] == told[1]
