"""What Triton's sequence batcher adds to the requests of a sequence: flags, identities, and inputs that hold them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pytriton.model_config.dtypes import array_dtype, type_from_config_name
from pytriton.proxy_backend.wire.batch import RequestData

START, END = 1, 2
_KINDS = {"CONTROL_SEQUENCE_START": START, "CONTROL_SEQUENCE_END": END}
_VALUES = {"int32_false_true": np.int32, "fp32_false_true": np.float32, "bool_false_true": np.bool_}


class SequenceControls:
    """Makes requests of a sequence from those of a test."""

    def __init__(self, config: Mapping[str, Any], *, batching: bool) -> None:
        """Read a configuration."""
        sequences = config.get("sequence_batching") or {}
        self._iterative = bool(sequences.get("iterative_sequence"))
        self._controls = [
            (each["name"], control)
            for each in _listed(sequences.get("control_input"))
            for control in _listed(each.get("control"))
        ]
        self._shape = (1, 1) if batching else (1,)
        self._identities = itertools.count(1)

    def begun(self, request: RequestData, *, start: bool, end: bool) -> RequestData:
        """Return a request as the model gets it for the first time."""
        identity = request.correlation_id
        if self._iterative:
            # Each request of such a model is a sequence, whose steps the scheduler makes.
            start = True
            identity = identity or next(self._identities)
        return self._with_controls(
            dataclasses.replace(request, correlation_id=identity, flags=START * start | END * end)
        )

    def continued(self, request: RequestData) -> RequestData:
        """Return a request as the model gets it again after it was given back to the scheduler."""
        return self._with_controls(dataclasses.replace(request, flags=request.flags & ~START))

    def _with_controls(self, request: RequestData) -> RequestData:
        inputs = dict(request.inputs)
        for name, control in self._controls:
            kind = control.get("kind", "CONTROL_SEQUENCE_START")
            if kind == "CONTROL_SEQUENCE_CORRID":
                dtype = array_dtype(type_from_config_name(control["data_type"]))
                value = request.correlation_id
                inputs[name] = np.full(self._shape, value.encode() if isinstance(value, str) else value, dtype)
                continue
            field = next((field for field in _VALUES if field in control), "int32_false_true")
            values = control.get(field, [0, 1])
            holds = kind == "CONTROL_SEQUENCE_READY" or bool(request.flags & _KINDS.get(kind, 0))
            inputs[name] = np.full(self._shape, values[holds], _VALUES[field])
        return dataclasses.replace(request, inputs=inputs)


def _listed(value: Any) -> list[Any]:
    """Return a repeated field of messages as a list, even if the text has one message."""
    return value if isinstance(value, list) else [] if value is None else [value]
