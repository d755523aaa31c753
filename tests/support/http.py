"""Plain HTTP calls, for what no client of ours does."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from support.waiting import PATIENCE_S


def call(
    url: str | None, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Return status and answer of one call; the answer is decoded where it is JSON."""
    if url is None:
        raise AssertionError("the service is not there")
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    return response.status, json.loads(text) if text.startswith(("{", "[")) else text


def tensor(name: str, *values: float) -> dict[str, Any]:
    """Return a float32 tensor of shape (1, number of values), in JSON."""
    return {"name": name, "shape": [1, len(values)], "datatype": "FP32", "data": list(values)}


def infer(url: str | None, model: str, *values: float, **headers: str) -> Any:
    """Return the first output of a model with the input `x`, or the text of the error."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, answer = call(url, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor("x", *values)]}, named)
    return answer["outputs"][0]["data"] if status == 200 else answer["error"]
