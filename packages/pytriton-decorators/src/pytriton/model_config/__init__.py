"""Descriptions of a model: its tensors, and how Triton serves it."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from pytriton.model_config.common import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction
from pytriton.model_config.cost import Cost
from pytriton.model_config.model_config import ModelConfig
from pytriton.model_config.tensor import Tensor

__all__ = ["Cost", "DeviceKind", "DynamicBatcher", "ModelConfig", "QueuePolicy", "Tensor", "TimeoutAction"]
