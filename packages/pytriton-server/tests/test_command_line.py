from pathlib import Path

import pytest

from pytriton.server.command_line import ServerFolders, build_command, control_headers, has_gpu, redacted
from pytriton.server.ports import ReservedPorts, reserve_ports
from pytriton.server.security import TritonSecurityConfig
from pytriton.server.settings import TritonConfig

FOLDERS = ServerFolders(
    executable=Path("/server/bin/tritonserver"),
    models=Path("/workspace/models"),
    backends=Path("/workspace/backends"),
    caches=Path("/server/caches"),
)
OPEN = TritonSecurityConfig(restricted_endpoints=[])
NO_PORTS = ReservedPorts({}, [])


def command(config: TritonConfig, security: TritonSecurityConfig = OPEN, ports: ReservedPorts = NO_PORTS) -> list[str]:
    return build_command(config, security, FOLDERS, ports)


def test_what_is_passed_when_nothing_is_set() -> None:
    expected = {
        "--model-repository=/workspace/models",
        "--backend-directory=/workspace/backends",
        "--cache-directory=/server/caches",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-on-error=false",
        "--exit-timeout-secs=1",
    }
    if not has_gpu():
        expected |= {"--allow-gpu-metrics=false", "--metrics-interval-ms=500", "--pinned-memory-pool-byte-size=0"}
    program, *options = command(TritonConfig())
    assert program == "/server/bin/tritonserver"
    assert set(options) == expected
    assert len(options) == len(expected)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (TritonConfig(allow_gpu_metrics=True), "--allow-gpu-metrics=true"),
        (TritonConfig(exit_timeout_secs=30), "--exit-timeout-secs=30"),
        (TritonConfig(exit_on_error=True), "--exit-on-error=true"),
        (TritonConfig(cache_directory="/mine"), "--cache-directory=/mine"),
        (TritonConfig(log_file=Path("/a b/c")), "--log-file=/a b/c"),
        (TritonConfig(http_header_forward_pattern="x-(a|b) .*"), "--http-header-forward-pattern=x-(a|b) .*"),
    ],
)
def test_what_is_set_is_passed_once_and_unchanged(config: TritonConfig, option: str) -> None:
    made = command(config)
    name = option.partition("=")[0]
    assert [part for part in made if part.partition("=")[0] == name] == [option]


def test_lists_become_repeated_options() -> None:
    made = command(TritonConfig(cache_config=["local,size=1", "redis,host=a"], model_repository=Path("/mine")))
    assert made.count("--cache-config=local,size=1") == 1
    assert made.count("--cache-config=redis,host=a") == 1
    # The bound models' repository comes first, the user's is served next to it.
    assert [part for part in made if part.startswith("--model-repository=")] == [
        "--model-repository=/workspace/models",
        "--model-repository=/mine",
    ]


def test_picked_ports_replace_zero() -> None:
    config = TritonConfig(http_port=0, grpc_port=0, metrics_port=0, http_address="127.0.0.1", grpc_address="127.0.0.1")
    ports = reserve_ports(config)
    try:
        made = command(config, ports=ports)
        for endpoint in ports:
            assert endpoint.port > 0
            assert f"--{endpoint.setting.replace('_', '-')}={endpoint.port}" in made
    finally:
        ports.release()


def test_restrictions_and_what_the_user_restricts_himself() -> None:
    security = TritonSecurityConfig(access_token="abc=", restricted_endpoints=["trace", "statistics"])
    config = TritonConfig(http_restricted_api="trace,logging:my-key=my-value")
    made = command(config, security)
    assert "--http-restricted-api=trace,logging:my-key=my-value" in made
    assert "--http-restricted-api=statistics:triton-access-token=abc=" in made
    assert "--grpc-restricted-protocol=trace,statistics:triton-access-token=abc=" in made
    assert control_headers(config, security, "http") == {"triton-access-token": "abc=", "my-key": "my-value"}


def test_tokens_are_left_out_of_logs() -> None:
    security = TritonSecurityConfig(access_token="abc==d", restricted_endpoints=["trace"])
    text = redacted(command(TritonConfig(http_restricted_api="logging:key=hidden"), security))
    assert "abc" not in text
    assert "==d" not in text
    assert "hidden" not in text
    assert "--http-restricted-api=trace:triton-access-token=***" in text
    assert "--load-model=*" in text


def test_no_restriction_without_a_token() -> None:
    assert not [part for part in command(TritonConfig()) if "restricted" in part]
    assert control_headers(TritonConfig(), OPEN, "http") == {}
