"""What authors call the types of tensors, as a parameter of a model's configuration carries it to callers."""

from __future__ import annotations

import json
from typing import Any

from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

HINTS_PARAMETER = "pytriton_hints"
"""The parameter: a JSON object with the hints of `inputs` and `outputs`, each by the names of tensors. Clients and the
page of a server read it as well."""


def write_hints(config: TritonModelConfig) -> str | None:
    """Return the text of the parameter; None without any hint."""
    named = {
        kind: {spec.name: spec.hint for spec in specs or () if spec.hint}
        for kind, specs in (("inputs", config.inputs), ("outputs", config.outputs))
    }
    return json.dumps(named) if any(named.values()) else None


def read_hints(text: str, config: TritonModelConfig) -> bool:
    """Give the tensors of a configuration the hints of a text; return whether `write_hints` may have written it."""
    try:
        named: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    kinds: list[tuple[str, list[TensorSpec]]] = [
        ("inputs", list(config.inputs or ())),
        ("outputs", list(config.outputs or ())),
    ]
    is_known = (
        isinstance(named, dict)
        and named.keys() == {"inputs", "outputs"}
        and all(
            isinstance(named[kind], dict)
            and named[kind].keys() <= {spec.name for spec in specs}
            and all(isinstance(hint, str) and hint for hint in named[kind].values())
            for kind, specs in kinds
        )
    )
    if is_known:
        for kind, specs in kinds:
            for spec in specs:
                spec.hint = named[kind].get(spec.name)
    return is_known
