"""A model that does by rule what a language model does by training: it calls tools, and fills forms."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypedDict

from pytriton.decorators import model

__all__ = ["clerk", "filled"]

VALUES = {"string": "Oslo", "integer": 4, "number": 4.5, "boolean": True, "null": None}


class Piece(TypedDict, total=False):
    text: str
    tool_calls: str
    prompt_tokens: int
    completion_tokens: int


def filled(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return a value that fits a schema, as far as clients write them."""
    root = schema if root is None else root
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return filled(found, root)
    if "enum" in schema:
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return filled(schema[name][0], root)
    kind = schema.get("type", "object")
    if kind == "array":
        return [filled(schema.get("items", {}), root)]
    if kind == "object":
        return {name: filled(each, root) for name, each in schema.get("properties", {}).items()}
    return VALUES[kind]


@model
async def clerk(
    prompt: str,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str = "auto",
    response_format: dict[str, Any] | None = None,
) -> AsyncIterator[Piece]:
    """Calls the first tool until it has its answer, then the tool for answers, or says what it has got."""
    last = (messages or [{}])[-1]
    content = last.get("content")
    said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or []}
    has_answer = last.get("role") == "tool" or "Observation:" in said
    if response_format is not None and not functions:
        text = json.dumps(filled(response_format.get("json_schema", {}).get("schema", {})))
        for at in range(0, len(text), 7):
            yield Piece(text=text[at : at + 7])
    elif functions and (not has_answer or "final_answer" in functions or tool_choice != "auto"):
        name = next(iter(functions))
        if tool_choice.startswith("{"):
            name = json.loads(tool_choice)["function"]["name"]
        elif has_answer and "final_answer" in functions:
            name = "final_answer"
        arguments = filled(functions[name].get("parameters", {}))
        if name == "final_answer":
            arguments = {"answer": said.split("Observation:")[-1].strip()}
        yield Piece(tool_calls=json.dumps({"name": name, "arguments": arguments}))
    else:
        for word in f"It says {said}.".split():
            yield Piece(text=f"{word} ")
    yield Piece(prompt_tokens=len(prompt.split()), completion_tokens=5)
