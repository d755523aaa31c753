"""From settings to the command line of tritonserver."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pytriton.server.settings.config import TritonConfig, is_on_vertex_ai
from pytriton.server.settings.rules import Restriction, parse_restriction
from pytriton.server.settings.security import TRITON_ACCESS_HEADER, TritonSecurityConfig
from pytriton.server.tritonserver.ports import Endpoint, ReservedPorts

EXIT_TIMEOUT_S = 1
"""Seconds that tritonserver waits for open connections after its requests have ended, by default."""

METRICS_INTERVAL_MS = 500
"""How often the metrics of the CPU are collected by default, in milliseconds. Those of a GPU cost more."""

QUIET_WITHOUT_GPU = ("CudaDriverHelper has not been initialized", "CUDA driver version is insufficient")
"""Complaints of tritonserver on a machine without a GPU, where they mean nothing."""

DRAIN_TIMEOUT_S = 30
"""Seconds that it waits for requests by default, if models cannot be taken out of service first."""

EXPLICIT = "explicit"
"""The value of `TritonConfig.model_control_mode` with which models are loaded and unloaded by calls."""

OWN_SETTINGS = frozenset({"cors_origins", "python_models", "python_models_idle"})
"""Fields of `TritonConfig` that are no options of tritonserver."""

_RESTRICTED = {"http": "http_restricted_api", "grpc": "grpc_restricted_protocol"}
# <option>=<groups>:<header>=<token>, and such as --cache-config=redis,password=<password>. A secret may contain "=".
_BEFORE_SECRET = re.compile(
    rf"--({'|'.join(name.replace('_', '-') for name in _RESTRICTED.values())})=[^=]*="
    r"|--(cache|backend)-config=[^=]*(password|secret|token)[^=]*=",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class ServerFolders:
    """The folders that tritonserver uses."""

    executable: Path
    models: Path
    """The model repository of the bound models."""
    backends: Path
    linked: Path | None = None
    """A model repository of links to folders of the user's, if there is one."""
    caches: Path | None
    """Folder of cache libraries, if there is one."""


def build_command(
    config: TritonConfig,
    security: TritonSecurityConfig,
    folders: ServerFolders,
    ports: ReservedPorts,
    models: Collection[str] = (),
) -> list[str]:
    """Return program and arguments. The user's settings are kept; unset ones get what this package needs."""
    values: dict[str, object] = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name not in OWN_SETTINGS
    }
    for endpoint in ports:
        values[endpoint.setting] = endpoint.port
        address = endpoint.setting.removesuffix("_port") + "_address"
        if values.get(address) is not None or endpoint.is_ipv6:
            values[address] = _address(endpoint)
    if ports.triton_metrics is not None:
        # The user's address is for our own page, which includes Triton's metrics.
        values["metrics_address"] = _address(ports.triton_metrics)
    values["model_repository"] = [path for path in (folders.models, folders.linked, config.model_repository) if path]
    defaults: dict[str, object] = {
        # This package reports models that fail to load, with reasons that an exit code cannot give.
        "exit_on_error": False,
        # Requests have ended before the server gets its signal, so only idle connections remain.
        "exit_timeout_secs": EXIT_TIMEOUT_S if is_controlled(config) else DRAIN_TIMEOUT_S,
        "model_control_mode": EXPLICIT,
        "allow_gpu_metrics": None if has_gpu() else False,
        "cache_directory": folders.caches,
        "pinned_memory_pool_byte_size": None if has_gpu() else 0,
        # The metrics thread sleeps for half of the interval, and the server's end waits for it.
        "metrics_interval_ms": None if has_gpu() else METRICS_INTERVAL_MS,
        **_protocols_on_vertex_ai(),
    }
    for name, value in defaults.items():
        if values[name] is None:
            values[name] = value
    command = [str(folders.executable)]
    for name, value in values.items():
        command += _options(name, value)
    if is_controlled(config):
        named = config.load_model is not None
        command += [
            f"--load-model={name}" for name in sorted(models) if named and name not in (config.load_model or ())
        ]
        command += [] if named else ["--load-model=*"]
    command.append(f"--backend-directory={folders.backends}")
    return command + _restrictions(config, security)


def is_controlled(config: TritonConfig) -> bool:
    """Return whether calls can load and unload models."""
    return (config.model_control_mode or EXPLICIT).lower() == EXPLICIT


def redacted(command: Sequence[str]) -> str:
    """Return a command as text for logs and errors, without the secrets in it."""
    return " ".join(f"{found[0]}***" if (found := _BEFORE_SECRET.match(part)) else part for part in command)


def secrets_of(command: Sequence[str]) -> list[str]:
    """Return the secrets in a command; each ends an argument."""
    return [part[found.end() :] for part in command if (found := _BEFORE_SECRET.match(part))]


def control_headers(config: TritonConfig, security: TritonSecurityConfig, protocol: str) -> dict[str, str]:
    """Return the headers with which this package's own calls pass every restriction, the user's included."""
    headers = {}
    restriction = _restriction(config, protocol)
    if security.access_token:
        headers[TRITON_ACCESS_HEADER] = security.access_token
    if restriction is not None:
        # Two values for one header are refused before the start, unless this package's token protects nothing.
        headers = {name: value for name, value in headers.items() if name.lower() != restriction.header.lower()}
        headers[restriction.header] = restriction.value
    return headers


def has_gpu() -> bool:
    """Return whether this process sees an NVIDIA GPU."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def _options(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, list):
        return [f"{option}={item}" for item in value]
    if isinstance(value, bool):
        return [f"{option}={str(value).lower()}"]
    return [f"{option}={value}"]


def _address(endpoint: Endpoint) -> str:
    if not endpoint.is_ipv6:
        return endpoint.address
    # The two services read IPv6 addresses in different forms.
    return f"[{endpoint.address}]" if endpoint.setting == "grpc_port" else f"ipv6:{endpoint.address}"


def _protocols_on_vertex_ai() -> dict[str, bool]:
    """On Vertex AI, tritonserver serves neither HTTP nor gRPC by default, so these options switch them on."""
    return {"allow_http": True, "allow_grpc": True} if is_on_vertex_ai() else {}


def _restriction(config: TritonConfig, protocol: str) -> Restriction | None:
    name = _RESTRICTED[protocol]
    text = getattr(config, name)
    return parse_restriction(text, f"TritonConfig.{name}") if text else None


def _restrictions(config: TritonConfig, security: TritonSecurityConfig) -> list[str]:
    if not security.access_token:
        return []
    options = []
    for protocol, name in _RESTRICTED.items():
        # tritonserver refuses a group that is named twice, and the user's setting has priority.
        own = _restriction(config, protocol)
        groups = [group for group in security.restricted_endpoints or () if own is None or group not in own.groups]
        if groups:
            option = "--" + name.replace("_", "-")
            options.append(f"{option}={','.join(groups)}:{TRITON_ACCESS_HEADER}={security.access_token}")
    return options
