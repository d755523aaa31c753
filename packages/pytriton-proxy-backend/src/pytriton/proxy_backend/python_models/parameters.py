"""Parameters of requests and responses: a dictionary for whoever gives them, a JSON text for whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..wire.record import ParameterValue
from .errors import TritonModelException


def checked_parameters(parameters: Any) -> Mapping[str, ParameterValue]:
    """Check the parameters that a model gives; `None` is none.

    Raises:
        TritonModelException: If they are no dictionary of text to bool, int or text.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values to fit into 64 bits, found {value} for '{key}'")
    return dict(parameters)


def received_text(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the JSON text of parameters that came with a request: without blanks, as Triton writes it."""
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


def given_text(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the JSON text of parameters that the model gave itself: as `json.dumps` writes it."""
    return json.dumps(parameters)
