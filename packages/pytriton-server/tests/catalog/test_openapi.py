"""The OpenAPI document of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.catalog.listing import ListedModel
from pytriton.catalog.openapi import describe_openapi
from pytriton.client import ModelSpec, TensorSpec
from pytriton.server.control.http import VersionState

openapi_spec_validator = pytest.importorskip("openapi_spec_validator")

ALL_TYPES = (
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64,
    np.bytes_,
)  # fmt: skip


def listed(spec: ModelSpec | None, name: str = "", problem: str = "") -> ListedModel:
    name = name if spec is None else spec.model_name
    state = VersionState(name, 1, "UNAVAILABLE" if spec is None else "READY", "")
    return ListedModel(name, [state], spec, problem, None)


def described(*models: ListedModel) -> dict[str, Any]:
    document = describe_openapi(models, "http://localhost:8000")
    openapi_spec_validator.validate(document)
    return document


def test_every_type_is_described() -> None:
    tensors = tuple(TensorSpec(f"x{number}", (1,), dtype) for number, dtype in enumerate(ALL_TYPES))
    document = described(listed(ModelSpec("all", inputs=tensors, outputs=tensors)))
    assert set(document["paths"]) == {"/v2/models/all/generate", "/v2/models/all/infer"}
    generate = document["paths"]["/v2/models/all/generate"]["post"]["requestBody"]["content"]["application/json"]
    assert generate["schema"]["properties"]["x1"] == {"type": "integer", "minimum": -128, "maximum": 127}
    assert generate["schema"]["properties"]["x8"]["maximum"] == 2**64 - 1


def test_what_a_model_takes() -> None:
    spec = ModelSpec(
        "m",
        max_batch_size=4,
        batching=True,
        inputs=(TensorSpec("a", (2, 3), np.float32), TensorSpec("b", (-1,), np.bytes_, optional=True)),
        outputs=(TensorSpec("y", (-1,), np.int64),),
    )
    paths = described(listed(spec))["paths"]
    request = paths["/v2/models/m/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    number = {"type": "number", "format": "float"}
    assert request["required"] == ["a"]
    assert request["properties"]["a"] == {"type": "array", "items": number, "minItems": 6, "maxItems": 6}
    assert request["properties"]["b"] == {"type": "array", "items": {"type": "string"}}
    answer = paths["/v2/models/m/generate"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    integer = {"type": "integer", "format": "int64"}
    assert answer["properties"]["y"] == {"anyOf": [integer, {"type": "array", "items": integer}]}
    infer = paths["/v2/models/m/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    inputs = infer["properties"]["inputs"]
    assert (inputs["minItems"], inputs["maxItems"]) == (1, 2)
    assert [each["properties"]["shape"]["minItems"] for each in inputs["items"]["oneOf"]] == [3, 2]


def test_streams() -> None:
    spec = ModelSpec("s", decoupled=True, inputs=(TensorSpec("t", (1,), np.bytes_),))
    (path,) = described(listed(spec))["paths"].items()
    assert path[0] == "/v2/models/s/generate_stream"
    assert list(path[1]["post"]["responses"]["200"]["content"]) == ["text/event-stream"]


def test_what_json_cannot_hold_is_told() -> None:
    half = ModelSpec("half", inputs=(TensorSpec("x", (1,), np.float16),))
    free = ModelSpec("free", inputs=(TensorSpec("x", (-1, -1), np.float32),))
    named = ModelSpec("named", inputs=(TensorSpec("id", (1,), np.int32),))
    document = described(listed(half), listed(free), listed(named), listed(None, "broken", "it\nfails"))
    assert set(document["paths"]) == {"/v2/models/free/infer", "/v2/models/named/infer"}
    told = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert "No infer: 'x' is FP16, which Triton does not have in JSON." in told["half"]
    assert "No generate: 'x' has several axes of any length" in told["free"]
    assert "No generate: a tensor is called 'id'" in told["named"]
    assert told["broken"] == "UNAVAILABLE. it\nfails"


def test_hostile_names() -> None:
    spec = ModelSpec("a/{b}<script>", inputs=(TensorSpec("x", (1,), np.int32),))
    again = ModelSpec("a__b__script_", inputs=(TensorSpec("x", (1,), np.int32),))
    paths = described(listed(spec), listed(again))["paths"]
    assert "/v2/models/a%2F%7Bb%7D%3Cscript%3E/generate" in paths
    assert len({each["post"]["operationId"] for each in paths.values()}) == 4
