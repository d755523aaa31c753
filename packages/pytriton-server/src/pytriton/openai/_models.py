"""What a model is to callers of the OpenAI API, read from its configuration on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.management import parse_model_config

__all__ = ["CHAT_TEMPLATE", "ENDPOINTS", "ServedModel", "UnfitModelError", "read_model"]

CHAT_TEMPLATE = "chat_template"
"""The entry of `parameters` in the model's configuration that holds its chat template."""

ENDPOINTS = {
    "text": ("/v1/chat/completions", "/v1/completions"),
    "embedding": ("/v1/embeddings",),
}
"""Where models of each kind are asked."""

FINISH_REASON = "finish_reason"
COUNTS = ("prompt_tokens", "completion_tokens")


class UnfitModelError(ValueError):
    """A model that neither takes text nor gives text or vectors; its text says which of that."""


@dataclass(frozen=True)
class ServedModel:
    """A model that can be asked.

    Attributes:
        spec: Its tensors.
        kind: Whether it gives texts or vectors.
        prompt: The input for the text.
        output: The output that is given back.
        chat_template: Its chat template; None is the default one.
    """

    spec: ModelSpec
    kind: Literal["text", "embedding"]
    prompt: TensorSpec
    output: TensorSpec
    chat_template: str | None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where it is asked."""
        return ENDPOINTS[self.kind]

    @property
    def options(self) -> dict[str, TensorSpec]:
        """Its optional inputs by name, which take fields of requests."""
        return {tensor.name: tensor for tensor in self.spec.inputs if tensor is not self.prompt}

    @property
    def counts(self) -> tuple[str, ...]:
        """Its outputs that count tokens; all that its kind has to tell, or none."""
        wanted = COUNTS if self.kind == "text" else COUNTS[:1]
        names = {tensor.name for tensor in self.spec.outputs}
        return wanted if names.issuperset(wanted) else ()


def read_model(config: Mapping[str, Any]) -> ServedModel:
    """Return what a model is.

    Args:
        config: Its configuration, in the JSON of Triton.

    Raises:
        UnfitModelError: It is not for these endpoints.
        PyTritonClientError: The configuration cannot be read.
    """
    spec = parse_model_config(config, None)
    needed = [tensor for tensor in spec.inputs if not tensor.optional]
    if len(needed) != 1 or not _holds_one_text(needed[0]):
        raise UnfitModelError(
            f"expected one input that is not optional, of strings and with the shape (1,); it has {_describe(needed)}"
        )
    extra = [
        tensor
        for tensor in spec.outputs
        if not (tensor.name in COUNTS and np.issubdtype(tensor.dtype, np.integer))
        and not (tensor.name == FINISH_REASON and tensor.dtype is np.bytes_)
    ]
    parameters = config.get("parameters") or {}
    template = parameters.get(CHAT_TEMPLATE, {}).get("string_value")
    if len(extra) == 1 and extra[0].dtype is np.bytes_:
        return ServedModel(spec, "text", needed[0], extra[0], template)
    if len(extra) == 1 and np.issubdtype(extra[0].dtype, np.floating) and len(extra[0].shape) == 1:
        if spec.decoupled:
            raise UnfitModelError("it gives vectors and is decoupled: an embedding is one answer")
        return ServedModel(spec, "embedding", needed[0], extra[0], None)
    raise UnfitModelError(
        "expected one output of strings, or one of floats with one axis, beside finish_reason, prompt_tokens and "
        f"completion_tokens; it has {_describe(extra)}"
    )


def _holds_one_text(tensor: TensorSpec) -> bool:
    return tensor.dtype is np.bytes_ and tensor.shape in ((), (1,), (-1,))


def _describe(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{it.name}: {it.datatype}{list(it.shape)}" for it in tensors) or "none"
