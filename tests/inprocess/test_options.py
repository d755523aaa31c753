"""`Options` of a server in process: defaults, what is checked, and what reaches Triton."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.inprocess import Options, RateLimiterResource, Server


def test_defaults_are_those_of_tritons_own_api() -> None:
    options = Options()

    assert options.server_id == "triton"
    assert options.model_control_mode is inprocess.ModelControlMode.NONE
    assert options.rate_limiter_mode is inprocess.RateLimitMode.OFF
    assert options.log_format is inprocess.LogFormat.DEFAULT
    assert (options.strict_model_config, options.exit_on_error, options.strict_readiness) == (False, True, True)
    assert (options.pinned_memory_pool_size, options.exit_timeout, options.metrics_interval) == (1 << 28, 30, 2000)
    assert (options.buffer_manager_thread_count, options.model_load_thread_count) == (0, 4)
    assert (options.model_load_retry_count, options.min_supported_compute_capability) == (0, 6.0)
    assert (options.log_info, options.log_warn, options.log_error, options.log_verbose) == (False, False, False, 0)
    assert (options.metrics, options.gpu_metrics, options.cpu_metrics) == (True, True, True)
    assert (options.model_namespacing, options.enable_peer_access, options.log_file) == (False, True, None)


def test_options_do_not_share_their_collections() -> None:
    first, second = Options(), Options()

    first.startup_models.append("linear")
    first.cache_config["local"] = {"size": 1024}

    assert second == Options()


def test_unknown_option_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match="colour"):
        Server(colour="red")


def test_keywords_change_single_options() -> None:
    options = Options(server_id="first", exit_timeout=7)

    server = Server(options, server_id="second")

    assert (server.options.server_id, server.options.exit_timeout) == ("second", 7)
    assert options.server_id == "first"


WRONG_TYPES: list[tuple[str, Any]] = [
    ("server_id", 1),
    ("server_id", b"bytes"),
    ("model_repository", 1),
    ("model_repository", [1]),
    ("model_control_mode", 2),
    ("model_control_mode", "EXPLICIT"),
    ("startup_models", "linear"),
    ("startup_models", [1]),
    ("strict_model_config", 1),
    ("rate_limiter_mode", None),
    ("rate_limiter_resources", [("r", 1, 0)]),
    ("rate_limiter_resources", [RateLimiterResource("r", "many", 0)]),  # type: ignore[arg-type]
    ("pinned_memory_pool_size", 1.5),
    ("pinned_memory_pool_size", True),
    ("cuda_memory_pool_sizes", [1]),
    ("cuda_memory_pool_sizes", {"0": 1}),
    ("cache_config", [("local", {})]),
    ("cache_config", {"local": 1}),
    ("cache_directory", 1),
    ("min_supported_compute_capability", "6.0"),
    ("exit_timeout", "30"),
    ("log_info", "yes"),
    ("log_format", 1),
    ("log_file", 3),
    ("metrics", None),
    ("backend_directory", 1),
    ("backend_configuration", {"python": "value"}),
    ("host_policies", {"gpu_0": {1: "x"}}),
    ("metrics_configuration", {"": {"a": None}}),
    ("model_load_device_limits", [0.5]),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_wrong_type_is_an_error_at_start(name: str, value: Any) -> None:
    server = Server(**{name: value})

    with pytest.raises(TypeError) as caught:
        server.start()

    error = caught.value
    assert isinstance(error, inprocess.InvalidArgumentError)
    assert error.expected
    assert error.where is not None
    assert error.where.startswith(f"Options.{name}")
    assert f"Options.{name}" in str(error)
    assert type(error.received).__name__ in str(error)
    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.live()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exit_timeout", -1),
        ("exit_timeout", 1 << 32),
        ("pinned_memory_pool_size", -1),
        ("log_verbose", -1),
        ("server_id", "a\0b"),
        ("model_load_thread_count", 0),
        ("min_supported_compute_capability", float("nan")),
        ("cache_config", {"local": {"size": 1}, "redis": {}}),
        ("cache_config", {"local": "no JSON"}),
        ("model_repository", None),
    ],
)
def test_value_that_triton_cannot_take_is_an_error_at_start(name: str, value: Any) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match=f"Options.{name}") as caught:
        Server(**{name: value}).start()

    assert not isinstance(caught.value, TypeError)


def test_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"

    with pytest.raises(inprocess.NotFoundError, match="nothing") as caught:
        Server(model_repository=str(missing)).start()

    # Triton itself reports an internal error for it, which code for its own API expects.
    assert isinstance(caught.value, inprocess.InternalError)
    assert caught.value.received == str(missing)


def test_repository_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(inprocess.RepositoryNotFoundError, match="file of another kind"):
        Server(model_repository=[file]).start()


def test_check_tells_before_the_start() -> None:
    settings: dict[str, Any] = {"exit_timeout": np.int64(3), "metrics": np.True_}
    Options(**settings).check()

    with pytest.raises(TypeError, match="exit_timeout"):
        Options(exit_timeout="3").check()  # type: ignore[arg-type]


def test_backend_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match="backend_directory"):
        Server(backend_directory=str(tmp_path / "nothing")).start()


def test_folders_of_containers_are_taken_for_the_defaults() -> None:
    """Scripts for NVIDIA's package name them, and it has no others: no server from pip has these."""
    with Server(
        backend_directory="/opt/tritonserver/backends",
        cache_directory="/opt/tritonserver/caches",
        repo_agent_directory="/opt/tritonserver/repoagents",
        cache_config={"local": {"size": 1 << 20}},
    ) as server:
        assert server.ready()


def test_everything_set_is_accepted_by_triton(tmp_path: Path) -> None:
    """Cache settings among them, which NVIDIA's package cannot set at all."""
    repository = tmp_path / "models"
    repository.mkdir()
    backends = tmp_path / "backends"
    (backends / "mine").mkdir(parents=True)
    agents = tmp_path / "agents"
    agents.mkdir()
    log = tmp_path / "log"
    options = Options(
        model_repository=[repository],
        server_id="everything",
        model_control_mode=inprocess.ModelControlMode.EXPLICIT,
        startup_models=[],
        strict_model_config=True,
        rate_limiter_mode=inprocess.RateLimitMode.EXEC_COUNT,
        rate_limiter_resources=[RateLimiterResource("licence", 2), RateLimiterResource("slot", 1, 0)],
        pinned_memory_pool_size=0,
        cuda_memory_pool_sizes={0: 1 << 20},
        cuda_virtual_address_sizes={0: 1 << 20},
        cache_config={"local": {"size": np.int64(1 << 20)}},
        min_supported_compute_capability=np.float32(7),
        exit_timeout=np.int64(5),
        buffer_manager_thread_count=1,
        model_load_thread_count=2,
        model_load_retry_count=1,
        model_namespacing=True,
        enable_peer_access=False,
        log_file=log,
        log_info=True,
        log_format=inprocess.LogFormat.ISO8601,
        cpu_metrics=False,
        metrics_interval=500,
        backend_directory=backends,
        repo_agent_directory=str(agents),
        model_load_device_limits=[inprocess.ModelLoadDeviceLimit(inprocess.InstanceGroupKind.GPU, 0, 0.5)],
        backend_configuration={"python": {"shm-default-byte-size": 1048576}},  # type: ignore[dict-item]
        host_policies={"gpu_0": {"numa-node": "0"}},
        metrics_configuration={"": {"summary_latencies": "true"}},
        model_config_name="other",
    )

    with Server(options) as server:
        assert server.metadata()["name"] == "everything"
        written = log.read_text()
    # Log settings are those of the process: the file must not be written to when it is gone.
    with Server():
        pass

    assert str(repository) in written
    assert "cache_enabled                    | 1" in written
    assert "rate_limit                       | EXEC_COUNT" in written


def test_log_levels_include_what_is_more_severe(tmp_path: Path) -> None:
    log = tmp_path / "log"

    with Server(log_file=str(log), log_verbose=1):
        pass
    verbose = log.read_text()
    log.unlink()
    with Server(log_file=str(log), log_error=True):
        pass
    errors_only = log.read_text() if log.exists() else ""
    with Server():
        pass

    assert "\nI" in verbose
    assert not [line for line in errors_only.splitlines() if line.startswith(("I", "W"))]


@pytest.mark.parametrize("name", ["", "no/such/folder/log"])
def test_log_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)

    with pytest.raises(inprocess.InvalidArgumentError, match=r"Options\.log_file") as caught:
        Server(log_file=path, log_error=True).start()

    assert (caught.value.received, caught.value.where) == (path, "Options.log_file")


def test_changes_of_options_apply_to_the_next_start() -> None:
    server = Server(server_id="first")
    with server:
        server.options.server_id = "second"
        assert server.metadata()["name"] == "first"
    with server:
        assert server.metadata()["name"] == "second"


def test_options_are_the_fields_of_a_dataclass() -> None:
    names = {field.name for field in dataclasses.fields(Options)}

    assert {name for name, _ in WRONG_TYPES} <= names
    assert not hasattr(Options(), "__dict__")


def test_cached_files_go_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path))

    with Server():
        assert os.listdir(tmp_path)

    assert not os.listdir(tmp_path)
