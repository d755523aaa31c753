"""From settings to the command line of tritonserver."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pytriton.server.ports import ReservedPorts
from pytriton.server.security import TRITON_ACCESS_HEADER, TritonSecurityConfig
from pytriton.server.settings import TritonConfig

__all__ = [
    "EXIT_TIMEOUT_S",
    "QUIET_WITHOUT_GPU",
    "ServerFolders",
    "build_command",
    "control_headers",
    "has_gpu",
    "redacted",
]

EXIT_TIMEOUT_S = 1
"""How long tritonserver waits for open connections after its requests are done, in seconds, unless the user says."""

METRICS_INTERVAL_MS = 500
"""How often the metrics of the CPU are collected, in milliseconds, unless the user says. Those of a GPU cost more."""

QUIET_WITHOUT_GPU = ("CudaDriverHelper has not been initialized", "CUDA driver version is insufficient")
"""What tritonserver complains about on a machine without a GPU, where it means nothing."""

_SECRETS = ("http_restricted_api", "grpc_restricted_protocol")


@dataclass(frozen=True, kw_only=True)
class ServerFolders:
    """Where tritonserver finds things."""

    executable: Path
    models: Path
    """The model repository of the bound models."""
    backends: Path
    caches: Path | None
    """Folder of cache libraries, if there is one."""


def build_command(
    config: TritonConfig, security: TritonSecurityConfig, folders: ServerFolders, ports: ReservedPorts
) -> list[str]:
    """Gives program and arguments. What the user set is never changed; what is unset gets what this package needs.

    Args:
        config: The settings.
        security: The token and what it protects.
        folders: Where tritonserver finds things.
        ports: The ports to listen on, in place of those in `config`.
    """
    values: dict[str, object] = {field.name: getattr(config, field.name) for field in fields(config)}
    for endpoint in ports:
        values[endpoint.setting] = endpoint.port
    values["model_repository"] = [folders.models, *([config.model_repository] if config.model_repository else [])]
    defaults: dict[str, object] = {
        # A model that cannot be loaded is told by name and reason, which an exit code cannot.
        "exit_on_error": False,
        # Requests are waited for before the server is told to end; what remains are idle connections.
        "exit_timeout_secs": EXIT_TIMEOUT_S,
        "allow_gpu_metrics": None if has_gpu() else False,
        "cache_directory": folders.caches,
        # Its thread sleeps for half of the interval, and the end of the server waits for it.
        "metrics_interval_ms": None if has_gpu() else METRICS_INTERVAL_MS,
    }
    for name, value in defaults.items():
        if values[name] is None:
            values[name] = value
    command = [str(folders.executable)]
    for name, value in values.items():
        command += _options(name, value)
    command += [
        f"--backend-directory={folders.backends}",
        "--model-control-mode=explicit",
        "--load-model=*",
    ]
    if not has_gpu():
        command.append("--pinned-memory-pool-byte-size=0")
    return command + _restrictions(config, security)


def redacted(command: Sequence[str]) -> str:
    """Gives a command as text for logs and errors, without the tokens in it."""
    options = tuple("--" + name.replace("_", "-") for name in _SECRETS)
    # <option>=<groups>:<header>=<token>, and a token may hold "=" itself.
    return " ".join(
        "=".join([*part.split("=", 2)[:2], "***"]) if part.startswith(options) else part for part in command
    )


def control_headers(config: TritonConfig, security: TritonSecurityConfig) -> dict[str, str]:
    """Gives the HTTP headers with which this package's own calls pass every restriction, the user's included."""
    headers = {}
    if security.access_token:
        headers[TRITON_ACCESS_HEADER] = security.access_token
    for restriction in (config.http_restricted_api, config.grpc_restricted_protocol):
        _, _, pair = (restriction or "").partition(":")
        key, separator, value = pair.partition("=")
        if separator:
            headers.setdefault(key, value)
    return headers


def has_gpu() -> bool:
    """Tells whether this machine shows an NVIDIA GPU to this process."""
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


def _restrictions(config: TritonConfig, security: TritonSecurityConfig) -> list[str]:
    if not security.access_token:
        return []
    options = []
    for option, own in (
        ("--http-restricted-api", config.http_restricted_api),
        ("--grpc-restricted-protocol", config.grpc_restricted_protocol),
    ):
        # tritonserver refuses a group that is named twice, and what the user set for it goes first.
        taken = (own or "").partition(":")[0].split(",")
        groups = [group for group in security.restricted_endpoints or () if group not in taken]
        if groups:
            options.append(f"{option}={','.join(groups)}:{TRITON_ACCESS_HEADER}={security.access_token}")
    return options
