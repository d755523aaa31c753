"""What a request for a chat asks of a model: prompt, tools, form of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.schemas import SCHEMA, AnswerCheck, read_response_format
from pytriton.openai._generation import Wishes
from pytriton.openai._messages import read_messages
from pytriton.openai._models import LOGPROBS, TOOL_CALLS, TOOL_PARSER, EndpointModel
from pytriton.openai._requests import ChatRequest, TokenizeRequest, make_tensor, unsupported


@dataclass
class Chat:
    """What a model gets for a chat."""

    prompt: str = ""  # the text that it is to continue
    wishes: Wishes = field(default_factory=Wishes)  # what is wanted of the answer
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # optional inputs


async def read_check(body: ChatRequest, model: EndpointModel) -> AnswerCheck | None:
    """Return the check for the format that a request asks for; None if any text will do."""
    if not body.response_format or body.response_format.get("type") == "text":
        return None
    if "response_format" not in model.options and SCHEMA not in model.options:
        raise unsupported(
            "response_format",
            body.model,
            model.options,
            f"It would have an optional input 'response_format', or {SCHEMA!r} for the schema alone. ",
        )
    # A large schema takes time, so a thread reads it.
    return await asyncio.to_thread(read_response_format, body.response_format)


def read_chat(body: ChatRequest, model: EndpointModel, check: AnswerCheck | None) -> Chat:
    """Return the inputs of a model for a request, whose answer gets a check."""
    told = read_messages(body.messages, model)
    given: dict[str, Any] = {"messages": body.messages}
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    tools = _read_tools(body, model)
    if tools:
        variables["tools"] = given["tools"] = tools
        given["tool_choice"] = body.tool_choice
    if body.documents:
        if not ("documents" in model.options or model.chat_template.shows("documents")):
            raise unsupported("documents", body.model, model.options)
        variables["documents"] = given["documents"] = body.documents
    if check is not None:
        given |= {"response_format": body.response_format, SCHEMA: check.schema or {"type": "object"}}
    if body.top_logprobs and not body.logprobs:
        raise _invalid("top_logprobs", 'it beside "logprobs": true', body.top_logprobs)
    if body.logprobs:
        if LOGPROBS not in model.output_names:
            raise unsupported(LOGPROBS, body.model, model.options, f"It would have an output {LOGPROBS!r}. ")
        given |= {LOGPROBS: body.logprobs, "top_logprobs": body.top_logprobs}
    inputs = {
        name: make_tensor(name, value, model)
        for name, value in given.items()
        if value is not None and name in model.options
    }
    for name, files in told.files.items():
        if files:
            inputs[name] = _files_tensor(name, files, model)
    return Chat(
        model.chat_template.render(told.messages, variables, body.model),
        Wishes(frozenset(tool["function"]["name"] for tool in tools), bool(body.logprobs), check),
        inputs,
    )


def render_prompt(body: TokenizeRequest, model: EndpointModel) -> str:
    """Return the text that a model gets for messages."""
    told = read_messages(body.messages or [], model)
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    variables["add_generation_prompt"] = body.add_generation_prompt
    if body.tools:
        variables["tools"] = body.tools
    return model.chat_template.render(told.messages, variables, model.spec.model_name)


def _read_tools(body: ChatRequest, model: EndpointModel) -> list[dict[str, Any]]:
    """Return the tools that the model may call."""
    choice = body.tool_choice or None
    if not body.tools or choice == "none":
        if choice in (None, "none", "auto"):
            return []
        raise _invalid("tool_choice", "tools to choose from, in the field tools", choice)
    if not model.takes_tools:
        raise unsupported(
            "tools",
            body.model,
            model.options,
            "It would have an optional input 'tools', or a chat template that shows them; and an output "
            f"{TOOL_CALLS!r}, or the parameter {TOOL_PARSER!r}. ",
        )
    names = [_tool_name(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    if choice in (None, "auto"):
        return body.tools
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name not in names:
            raise _invalid("tool_choice", f"the name of one of the tools, {', '.join(names)}", choice)
    elif choice != "required":
        known = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
        raise _invalid("tool_choice", known, choice)
    if "tool_choice" not in model.options:
        # A caller who requires a call would take any answer for one.
        raise unsupported("tool_choice", body.model, model.options, "It would have an optional input 'tool_choice'. ")
    return body.tools


def _tool_name(tool: Mapping[str, Any], where: str) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise _invalid(where, '{"type": "function", "function": {"name": ..., "parameters": {...}}}', tool, "tools")
    return name


def _files_tensor(name: str, files: list[bytes], model: EndpointModel) -> npt.NDArray[Any]:
    shape = model.options[name].shape
    if len(shape) != 1 or (shape[0] != -1 and shape[0] != len(files)):
        expected = f"{shape[0]} of the parts for the input {name!r}, which has the shape {list(shape)}"
        raise _invalid("messages", expected, f"{len(files)} of them")
    array: npt.NDArray[Any] = np.empty(len(files), object)
    array[:] = files
    return array


def _invalid(where: str, expected: str, got: Any, param: str | None = None) -> OpenAIError:
    return OpenAIError(
        400, f"{where}: expected {expected}; got {got!r:.100}.", param=param or where, code="invalid_value"
    )
