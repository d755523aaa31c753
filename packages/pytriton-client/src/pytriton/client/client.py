"""The clients under the path that PyTriton gave to them."""

from __future__ import annotations

from ._asyncio import AsyncioDecoupledModelClient, AsyncioModelClient
from ._base import DEFAULT_INFERENCE_TIMEOUT_S, DEFAULT_INIT_TIMEOUT_S, BaseModelClient
from ._futures import FuturesModelClient
from ._sync import DecoupledModelClient, ModelClient

__all__ = [
    "DEFAULT_INFERENCE_TIMEOUT_S",
    "DEFAULT_INIT_TIMEOUT_S",
    "AsyncioDecoupledModelClient",
    "AsyncioModelClient",
    "BaseModelClient",
    "DecoupledModelClient",
    "FuturesModelClient",
    "ModelClient",
]
