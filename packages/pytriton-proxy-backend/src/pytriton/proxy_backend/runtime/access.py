"""The access log: a record for each request that a worker has answered, where the environment asks for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from time import monotonic_ns
from typing import Any

from ..model import ModelSpec
from ..wire.batch import Batch
from .trace_context import read_ids

ACCESS_VARIABLE = "PYTRITON_ACCESS_LOG"
"""Environment variable that asks for it: 1, here and in the worker processes."""

_LEVEL = logging.INFO
_SUCCEEDED = "ok"

ACCESS_LOGGER = "pytriton.access"
"""Name of the logger that has the records."""

logger = logging.getLogger(ACCESS_LOGGER)


def is_wanted() -> bool:
    """Return whether the environment asks for it."""
    return os.environ.get(ACCESS_VARIABLE, "0") not in ("", "0")


def log_access(fields: Mapping[str, Any]) -> None:
    """Write the record of a request; the fields are also in its text."""
    logger.log(_LEVEL, "%s", json.dumps(fields), extra=dict(fields))


def pass_on_records(handler: logging.Handler) -> None:
    """Pass the records to one handler only, whatever the level of the log is."""
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(_LEVEL)


class Access:
    """The access log of one batch: a record for each request when it has its last answer."""

    __slots__ = ("_began_ns", "_fields", "_open", "_outcomes")

    def __init__(self, model: ModelSpec, batch: Batch) -> None:
        self._began_ns = monotonic_ns()
        self._fields = [_fields(model, batch, index) for index in range(len(batch.rows))]
        self._open = dict.fromkeys(range(len(batch.rows)))
        self._outcomes: dict[int, str] = {}

    def fail(self, index: int, kind: str) -> None:
        """Note that a request got an error, of a kind as in the metrics."""
        self._outcomes.setdefault(index, kind)

    def end(self, kind: str = _SUCCEEDED, ended: Iterable[int] | None = None) -> None:
        """Write the records of the requests that `ended`, or of all that are left.

        `kind` is the outcome of requests without a noted one.
        """
        duration_ms = round((monotonic_ns() - self._began_ns) / 1e6, 3)
        for index in list(self._open) if ended is None else ended:
            if index in self._open:
                del self._open[index]
                told = {"duration_ms": duration_ms, "outcome": self._outcomes.get(index, kind)}
                log_access({**self._fields[index], **told})


def _fields(model: ModelSpec, batch: Batch, index: int) -> dict[str, Any]:
    """Return the fields of a request that are known when it comes."""
    fields = {
        "model": model.name,
        "version": model.version,
        "request_id": batch.load_fields(index)[0],
        "rows": batch.rows[index],
        "batch": len(batch.rows),
    }
    ids = read_ids(batch, index)
    return fields if ids is None else {**fields, "trace_id": ids[0], "span_id": ids[1]}
