"""The memory budget of worker processes, as an operator gives it."""

import os
from collections.abc import Collection, Sequence
from typing import Any

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.proxy_backend.process.budget import LEAST_BUDGET_BYTES, MemoryBudget
from pytriton.proxy_backend.settings import SIZE, read_size
from pytriton.server.settings.config import WORKERS, TritonConfig

MEMORY_BUDGET_VARIABLE = "PYTRITON_MEMORY_BUDGET"
"""Environment variable with the memory budget of a `Triton` that was given none."""


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
        raise _rejected(where, memory_budget, f"{SIZE}, {least}")
    return MemoryBudget(size, min_awake)


def without_processes(config: TritonConfig, folders: Collection[str]) -> Sequence[str] | None:
    """Return what a server serves from folders and its repository; None where processes of ours run a `model.py`."""
    if (config.python_models or (WORKERS if folders else "")).lower() == WORKERS:
        return None
    repository = config.model_repository
    return [*map(repr, folders), *([] if repository is None else [f"what is in {repository}"])]


def _rejected(where: str, value: Any, rule: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(f"{where} must be {rule}; got {value!r}.", parameter=where, value=value, rule=rule)
