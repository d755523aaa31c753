"""Chat templates: the text that a model gets for messages, as the `transformers` library renders it."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pytriton.openai._errors import OpenAIError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '; ' if message.content or not loop.first }}"
    "calls {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for models that have none."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TRIED_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
_TRIED_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


class _RefusedError(Exception):
    """A template called `raise_exception`."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of Jinja."""

    text: str = DEFAULT_TEMPLATE  # the template
    # The special tokens that the template may name, such as `bos_token`, with their texts.
    tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, template: str | None, tokenizer_config: str | None) -> ChatTemplate:
        """Make the template of a model."""
        config: Any = {}
        if tokenizer_config is not None:
            try:
                config = json.loads(tokenizer_config)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"its tokenizer_config is no JSON: {error}") from None
            if not isinstance(config, dict):
                raise ValueError(f"its tokenizer_config is no JSON object; got {config!r:.60}")
        given = config.get("chat_template")
        text = template if template is not None else given if isinstance(given, str) else DEFAULT_TEMPLATE
        tokens = ((name, _token_text(config.get(name))) for name in _TOKENS)
        return cls(text, tuple((name, token) for name, token in tokens if token is not None))

    def shows(self, name: str) -> bool:
        """Return whether the template asks for a variable."""
        return name in _variables(self.text)

    def takes_parts(self) -> bool:
        """Return whether it looks into the parts of a content, such as images, itself."""
        return any(f"{quote}image{quote}" in self.text or f"{quote}audio{quote}" in self.text for quote in "'\"")

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], model: str) -> str:
        """Return the text that the model has to continue."""
        try:
            return self._render(messages, variables)
        except _RefusedError as error:
            raise OpenAIError(
                400, f"messages: model {model!r} refuses them: {error}", param="messages", code="invalid_value"
            ) from None
        except _FAILURES as error:
            raise OpenAIError(
                500,
                f"The chat template of model {model!r} failed: {type(error).__name__}: {error}",
                code="chat_template_error",
                retry=False,
            ) from error

    def check(self) -> None:
        """Try the template with a conversation, and with calls of tools if it shows tools."""
        try:
            _compile(self.text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" (line {line})"
            raise ValueError(f"its chat template cannot be parsed: {error}{where}") from None
        plain: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
        called: list[dict[str, Any]] = [
            *plain,
            {"role": "assistant", "content": "", "tool_calls": [_TRIED_CALL]},
            {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"},
        ]
        self._try("a conversation", plain, {})
        if self.shows("tools"):
            self._try("a conversation with tools", plain, {"tools": [_TRIED_TOOL]})
            self._try("calls of tools", called, {"tools": [_TRIED_TOOL]})

    def _try(self, what: str, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> None:
        try:
            self._render(messages, more)
        except _RefusedError:
            return  # the template refused on purpose
        except _FAILURES as error:
            raise ValueError(f"its chat template fails for {what}: {type(error).__name__}: {error}") from None

    def _render(self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(self.tokens), **more}
        return _compile(self.text).render({**variables, "messages": messages})


_FAILURES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _token_text(token: Any) -> str | None:
    """Return the text of a token, which is a string or an object of the tokenizer's configuration."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _environment() -> Environment:
    # The owner of the model writes the template; `transformers` uses the same sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    environment = _environment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateError:
        return frozenset()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML, which models do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))
