"""What can be set about tritonserver: `TritonConfig`."""

import dataclasses
import functools
import logging
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from pytriton.exceptions import PyTritonValidationError

__all__ = ["ENVIRONMENT_PREFIX", "TritonConfig"]

ENVIRONMENT_PREFIX = "PYTRITON_TRITON_CONFIG_"
"""Start of the names of environment variables that hold fields of `TritonConfig`."""

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f"})

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class TritonConfig:
    """Settings of tritonserver, each named as the server's own command line option.

    A field that is None is not passed on, so the server's default holds. Values of another type are converted where
    that is
    safe: text to numbers, paths and booleans (`true`, `false`, `1`, `0`, `yes`, `no`, `on`, `off`).

    Raises:
        PyTritonValidationError: A value cannot be converted to the type of its field, a port is out of range, or
            neither HTTP nor gRPC is allowed.
    """

    model_repository: pathlib.Path | None = None
    """A folder of further models, served next to the bound ones."""
    id: str | None = None
    """Name of the server, as in its metadata."""
    log_verbose: int | None = None
    """0 is quiet; from 1 on every request is logged, which costs speed."""
    log_file: pathlib.Path | None = None
    """File for the server's log. Its lines do not reach Python's logging then."""
    exit_timeout_secs: int | None = None
    """How long a stop may wait for requests that are being served, in seconds (30 when unset)."""
    exit_on_error: bool | None = None
    """Whether the server ends when a model cannot be loaded at its start. However it is set, a *bound* model that
    cannot be loaded makes the start fail."""
    strict_readiness: bool | None = None
    """Whether the server is ready only while all of its models are."""
    allow_http: bool | None = None
    http_address: str | None = None
    """Address to listen on (0.0.0.0 when unset: every interface)."""
    http_port: int | None = None
    """Port to listen on (8000 when unset); 0 takes a free one."""
    http_header_forward_pattern: str | None = None
    """Regular expression: the headers that become parameters of a request."""
    http_thread_count: int | None = None
    http_restricted_api: str | None = None
    """`<endpoints>:<header>=<value>`. Endpoints named here are left out of what `TritonSecurityConfig` protects."""
    allow_grpc: bool | None = None
    grpc_address: str | None = None
    """Address to listen on (0.0.0.0 when unset: every interface)."""
    grpc_port: int | None = None
    """Port to listen on (8001 when unset); 0 takes a free one."""
    grpc_header_forward_pattern: str | None = None
    """Regular expression: the headers that become parameters of a request."""
    grpc_infer_allocation_pool_size: int | None = None
    grpc_use_ssl: bool | None = None
    grpc_use_ssl_mutual: bool | None = None
    grpc_server_cert: pathlib.Path | None = None
    grpc_server_key: pathlib.Path | None = None
    grpc_root_cert: pathlib.Path | None = None
    grpc_infer_response_compression_level: str | None = None
    """One of none, low, medium, high."""
    grpc_keepalive_time: int | None = None
    """In milliseconds."""
    grpc_keepalive_timeout: int | None = None
    """In milliseconds."""
    grpc_keepalive_permit_without_calls: bool | None = None
    grpc_http2_max_pings_without_data: int | None = None
    grpc_http2_min_recv_ping_interval_without_data: int | None = None
    """In milliseconds."""
    grpc_http2_max_ping_strikes: int | None = None
    grpc_restricted_protocol: str | None = None
    """`<protocols>:<header>=<value>`, as `http_restricted_api`."""
    allow_metrics: bool | None = None
    allow_gpu_metrics: bool | None = None
    """When unset, GPU metrics are left out on a machine without a GPU."""
    allow_cpu_metrics: bool | None = None
    metrics_interval_ms: int | None = None
    """How often metrics are collected, in milliseconds."""
    metrics_port: int | None = None
    """Port to listen on (8002 when unset); 0 takes a free one."""
    metrics_address: str | None = None
    """Address to listen on (that of HTTP when unset)."""
    allow_sagemaker: bool | None = None
    sagemaker_port: int | None = None
    sagemaker_safe_port_range: str | None = None
    """`<first>-<last>`."""
    sagemaker_thread_count: int | None = None
    allow_vertex_ai: bool | None = None
    vertex_ai_port: int | None = None
    vertex_ai_thread_count: int | None = None
    vertex_ai_default_model: str | None = None
    metrics_config: list[str] | None = None
    """Items `<setting>=<value>`."""
    trace_config: list[str] | None = None
    """Items `<setting>=<value>` or `<mode>,<setting>=<value>`."""
    cache_config: list[str] | None = None
    """Items `<cache>,<setting>=<value>`, such as `local,size=1048576`."""
    cache_directory: str | None = None
    """Folder of cache libraries (that of the server in use when unset)."""
    buffer_manager_thread_count: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _converted(kind, value, f"TritonConfig.{name}"))
        for name in ("http_port", "grpc_port", "metrics_port", "sagemaker_port", "vertex_ai_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise PyTritonValidationError(
                    f"TritonConfig.{name}={port} is not a port: expected 0 (any free port) to 65535.",
                    expected="0 to 65535",
                    received=port,
                )
        if self.allow_http is False and self.allow_grpc is False:
            raise PyTritonValidationError(
                "The `http` or `grpc` endpoint has to be allowed. Leave TritonConfig.allow_http or "
                "TritonConfig.allow_grpc unset, or set one of them to True."
            )

    def to_dict(self) -> dict[str, Any]:
        """Gives all fields by name, the unset ones as None."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "TritonConfig":
        """Makes a configuration from values by name.

        Args:
            config: Fields by name. A name that is no field is left out, with a warning in the log.

        Raises:
            PyTritonValidationError: As for the constructor.
        """
        known = _kinds()
        for name in config:
            if name not in known:
                logger.warning("TritonConfig has no field %r: its value is ignored.", name)
        return cls(**{name: value for name, value in config.items() if name in known})

    @classmethod
    def from_env(cls) -> "TritonConfig":
        """Makes a configuration from environment variables.

        A field comes from `PYTRITON_TRITON_CONFIG_<FIELD>`, upper or lower case. A list takes one item from there, and
        further ones from `PYTRITON_TRITON_CONFIG_<FIELD>_<number>`, in the order of the numbers. An empty value counts
        as unset; a variable that names no field is left out, with a warning in the log.

        Raises:
            PyTritonValidationError: As for the constructor; the text names the variable.
        """
        values: dict[str, Any] = {}
        items: dict[str, dict[int, str]] = {}
        for variable, text in os.environ.items():
            if not variable.upper().startswith(ENVIRONMENT_PREFIX) or not text:
                continue
            name = variable[len(ENVIRONMENT_PREFIX) :].lower()
            field, _, number = name.rpartition("_")
            if _kinds().get(name) is list:
                items.setdefault(name, {})[-1] = text
            elif name in _kinds():
                values[name] = _converted(_kinds()[name], text, f"environment variable {variable}")
            elif _kinds().get(field) is list and number.isdecimal():
                items.setdefault(field, {})[int(number)] = text
            else:
                logger.warning("Environment variable %s names no field of TritonConfig: it is ignored.", variable)
        for name, by_number in items.items():
            values[name] = [by_number[number] for number in sorted(by_number)]
        return cls(**values)

    def merged_over(self, defaults: "TritonConfig") -> "TritonConfig":
        """Gives a new configuration: the fields that are set here, and those of `defaults` where they are not."""
        mine = {name: value for name, value in self.to_dict().items() if value is not None}
        return TritonConfig(**{**defaults.to_dict(), **mine})


@functools.cache
def _kinds() -> dict[str, type]:
    """Gives the type of every field, without its `None`: bool, int, str, pathlib.Path or list (of str)."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(TritonConfig).items():
        kind = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        kinds[name] = typing.get_origin(kind) or kind
    return kinds


def _converted(kind: type, value: Any, where: str) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    elif kind is int:
        try:
            if not isinstance(value, (bool, float)):
                return int(value)
        except (TypeError, ValueError):
            # Falls to the one error below, which names the field.
            pass
    elif kind is list:
        if isinstance(value, str):
            return [value]
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return list(value)
    elif kind is pathlib.Path:
        if isinstance(value, (str, os.PathLike)):
            return pathlib.Path(os.fspath(value)).expanduser()
    elif isinstance(value, (str, int, float, os.PathLike)) and not isinstance(value, bool):
        return str(value)
    expected = {
        bool: "a boolean (true, false, 1, 0, yes, no, on, off)",
        int: "an integer",
        list: "a list of strings",
        pathlib.Path: "a path",
    }.get(kind, "a string")
    raise PyTritonValidationError(f"{where} must be {expected}; got {value!r}.", expected=expected, received=value)
