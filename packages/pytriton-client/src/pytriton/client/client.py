"""The clients under the path that PyTriton gave to them."""

from __future__ import annotations

from ._base import DEFAULT_INFERENCE_TIMEOUT_S, DEFAULT_INIT_TIMEOUT_S, BaseModelClient
from ._sync import ModelClient

__all__ = ["DEFAULT_INFERENCE_TIMEOUT_S", "DEFAULT_INIT_TIMEOUT_S", "BaseModelClient", "ModelClient"]
