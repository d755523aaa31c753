"""A model as a tool: its schemas, the inputs of a call, and what the caller gets for the outputs."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mcp_types as types
import numpy as np

from pytriton.catalog.media import media_type_of
from pytriton.catalog.snippets import asks_for_file, describe_type
from pytriton.catalog.tensors import parse_inputs
from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.management import parse_model_config
from pytriton.decorators.serving import DESCRIPTION_PARAMETER, is_file, json_example

__all__ = ["ToolError", "ToolModel", "read_model", "tool_names"]

RESPONSES = "responses"
"""What a stream that cannot be joined to one answer has in place of outputs."""

_MOST_OF_NAME = 64
_NOT_IN_JSON = ("NaN", "Infinity", "-Infinity")


class ToolError(Exception):
    """A call that cannot be answered; the text is for the caller."""


@dataclass(frozen=True)
class ToolModel:
    """A model that is offered as a tool."""

    spec: ModelSpec
    description: str

    @property
    def is_joined(self) -> bool:
        """Whether its responses are pieces of texts, which are joined."""
        return self.spec.decoupled and all(_is_one(it) and _is_text(it) for it in self.spec.outputs)

    def as_tool(self, name: str) -> types.Tool:
        """Return what callers learn of it."""
        outputs = {it.name: _schema(it, is_output=True) for it in self.spec.outputs}
        answer = _object(outputs, outputs)
        if self.spec.decoupled and not self.is_joined:
            # In the steps of a stream, outputs may be missing.
            answer = _object({RESPONSES: {"type": "array", "items": _object(outputs, ())}}, [RESPONSES])
        inputs = {it.name: _schema(it, is_output=False) for it in self.spec.inputs}
        needed = [it.name for it in self.spec.inputs if not it.optional]
        return types.Tool(
            name=name,
            title=self.spec.model_name,
            description=self.description or f"The model {self.spec.model_name}.",
            input_schema={**_object(inputs, needed), "additionalProperties": False},
            output_schema=answer,
        )

    def read_inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of one sample for the arguments of a call.

        Raises:
            ToolError: Base64 cannot be read, or a shape is not that of the input.
            PyTritonClientValueError: A name is none of an input, or one is missing.
        """
        # Many callers write null for what they leave out.
        given = {name: value for name, value in arguments.items() if value is not None}
        files = {it.name for it in self.spec.inputs if asks_for_file(it)}
        values = {name: _from_base64(name, value) if name in files else value for name, value in given.items()}
        inputs = parse_inputs(self.spec, {}, values, is_batch=False)
        for tensor in self.spec.inputs:
            if tensor.name in inputs and json_example(tensor) is None:
                _check_shape(tensor, inputs[tensor.name])
        return inputs

    def as_result(self, results: Sequence[Mapping[str, Any]]) -> types.CallToolResult:
        """Return what the caller gets for the responses of a model: JSON, the same as text, images and sounds."""
        tensors = {it.name: it for it in self.spec.outputs}
        if self.is_joined:
            pieces: dict[str, list[Any]] = {name: [] for name in tensors}
            for result in results:
                for name, value in result.items():
                    pieces[name].append(np.asarray(value).item())
            results = [{name: np.array([b"".join(each)], object) for name, each in pieces.items()}]
        answers = [{name: _value(it, tensors[name]) for name, it in result.items()} for result in results]
        structured = {RESPONSES: answers} if self.spec.decoupled and not self.is_joined else answers[0]
        content: list[types.ContentBlock] = []
        for result in results:
            for name, value in result.items():
                content += _media(value) if is_file(tensors[name]) else ()
        single = list(answers[0].values()) if len(answers) == 1 else []
        if len(single) == 1 and isinstance(single[0], str) and not any(map(is_file, self.spec.outputs)):
            text = single[0]
        else:
            # Images and sounds follow as what they are.
            shown = structured if not content else _without_files(structured, tensors)
            text = json.dumps(shown, ensure_ascii=False)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text), *content], structured_content=structured
        )


def read_model(config: Mapping[str, Any]) -> ToolModel:
    """Read a model from its configuration.

    Raises:
        PyTritonClientError: It has tensors of a type that clients do not know.
    """
    told = ((config.get("parameters") or {}).get(DESCRIPTION_PARAMETER) or {}).get("string_value")
    return ToolModel(parse_model_config(config, None), told if isinstance(told, str) else "")


def tool_names(models: Iterable[str]) -> dict[str, str]:
    """Return models by the names of their tools, of which the language models allow few characters."""
    names: dict[str, str] = {}
    # A model whose name is allowed has it, whatever the names of others become.
    for model in sorted(models, key=lambda it: (_plain_name(it) != it, it)):
        name, number = _plain_name(model), 1
        while name in names:
            number += 1
            name = f"{_plain_name(model)[: _MOST_OF_NAME - 5]}_{number}"
        names[name] = model
    return names


def _plain_name(model: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "_", model)[:_MOST_OF_NAME]


def _object(properties: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _is_one(tensor: TensorSpec) -> bool:
    return all(size == 1 for size in tensor.shape)


def _is_text(tensor: TensorSpec) -> bool:
    return tensor.datatype == "BYTES" and not is_file(tensor) and json_example(tensor) is None


def _schema(tensor: TensorSpec, *, is_output: bool) -> dict[str, Any]:
    schema = _element(tensor, is_output=is_output)
    for size in () if _is_one(tensor) else reversed(tensor.shape):
        limits = {} if size < 0 else {"minItems": size, "maxItems": size}
        schema = {"type": "array", "items": schema, **limits}
    encoded = ", as base64" if _is_encoded(tensor, is_output=is_output) else ""
    return {**schema, "description": describe_type(tensor) + encoded}


def _is_encoded(tensor: TensorSpec, *, is_output: bool) -> bool:
    # Of an output without a hint, the bytes tell.
    return is_file(tensor) if is_output else asks_for_file(tensor)


def _element(tensor: TensorSpec, *, is_output: bool) -> dict[str, Any]:
    kind, in_json = tensor.datatype, json_example(tensor)
    if in_json is not None:
        return {"type": "object"} if in_json == "{}" else {"type": "array", "items": {"type": "object"}}
    if kind == "BYTES":
        encoded = {"type": "string", "contentEncoding": "base64"}
        if _is_encoded(tensor, is_output=is_output):
            return encoded
        if is_output and not tensor.hint:
            return {"anyOf": [{"type": "string"}, _object({"base64": encoded}, ["base64"])]}
        return {"type": "string"}
    if kind == "BOOL":
        return {"type": "boolean"}
    if kind.startswith(("FP", "BF")):
        return {"anyOf": [{"type": "number"}, {"enum": list(_NOT_IN_JSON)}]} if is_output else {"type": "number"}
    limits = np.iinfo(np.dtype(tensor.dtype).name)
    # Larger numbers are no integers to many readers of JSON.
    found = {name: it for name, it in (("minimum", limits.min), ("maximum", limits.max)) if abs(it) < 2**53}
    return {"type": "integer", **found}


def _check_shape(tensor: TensorSpec, value: Any) -> None:
    """Check the shape here: the server would count the axis of the batch, of which callers of tools know nothing."""
    try:
        shape = np.shape(value)
    except ValueError:
        return  # of lists that differ in length, as the client says better
    pairs = zip(tensor.shape, shape, strict=False)
    if len(shape) != len(tensor.shape) or any(wanted not in (-1, got) for wanted, got in pairs):
        told = ", ".join("any" if size < 0 else str(size) for size in tensor.shape)
        raise ToolError(f"Input {tensor.name!r}: expected the shape [{told}], received {list(shape)}.")


def _from_base64(name: str, value: Any) -> Any:
    """Return the bytes for base64, also of a data URL, and in lists."""
    if isinstance(value, list):
        return [_from_base64(name, each) for each in value]
    if not isinstance(value, str):
        raise ToolError(f"Input {name!r}: expected a string of base64, received {type(value).__name__}.")
    head, comma, data = value.partition(",")
    is_url = comma and head.startswith("data:") and head.endswith(";base64")
    try:
        return base64.b64decode(data if is_url else value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ToolError(f"Input {name!r}: expected bytes as base64, or as a data URL of it; {error}.") from None


def _value(value: Any, tensor: TensorSpec) -> Any:
    """Return an output, as JSON has it."""
    array = np.asarray(value, object if isinstance(value, bytes) else None)
    if _is_one(tensor) and array.size == 1:
        return _plain(array.reshape(-1).tolist()[0], tensor)
    return _plain(array.tolist(), tensor)


def _plain(value: Any, tensor: TensorSpec) -> Any:
    if isinstance(value, list):
        return [_plain(each, tensor) for each in value]
    if isinstance(value, bytes):
        encoded = base64.b64encode(value).decode()
        if is_file(tensor):
            return encoded
        try:
            return value.decode() if json_example(tensor) is None else json.loads(value)
        except ValueError as error:
            if tensor.hint:
                raise ToolError(
                    f"Output {tensor.name!r} is to be {tensor.hint}, and cannot be read: {error}."
                ) from None
            return {"base64": encoded}
    if isinstance(value, np.generic):
        value = float(cast("Any", value))  # of a type that numpy lacks
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_IN_JSON[0 if math.isnan(value) else 1 if value > 0 else 2]
    return value


def _media(value: Any) -> list[types.ContentBlock]:
    """Return the images and sounds of an output."""
    found: list[types.ContentBlock] = []
    for data in np.asarray(value, object).ravel().tolist():
        media_type, encoded = media_type_of(data), base64.b64encode(data).decode()
        if media_type.startswith("image/"):
            found.append(types.ImageContent(type="image", data=encoded, mime_type=media_type))
        elif media_type.startswith("audio/"):
            found.append(types.AudioContent(type="audio", data=encoded, mime_type=media_type))
    return found


def _without_files(answer: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> dict[str, Any]:
    if RESPONSES in answer and RESPONSES not in tensors:
        return {RESPONSES: [_without_files(each, tensors) for each in answer[RESPONSES]]}
    return {name: "(see below)" if is_file(tensors[name]) else value for name, value in answer.items()}
