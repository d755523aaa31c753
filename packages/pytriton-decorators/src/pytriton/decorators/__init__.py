"""Decorators for inference callables, and what a callable can learn about its model and its requests."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from pytriton.decorators._batching import batch, get_inference_request_batch_size, sample
from pytriton.decorators._context import ModelConfigDict, TritonContext, get_model_config, get_triton_context
from pytriton.decorators._outputs import convert_output
from pytriton.decorators._requests import get_requests
from pytriton.decorators._types import (
    InferCallable,
    InferenceRequest,
    InferenceRequests,
    InferenceResult,
    InferenceResults,
    InputNames,
    RequestLike,
)

__all__ = [
    "InferCallable",
    "InferenceRequest",
    "InferenceRequests",
    "InferenceResult",
    "InferenceResults",
    "InputNames",
    "ModelConfigDict",
    "RequestLike",
    "TritonContext",
    "batch",
    "convert_output",
    "get_inference_request_batch_size",
    "get_model_config",
    "get_requests",
    "get_triton_context",
    "sample",
]
