"""What a model is to callers of the OpenAI API, read from its configuration on the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.management import parse_model_config
from pytriton.openai._formats.tool_calls import TOOL_PARSERS
from pytriton.openai._templates import ChatTemplate
from pytriton.openai._tokens.tokenizer import Tokenizer, read_tokenizer

CHAT_TEMPLATE = "chat_template"
"""The entry of `parameters` in the model's configuration that holds its chat template."""
TOKENIZER_CONFIG = "tokenizer_config"
"""The entry with the content of a `tokenizer_config.json`, for the template and for the tokens that it names."""
TOKENIZER = "tokenizer"
"""The entry with the path of a `tokenizer.json`, or of its folder."""
TOOL_PARSER = "tool_parser"
"""The parameter that says how the model writes calls of tools into its text."""

ENDPOINTS = {
    "text": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "embedding": ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score"),
    "score": ("/v1/rerank", "/v2/rerank", "/v1/score"),
    "speech": ("/v1/audio/transcriptions",),
}
"""The endpoints of each kind of model."""

NOUNS = {"text": "texts", "embedding": "vectors", "score": "scores of pairs of texts", "speech": "transcriptions"}
"""The noun for the outputs of each kind."""

FINISH_REASON = "finish_reason"
COUNTS = ("prompt_tokens", "completion_tokens")
TOOL_CALLS, REASONING, REFUSAL, LOGPROBS = "tool_calls", "reasoning_content", "refusal", "logprobs"
SPOKEN = ("segments", "words", "language", "duration")
"""Outputs of a model that takes audio besides the text."""
_AUDIO = ("audio", "file")
_TEXTS_BESIDE = (FINISH_REASON, TOOL_CALLS, REASONING, REFUSAL, LOGPROBS)


class UnfitModelError(ValueError):
    """The endpoints cannot serve this model, because of its inputs or outputs; the text says which."""


@dataclass(frozen=True)
class EndpointModel:
    """A model that can be asked."""

    spec: ModelSpec  # its tensors
    # Whether the model returns texts, vectors, scores of pairs of texts, or the text of audio.
    kind: Literal["text", "embedding", "score", "speech"]
    prompt: TensorSpec  # the input for the text, or for the audio; of pairs for the query
    output: TensorSpec  # the output that is given back
    chat_template: ChatTemplate
    tool_parser: str | None = None  # how its text is read for calls of tools; None where it is not
    tokenizer: Tokenizer | None = None  # what it declares; None where it declares none
    # How many tokens the model takes at once, from its tokenizer's configuration; None if that has no limit.
    most_tokens: int | None = None
    document: TensorSpec | None = None  # of pairs the input for the text that is compared with the query

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that serve it."""
        return ENDPOINTS[self.kind]

    @property
    def options(self) -> dict[str, TensorSpec]:
        """Its optional inputs by name, which take fields of requests."""
        return {tensor.name: tensor for tensor in self.spec.inputs if tensor not in self.texts}

    @property
    def texts(self) -> tuple[TensorSpec, ...]:
        """Its inputs for texts, which are not optional."""
        return (self.prompt,) if self.document is None else (self.prompt, self.document)

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
        """Its outputs that count tokens."""
        return tuple(name for name in COUNTS if name in self.output_names)


def read_model(config: Mapping[str, Any]) -> EndpointModel:
    """Read from a configuration how the endpoints serve a model."""
    spec = parse_model_config(config, None)
    needed = [tensor for tensor in spec.inputs if not tensor.optional]
    if len(needed) not in (1, 2) or not all(map(_holds_one_text, needed)):
        raise UnfitModelError(
            "expected one input that is not optional, of strings and with the shape (1,), or two of them for a query "
            f"and a document; it has {_describe(needed)}"
        )
    is_speech = len(needed) == 1 and needed[0].name in _AUDIO
    extra = [
        tensor
        for tensor in spec.outputs
        if not (is_speech and tensor.name in SPOKEN)
        and not (tensor.name in COUNTS and np.issubdtype(tensor.dtype, np.integer))
        and not (tensor.name in _TEXTS_BESIDE and tensor.dtype is np.bytes_)
    ]
    parameters = {name: value.get("string_value") for name, value in (config.get("parameters") or {}).items()}
    tokenizer_config = parameters.get(TOKENIZER_CONFIG)
    try:
        template = ChatTemplate.read(parameters.get(CHAT_TEMPLATE), tokenizer_config)
        path = parameters.get(TOKENIZER)
        tokens = (None if path is None else read_tokenizer(path), _most_tokens(tokenizer_config))
    except ValueError as error:
        raise UnfitModelError(str(error)) from error
    if len(needed) == 2:
        return _read_scoring(spec, needed, extra, template, tokens)
    if len(extra) == 1 and extra[0].dtype is np.bytes_:
        parser = parameters.get(TOOL_PARSER)
        if parser is not None and parser not in TOOL_PARSERS:
            raise UnfitModelError(f"its {TOOL_PARSER} is {parser!r}: expected one of {', '.join(TOOL_PARSERS)}")
        return EndpointModel(spec, "speech" if is_speech else "text", needed[0], extra[0], template, parser, *tokens)
    if len(extra) == 1 and np.issubdtype(extra[0].dtype, np.floating) and len(extra[0].shape) == 1:
        if spec.decoupled:
            raise UnfitModelError("it gives vectors and is decoupled: an embedding is one answer")
        return EndpointModel(spec, "embedding", needed[0], extra[0], template, None, *tokens)
    raise UnfitModelError(
        f"expected one output of strings, or one of floats with one axis, beside {', '.join(_TEXTS_BESIDE + COUNTS)}; "
        f"it has {_describe(extra)}"
    )


def _read_scoring(
    spec: ModelSpec,
    needed: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    template: ChatTemplate,
    tokens: tuple[Tokenizer | None, int | None],
) -> EndpointModel:
    """Return a model that compares two texts."""
    is_score = len(outputs) == 1 and np.issubdtype(outputs[0].dtype, np.floating) and outputs[0].shape in ((), (1,))
    if not is_score or spec.decoupled:
        raise UnfitModelError(
            "with two inputs of strings, a query and a document, expected one output of floats with the shape (1,), "
            f"not decoupled; it has {_describe(outputs)}"
        )
    # The inputs keep their order, except that one named "document" comes last.
    query, document = sorted(needed, key=lambda tensor: tensor.name == "document")
    return EndpointModel(spec, "score", query, outputs[0], template, None, *tokens, document)


def _most_tokens(tokenizer_config: str | None) -> int | None:
    told = json.loads(tokenizer_config).get("model_max_length") if tokenizer_config is not None else None
    # If the limit is unknown, `transformers` writes a number that no text reaches.
    return int(told) if isinstance(told, (int, float)) and 0 < told < 2**31 else None


def _holds_one_text(tensor: TensorSpec) -> bool:
    return tensor.dtype is np.bytes_ and tensor.shape in ((), (1,), (-1,))


def _describe(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{it.name}: {it.datatype}{list(it.shape)}" for it in tensors) or "none"
