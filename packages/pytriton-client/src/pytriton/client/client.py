"""The clients under the path that PyTriton gave to them."""

from __future__ import annotations

from ._asyncio import AsyncioModelClient
from ._asyncio_decoupled import AsyncioDecoupledModelClient
from ._base import DEFAULT_INFERENCE_TIMEOUT_S, DEFAULT_INIT_TIMEOUT_S, BaseModelClient
from ._futures import FuturesModelClient
from ._sync import ModelClient
from ._sync_decoupled import DecoupledModelClient

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
