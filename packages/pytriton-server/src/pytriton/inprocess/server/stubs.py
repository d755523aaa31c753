"""The processes in which Triton's Python backend runs its models, and what is left of models whose process crashed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pytriton.server.tritonserver.stubs import remove_shared_memory, shared_memory_of, stubs_of

GRACE_S = 3.0
"""How long a model with a crashed process may take to be unloaded, in seconds. One that had a request when it crashed,
or since, never is: Triton's Python backend holds on to something of that request."""


def crashed(configs: Iterable[tuple[str, str, Mapping[str, Any]]]) -> set[tuple[str, str]]:
    """Return names and versions of models of the Python backend that have fewer processes than instances."""
    wanted = {
        (name, version): sum(
            int(group.get("count", 1)) * max(1, len(group.get("gpus", ()))) for group in config["instance_group"]
        )
        for name, version, config in configs
        if config.get("backend") == "python"
    }
    there = Counter(stub.model for stub in stubs_of(os.getpid())) if wanted else Counter()
    return {model for model, count in wanted.items() if there[model] < count}


def idle_regions(prefix: str) -> set[Path]:
    """Find shared memory of ended processes that this process has mapped."""
    return shared_memory_of(os.getpid(), prefix) - {stub.memory for stub in stubs_of(os.getpid())}


def clear_away(models: Collection[tuple[str, str]], regions: Collection[Path]) -> None:
    """End the remaining processes of models that will never be unloaded, and remove their shared memory."""
    for stub in stubs_of(os.getpid()):
        if stub.model in models:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
            regions = [*regions, stub.memory]
    remove_shared_memory(regions)
