from pathlib import Path

import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.command_line import (
    ServerFolders,
    build_command,
    control_headers,
    has_gpu,
    redacted,
    secrets_of,
)
from pytriton.server.tritonserver.ports import ReservedPorts, reserve_ports

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


@pytest.mark.parametrize(
    ("config", "models", "loaded"),
    [
        (TritonConfig(load_model=["a"]), [], ["a"]),
        (TritonConfig(load_model=["a"]), ["b", "a"], ["a", "b"]),
        (TritonConfig(load_model=[]), ["b"], ["b"]),
        (TritonConfig(model_control_mode="explicit"), ["b"], ["*"]),
        (TritonConfig(model_control_mode="poll"), ["b"], []),
        (TritonConfig(model_control_mode="none"), [], []),
    ],
)
def test_what_is_loaded_at_the_start(config: TritonConfig, models: list[str], loaded: list[str]) -> None:
    made = build_command(config, OPEN, FOLDERS, NO_PORTS, models)
    assert [part.partition("=")[2] for part in made if part.startswith("--load-model=")] == loaded
    (mode,) = (part.partition("=")[2] for part in made if part.startswith("--model-control-mode="))
    assert mode == (config.model_control_mode or "explicit")
    # Where models cannot be taken out of service by calls, the server waits for their requests itself.
    assert ("--exit-timeout-secs=30" in made) is (mode != "explicit")


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
    assert control_headers(config, security, "grpc") == {"triton-access-token": "abc="}


def test_each_protocol_has_its_own_header() -> None:
    config = TritonConfig(http_restricted_api="logging:key=http", grpc_restricted_protocol="logging:key=grpc")
    assert control_headers(config, OPEN, "http") == {"key": "http"}
    assert control_headers(config, OPEN, "grpc") == {"key": "grpc"}
    # A token that protects nothing must not hide the header that does.
    unused = TritonSecurityConfig(access_token="abc", restricted_endpoints=[])
    own = TritonConfig(http_restricted_api="logging:Triton-Access-Token=mine")
    assert control_headers(own, unused, "http") == {"Triton-Access-Token": "mine"}


def test_nothing_is_left_for_the_token_to_protect() -> None:
    security = TritonSecurityConfig(access_token="abc", restricted_endpoints=["trace"])
    made = command(TritonConfig(http_restricted_api="trace:a=b"), security)
    assert [part for part in made if part.startswith("--http-restricted")] == ["--http-restricted-api=trace:a=b"]


@pytest.mark.parametrize(
    ("given", "http", "grpc"),
    [("::1", "ipv6:::1", "[::1]"), ("[::]", "ipv6:::", "[::]"), ("localhost", "127.0.0.1", "127.0.0.1")],
)
def test_addresses_in_the_forms_of_the_two_services(given: str, http: str, grpc: str) -> None:
    config = TritonConfig(http_port=0, grpc_port=0, allow_metrics=False, http_address=given, grpc_address=given)
    try:
        ports = reserve_ports(config)
    except PyTritonValidationError:
        pytest.skip("this machine has no IPv6")
    try:
        made = command(config, ports=ports)
    finally:
        ports.release()
    assert f"--http-address={http}" in made
    assert f"--grpc-address={grpc}" in made


def test_protocols_stay_on_where_vertex_ai_would_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    made = command(TritonConfig(allow_grpc=False))
    assert "--allow-http=true" in made
    assert "--allow-grpc=false" in made
    monkeypatch.delenv("AIP_MODE")
    assert not [part for part in command(TritonConfig()) if part.startswith("--allow-http")]


def command_with_secrets() -> list[str]:
    config = TritonConfig(
        http_restricted_api="logging:key=hidden",
        cache_config=["redis,host=cache", "redis,password=p=q"],
        backend_config=["mine,Api-Token=t", "mine,size=3"],
    )
    return command(config, TritonSecurityConfig(access_token="abc==d", restricted_endpoints=["trace"]))


def test_secrets_are_left_out_of_logs() -> None:
    text = redacted(command_with_secrets())
    assert "abc" not in text
    assert "==d" not in text
    assert "hidden" not in text
    assert "--http-restricted-api=trace:triton-access-token=***" in text
    assert "--cache-config=redis,host=cache --cache-config=redis,password=***" in text
    assert "--backend-config=mine,Api-Token=*** --backend-config=mine,size=3" in text
    assert "--load-model=*" in text


def test_the_secrets_of_a_command() -> None:
    assert sorted(set(secrets_of(command_with_secrets()))) == ["abc==d", "hidden", "p=q", "t"]


def test_no_restriction_without_a_token() -> None:
    assert not [part for part in command(TritonConfig()) if "restricted" in part]
    assert control_headers(TritonConfig(), OPEN, "http") == {}
