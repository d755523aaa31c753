"""The access log: a record for each request that a worker has answered, where the environment asks for it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from ..model import ModelSpec
from ..wire.batch import Batch

__all__ = ["ACCESS_VARIABLE", "Access", "is_wanted", "log_access", "pass_on_records"]

ACCESS_VARIABLE = "PYTRITON_ACCESS_LOG"
"""Environment variable that asks for it: 1, here and in the worker processes."""

_LEVEL = logging.INFO
_SUCCEEDED = "ok"

logger = logging.getLogger("pytriton.access")


def is_wanted() -> bool:
    """Return whether the environment asks for it."""
    return os.environ.get(ACCESS_VARIABLE, "0") not in ("", "0")


def log_access(fields: Mapping[str, Any]) -> None:
    """Write the record of a request; the fields are also in its text."""
    logger.log(_LEVEL, "%s", json.dumps(fields), extra=dict(fields))


def pass_on_records() -> None:
    """Write the records as lines that the parent of a worker process knows, whatever its level of the log."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(_LEVEL)


class Access:
    """What becomes of the requests of one batch.

    Args:
        model: The model that they are for.
        batch: The batch, which has just come.
    """

    __slots__ = ("_began_ns", "_model", "_outcomes", "_requests")

    def __init__(self, model: ModelSpec, batch: Batch) -> None:
        self._began_ns = monotonic_ns()
        self._model = model
        self._requests = [(batch.load_fields(index)[0], rows) for index, rows in enumerate(batch.rows)]
        self._outcomes: dict[int, str] = {}

    def fail(self, index: int, kind: str) -> None:
        """Note that a request got an error, of a kind as in the metrics."""
        self._outcomes.setdefault(index, kind)

    def end(self, kind: str = _SUCCEEDED) -> None:
        """Write the records; `kind` is the outcome of those requests of which nothing else was noted."""
        duration_ms = round((monotonic_ns() - self._began_ns) / 1e6, 3)
        for index, (request_id, rows) in enumerate(self._requests):
            log_access(
                {
                    "model": self._model.name,
                    "version": self._model.version,
                    "request_id": request_id,
                    "rows": rows,
                    "batch": len(self._requests),
                    "duration_ms": duration_ms,
                    "outcome": self._outcomes.get(index, kind),
                }
            )
        self._requests = []
