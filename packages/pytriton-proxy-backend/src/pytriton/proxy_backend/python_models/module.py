"""The modules that a `model.py` imports: `triton_python_backend_utils`, and `c_python_backend_utils` beneath it."""

from __future__ import annotations

import os
import sys
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from . import config, metrics, tensors
from .bls import ResponseIterator
from .errors import TritonError, TritonModelException
from .logger import Logger
from .requests import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from .responses import InferenceResponse
from .senders import COMPLETE_FINAL, InferenceResponseSender

_IMPORTABLE = os.path.join(os.path.dirname(__file__), "importable")
_CLASSES: dict[str, Any] = {
    "InferenceRequest": InferenceRequest,
    "InferenceResponse": InferenceResponse,
    "Logger": Logger,
    "MetricFamily": metrics.MetricFamily,
    "PreferredMemory": PreferredMemory,
    "TRITONSERVER_MEMORY_CPU": MemoryType.TRITONSERVER_MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": MemoryType.TRITONSERVER_MEMORY_GPU,
    "Tensor": tensors.Tensor,
    "TritonError": TritonError,
    "TritonModelException": TritonModelException,
    "is_model_ready": metrics.is_model_ready,
    "load_model": metrics.load_model,
    "unload_model": metrics.unload_model,
}
_UTILS: dict[str, Any] = {
    **{
        name: getattr(config, name)
        for name in (
            "ModelConfig", "TRITON_STRING_TO_NUMPY", "get_input_config_by_name", "get_output_config_by_name",
            "numpy_to_triton_type", "triton_string_to_numpy", "triton_to_numpy_type",
            "using_decoupled_model_transaction_policy",
        )
    },
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": 2,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": 1,
    "TRITONSERVER_REQUEST_RELEASE_ALL": RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": COMPLETE_FINAL,
    "deserialize_bytes_tensor": tensors.deserialize_bytes_tensor,
    "serialize_byte_tensor": tensors.serialize_byte_tensor,
}  # fmt: skip


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> tensors.Tensor | None:
    """Return the input of a request that has a name; `None` if it has none."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> tensors.Tensor | None:
    """Return the output of a response that has a name; `None` if it has none."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def _no_model_dir() -> str:
    raise TritonModelException("the folder of the model is known in the process that hosts it alone")


def install(model_dir: str | None = None) -> ModuleType:
    """Install the modules for a model in this process; processes that it spawns find them on their path.

    `model_dir` is what `get_model_dir` returns.
    """
    compiled = ModuleType("c_python_backend_utils", "What Triton's stub has compiled; here it is Python.")
    vars(compiled).update(
        _CLASSES,
        InferenceResponseSender=InferenceResponseSender,
        InferenceTrace=InferenceTrace,
        MemoryType=MemoryType,
        Metric=metrics.Metric,
        MetricKind=metrics.MetricKind,
        ResponseIterator=ResponseIterator,
    )
    utils = ModuleType("triton_python_backend_utils", "What a model of Triton's Python backend works with.")
    vars(utils).update(
        _CLASSES,
        **_UTILS,
        get_input_tensor_by_name=get_input_tensor_by_name,
        get_output_tensor_by_name=get_output_tensor_by_name,
        get_model_dir=_no_model_dir if model_dir is None else lambda: model_dir,
    )
    for value in vars(compiled).values():
        if isinstance(value, type):
            # Texts of errors, and pickle, show this name.
            value.__module__ = compiled.__name__
    for module in (compiled, utils):
        file = os.path.join(_IMPORTABLE, f"{module.__name__}.py")
        module.__spec__ = spec_from_file_location(module.__name__, file)
        module.__file__ = file
        sys.modules[module.__name__] = module
    if _IMPORTABLE not in sys.path:
        sys.path.append(_IMPORTABLE)
    return utils
