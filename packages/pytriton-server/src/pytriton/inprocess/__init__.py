"""Triton inside the caller's own process: no network and no second process.

The names, defaults and semantics are those of Triton's in-process Python API, so that code written for it runs with
`from pytriton import inprocess as tritonserver`. Importing this loads no library: that is left to `Server.start()`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from pytriton.inprocess._name import as_tritonserver
from pytriton.inprocess.capi.enums import (
    DataType,
    DLDeviceType,
    InstanceGroupKind,
    LogFormat,
    LogLevel,
    MemoryType,
    MetricFormat,
    MetricKind,
    ModelBatchFlag,
    ModelControlMode,
    ModelTxnPropertyFlag,
    RateLimitMode,
    RequestFlag,
    TraceActivity,
    TraceLevel,
)
from pytriton.inprocess.capi.errors import (
    AlreadyBoundError,
    AlreadyExistsError,
    CancelledError,
    InternalError,
    InvalidArgumentError,
    ModelNotFoundError,
    NotBoundError,
    NotFoundError,
    OptionTypeError,
    RepositoryNotFoundError,
    TimedOutError,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from pytriton.inprocess.requests.inference import AsyncResponseIterator, ResponseIterator
from pytriton.inprocess.requests.model import Model, ModelDictionary
from pytriton.inprocess.requests.request import InferenceRequest
from pytriton.inprocess.requests.response import InferenceResponse
from pytriton.inprocess.requests.tracing import Trace, TraceEvent
from pytriton.inprocess.server.metrics import Metric, MetricFamily
from pytriton.inprocess.server.options import ModelLoadDeviceLimit, Options, RateLimiterResource
from pytriton.inprocess.server.server import Server
from pytriton.inprocess.tensors.memory import MemoryBuffer
from pytriton.inprocess.tensors.tensor import Tensor

__all__ = [
    "AlreadyBoundError",
    "AlreadyExistsError",
    "AsyncResponseIterator",
    "CancelledError",
    "DLDeviceType",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InstanceGroupKind",
    "InternalError",
    "InvalidArgumentError",
    "LogFormat",
    "LogLevel",
    "MemoryBuffer",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricFormat",
    "MetricKind",
    "Model",
    "ModelBatchFlag",
    "ModelControlMode",
    "ModelDictionary",
    "ModelLoadDeviceLimit",
    "ModelNotFoundError",
    "ModelTxnPropertyFlag",
    "NotBoundError",
    "NotFoundError",
    "OptionTypeError",
    "Options",
    "RateLimitMode",
    "RateLimiterResource",
    "RepositoryNotFoundError",
    "RequestFlag",
    "ResponseIterator",
    "Server",
    "Tensor",
    "TimedOutError",
    "Trace",
    "TraceActivity",
    "TraceEvent",
    "TraceLevel",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
    "as_tritonserver",
]

if _TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return `__version__`, the version of pytriton-server, whose look-up takes longer than the whole import."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        try:
            return metadata.version("pytriton-server")
        except metadata.PackageNotFoundError:
            return "UNKNOWN"
