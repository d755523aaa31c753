"""The trace context of a request, as W3C has it: who traces it, and in which span."""

from __future__ import annotations

import json
import re

from ..wire.batch import TRACEPARENT, Batch

_HEADERS = (TRACEPARENT, "tracestate")
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")


def read_carrier(batch: Batch, index: int) -> dict[str, str]:
    """Return the headers of a request's trace context, empty if it has none.

    They are those of Triton's own span if Triton traces the request, otherwise the caller's if the server forwards
    them.
    """
    text = batch.load_fields(index)[5]
    if text:
        return _parsed(text)
    return {
        name.lower(): str(value) for name, value in batch.load_parameters(index).items() if name.lower() in _HEADERS
    }


def read_ids(batch: Batch, index: int) -> tuple[str, str] | None:
    """Return the ids of the trace and the span that a request belongs to; `None` if it is not traced."""
    found = _FORM.fullmatch(read_carrier(batch, index).get(TRACEPARENT, ""))
    return None if found is None else (found[1], found[2])


def _parsed(text: str) -> dict[str, str]:
    """Read Triton's form of a trace context: the headers as a JSON object."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: value for name, value in values.items() if name in _HEADERS and isinstance(value, str)}
