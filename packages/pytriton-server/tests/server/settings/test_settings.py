import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.config import TritonConfig

PREFIX = "PYTRITON_TRITON_CONFIG_"


def test_every_field_is_unset_by_default() -> None:
    assert set(TritonConfig().to_dict().values()) == {None}


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="TritonConfig initialization can't be used with positional arguments"):
        TritonConfig(Path("models"))  # type: ignore[call-arg]


def test_fields_of_the_reference_are_there() -> None:
    names = {field.name for field in dataclasses.fields(TritonConfig)}
    assert {
        "model_repository",
        "grpc_keepalive_permit_without_calls",
        "cache_config",
        "vertex_ai_default_model",
    } <= names


def test_one_of_the_two_protocols_has_to_be_allowed() -> None:
    with pytest.raises(PyTritonValidationError, match=r"The `http` or `grpc` endpoint has to be allowed\."):
        TritonConfig(allow_http=False, allow_grpc=False)
    TritonConfig(allow_http=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"http_port": 65536}, r"http_port=65536 .* 0 .* to 65535"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"http_port": "eight"}, "http_port must be an integer; got 'eight'"),
        ({"http_port": True}, "http_port must be an integer"),
        ({"http_port": np.True_}, "http_port must be an integer"),
        ({"http_port": b"80"}, "http_port must be an integer"),
        ({"http_port": None, "grpc_port": "1e3"}, "grpc_port must be an integer"),
        ({"http_thread_count": 0}, r"http_thread_count must be between 1 and 2147483647; got 0"),
        ({"http_max_input_size": 2**63}, "http_max_input_size must be between 1 and 9223372036854775807"),
        ({"grpc_infer_thread_count": 1}, "grpc_infer_thread_count must be between 2 and 128; got 1"),
        ({"grpc_max_response_pool_size": 0}, "grpc_max_response_pool_size must be between 1 and 2147483647"),
        ({"exit_timeout_secs": -1}, "exit_timeout_secs must be between 0 and"),
        ({"grpc_keepalive_time": 2**31}, "grpc_keepalive_time must be between 1 and"),
        ({"grpc_infer_response_compression_level": "best"}, "must be one of none, low, medium, high; got 'best'"),
        ({"http_header_forward_pattern": "("}, r"http_header_forward_pattern must be a regular expression .*\("),
        ({"grpc_header_forward_pattern": "a(?!b)"}, "grpc_header_forward_pattern .* RE2 has no look-ahead"),
        ({"sagemaker_safe_port_range": "9000"}, "must be a range of ports <first>-<last>, .* got '9000'"),
        ({"sagemaker_safe_port_range": "9100-9000"}, "must be a range of ports"),
        ({"sagemaker_safe_port_range": "0-70000"}, "must be a range of ports"),
        ({"metrics_config": ["a,b=1"]}, "items of the form <setting>=<value>, .* got 'a,b=1'"),
        ({"cache_config": ["local"]}, "items of the form <cache>,<setting>=<value>, .* got 'local'"),
        ({"cache_config": ["size=1"]}, "items of the form <cache>,<setting>=<value>"),
        ({"rate_limit": "on"}, "rate_limit must be one of execution_count, off; got 'on'"),
        ({"rate_limit_resource": ["licence"]}, "items of the form <resource>:<count> or .* got 'licence'"),
        ({"rate_limit_resource": ["licence:2:"]}, "items of the form <resource>:<count> or"),
        ({"backend_config": ["python"]}, "items of the form <backend>,<setting>=<value>, .* got 'python'"),
        ({"host_policy": ["numa-node=1"]}, "items of the form <policy>,<setting>=<value>"),
        ({"cuda_memory_pool_byte_size": ["0"]}, "items of the form <GPU>:<bytes>, .* got '0'"),
        ({"pinned_memory_pool_byte_size": -1}, "must be between 0 and 9223372036854775807; got -1"),
        ({"model_load_thread_count": 0}, "must be between 1 and 2147483647; got 0"),
        ({"trace_config": ["rate"]}, "items of the form <setting>=<value> or <mode>"),
        ({"trace_config": ["zipkin,url=http://a"]}, "mode triton or opentelemetry, .* got 'zipkin,url=http://a'"),
        ({"http_restricted_api": "health"}, "must have the form <groups>:<header>=<value>"),
        ({"http_restricted_api": "health:key"}, "must have the form"),
        ({"http_restricted_api": "healthy:a=b"}, r"\['healthy'\] are none\. Groups: \['health', "),
        ({"grpc_restricted_protocol": "health,health:a=b"}, r"\['health'\] are named twice"),
        ({"http_restricted_api": "health:my key=b"}, "The name is 'my key', the value is not shown"),
        ({"http_restricted_api": "health:key=b\n"}, "must name a header of HTTP"),
        ({"http_restricted_api": "health:key=für"}, "must name a header of HTTP"),
        ({"id": "a\0b"}, "id holds a NUL character"),
        ({"trace_config": ["a=\0"]}, "trace_config holds a NUL character"),
        ({"log_verbose": 1.5}, "log_verbose must be an integer"),
        ({"allow_metrics": "perhaps"}, "allow_metrics must be a boolean"),
        ({"allow_metrics": 2}, "allow_metrics must be a boolean"),
        ({"cache_config": {"local": 1}}, "cache_config must be a list of strings"),
        ({"cache_config": [1]}, "cache_config must be a list of strings"),
        ({"log_file": 3}, "log_file must be a path"),
        ({"id": ["a"]}, "id must be a string"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(PyTritonValidationError, match=message):
        TritonConfig.from_dict(values)


def test_a_restriction_that_is_refused_does_not_show_its_value() -> None:
    for text in ("health=secret", "healthy:key=secret", "health,health:key=secret"):
        with pytest.raises(PyTritonValidationError) as caught:
            TritonConfig(http_restricted_api=text)
        assert "secret" not in str(caught.value)
        assert "secret" not in str(caught.value.received)


def test_what_the_server_understands_is_let_through() -> None:
    scalars: dict[str, Any] = {"http_port": np.int64(8000), "allow_http": np.True_, "exit_timeout_secs": 10.0}
    assert TritonConfig(log_verbose=True).log_verbose == 1
    TritonConfig(
        **scalars,
        grpc_infer_response_compression_level="HIGH",
        http_header_forward_pattern=r"\pL+(?i)x",
        trace_config=["mode=opentelemetry", "OpenTelemetry,resource=service.name=a,b", "triton,file=/a=b", "level=OFF"],
        http_restricted_api="health,metadata:key=a=b:c",
        sagemaker_safe_port_range="9000-9000",
    )


def test_an_empty_address_is_unset() -> None:
    assert TritonConfig(http_address="", grpc_address="", metrics_address="") == TritonConfig()


def test_a_subclass_stays_one() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Mine(TritonConfig):
        mine: int = 7

    made = Mine.from_dict({"http_port": "1", "mine": 8})
    assert isinstance(made, Mine)
    assert made.mine == 8
    assert isinstance(Mine.from_env(), Mine)
    # What the server is started with.
    assert made.with_environment().http_port == 1


def test_from_dict_converts_and_ignores_unknown_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = TritonConfig.from_dict(
            {
                "http_port": "8000",
                "allow_grpc": "off",
                "log_file": "~/log",
                "metrics_config": ("a=1",),
                "log_verbosity": 4,
            }
        )
    assert config == TritonConfig(
        http_port=8000, allow_grpc=False, log_file=Path("~/log").expanduser(), metrics_config=["a=1"]
    )
    assert "log_verbosity" in caplog.text


def test_round_trip_through_a_dictionary() -> None:
    config = TritonConfig(
        http_port=1, cache_config=["local,size=1"], model_repository=Path("/models"), exit_on_error=True
    )
    assert TritonConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("false", False), ("False", False), ("0", False), ("no", False), ("true", True), ("1", True), ("ON", True)],
)
def test_booleans_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv(PREFIX + "ALLOW_METRICS", text)
    assert TritonConfig.from_env().allow_metrics is expected


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "CACHE_CONFIG", "local,size=10")
    monkeypatch.setenv(PREFIX + "METRICS_CONFIG_10", "last=1")
    monkeypatch.setenv(PREFIX + "METRICS_CONFIG_2", "middle=1")
    monkeypatch.setenv(PREFIX + "METRICS_CONFIG_0", "first=1")
    config = TritonConfig.from_env()
    assert config.cache_config == ["local,size=10"]
    assert config.metrics_config == ["first=1", "middle=1", "last=1"]


def test_names_in_the_environment_in_any_case(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PREFIX + "http_Port", "1234")
    monkeypatch.setenv(PREFIX + "LOG_FILE", "/tmp/log")
    monkeypatch.setenv(PREFIX + "ID", "")
    monkeypatch.setenv(PREFIX + "LOG_VERBOSITY", "4")
    assert TritonConfig.from_env() == TritonConfig(http_port=1234, log_file=Path("/tmp/log"))
    assert f"{PREFIX}LOG_VERBOSITY" in caplog.text


def test_a_wrong_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "HTTP_PORT", "http")
    with pytest.raises(PyTritonValidationError, match=f"environment variable {PREFIX}HTTP_PORT must be an integer"):
        TritonConfig.from_env()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HTTP_PORT", "70000", "=70000 is not a port: expected 0"),
        ("CACHE_CONFIG", "local", "must hold items of the form"),
        ("CACHE_CONFIG_3", "local", "must hold items of the form"),
        ("ALLOW_GRPC", "maybe", "must be a boolean"),
        ("HTTP_RESTRICTED_API", "nothing:a=b", "must name each group"),
    ],
)
def test_a_value_that_breaks_a_rule_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(PREFIX + name, text)
    with pytest.raises(PyTritonValidationError, match=f"^environment variable {PREFIX}{name}.*{message}"):
        TritonConfig.from_env()


def test_one_protocol_off_here_and_one_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "ALLOW_HTTP", "false")
    monkeypatch.setenv(PREFIX + "ALLOW_GRPC", "false")
    # What is set goes first, so that the two are never looked at alone.
    assert TritonConfig(allow_http=True).with_environment() == TritonConfig(allow_http=True, allow_grpc=False)
    with pytest.raises(PyTritonValidationError, match="has to be allowed"):
        TritonConfig().with_environment()


def test_every_field_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # By parts of the annotations, the most specific ones first.
    texts = {"list": "local,size=1", "Path": "~/file", "bool": "true", "int": "9000", "str": "text"}
    special = {
        "http_restricted_api": "health:a=b",
        "grpc_restricted_protocol": "health:a=b",
        "grpc_infer_response_compression_level": "low",
        "python_models": "workers",
        "python_models_idle": "5m",
        "model_control_mode": "poll",
        "cors_origins": "https://app.example",
        "rate_limit": "off",
        "rate_limit_resource": "licence:2",
        "cuda_memory_pool_byte_size": "0:1024",
        "sagemaker_safe_port_range": "1-2",
        "metrics_config": "a=1",
        "trace_config": "rate=1",
        "grpc_infer_thread_count": "64",
    }
    for field in dataclasses.fields(TritonConfig):
        kind = next(kind for kind in texts if kind in str(field.type))
        monkeypatch.setenv(PREFIX + field.name.upper(), special.get(field.name, texts[kind]))
    config = TritonConfig.from_env()
    assert None not in config.to_dict().values()
    assert config.model_repository == Path("~/file").expanduser()
    assert config.cache_config == ["local,size=1"]
    assert config.strict_readiness is True


def test_what_is_set_wins_over_defaults_even_if_false() -> None:
    merged = TritonConfig(allow_http=False, http_port=1).merged_over(TritonConfig(allow_http=True, grpc_port=2))
    assert merged == TritonConfig(allow_http=False, http_port=1, grpc_port=2)
