"""Sizes of memory as people write them, and the memory budget of worker processes."""

import math
import os
import re
from typing import Any

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.proxy_backend.process.budget import MemoryBudget

MEMORY_BUDGET_VARIABLE = "PYTRITON_MEMORY_BUDGET"
"""Environment variable with the memory budget of a `Triton` that was given none."""

LEAST_BUDGET_BYTES = 16 << 20
"""The smallest budget: a worker process takes more than that with its interpreter and numpy alone."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B?|B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_FORM = "a number of bytes, or text such as 2GiB, 500MiB or 1.5GB"


def read_size(value: Any) -> int:
    """Return the bytes that a number above 0, or a text such as `2GiB`, `500M` or `1.5 GB`, means.

    With an `i` a unit is a power of 1024, without one of 1000.
    """
    size: float = 0
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) is not None:
        unit = (found[2] or "").removesuffix("B")
        size = float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i").upper()]
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if not 1 <= size < 1 << 62:
        raise ValueError(f"expected {_FORM}; got {value!r}")
    return math.floor(size)


def make_budget(owner: str, memory_budget: Any, min_awake: Any) -> MemoryBudget:
    """Make the budget of a server; where none is given, that of the environment, else one without a limit."""
    where = f"{owner}.memory_budget"
    if memory_budget is None and (told := os.environ.get(MEMORY_BUDGET_VARIABLE)):
        memory_budget, where = told, f"environment variable {MEMORY_BUDGET_VARIABLE}"
    if isinstance(min_awake, bool) or not isinstance(min_awake, int) or min_awake < 0:
        raise _rejected(f"{owner}.min_awake", min_awake, "an integer of at least 0")
    if memory_budget is None:
        return MemoryBudget(None, min_awake)
    try:
        size = read_size(memory_budget)
    except ValueError:
        size = 0
    if size < LEAST_BUDGET_BYTES:
        least = f"of at least {LEAST_BUDGET_BYTES >> 20} MiB, which a worker process takes by itself"
        raise _rejected(where, memory_budget, f"{_FORM}, {least}")
    return MemoryBudget(size, min_awake)


def _rejected(where: str, value: Any, rule: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(f"{where} must be {rule}; got {value!r}.", parameter=where, value=value, rule=rule)
