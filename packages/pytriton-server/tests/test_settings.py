import dataclasses
import logging
from pathlib import Path

import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings import TritonConfig

PREFIX = "PYTRITON_TRITON_CONFIG_"


def test_every_field_is_unset_by_default() -> None:
    assert set(TritonConfig().to_dict().values()) == {None}


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        TritonConfig(Path("models"))  # type: ignore[call-arg]


def test_fields_of_the_reference_are_there() -> None:
    names = {field.name for field in dataclasses.fields(TritonConfig)}
    assert len(names) == 50
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


def test_what_is_set_wins_over_defaults_even_if_false() -> None:
    merged = TritonConfig(allow_http=False, http_port=1).merged_over(TritonConfig(allow_http=True, grpc_port=2))
    assert merged == TritonConfig(allow_http=False, http_port=1, grpc_port=2)
