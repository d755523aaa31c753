"""The bodies of requests, and what of them a model gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pytriton.openai._errors import OpenAIError
from pytriton.openai._models import ServedModel

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "Generating",
    "encode_text",
    "inputs_and_parameters",
    "make_tensor",
    "unsupported",
]

_logger = logging.getLogger(__name__)

MOST_CHOICES = 128
"""How many choices one request may ask for."""
MOST_STOPS = 16

# What a model takes as an optional input of the name, and else as a parameter of its request.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
# They say nothing about the answer.
_IGNORED = frozenset(
    (
        *("user", "metadata", "safety_identifier", "parallel_tool_calls", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
)
# What would be another answer is refused where a model does not declare it; but not with one of these values, beside
# null, with which a field asks for nothing that is not done anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
# Fields that nobody knows are named in the log, once each, so many at most: callers make names up.
_MOST_NAMED = 100
_named: set[str] = set()
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")

Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Body(BaseModel):
    # Of fields that are not known, `inputs_and_parameters` decides.
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str


class Generating(_Body):
    """What requests for chats and for completions have in common."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer.

        Raises:
            OpenAIError: There are too many, or an empty one.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or "" in stops:
            raise OpenAIError(
                400,
                f"stop: expected at most {MOST_STOPS} texts, none of them empty; got {stops!r:.200}.",
                param="stop",
                code="invalid_value",
            )
        return stops

    @property
    def tells_usage(self) -> bool:
        """Whether a stream is to end with the counts of tokens.

        Raises:
            OpenAIError: It has options for a stream that are not known, or that there is no stream for.
        """
        told = self.stream_options or {}
        wrong = sorted(name for name, value in told.items() if name not in _STREAM_OPTIONS or type(value) is not bool)
        if wrong:
            problem = f"expected true or false for {' and '.join(_STREAM_OPTIONS)}; got {told!r:.200}"
        elif told.get("include_obfuscation"):
            problem = "include_obfuscation is not supported by this server: leave it out, or say false"
        elif told and not self.stream:
            problem = 'is for streams alone: leave it out, or ask with "stream": true'
        else:
            return bool(told.get("include_usage"))
        raise OpenAIError(400, f"stream_options: {problem}.", param="stream_options", code="invalid_value")


class ChatRequest(Generating):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(Generating):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]

    @property
    def prompts(self) -> list[str]:
        """The texts to be continued.

        Raises:
            OpenAIError: It has tokens in place of texts, none, or too many.
        """
        return _texts(self.prompt, "prompt", MOST_CHOICES)


class EmbeddingRequest(_Body):
    """The body of `POST /v1/embeddings`."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def texts(self) -> list[str]:
        """The texts.

        Raises:
            OpenAIError: It has tokens in place of texts, none, or too many.
        """
        return _texts(self.input, "input", 2048)


def encode_text(text: str, param: str) -> bytes:
    """Return a text as a model gets it.

    Raises:
        OpenAIError: It has halves of surrogate pairs, which JSON can say and UTF-8 cannot.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise OpenAIError(
            400, f"{param}: expected text that UTF-8 can encode; {error}.", param=param, code="invalid_value"
        ) from None


def inputs_and_parameters(
    body: Generating | EmbeddingRequest, model: ServedModel, *, strict: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optional inputs that a request gives a model, and the parameters.

    Args:
        body: The request.
        model: Who is asked.
        strict: Whether fields that are not known are refused.

    Raises:
        OpenAIError: The request asks for what neither the model nor these endpoints have.
    """
    values = {name: getattr(body, name, None) for name in _SAMPLING}
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    options = model.options
    for name, value in (body.model_extra or {}).items():
        if name in options:
            values[name] = value
        elif name in _IGNORED or _asks_for_nothing(name, value):
            continue
        elif name in _REFUSED or strict:
            raise unsupported(name, body.model, options)
        elif name not in _named and len(_named) < _MOST_NAMED:
            _named.add(name)
            _logger.warning("The field %.60r of a request has no effect: model %r does not know it", name, body.model)
    given = {name: value for name, value in values.items() if value is not None}
    inputs = {name: make_tensor(name, value, model) for name, value in given.items() if name in options}
    return inputs, {name: value for name, value in given.items() if name not in options}


def unsupported(name: str, model: str, options: Collection[str], advice: str = "") -> OpenAIError:
    """Return the error for a field that a model does not take.

    Args:
        name: The field.
        model: The model.
        options: The names of its optional inputs.
        advice: What it would have to have.
    """
    takes = ", ".join(sorted(options))
    return OpenAIError(
        400,
        f"{name}: not supported by model {model!r}, nor by this server. {advice}Leave it out"
        + (f"; beside the usual ones the model takes {takes}." if takes else "."),
        param=name,
        code="unsupported_parameter",
    )


def _asks_for_nothing(name: str, value: Any) -> bool:
    # Equal in Python are 0 and False as well, which are different wishes: `logprobs` of a completion may be 0.
    return value is None or any(value == it and type(value) is type(it) for it in _REFUSED.get(name, ()))


def make_tensor(name: str, value: Any, model: ServedModel) -> npt.NDArray[Any]:
    """Return the array of an optional input; what a text cannot be is one of JSON.

    Raises:
        OpenAIError: The value is not of its type.
    """
    spec = model.options[name]
    dtype: Any = spec.dtype  # of one kind or another, which is looked at below
    is_text = spec.dtype is np.bytes_
    if is_text and (isinstance(value, dict) or (isinstance(value, list) and any(isinstance(it, dict) for it in value))):
        value = json.dumps(value, ensure_ascii=False)
    elements = value if isinstance(value, list) else [value]
    kinds: tuple[type, ...] = (str,) if is_text else (bool,) if spec.dtype is np.bool_ else (int, float)
    fits = all(isinstance(it, kinds) and (bool in kinds or not isinstance(it, bool)) for it in elements)
    if fits and np.issubdtype(spec.dtype, np.integer):
        limits = np.iinfo(dtype)
        fits = all(isinstance(it, int) and limits.min <= it <= limits.max for it in elements)
    elif fits and np.issubdtype(spec.dtype, np.floating):
        fits = all(abs(it) <= float(np.finfo(dtype).max) for it in elements)
    array = np.array([])
    if fits and elements:
        values = [encode_text(it, name) for it in elements] if is_text else elements
        array = np.array(values, object if is_text else spec.dtype)
        array = array if isinstance(value, list) else array.reshape((1,) * len(spec.shape))
        fits = len(spec.shape) == array.ndim and all(
            wanted in (-1, length) for wanted, length in zip(spec.shape, array.shape, strict=True)
        )
    if not fits or not elements:
        raise OpenAIError(
            400,
            f"{name}: expected {spec.datatype} of the shape {list(spec.shape)}, as model {model.spec.model_name!r} "
            f"declares it; got {value!r:.100}.",
            param=name,
            code="invalid_value",
        )
    return array


def _texts(given: str | Sequence[Any], param: str, most: int) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or len(texts) > most:
        problem = f"{len(texts)} of them"
    elif not all(isinstance(it, str) for it in texts):
        problem = "tokens, which the server cannot tell a model: send the text"
    elif "" in texts:
        problem = "an empty text" if param == "input" else ""
    else:
        problem = ""
    if problem:
        raise OpenAIError(
            400,
            f"{param}: expected a text, or a list of 1 to {most}; got {problem}.",
            param=param,
            code="invalid_value",
        )
    return texts
