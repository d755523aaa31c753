"""The models of the benchmark: what they are called, take, compute and cost.

The runner and the servers, each in an environment of its own, import this file, so it needs numpy alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ACCESS_TOKEN = "bench"
"""Lets the runner register shared memory."""


@dataclass(frozen=True)
class Model:
    """One served function: two inputs `a` and `b` give their sum `y`; one input `a` is given back as `y`."""

    name: str
    width: int
    """Elements in a row of each tensor."""
    inputs: tuple[str, ...] = ("a", "b")
    datatype: str = "FP32"
    """`FP32`, or `BYTES` for strings."""
    item_bytes: int = 4
    """Size of an element."""
    max_batch_size: int = 16
    batch_us: int = 0
    """How long a batch sleeps in microseconds, whatever its size: a device computes 16 rows as fast as one."""
    row_us: int = 0
    """How long it sleeps for each row on top."""
    responses: int = 0
    """How many times it answers each request, as a stream; 0 for an ordinary model with one answer."""
    spin: int = 0
    """Rounds of a loop of pure Python for each batch."""

    def compute(self, batch: Sequence[Any]) -> Any:
        """Return `y` for the arrays of a batch, after the time that this takes."""
        if self.batch_us or self.row_us:
            time.sleep((self.batch_us + self.row_us * len(batch[0])) / 1e6)
        if self.spin:
            spin(self.spin)
        return batch[0] + batch[1] if len(batch) > 1 else batch[0]

    @property
    def numpy_type(self) -> type:
        """The element type of its arrays."""
        return np.float32 if self.datatype == "FP32" else np.bytes_


def spin(rounds: int) -> int:
    """Keep the interpreter busy."""
    value = 1
    for _ in range(rounds):
        value = (value * 48271) % 2147483647
    return value


def dump(models: Sequence[Model]) -> str:
    """Write models for the command line of a server."""
    return json.dumps([asdict(model) for model in models])


def load(text: str) -> list[Model]:
    """Read what `dump` wrote."""
    return [Model(**{**fields, "inputs": tuple(fields["inputs"])}) for fields in json.loads(text)]
