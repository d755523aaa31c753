"""The bodies of requests, and what of them a model gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.strict_json import depth_of
from pytriton.openai._models import EndpointModel

_logger = logging.getLogger(__name__)

MOST_CHOICES = 128
"""How many choices one request may ask for."""
MOST_LEVELS = 128
"""How deep the JSON of a request may be."""
MOST_TEXTS = 2048
"""How many texts one request may ask vectors for."""
MOST_STOPS = 16
MOST_STOP_LENGTH = 1000

# The model gets these as optional inputs of the same name, otherwise as parameters.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
# These fields do not change the answer.
_IGNORED = frozenset(
    (
        *("user", "metadata", "safety_identifier", "parallel_tool_calls", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
)
# These fields would change the answer, so they are refused unless the model declares them. The listed values, and empty
# ones, ask only for what is done anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "logit_bias": (),
    "logprobs": (),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "stream": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (),
    "web_search_options": (),
}
# These fields ask for something even if they are empty: for the chosen token, or a default search.
_ASKING = (("logprobs", int), ("web_search_options", dict))
# Each unknown field is logged once, up to this many, because callers may invent names.
_MOST_NAMED = 100
_named: set[str] = set()
# These fields are for chats alone: the answer to a prompt has no place for what they ask for.
_OF_CHATS = ("logprobs", "top_logprobs", "tools", "tool_choice")
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

Penalty = Annotated[float, Field(ge=-2, le=2)]
# Validation stops at the first element that does not fit, because an error for each element would take many times the
# memory of the body.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Body(BaseModel):
    """A request for a model."""

    # `inputs_and_parameters` decides about unknown fields.
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    # The model gets these fields if it declares inputs for them; the endpoints do what they ask for anyway.
    told: ClassVar[tuple[str, ...]] = ("model",)
    # The model gets these as parameters if it declares no inputs for them.
    hints: ClassVar[tuple[str, ...]] = ()

    model: str

    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, given: Any) -> Any:
        # Recursive readers would fail on deeper values.
        if depth_of(given) > MOST_LEVELS:
            raise PydanticCustomError("too_deep", "Expected at most {most} levels of JSON", {"most": MOST_LEVELS})
        return given


class Generating(Body):
    """The common fields of requests for chats and for completions."""

    told: ClassVar[tuple[str, ...]] = ("model", "stream", "stream_options", "n", "stop")

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | Texts | None = None
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
        """The texts that end an answer."""
        stops = ([self.stop] if isinstance(self.stop, str) else self.stop) if self.stop else []
        if len(stops) > MOST_STOPS or not all(0 < len(stop) <= MOST_STOP_LENGTH for stop in stops):
            raise OpenAIError(
                400,
                f"stop: expected at most {MOST_STOPS} texts of 1 to {MOST_STOP_LENGTH} characters; got {stops!r:.200}.",
                param="stop",
                code="invalid_value",
            )
        return stops

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        told = {name: value for name, value in (self.stream_options or {}).items() if value not in (None, False)}
        if any(name not in _STREAM_OPTIONS or value is not True for name, value in told.items()):
            problem = f"expected true or false for {', '.join(_STREAM_OPTIONS)}; got {told!r:.200}"
        elif told.get("include_obfuscation"):
            problem = "include_obfuscation is not supported by this server: leave it out, or say false"
        elif told and not self.stream:
            problem = 'is for streams alone: leave it out, or ask with "stream": true'
        else:
            return bool(told.get("include_usage"))
        raise OpenAIError(400, f"stream_options: {problem}.", param="stream_options", code="invalid_value")

    @property
    def tells_usage_always(self) -> bool:
        """Whether each event of a stream has the counts so far."""
        return self.tells_usage and bool((self.stream_options or {}).get("continuous_usage_stats"))


class ChatRequest(Generating):
    """The body of `POST /v1/chat/completions`."""

    told = (*Generating.told, "max_completion_tokens", "chat_template_kwargs")

    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    documents: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(Generating):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]


class EmbeddingRequest(Body):
    """The body of `POST /v1/embeddings`."""

    told = ("model", "encoding_format", "dimensions")

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class RerankRequest(Body):
    """The body of `POST /v1/rerank` (Jina's API) and of `POST /v2/rerank` (Cohere's)."""

    query: str
    documents: list[Any]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None


class ScoreRequest(Body):
    """The body of `POST /v1/score`: two sides, by their names of before or of now."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[list[str], list[str]]]:
        """The names of the two sides, and the texts of each."""
        names = ("text_1", "text_2") if self.queries is None else ("queries", "documents")
        given = [getattr(self, name) for name in names]
        if None in given:
            name = names[given.index(None)]
            raise OpenAIError(400, f"{name}: expected a text, or a list of texts.", param=name, code="invalid_value")
        first, second = ([side] if isinstance(side, str) else list(side) for side in given)
        return names, (first, second)


class TranscriptionRequest(Body):
    """The fields of the form of `POST /v1/audio/transcriptions`, beside the file."""

    # The fields of a form are texts.
    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())
    told = ("model", "stream", "response_format", "timestamp_granularities", "include")
    hints = ("language", "prompt")

    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    timestamp_granularities: Texts | None = None
    include: Texts | None = None
    stream: bool | None = None


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a prompt, or messages of a chat."""

    model: str | None = None  # type: ignore[assignment] # where there is one alone
    prompt: str | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None  # type: ignore[assignment] # where there is one alone
    tokens: Tokens


def encode_text(text: str, param: str) -> bytes:
    """Return a text as a model gets it."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise OpenAIError(
            400, f"{param}: expected text that UTF-8 can encode; {error}.", param=param, code="invalid_value"
        ) from None


def inputs_and_parameters(
    body: Body, model: EndpointModel, *, strict: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optional inputs that a request gives a model, and the parameters."""
    options = model.options
    values = {name: getattr(body, name, None) for name in (*_SAMPLING, *body.hints)}
    told = {name: getattr(body, name, None) for name in body.told if name in options}
    values |= {name: value for name, value in told.items() if value not in ("", [])}
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    for name, value in (body.model_extra or {}).items():
        if isinstance(body, CompletionRequest) and name in _OF_CHATS and not _asks_for_nothing(name, value):
            raise unsupported(name, body.model, (), "It is for /v1/chat/completions. ")
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
    """Return the error for a field that a model does not take."""
    takes = ", ".join(sorted(options))
    return OpenAIError(
        400,
        f"{name}: not supported by model {model!r}, nor by this server. {advice}Leave it out"
        + (f"; beside the usual ones the model takes {takes}." if takes else "."),
        param=name,
        code="unsupported_parameter",
    )


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name not in _REFUSED:
        return False
    # 0 and False are equal in Python, but different wishes.
    is_empty = not value and (name, type(value)) not in _ASKING
    return is_empty or any(value == it and type(value) is type(it) for it in _REFUSED[name])


def make_tensor(name: str, value: Any, model: EndpointModel) -> npt.NDArray[Any]:
    """Return the array of an optional input; elements that are not text are given in JSON."""
    spec = model.options[name]
    dtype: Any = spec.dtype  # either kind is checked below
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


def read_texts(given: str | Sequence[Any], param: str, most: int, model: EndpointModel) -> list[str]:
    """Return the texts of a prompt or an input, each a text or a list of tokens."""
    each: list[Any] = [given] if isinstance(given, str) or _are_tokens(given) else list(given)
    problem = ""
    if not each or len(each) > most:
        problem = f"{len(each)} of them"
    elif wrong := [it for it in each if not (isinstance(it, str) or _are_tokens(it))]:
        problem = f"{wrong[0]!r:.60}"
    elif param == "input" and any(not it for it in each):
        problem = "an empty text"
    elif model.tokenizer is None and not all(isinstance(it, str) for it in each):
        problem = f"tokens, and model {model.spec.model_name!r} declares no tokenizer that reads them: send the text"
        problem += (
            " (LangChain does with OpenAIEmbeddings(check_embedding_ctx_length=False))" if param == "input" else ""
        )
    elif model.tokenizer is not None:
        size = model.tokenizer.size
        unknown = [token for it in each if not isinstance(it, str) for token in it if not 0 <= token < size]
        problem = f"a token {unknown[0]}, where the tokenizer of the model has {size}" if unknown else ""
    if problem:
        raise OpenAIError(
            400,
            f"{param}: expected a text, or a list of 1 to {most}; got {problem}.",
            param=param,
            code="invalid_value",
        )
    # The model itself adds the tokens that a tokenizer puts around an input.
    return [
        it if isinstance(it, str) or model.tokenizer is None else model.tokenizer.decode(it, special=param != "input")
        for it in each
    ]


def _are_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(it) is int for it in given)
