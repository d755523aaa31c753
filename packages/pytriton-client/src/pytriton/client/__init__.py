"""Clients for models on an NVIDIA Triton Inference Server.

Importing this package is light: the libraries of a protocol are imported when the first client for it is made.
"""

from pytriton.client._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from ._asyncio import AsyncioDecoupledModelClient, AsyncioModelClient
from ._core.requests import ModelResult
from ._core.spec import ModelSpec, TensorSpec
from ._core.tls import TlsSettings
from ._futures import FuturesModelClient
from ._sync import DecoupledModelClient, ModelClient

__all__ = [
    "AsyncioDecoupledModelClient",
    "AsyncioModelClient",
    "DecoupledModelClient",
    "FuturesModelClient",
    "ModelClient",
    "ModelResult",
    "ModelSpec",
    "TensorSpec",
    "TlsSettings",
]
