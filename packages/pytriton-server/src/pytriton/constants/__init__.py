"""Constants of NVIDIA PyTriton that scripts of others import. Each read warns and says what takes its place.

`PYTRITON_HOME` is found when it is read, not when this module is imported.
"""

from __future__ import annotations

import warnings
from typing import Any

from pytriton.proxy_backend.system.home import default_home

__all__ = [
    "CREATE_TRITON_CLIENT_TIMEOUT_S",
    "DEFAULT_GRPC_PORT",
    "DEFAULT_HTTP_PORT",
    "DEFAULT_METRICS_PORT",
    "DEFAULT_TRITON_STARTUP_TIMEOUT_S",
    "PYTRITON_HOME",
    "TRITON_CONTEXT_FIELD_NAME",
    "TRITON_LOCAL_IP",
]

_ADVICE = "write the value itself, {value!r}"
_VALUES: dict[str, tuple[Any, str]] = {
    "CREATE_TRITON_CLIENT_TIMEOUT_S": (10, _ADVICE),
    "DEFAULT_GRPC_PORT": (8001, _ADVICE),
    "DEFAULT_HTTP_PORT": (8000, _ADVICE),
    "DEFAULT_METRICS_PORT": (8002, _ADVICE),
    "DEFAULT_TRITON_STARTUP_TIMEOUT_S": (120, _ADVICE),
    "TRITON_CONTEXT_FIELD_NAME": ("triton_context", "use the decorator pytriton.decorators.triton_context"),
    "TRITON_LOCAL_IP": ("127.0.0.1", _ADVICE),
}


def __getattr__(name: str) -> Any:
    if name == "PYTRITON_HOME":
        value, advice = default_home(), "set the environment variable PYTRITON_HOME, or pass Triton(workspace=...)"
    elif name in _VALUES:
        value, advice = _VALUES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"pytriton.constants.{name} is kept for scripts written for NVIDIA PyTriton; {advice.format(value=value)}.",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
