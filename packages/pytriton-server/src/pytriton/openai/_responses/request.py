"""Requests of the Responses API, and the chats that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pytriton.openai._errors import OpenAIError, from_validation
from pytriton.openai._requests import Body, ChatRequest, Objects, Texts

# These fields need a stored answer, and none is stored.
_STORED = ("previous_response_id", "conversation", "prompt", "background")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("system", "developer", "user", "assistant")
# Fields that have another name at the endpoint of chats.
_NAMES = {
    "messages": "input", "response_format": "text", "max_tokens": "max_output_tokens", "logprobs": "include",
    "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning",
}  # fmt: skip


class ResponseRequest(Body):
    """The body of `POST /v1/responses`."""

    input: str | Objects
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Texts | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None


def read_response_request(body: ResponseRequest) -> ChatRequest:
    """Return the chat that a request is."""
    for name in _STORED:
        if getattr(body, name):
            raise OpenAIError(
                400,
                f"{name}: not supported by this server, which keeps no answers: leave it out, and send what was said "
                "before in input.",
                param=name,
                code="unsupported_parameter",
            )
    tools, choice = _read_tools(body)
    tells_logprobs = "message.output_text.logprobs" in (body.include or ())
    fields = {
        **(body.model_extra or {}),
        "model": body.model,
        "messages": _read_input(body),
        "stream": body.stream,
        "stream_options": body.stream_options,
        "tools": tools,
        "tool_choice": choice,
        "response_format": _read_format(body.text or {}),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": tells_logprobs or None,
        "top_logprobs": body.top_logprobs if tells_logprobs else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "verbosity": (body.text or {}).get("verbosity"),
    }
    try:
        chat = ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise named_as_asked(from_validation(error.errors())) from None
    if chat.n not in (None, 1):
        raise _wrong("n", "one answer: there is no other in this API", chat.n)
    return chat


def named_as_asked(error: OpenAIError) -> OpenAIError:
    """Return an error of a chat with the field that the caller of this API has sent."""
    error.param = _NAMES.get(error.param or "", error.param)
    return error


def _read_input(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the messages of a request."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise _wrong("input", "a text, or a list of at least one item", body.input)
    thoughts = ""
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = _read_content(item.get("content") or item.get("summary") or [], where)
            thoughts += "".join(part.get("text", "") for part in parts)
            continue
        if kind == "message":
            messages.append(_read_message(item, where))
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _read_content(output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            known = "message, function_call, function_call_output or reasoning"
            raise _wrong(f"{where}.type", f"{known}: nothing else is known, and nothing is kept", kind)
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thoughts
        thoughts = ""
    return messages


def _read_message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if not isinstance(content, str):
        content = _read_content(content, f"{where}.content")
    return {"role": role, "content": content}


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add a call of a tool to the assistant's message before it, as chats have it."""
    name, arguments = item.get("name"), item.get("arguments")
    if not (isinstance(name, str) and name and isinstance(arguments, str)):
        raise _wrong(where, "a call with a name and arguments, which are text", item)
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _read_content(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise _wrong(where, "a text, or a list of parts", content)
    return [_read_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _read_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    return {"type": "text", "text": _text_of(part, where)}


def _text_of(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXTS else None
    if not isinstance(text, str):
        raise _wrong(where, 'a part such as {"type": "input_text", "text": "..."}; files are not kept', part)
    return text


def _read_tools(body: ResponseRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """Return the tools and the choice among them in the form of chats."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            expected = 'a tool of the caller, {"type": "function", "name": ..., "parameters": {...}}'
            raise _wrong(f"tools[{index}]", f"{expected}: there are none of OpenAI's here", tool, "tools")
        known = ("name", "description", "parameters", "strict")
        function: dict[str, Any] = {name: tool[name] for name in known if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    choice: Any = body.tool_choice
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("tools")
            names = [it.get("name") for it in allowed if isinstance(it, Mapping)] if isinstance(allowed, list) else []
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            choice = choice.get("mode", "auto")
        elif choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise _wrong("tool_choice", "none, auto, required, or a function", choice)
    return tools or None, choice


def _read_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    told = text.get("format")
    if told is None:
        return None
    kind = told.get("type") if isinstance(told, Mapping) else None
    if kind == "json_schema":
        return {"type": kind, "json_schema": {name: value for name, value in told.items() if name != "type"}}
    if kind not in ("text", "json_object"):
        raise _wrong("text.format", "a form of the type text, json_object or json_schema", told, "text")
    return {"type": kind}


def _wrong(where: str, expected: str, got: Any, param: str | None = None) -> OpenAIError:
    param = param or where.partition("[")[0].partition(".")[0]
    return OpenAIError(400, f"{where}: expected {expected}; got {got!r:.100}.", param=param, code="invalid_value")
