"""Bind a Python function, get an NVIDIA Triton Inference Server endpoint."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from typing import TYPE_CHECKING, Any

from pytriton.decorators import TritonContext
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.errors import (
    PortInUseError,
    TritonModelLoadError,
    TritonServerError,
    TritonServerExitedError,
    TritonServerStartError,
    TritonServerTimeoutError,
    WorkspaceError,
)
from pytriton.server.lifecycle.policies import (
    DefaultTritonLifecyclePolicy,
    RestartPolicy,
    TritonLifecyclePolicy,
    VertextAILifecyclePolicy,
)
from pytriton.server.models.process_workers import ProcessWorker, TritonWorkerError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import (
    DEFAULT_PROTECTED_ENDPOINTS,
    TRITON_ACCESS_HEADER,
    VALID_TRITON_ENDPOINTS,
    TritonSecurityConfig,
)
from pytriton.server.tritonserver.binary import TritonServerNotFoundError
from pytriton.server.tritonserver.guard import GuardConfig
from pytriton.server.workspace import Workspace
from pytriton.triton._base import MONITORING_PERIOD_S, WAIT_FORM_MODEL_TIMEOUT_S, TritonBase
from pytriton.triton._beside import run_beside
from pytriton.triton._constants import (
    GROWTH_BACKEND_SHM_SIZE,
    INITIAL_BACKEND_SHM_SIZE,
    MODEL_CONFIG_URL,
    MODEL_INFER_URL,
    MODEL_READY_URL,
    MODEL_URL,
    TRITONSERVER_DIST_DIR,
)
from pytriton.triton._description import ModelDescription, TritonDescription
from pytriton.triton._remote import RemoteTriton
from pytriton.triton._triton import Triton, running

if TYPE_CHECKING:
    from pytriton.client import ModelClient

__all__ = [
    "DEFAULT_PROTECTED_ENDPOINTS",
    "GROWTH_BACKEND_SHM_SIZE",
    "INITIAL_BACKEND_SHM_SIZE",
    "MODEL_CONFIG_URL",
    "MODEL_INFER_URL",
    "MODEL_READY_URL",
    "MODEL_URL",
    "MONITORING_PERIOD_S",
    "TRITONSERVER_DIST_DIR",
    "TRITON_ACCESS_HEADER",
    "VALID_TRITON_ENDPOINTS",
    "WAIT_FORM_MODEL_TIMEOUT_S",
    "DefaultTritonLifecyclePolicy",
    "GuardConfig",
    "ModelClient",
    "ModelConfig",
    "ModelDescription",
    "PortInUseError",
    "ProcessWorker",
    "RemoteTriton",
    "RestartPolicy",
    "Tensor",
    "Triton",
    "TritonBase",
    "TritonConfig",
    "TritonContext",
    "TritonDescription",
    "TritonLifecyclePolicy",
    "TritonModelLoadError",
    "TritonSecurityConfig",
    "TritonServerError",
    "TritonServerExitedError",
    "TritonServerNotFoundError",
    "TritonServerStartError",
    "TritonServerTimeoutError",
    "TritonWorkerError",
    "VertextAILifecyclePolicy",
    "Workspace",
    "WorkspaceError",
    "run_beside",
    "running",
]


def __getattr__(name: str) -> Any:
    # Old scripts import ModelClient from here. Importing it takes longer than starting a server, because it imports
    # gevent and gRPC.
    if name == "ModelClient":
        from pytriton.client import ModelClient

        return ModelClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
