"""What a model is to callers of the OpenAI API, read from its configuration on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.management import parse_model_config
from pytriton.openai._templates import ChatTemplate
from pytriton.openai._tool_calls import TOOL_PARSERS

__all__ = ["CHAT_TEMPLATE", "ENDPOINTS", "ServedModel", "UnfitModelError", "read_model"]

CHAT_TEMPLATE = "chat_template"
"""The entry of `parameters` in the model's configuration that holds its chat template."""
TOKENIZER_CONFIG = "tokenizer_config"
"""The entry with the content of a `tokenizer_config.json`, for the template and for the tokens that it names."""
TOOL_PARSER = "tool_parser"
"""The entry that says how the model writes calls of tools into its text."""

ENDPOINTS = {
    "text": ("/v1/chat/completions", "/v1/completions"),
    "embedding": ("/v1/embeddings",),
}
"""Where models of each kind are asked."""

FINISH_REASON = "finish_reason"
COUNTS = ("prompt_tokens", "completion_tokens")
TOOL_CALLS, REASONING, REFUSAL, LOGPROBS = "tool_calls", "reasoning_content", "refusal", "logprobs"
_TEXTS_BESIDE = (FINISH_REASON, TOOL_CALLS, REASONING, REFUSAL, LOGPROBS)


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
        chat_template: Its chat template.
        tool_parser: How its text is read for calls of tools; None where it is not.
    """

    spec: ModelSpec
    kind: Literal["text", "embedding"]
    prompt: TensorSpec
    output: TensorSpec
    chat_template: ChatTemplate
    tool_parser: str | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where it is asked."""
        return ENDPOINTS[self.kind]

    @property
    def options(self) -> dict[str, TensorSpec]:
        """Its optional inputs by name, which take fields of requests."""
        return {tensor.name: tensor for tensor in self.spec.inputs if tensor is not self.prompt}

    @property
    def output_names(self) -> frozenset[str]:
        """The names of all of its outputs."""
        return frozenset(tensor.name for tensor in self.spec.outputs)

    @property
    def takes_tools(self) -> bool:
        """Whether tools reach it, and its calls of them the caller."""
        is_told = "tools" in self.options or self.chat_template.shows("tools")
        return is_told and (TOOL_CALLS in self.output_names or self.tool_parser is not None)

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
        and not (tensor.name in _TEXTS_BESIDE and tensor.dtype is np.bytes_)
    ]
    parameters = {name: value.get("string_value") for name, value in (config.get("parameters") or {}).items()}
    try:
        template = ChatTemplate.read(parameters.get(CHAT_TEMPLATE), parameters.get(TOKENIZER_CONFIG))
    except ValueError as error:
        raise UnfitModelError(str(error)) from error
    if len(extra) == 1 and extra[0].dtype is np.bytes_:
        parser = parameters.get(TOOL_PARSER)
        if parser is not None and parser not in TOOL_PARSERS:
            raise UnfitModelError(f"its {TOOL_PARSER} is {parser!r}: expected one of {', '.join(TOOL_PARSERS)}")
        return ServedModel(spec, "text", needed[0], extra[0], template, parser)
    if len(extra) == 1 and np.issubdtype(extra[0].dtype, np.floating) and len(extra[0].shape) == 1:
        if spec.decoupled:
            raise UnfitModelError("it gives vectors and is decoupled: an embedding is one answer")
        return ServedModel(spec, "embedding", needed[0], extra[0], template)
    raise UnfitModelError(
        f"expected one output of strings, or one of floats with one axis, beside {', '.join(_TEXTS_BESIDE + COUNTS)}; "
        f"it has {_describe(extra)}"
    )


def _holds_one_text(tensor: TensorSpec) -> bool:
    return tensor.dtype is np.bytes_ and tensor.shape in ((), (1,), (-1,))


def _describe(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{it.name}: {it.datatype}{list(it.shape)}" for it in tensors) or "none"
