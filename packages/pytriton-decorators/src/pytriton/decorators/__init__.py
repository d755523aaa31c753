"""Decorators for inference callables, and what a callable can learn about its model and its requests."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from pytriton.decorators._batching import batch, sample
from pytriton.decorators._calls.context import ModelConfigDict, TritonContext, get_model_config, get_triton_context
from pytriton.decorators._calls.inputs import get_inference_request_batch_size
from pytriton.decorators._calls.outputs import convert_output
from pytriton.decorators._calls.requests import get_requests, get_row_requests
from pytriton.decorators._calls.types import (
    InferCallable,
    InferenceRequest,
    InferenceRequests,
    InferenceResult,
    InferenceResults,
    InputNames,
    RequestLike,
)
from pytriton.decorators._context_argument import triton_context
from pytriton.decorators._first_value import first_value
from pytriton.decorators._grouping import group_by_keys, group_by_values
from pytriton.decorators._hints.hints import Shape
from pytriton.decorators._hints.model import ModelOptions, get_model_signature, model
from pytriton.decorators._hints.signatures import ModelSignature
from pytriton.decorators._optionals import fill_optionals
from pytriton.decorators._padding import ConstantPadder, pad_batch

__all__ = [
    "ConstantPadder",
    "InferCallable",
    "InferenceRequest",
    "InferenceRequests",
    "InferenceResult",
    "InferenceResults",
    "InputNames",
    "ModelConfigDict",
    "ModelOptions",
    "ModelSignature",
    "RequestLike",
    "Shape",
    "TritonContext",
    "batch",
    "convert_output",
    "fill_optionals",
    "first_value",
    "get_inference_request_batch_size",
    "get_model_config",
    "get_model_signature",
    "get_requests",
    "get_row_requests",
    "get_triton_context",
    "group_by_keys",
    "group_by_values",
    "model",
    "pad_batch",
    "sample",
    "triton_context",
]
