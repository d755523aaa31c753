"""The result of an inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ModelResult", "ParameterValue"]

ParameterValue = str | int | float | bool


class ModelResult(dict[str, Any]):
    """The outputs of a model by name, and what the response says besides them. Else it is a dictionary like any other.

    Args:
        outputs: Arrays by name; strings are object arrays of ``bytes``. Of a sample, an output without any axis but the
            batch axis is a numpy scalar, or ``bytes``.
        parameters: What the callable added to its response.
        request_id: The id of the request that this answers.
        model_name: The model that answered.
        model_version: The version that answered, also where the client asked for the latest.

    Attributes:
        parameters: What the callable added to its response; empty where it added nothing.
        request_id: The id of the request that this answers; ``""`` where the server did not say.
        model_name: The model that answered.
        model_version: The version that answered, as text; ``None`` where the server did not say.
    """

    __slots__ = ("model_name", "model_version", "parameters", "request_id")

    parameters: dict[str, ParameterValue]
    request_id: str
    model_name: str
    model_version: str | None

    def __init__(
        self,
        outputs: Mapping[str, Any] | None = None,
        *,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        model_name: str = "",
        model_version: str | None = None,
    ) -> None:
        super().__init__(outputs or {})
        self.parameters = dict(parameters) if parameters else {}
        self.request_id = request_id
        self.model_name = model_name
        self.model_version = model_version
