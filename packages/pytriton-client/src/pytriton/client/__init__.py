"""Clients for models on an NVIDIA Triton Inference Server.

Importing this package is light: the libraries of a protocol are imported when the first client for it is made.
"""

from __future__ import annotations

from ._spec import ModelSpec, TensorSpec
from ._sync import ModelClient

__all__ = ["ModelClient", "ModelSpec", "TensorSpec"]
