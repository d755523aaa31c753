"""The messages of a chat: what of them a template gets, and what a model gets beside the prompt."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.strict_json import STRICT, depth_of
from pytriton.openai._models import EndpointModel
from pytriton.openai._requests import MOST_LEVELS

IMAGES, AUDIO = "images", "audio"
"""The optional inputs for the files in messages: lists of images and of audio."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Messages may have these fields, which a template may ignore.
_BESIDE_CONTENT = ("tool_calls", "function_call", "audio")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


@dataclass
class Conversation:
    """What the messages of a request say."""

    messages: list[dict[str, Any]] = field(default_factory=list)  # as a template gets them
    # The bytes of images and of audio, in their order, by the input that takes them.
    files: dict[str, list[bytes]] = field(default_factory=lambda: {IMAGES: [], AUDIO: []})


def read_messages(messages: Sequence[Mapping[str, Any]], model: EndpointModel) -> Conversation:
    """Check the messages of a request."""
    told = Conversation()
    for index, message in enumerate(messages):
        told.messages.append(_read_message(message, f"messages[{index}]", model, told.files))
    return told


def _read_message(
    message: Mapping[str, Any], where: str, model: EndpointModel, files: Mapping[str, list[bytes]]
) -> dict[str, Any]:
    template = model.chat_template
    beside = [name for name in _BESIDE_CONTENT if message.get(name)]
    for name in beside:
        if name not in template.text:
            raise _unfit(
                f"{where}.{name}", "none, for the chat template of the model does not show them", message[name]
            )
    role = message.get("role")
    if role not in _ROLES:
        raise _unfit(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):
        parts = [_read_part(part, f"{where}.content[{at}]", model, files) for at, part in enumerate(content)]
        is_text = all(part["type"] == "text" for part in parts)
        texts = [part["text"] for part in parts if part["type"] == "text"]
        content = "".join(texts) if is_text or not template.takes_parts() else parts
    elif not isinstance(content, str) and not (content is None and (beside or role == "assistant")):
        raise _unfit(f"{where}.content", "a text, or a list of parts", content)
    # Most templates print the content, and would print None.
    read = {**message, "role": role, "content": "" if content is None else content}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [_decoded(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return read


def _decoded(call: Any, where: str) -> Any:
    """Return a call of a tool as templates expect it: its arguments are values, not the text of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = STRICT.decode(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if depth_of(arguments) > MOST_LEVELS:
        raise _unfit(f"{where}.function.arguments", f"at most {MOST_LEVELS} levels of JSON", function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _read_part(part: Any, where: str, model: EndpointModel, files: Mapping[str, list[bytes]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get(_TEXT_PARTS[kind]), str):
        return {"type": "text", "text": part[_TEXT_PARTS[kind]]}
    if kind == "image_url" and IMAGES in model.options:
        given = part.get("image_url")
        files[IMAGES].append(_from_data_url(given.get("url") if isinstance(given, Mapping) else given, where))
        return {"type": "image"}
    if kind == "input_audio" and AUDIO in model.options:
        given = part.get("input_audio")
        files[AUDIO].append(_from_base64(given.get("data") if isinstance(given, Mapping) else None, where))
        return {"type": "audio"}
    takes = ['{"type": "text", "text": "..."}']
    takes += ['{"type": "image_url", "image_url": {"url": "data:..."}}'] if IMAGES in model.options else []
    takes += ['{"type": "input_audio", "input_audio": {"data": "..."}}'] if AUDIO in model.options else []
    name = model.spec.model_name
    raise _unfit(where, f"a part such as {' or '.join(takes)}, the only ones that model {name!r} takes", part)


def _from_data_url(url: Any, where: str) -> bytes:
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        # The server would have to fetch addresses that maybe only it can reach.
        raise _unfit(
            f"{where}.image_url.url", "a data URL, data:image/png;base64,... (the server fetches nothing)", url
        )
    return _from_base64(data, f"{where}.image_url.url")


def _from_base64(data: Any, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise _unfit(where, "data in Base64", data) from None


def _unfit(where: str, expected: str, got: Any) -> OpenAIError:
    return OpenAIError(400, f"{where}: expected {expected}; got {got!r:.100}.", param="messages", code="invalid_value")
