"""The models of a server as an OpenAPI document: what plain JSON over HTTP each of them takes and gives."""

import math
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from pytriton.catalog.listing import ListedModel
from pytriton.catalog.tensors import describe_signature
from pytriton.client import ModelSpec, TensorSpec
from pytriton.server.settings.security import TRITON_ACCESS_HEADER

OPENAPI_VERSION = "3.1.0"

Schema = dict[str, Any]

# Triton does not read or write these types as JSON.
_NOT_IN_JSON = ("FP16", "BF16")
_INPUT_KEYS = ("id", "parameters")
_OUTPUT_KEYS = ("id", "model_name", "model_version")
_ELEMENTS: dict[str, Schema] = {
    "BOOL": {"type": "boolean"},
    "FP32": {"type": "number", "format": "float"},
    "FP64": {"type": "number", "format": "double"},
    "BYTES": {"type": "string"},
    "INT32": {"type": "integer", "format": "int32"},
    "INT64": {"type": "integer", "format": "int64"},
    **{
        f"{'U' * unsigned}INT{bits}": {
            "type": "integer",
            "minimum": 0 if unsigned else -(1 << (bits - 1)),
            "maximum": (1 << (bits if unsigned else bits - 1)) - 1,
        }
        for bits in (8, 16, 32, 64)
        for unsigned in (False, True)
        if unsigned or bits < 32
    },
}
_ERROR = {
    "description": "The request is refused, or failed.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def describe_openapi(models: Iterable[ListedModel], server_url: str) -> dict[str, Any]:
    """Return the OpenAPI document of the models of a server.

    Models that are not loaded, or take no JSON, are mentioned without a path.
    """
    tags: list[dict[str, str]] = []
    paths: dict[str, Any] = {}
    taken: set[str] = set()
    for model in models:
        spec = model.spec
        if spec is None:
            tags.append({"name": model.name, "description": f"{model.state}. {model.problem}".strip()})
            continue
        calls = {"infer": (infer_problem(spec), _infer), _generate_word(spec): (generate_problem(spec), _generate)}
        lines = [describe_signature(spec)]
        for word, (problem, describe) in calls.items():
            if problem:
                lines.append(f"No {word}: {problem}.")
                continue
            operation = describe(spec)
            paths[f"/v2/models/{quote(model.name, safe='')}/{word}"] = {
                "post": {
                    "operationId": _operation_id(f"{word}_{model.name}", taken),
                    "tags": [model.name],
                    **operation,
                }
            }
        tags.append({"name": model.name, "description": "\n\n".join(lines)})
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Models of a Triton Inference Server",
            "version": "2",
            "description": f"What {server_url} serves, as KServe v2 and Triton's generate extension have it in JSON.",
        },
        "servers": [{"url": server_url}],
        # Most servers let everybody call their models.
        "security": [{}, {"accessToken": []}],
        "tags": tags,
        "paths": paths,
        "components": {
            "securitySchemes": {"accessToken": {"type": "apiKey", "in": "header", "name": TRITON_ACCESS_HEADER}},
            "schemas": {
                "Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
            },
        },
    }


def infer_problem(spec: ModelSpec) -> str:
    """Return why a model cannot be called with JSON; empty if it can."""
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor.datatype in _NOT_IN_JSON:
            return f"{tensor.name!r} is {tensor.datatype}, which Triton does not have in JSON"
    return "a decoupled model streams its answers" if spec.decoupled else ""


def generate_problem(spec: ModelSpec) -> str:
    """Return why the generate extension cannot call a model; empty if it can."""
    for tensors, keys in ((spec.inputs, _INPUT_KEYS), (spec.outputs, _OUTPUT_KEYS)):
        for tensor in tensors:
            if tensor.datatype in _NOT_IN_JSON:
                return f"{tensor.name!r} is {tensor.datatype}, which Triton does not have in JSON"
            if tensor.name in keys:
                return f"a tensor is called {tensor.name!r}, which the request or its answer uses for itself"
            if tensor.shape.count(-1) > 1:
                return f"{tensor.name!r} has several axes of any length, and the JSON no shape"
    return ""


def _generate_word(spec: ModelSpec) -> str:
    return "generate_stream" if spec.decoupled else "generate"


def _generate(spec: ModelSpec) -> Schema:
    answer = _object(
        {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            **{tensor.name: _flat(tensor, is_answer=True) for tensor in spec.outputs},
        },
        required=["model_name", "model_version"],
    )
    of_request = "One sample. " if spec.batching else ""
    media_type, what = ("text/event-stream", "one a `data:` line") if spec.decoupled else ("application/json", "")
    # OpenAPI 3.1 cannot describe the events of a stream, so the schema describes each event.
    description = f"The outputs, {what}." if what else "The outputs."
    return {
        "summary": f"Call {spec.model_name} with values by name",
        "description": f"{of_request}The elements of a tensor are one list, in the order of rows; one alone needs no "
        "list. Further members are parameters of the request.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _object(
                        {
                            **{tensor.name: _flat(tensor, is_answer=False) for tensor in spec.inputs},
                            "id": {"type": "string"},
                            "parameters": {"type": "object"},
                        },
                        required=[tensor.name for tensor in spec.inputs if not tensor.optional],
                    )
                }
            },
        },
        "responses": {
            "200": {"description": description, "content": {media_type: {"schema": answer}}},
            "default": _ERROR,
        },
    }


def _infer(spec: ModelSpec) -> Schema:
    required = sum(not tensor.optional for tensor in spec.inputs)
    names = [tensor.name for tensor in spec.outputs]
    request = _object(
        {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {
                "type": "array",
                "minItems": required,
                "maxItems": len(spec.inputs),
                "items": _one_of(spec, spec.inputs),
            },
            "outputs": {
                "type": "array",
                "description": "Those that are wanted; by default all.",
                "items": _object({"name": {"type": "string", "enum": names}}, required=["name"]),
            },
        },
        required=["inputs"],
    )
    answer = _object(
        {
            "id": {"type": "string"},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {"type": "array", "items": _one_of(spec, spec.outputs)},
        },
        required=["model_name", "model_version", "outputs"],
    )
    return {
        "summary": f"Call {spec.model_name} with tensors",
        "description": f"The first axis is that of the batch, of at most {spec.max_batch_size} samples."
        if spec.batching
        else "One sample, without an axis of a batch.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "The outputs.", "content": {"application/json": {"schema": answer}}},
            "default": _ERROR,
        },
    }


def _one_of(spec: ModelSpec, tensors: Iterable[TensorSpec]) -> Schema:
    schemas = [_tensor(tensor, batching=spec.batching) for tensor in tensors]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas} if schemas else {"type": "object"}


def _tensor(tensor: TensorSpec, *, batching: bool) -> Schema:
    rank = len(tensor.shape) + batching
    shown = ", ".join(["batch"] * batching + ["any" if length < 0 else str(length) for length in tensor.shape])
    return _object(
        {
            "name": {"type": "string", "enum": [tensor.name]},
            "datatype": {"type": "string", "enum": [tensor.datatype]},
            "shape": {
                "type": "array",
                "description": f"[{shown}]",
                "items": {"type": "integer", "minimum": 0},
                "minItems": rank,
                "maxItems": rank,
            },
            "data": {
                "type": "array",
                "description": "The elements in the order of rows, in one list; a request may nest them.",
                "items": _ELEMENTS[tensor.datatype],
            },
            "parameters": {"type": "object"},
        },
        required=["name", "datatype", "shape", "data"],
    )


def _flat(tensor: TensorSpec, *, is_answer: bool) -> Schema:
    """Return the schema of one sample of a tensor in the generate extension."""
    schema = _flat_schema(tensor, is_answer=is_answer)
    return {**schema, "description": f"`{tensor.hint}`"} if tensor.hint else schema


def _flat_schema(tensor: TensorSpec, *, is_answer: bool) -> Schema:
    element = _ELEMENTS[tensor.datatype]
    if -1 in tensor.shape:
        elements = {"type": "array", "items": element}
        # In an answer, a list of one element is its element.
        return {"anyOf": [element, elements]} if is_answer else elements
    count = math.prod(tensor.shape)
    return element if count == 1 else {"type": "array", "items": element, "minItems": count, "maxItems": count}


def _object(properties: Schema, *, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _operation_id(wanted: str, taken: set[str]) -> str:
    """Return a name that generators of code can use, and that no other operation has."""
    name = plain = re.sub(r"\W", "_", wanted, flags=re.ASCII)
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name)
    return name
