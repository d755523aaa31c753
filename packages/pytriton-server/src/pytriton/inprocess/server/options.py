"""`Options`: everything that can be set before a server starts, and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytriton.inprocess.capi.enums import InstanceGroupKind, LogFormat, ModelControlMode, RateLimitMode
from pytriton.inprocess.capi.errors import InvalidArgumentError
from pytriton.inprocess.server import option_rules as rules
from pytriton.inprocess.server.log_records import LogCallback

_MEBIBYTE = 1 << 20


@dataclass(slots=True)
class RateLimiterResource:
    """A resource that model instances share, for `RateLimitMode.EXEC_COUNT`.

    Attributes:
        name: Name that the instance groups of the models refer to.
        count: How many of it there are.
        device: Device that it belongs to; -1 for one that all devices share, as `global` in a model's configuration.
    """

    name: str
    count: int
    device: int = -1


@dataclass(slots=True)
class ModelLoadDeviceLimit:
    """How much of a device's memory may be in use for another model to be loaded onto it.

    Attributes:
        kind: Kind of the device. Triton supports `InstanceGroupKind.GPU`.
        device: Its number.
        fraction: Limit as a fraction of its memory, from 0 to 1.
    """

    kind: InstanceGroupKind
    device: int
    fraction: float


@dataclass(slots=True)
class Options:
    """Settings of a server in process. Every one of them is set on start, so that defaults of Triton never apply.

    Nothing is checked before `Server.start()` (or `check()`): the fields may be changed until then. Log settings belong
    to the process and not to the server: those of the server that was started last apply to all.

    Attributes:
        model_repository: Folder with models, or several. With none the server starts without models, for those that
            are bound or loaded from memory.
        server_id: Name of the server in its metadata and log.
        model_control_mode: Who decides which models are loaded.
        startup_models: Models to load at the start in mode `EXPLICIT`; `["*"]` for all.
        strict_model_config: Whether to refuse models whose configuration is not complete.
        rate_limiter_mode: Whether executions wait for resources.
        rate_limiter_resources: The resources.
        pinned_memory_pool_size: Pinned host memory to reserve where there is a GPU, in bytes.
        cuda_memory_pool_sizes: Memory to reserve per GPU, in bytes, by number of the GPU. Triton's own default is
            64 MiB for each.
        cuda_virtual_address_sizes: Address space to reserve per GPU for memory that grows, in bytes.
        cache_config: Settings of the response cache by name of the cache, such as `{"local": {"size": 1 << 24}}`. There
            can be one cache, and one server with a cache in a process until all of its servers have stopped. Models
            use it if their configuration has `response_cache { enable: true }`. Bound callables with
            `ModelConfig(response_cache=True)` have a cache of ours, which may take as much as the cache `local`.
        cache_directory: Folder with the implementations of the response cache; `None` for those of the server that is
            in use.
        min_supported_compute_capability: GPUs below this are not used.
        exit_on_error: Whether a start fails if a model does.
        strict_readiness: Whether the server is ready only if all of its models are.
        exit_timeout: How long `stop()` waits for requests and models to end, in seconds.
        buffer_manager_thread_count: Threads that copy tensors, 0 for none of their own.
        model_load_thread_count: How many models are loaded at the same time.
        model_load_retry_count: How often a model that fails to load is tried again.
        model_namespacing: Whether models of the same name may be in different repositories.
        enable_peer_access: Whether GPUs may access each other's memory.
        log_file: File for the log; standard error without one.
        log_info: Whether to log information, which also logs warnings.
        log_warn: Whether to log warnings, which also logs errors.
        log_error: Whether to log errors.
        log_format: How a log line begins.
        log_verbose: Level of verbose messages, 0 for none. Any other level logs everything else, too.
        log_callback: Gets each record of the log as `(level, file, line, timestamp in microseconds, message)`, in place
            of a file. It is called in a thread of its own, record by record, and has got all of them when a server has
            stopped. Verbose records come as `LogLevel.INFO`.
        metrics: Whether to count.
        gpu_metrics: Whether the counts include those of GPUs.
        cpu_metrics: Whether the counts include those of the CPU.
        metrics_interval: How often the metrics of devices are read, in milliseconds.
        backend_directory: Folder with backends that are used beside those of the server, and before them; `None` for
            those of the server only.
        repo_agent_directory: Folder with repository agents; `None` for none. For this and the other two folders, the
            ones of Triton's containers in `/opt/tritonserver` stand for `None` if they are not there.
        model_load_device_limits: Limits of the memory that models are loaded into.
        backend_configuration: Settings by name of the backend, such as
            `{"python": {"shm-default-byte-size": "1048576"}}`.
        host_policies: Settings by name of the host policy, such as `{"gpu_0": {"numa-node": "0"}}`.
        metrics_configuration: Settings of the metrics by their group, such as `{"": {"summary_latencies": "true"}}`.
        model_config_name: Which of the alternative configurations of the models to use, by the name of its file in
            their folder `configs`.
    """

    model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = field(default_factory=list)
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: list[str] = field(default_factory=list)
    strict_model_config: bool = False
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: list[RateLimiterResource] = field(default_factory=list)
    pinned_memory_pool_size: int = 256 * _MEBIBYTE
    cuda_memory_pool_sizes: dict[int, int] = field(default_factory=dict)
    cache_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_directory: str | os.PathLike[str] | None = None
    min_supported_compute_capability: float = 6.0
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = 0
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    enable_peer_access: bool = True
    log_file: str | os.PathLike[str] | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    log_callback: LogCallback | None = None
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str | os.PathLike[str] | None = None
    repo_agent_directory: str | os.PathLike[str] | None = None
    model_load_device_limits: list[ModelLoadDeviceLimit] = field(default_factory=list)
    backend_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    host_policies: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    cuda_virtual_address_sizes: dict[int, int] = field(default_factory=dict)
    model_config_name: str = ""

    def check(self) -> None:
        """Check the types and values of all fields, as `Server.start()` does.

        Raises:
            OptionTypeError: If a field has a value of the wrong type. It is a `TypeError`, too.
            InvalidArgumentError: If a value is outside of what is accepted, or `model_repository` is `None`.
            RepositoryNotFoundError: If a model repository is not there.
        """
        option_values(self)

    def repositories(self) -> list[str]:
        """Return the model repositories as a list of paths.

        Raises:
            OptionTypeError: If `model_repository` is neither a path nor several of them.
            InvalidArgumentError: If it is `None`.
        """
        return rules.repositories(self.model_repository)


_RULES: dict[str, rules.Rule] = {
    "server_id": rules.text,
    "model_control_mode": rules.member_of(ModelControlMode),
    "startup_models": rules.list_of(rules.text),
    "strict_model_config": rules.boolean,
    "rate_limiter_mode": rules.member_of(RateLimitMode),
    "rate_limiter_resources": rules.list_of(
        rules.record(RateLimiterResource, name=rules.text, count=rules.uint64, device=rules.int32)
    ),
    "pinned_memory_pool_size": rules.uint64,
    "cuda_memory_pool_sizes": rules.mapping(rules.int32, rules.uint64),
    "cache_config": rules.mapping(rules.text, rules.json_text),
    "cache_directory": rules.optional(rules.path),
    "min_supported_compute_capability": rules.number,
    "exit_on_error": rules.boolean,
    "strict_readiness": rules.boolean,
    "exit_timeout": rules.uint32,
    "buffer_manager_thread_count": rules.uint32,
    "model_load_thread_count": rules.uint32,
    "model_load_retry_count": rules.uint32,
    "model_namespacing": rules.boolean,
    "enable_peer_access": rules.boolean,
    "log_file": rules.optional(rules.path),
    "log_info": rules.boolean,
    "log_warn": rules.boolean,
    "log_error": rules.boolean,
    "log_format": rules.member_of(LogFormat),
    "log_verbose": rules.uint31,
    "log_callback": rules.optional(rules.function),
    "metrics": rules.boolean,
    "gpu_metrics": rules.boolean,
    "cpu_metrics": rules.boolean,
    "metrics_interval": rules.uint64,
    "backend_directory": rules.optional(rules.path),
    "repo_agent_directory": rules.optional(rules.path),
    "model_load_device_limits": rules.list_of(
        rules.record(
            ModelLoadDeviceLimit, kind=rules.member_of(InstanceGroupKind), device=rules.int32, fraction=rules.number
        )
    ),
    "backend_configuration": rules.mapping(rules.text, rules.settings),
    "host_policies": rules.mapping(rules.text, rules.settings),
    "metrics_configuration": rules.mapping(rules.text, rules.settings),
    "cuda_virtual_address_sizes": rules.mapping(rules.int32, rules.uint64),
    "model_config_name": rules.text,
}


def option_values(options: Options) -> dict[str, Any]:
    """Check all fields and give their values as the C API wants them: text as `bytes`, enumerations as numbers."""
    if not isinstance(options, Options):
        raise rules.wrong_type("options", "an Options", options)
    values = {name: rule(getattr(options, name), name) for name, rule in _RULES.items()}
    values["model_repository"] = rules.existing_folders(rules.repositories(options.model_repository))
    if len(values["cache_config"]) > 1:
        raise InvalidArgumentError(
            f"Options.cache_config: expected one cache, received {len(values['cache_config'])} "
            f"({', '.join(options.cache_config)}). Triton supports a single one.",
            expected="one cache",
            received=tuple(options.cache_config),
            where="Options.cache_config",
        )
    if values["model_load_thread_count"] == 0:
        raise rules.bad_value("model_load_thread_count", "at least 1", 0)
    return values
