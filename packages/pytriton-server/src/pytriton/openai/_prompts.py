"""The prompt that a chat template makes of messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pytriton.openai._errors import OpenAIError

__all__ = ["DEFAULT_TEMPLATE", "check_template", "make_prompt"]

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""That of models that give none."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a message may say beside its content, and a template may leave out.
_BESIDE_CONTENT = ("tool_calls", "function_call", "audio")


class _RefusedError(Exception):
    """A template called `raise_exception`."""


def make_prompt(template: str | None, messages: Sequence[Mapping[str, Any]], model: str) -> str:
    """Return the text that a model is to continue.

    Args:
        template: The model's chat template; None is the default one.
        messages: Those of the request.
        model: The model, for errors.

    Raises:
        OpenAIError: A message has what is no text, the template refuses the messages, or fails.
    """
    text = DEFAULT_TEMPLATE if template is None else template
    checked = [_checked(message, f"messages[{index}]", text) for index, message in enumerate(messages)]
    try:
        compiled = _compile(text)
        return compiled.render(messages=checked, add_generation_prompt=True)
    except _RefusedError as error:
        raise OpenAIError(
            400, f"messages: model {model!r} refuses them: {error}", param="messages", code="invalid_value"
        ) from None
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise OpenAIError(
            500,
            f"The chat template of model {model!r} failed: {type(error).__name__}: {error}",
            code="chat_template_error",
            retry=False,
        ) from error


def check_template(template: str | None) -> None:
    """Check that a chat template can be used.

    Raises:
        ValueError: It cannot be parsed.
    """
    try:
        _compile(DEFAULT_TEMPLATE if template is None else template)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" (line {line})"
        raise ValueError(f"its chat template cannot be parsed: {error}{where}") from None


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    # As Hugging Face's templates expect it; a template comes from the model's owner, not from a caller.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _checked(message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
    """Return a message whose content is a text."""
    told = [name for name in _BESIDE_CONTENT if message.get(name)]
    for name in told:
        if name not in template:
            raise _unfit(
                f"{where}.{name}", "none, for the chat template of the model does not show them", message[name]
            )
    role = message.get("role")
    if role not in _ROLES:
        raise _unfit(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if content is None and told:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise _unfit(f"{where}.content", "a text, or a list of parts of the type text", content)
    return {**message, "role": role, "content": content}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _unfit(where, 'a part such as {"type": "text", "text": "..."}, the only ones that models here take', part)
    return str(part["text"])


def _unfit(where: str, expected: str, got: Any) -> OpenAIError:
    return OpenAIError(400, f"{where}: expected {expected}; got {got!r:.100}.", param="messages", code="invalid_value")
