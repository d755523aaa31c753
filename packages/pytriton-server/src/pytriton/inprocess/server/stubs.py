"""The processes in which Triton's Python backend runs its models, and what is left of models whose process crashed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["GRACE_S", "clear_away", "crashed", "idle_regions"]

GRACE_S = 3.0
"""How long a model with a crashed process may take to be unloaded, in seconds. One that had a request when it crashed,
or since, never is: Triton's Python backend holds on to something of that request."""

_STUB = "triton_python_backend_stub"
_SHARED_MEMORY = "/dev/shm"
# Where the option shm-region-prefix-name says nothing else.
_PREFIX = "triton_python_backend_shm_region_"


def crashed(configs: Iterable[tuple[str, str, Mapping[str, Any]]]) -> set[tuple[str, str]]:
    """Tell which models of the Python backend have fewer processes than instances.

    Args:
        configs: Name, version and configuration of loaded models.

    Returns:
        Names and versions of these models.
    """
    wanted = {
        (name, version): sum(
            int(group.get("count", 1)) * max(1, len(group.get("gpus", ()))) for group in config["instance_group"]
        )
        for name, version, config in configs
        if config.get("backend") == "python"
    }
    there = Counter(stub.model for stub in _stubs()) if wanted else Counter()
    return {model for model, count in wanted.items() if there[model] < count}


def idle_regions(prefix: str) -> set[Path]:
    """Find the shared memory of processes that have ended, as far as this process has it mapped.

    Args:
        prefix: With which the names of such memory begin.
    """
    start = f"{_SHARED_MEMORY}/{prefix or _PREFIX}"
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line[line.index(start) :] for line in lines if start in line and not line.endswith(" (deleted)")}
    return {Path(path) for path in mapped} - {Path(_SHARED_MEMORY, stub.region) for stub in _stubs()}


def clear_away(models: Collection[tuple[str, str]], regions: Iterable[Path]) -> None:
    """End what is left of the processes of models that will never be unloaded, and remove their shared memory.

    Args:
        models: Names and versions.
        regions: Shared memory that no process has used for a while: one that is about to start has none yet.
    """
    for stub in _stubs():
        if stub.model in models:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
            regions = [*regions, Path(_SHARED_MEMORY, stub.region)]
    for region in regions:
        region.unlink(missing_ok=True)


class _Stub(NamedTuple):
    pid: int
    model: tuple[str, str]
    region: str


def _stubs() -> Iterator[_Stub]:
    """Find the processes that are children of this one and have not ended."""
    for process in Path("/proc").glob("[0-9]*"):
        # Processes come and go. One that has ended has no command any more.
        with contextlib.suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) != os.getpid():
                continue
            # The program, the model's file (.../<name>/<version>/model.py), and the name of the shared memory.
            program, file, region, *_ = [*os.fsdecode((process / "cmdline").read_bytes()).split("\0"), "", ""]
            if os.path.basename(program) == _STUB:
                *_, name, version, _ = Path(file).parts
                yield _Stub(int(process.name), (name, version), region)
