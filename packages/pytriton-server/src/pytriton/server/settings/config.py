"""What can be set about tritonserver: `TritonConfig`."""

import dataclasses
import functools
import logging
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.rules import checked, converted

if TYPE_CHECKING:
    from typing_extensions import Self

ENVIRONMENT_PREFIX = "PYTRITON_TRITON_CONFIG_"
"""Start of the names of environment variables that hold fields of `TritonConfig`."""

WORKERS = "workers"
"""Value of `TritonConfig.python_models`: processes of ours run the `model.py` files."""

_ADDRESSES = ("http_address", "grpc_address", "metrics_address")

logger = logging.getLogger(__name__)


_Class = typing.TypeVar("_Class")


def _refusing_positional(cls: type[_Class]) -> type[_Class]:
    """Let a class say in words of its own, which scripts may look for, that it takes keyword arguments only."""
    wrapped: Any = vars(cls)["__init__"]

    @functools.wraps(wrapped)
    def init(self: _Class, *arguments: Any, **settings: Any) -> None:
        if arguments:
            raise TypeError(
                f"{cls.__name__} initialization can't be used with positional arguments: give each setting by its "
                f"name, as in {cls.__name__}(http_port=8000)."
            )
        wrapped(self, **settings)

    setattr(cls, "__init__", init)  # noqa: B010 - mypy refuses the assignment
    return cls


@_refusing_positional
@dataclasses.dataclass(kw_only=True)
class TritonConfig:
    """Settings of tritonserver, each named as the server's own command line option.

    A field that is None is not passed on, so the server's default holds, where no other one is given here. Values of
    another type are converted where that is safe: text to numbers, paths and booleans (`true`, `false`, `1`, `0`,
    `yes`, `no`, `on`, `off`).

    Raises:
        PyTritonValidationError: A value cannot be converted to the type of its field or breaks the rule of the field
            (the text says which), or neither HTTP nor gRPC is allowed.
    """

    model_repository: pathlib.Path | str | None = None
    """A folder of further models, served next to the bound ones, or where tritonserver fetches them from: `s3://`,
    `gs://` (Google Cloud Storage) or `as://` (Azure). The credentials are in the environment, as Triton's page on model
    repositories has it."""
    python_models: str | None = None
    """Who runs the `model.py` of models in there whose backend is `python`: `stub` is Triton's Python backend (when
    unset), `workers` are processes of any Python, this one's by default, which are replaced when they die."""
    python_models_idle: str | None = None
    """After how long without a request, such as `90s`, `5m` or `1h`, the process of an instance of such a model ends
    with `workers`; the next request starts it again (never when unset). The parameter `PYTRITON_IDLE_TIMEOUT_S` of a
    model counts more."""
    model_control_mode: str | None = None
    """How the models of `model_repository` come and go: `explicit` when somebody asks, with all of them loaded at the
    start (when unset), `poll` when their files change, `none` not at all. With the last two, models are bound before
    the start, and not after it."""
    repository_poll_secs: int | None = None
    """How often the files are looked at with `poll`, in seconds (15 when unset)."""
    load_model: list[str] | None = None
    """Names of the models of `model_repository` that are loaded at the start with `explicit` (all when unset)."""
    model_load_thread_count: int | None = None
    """How many models are loaded at the same time (4 when unset)."""
    model_load_retry_count: int | None = None
    """How often the load of a model that has failed is tried again (0 when unset)."""
    rate_limit: str | None = None
    """Whether instances wait for what `rate_limiter` in `config.pbtxt` asks for: `execution_count`, or `off` (when
    unset)."""
    rate_limit_resource: list[str] | None = None
    """Items `<resource>:<count>` or `<resource>:<count>:<device>`: how much of it there is (when unset as much as the
    instance asks for that asks for most)."""
    backend_config: list[str] | None = None
    """Items `<backend>,<setting>=<value>`, such as `onnxruntime,default-max-batch-size=8`, for backends of the user's
    models."""
    host_policy: list[str] | None = None
    """Items `<policy>,<setting>=<value>`, such as `gpu_0,numa-node=1`: which processors the instances use that name the
    policy or run on the GPU."""
    pinned_memory_pool_byte_size: int | None = None
    """Pinned memory that is taken at the start, in bytes (256 MiB when unset; none on a machine without a GPU)."""
    cuda_memory_pool_byte_size: list[str] | None = None
    """Items `<GPU>:<bytes>`: memory of a GPU that is taken at the start (64 MiB when unset)."""
    id: str | None = None
    """Name of the server, as in its metadata."""
    log_verbose: int | None = None
    """0 is quiet; from 1 on every request is logged, which costs speed."""
    log_file: pathlib.Path | None = None
    """File for the server's log, in a folder that exists. Its lines do not reach Python's logging then. Once it is
    moved or removed, as logrotate does, it is begun anew."""
    exit_timeout_secs: int | None = None
    """How long a stop may wait for requests that are being served, in seconds (30 when unset)."""
    exit_on_error: bool | None = None
    """Whether the server ends when a model cannot be loaded at its start. However it is set, a *bound* model that
    cannot be loaded makes the start fail."""
    strict_readiness: bool | None = None
    """Whether the server is ready only while all of its models are."""
    allow_http: bool | None = None
    """Whether HTTP is served (True when unset)."""
    http_address: str | None = None
    """Address to listen on: a number (IPv4 or IPv6) or a name of this machine (0.0.0.0 when unset: every interface)."""
    http_port: int | None = None
    """Port to listen on (8000 when unset); 0 takes a free one."""
    http_header_forward_pattern: str | None = None
    """Regular expression (RE2): headers whose name it matches, in part and case aside, become parameters."""
    http_thread_count: int | None = None
    """Threads that handle HTTP (8 when unset)."""
    http_max_input_size: int | None = None
    """How large the JSON of a request over HTTP may be, a raw request, and what a compressed one unpacks to, in bytes
    (64 MiB when unset); others get 400. Binary tensors do not count. Needs tritonserver 2.59 or later: 2.51 has no such
    limit."""
    http_restricted_api: str | None = dataclasses.field(default=None, repr=False)
    """`<groups>:<header>=<value>`: groups of endpoints that answer only to callers with this header. Groups named here
    are left out of what `TritonSecurityConfig` protects."""
    cors_origins: list[str] | None = None
    """Origins, such as `https://app.example`, whose pages browsers let read answers over HTTP (CORS), those of the
    OpenAI endpoints included; `*` alone is any (none when unset). Needs the guard."""
    allow_grpc: bool | None = None
    """Whether gRPC is served (True when unset)."""
    grpc_address: str | None = None
    """Address to listen on, as `http_address`."""
    grpc_port: int | None = None
    """Port to listen on (8001 when unset); 0 takes a free one."""
    grpc_header_forward_pattern: str | None = None
    """Regular expression (RE2): metadata whose name it matches, in part and case aside, become parameters."""
    grpc_infer_thread_count: int | None = None
    """Threads that take requests for inference over gRPC, 2 to 128 (2 when unset). Needs tritonserver 2.57 or later."""
    grpc_infer_allocation_pool_size: int | None = None
    """How many requests' memory is kept for reuse (8 when unset)."""
    grpc_max_response_pool_size: int | None = None
    """How many responses may be in the queue of a gRPC stream (any number when unset). Needs tritonserver 2.56 or
    later."""
    grpc_use_ssl: bool | None = None
    """Whether gRPC is encrypted. Needs `grpc_server_cert` and `grpc_server_key`."""
    grpc_use_ssl_mutual: bool | None = None
    """Whether gRPC is encrypted and asks its callers for a certificate. Needs `grpc_root_cert`, too."""
    grpc_server_cert: pathlib.Path | None = None
    """The server's certificate, PEM."""
    grpc_server_key: pathlib.Path | None = None
    """The key of the server's certificate, PEM."""
    grpc_root_cert: pathlib.Path | None = None
    """Certificates, PEM, of those who may sign the certificates of callers."""
    grpc_infer_response_compression_level: str | None = None
    """How results are compressed: none, low, medium or high (none when unset)."""
    grpc_keepalive_time: int | None = None
    """After how much silence a connection is probed, in milliseconds (two hours when unset)."""
    grpc_keepalive_timeout: int | None = None
    """How long the answer to such a probe may take, in milliseconds (20000 when unset)."""
    grpc_keepalive_permit_without_calls: bool | None = None
    """Whether connections without a call are probed, too."""
    grpc_http2_max_pings_without_data: int | None = None
    """How many probes may follow each other with no data between them (2 when unset; 0 is any number)."""
    grpc_http2_min_recv_ping_interval_without_data: int | None = None
    """How far apart the probes of a caller without data have to be, in milliseconds (300000 when unset)."""
    grpc_http2_max_ping_strikes: int | None = None
    """How many too early probes a caller may send before its connection is closed (2 when unset; 0 is any number)."""
    grpc_max_connection_age: int | None = None
    """After how long a connection is closed, in milliseconds (never when unset)."""
    grpc_max_connection_age_grace: int | None = None
    """How long the calls of such a connection may take to end, in milliseconds (any time when unset)."""
    grpc_restricted_protocol: str | None = dataclasses.field(default=None, repr=False)
    """`<groups>:<header>=<value>`, as `http_restricted_api`. As metadata the header's name gets the prefix
    `triton-grpc-protocol-`."""
    allow_client_shm: bool | None = None
    """Whether clients may register shared memory with the server (False when unset). Needs tritonserver 2.68 or later:
    2.51 always allows it, to those who may use the group `shared-memory`."""
    allow_metrics: bool | None = None
    """Whether metrics are served (True when unset)."""
    allow_gpu_metrics: bool | None = None
    """When unset, GPU metrics are left out on a machine without a GPU."""
    allow_cpu_metrics: bool | None = None
    """Whether the metrics tell about the processor and the memory of the machine (True when unset)."""
    metrics_interval_ms: int | None = None
    """How often metrics are collected, in milliseconds."""
    metrics_port: int | None = None
    """Port to listen on (8002 when unset); 0 takes a free one."""
    metrics_address: str | None = None
    """Address to listen on (that of HTTP when unset)."""
    allow_sagemaker: bool | None = None
    """Whether SageMaker's endpoints `/ping` and `/invocations` are served, on every interface and, before tritonserver
    2.67, without the access token."""
    sagemaker_port: int | None = None
    """Port to listen on (8080 when unset); 0 takes a free one."""
    sagemaker_safe_port_range: str | None = None
    """`<first>-<last>`: the ports that SageMaker lets the other services have. Those of them that are 0 are picked from
    there."""
    sagemaker_thread_count: int | None = None
    """Threads that handle SageMaker's calls (8 when unset)."""
    allow_vertex_ai: bool | None = None
    """Whether Vertex AI's endpoints are served, on every interface and, before tritonserver 2.67, without the access
    token, at the paths in the environment variables `AIP_PREDICT_ROUTE` and `AIP_HEALTH_ROUTE` (True when unset where
    `AIP_MODE` is `PREDICTION`)."""
    vertex_ai_port: int | None = None
    """Port to listen on (when unset the one in `AIP_HTTP_PORT`, else 8080); 0 takes a free one."""
    vertex_ai_thread_count: int | None = None
    """Threads that handle Vertex AI's calls (8 when unset)."""
    vertex_ai_default_model: str | None = None
    """The model that predicts. May be unset where there is only one when the server starts."""
    metrics_config: list[str] | None = None
    """Items `<setting>=<value>`, such as `summary_latencies=true`."""
    trace_config: list[str] | None = None
    """Items `<setting>=<value>` or `<mode>,<setting>=<value>`."""
    cache_config: list[str] | None = None
    """Items `<cache>,<setting>=<value>`, such as `local,size=1048576` (bytes). With none there is no response cache.
    The size of `local` is also what the answers of bound models with `ModelConfig(response_cache=True)` may take."""
    cache_directory: str | None = None
    """Folder of cache libraries (that of the server in use when unset)."""
    buffer_manager_thread_count: int | None = None
    """Threads that copy tensors inside the server, besides the threads that need them (0 when unset)."""

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            value = getattr(self, name)
            if name in _ADDRESSES and value == "":
                setattr(self, name, None)
            elif value is not None:
                setattr(self, name, _accepted(name, kind, value, f"TritonConfig.{name}"))
        if self.allow_http is False and self.allow_grpc is False:
            raise PyTritonValidationError(
                "The `http` or `grpc` endpoint has to be allowed. Leave TritonConfig.allow_http or "
                "TritonConfig.allow_grpc unset, or set one of them to True."
            )
        if self.python_models_idle is not None and (self.python_models or WORKERS).lower() != WORKERS:
            raise PyTritonValidationError(
                f"TritonConfig.python_models_idle is for models that workers serve (python_models={WORKERS!r}); "
                f"Triton's Python backend (python_models={self.python_models!r}) does not end its processes.",
                expected=f"python_models={WORKERS!r}",
                received=self.python_models,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, the unset ones as None."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Self":
        """Make a configuration from values by name.

        Args:
            config: Fields by name. A name that is no field is left out, with a warning in the log.

        Raises:
            PyTritonValidationError: As for the constructor.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in config:
            if name not in known:
                logger.warning("TritonConfig has no field %r: its value is ignored.", name)
        return cls(**{name: value for name, value in config.items() if name in known})

    @classmethod
    def from_env(cls) -> "Self":
        """Make a configuration from environment variables.

        A field comes from `PYTRITON_TRITON_CONFIG_<FIELD>`, upper or lower case. A list takes one item from there, and
        further ones from `PYTRITON_TRITON_CONFIG_<FIELD>_<number>`, in the order of the numbers. An empty value counts
        as unset; a variable that names no field is left out, with a warning in the log.

        Raises:
            PyTritonValidationError: As for the constructor; the text names the variable.
        """
        return cls(**_environment_values())

    @property
    def has_grpc_tls(self) -> bool:
        """Whether gRPC is encrypted."""
        return bool(self.grpc_use_ssl or self.grpc_use_ssl_mutual)

    def merged_over(self, defaults: "TritonConfig") -> "TritonConfig":
        """Return a new configuration: the fields that are set here, and those of `defaults` where they are not."""
        return TritonConfig(**{**_set_fields(defaults), **_set_fields(self)})

    def with_environment(self) -> "TritonConfig":
        """Return a new configuration: the fields that are set here, and those of the environment where they are not.

        Raises:
            PyTritonValidationError: A variable is not acceptable, or the two together are not.
        """
        # Both are checked together, as each may switch off one protocol, so that none is left.
        return TritonConfig(**{**_environment_values(), **_set_fields(self)})


def is_on_vertex_ai() -> bool:
    """Return whether the environment says that this program runs as a server on Vertex AI."""
    return os.environ.get("AIP_MODE") == "PREDICTION"


def vertex_ai_is_on(config: TritonConfig) -> bool:
    """Return whether Vertex AI's endpoints are served."""
    return is_on_vertex_ai() if config.allow_vertex_ai is None else config.allow_vertex_ai


@functools.cache
def _kinds() -> dict[str, type]:
    """Return the type of every field, without its `None`, the first where there are several."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(TritonConfig).items():
        kind = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        kinds[name] = typing.get_origin(kind) or kind
    return kinds


def _set_fields(config: TritonConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _kinds() if getattr(config, name) is not None}


def _accepted(name: str, kind: type, value: Any, where: str) -> Any:
    if name == "log_verbose" and isinstance(value, bool):
        value = int(value)  # for this option alone, tritonserver takes True and False
    if name == "model_repository" and isinstance(value, str) and "://" in value:
        kind = str  # as a path, it would lose one of the slashes
    result = converted(kind, value, where)
    checked(name, result, where)
    return result


def _environment_values() -> dict[str, Any]:
    values: dict[str, Any] = {}
    items: dict[str, dict[int, str]] = {}
    for variable, text in os.environ.items():
        if not variable.upper().startswith(ENVIRONMENT_PREFIX) or not text:
            continue
        where = f"environment variable {variable}"
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        field, _, number = name.rpartition("_")
        if _kinds().get(name) is list:
            items.setdefault(name, {})[-1] = _accepted(name, list, text, where)[0]
        elif name in _kinds():
            values[name] = _accepted(name, _kinds()[name], text, where)
        elif _kinds().get(field) is list and number.isdecimal():
            items.setdefault(field, {})[int(number)] = _accepted(field, list, text, where)[0]
        else:
            logger.warning("Environment variable %s names no field of TritonConfig: it is ignored.", variable)
    for name, by_number in items.items():
        values[name] = [by_number[number] for number in sorted(by_number)]
    return values
