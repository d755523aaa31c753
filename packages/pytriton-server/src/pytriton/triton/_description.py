"""What `describe` returns: the models of a server, their tensors, where they are served, and whether they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytriton.decorators.serving import describe_tensors
from pytriton.model_config.triton_model_config import TritonModelConfig
from pytriton.proxy_backend.process.budget import MemoryBudget, size_text
from pytriton.server.models.definition import render_config_json
from pytriton.server.models.process_workers import PARENT, ProcessWorker
from pytriton.server.models.service import WorkerService


@dataclass(frozen=True)
class ModelDescription:
    """A model that is bound to a server. Its text is one line for people."""

    name: str
    version: int
    config: TritonModelConfig
    """Its configuration as Triton gets it, with its tensors."""
    threads: int
    """How many threads of this process serve it."""
    processes: int
    """How many other processes serve it, the most where their number changes."""
    is_ready: bool | None
    """Whether a worker can answer; None while the server does not run."""
    is_asleep: bool = False
    """Whether its workers have ended until a request comes; it is ready all the same."""
    idle_timeout_s: float | None = None
    """After how many seconds without a request that is so; None is never."""
    has_parent: bool = False
    """Whether its workers are forked from a parent when they wake, with `ProcessWorker(sleep="parent")`."""
    memory_bytes: int | None = None
    """What its worker processes take, of what they share with others their part (PSS); None if it may not sleep and
    there is no memory budget, and while the server does not run."""
    last_used: float | None = None
    """When somebody called it last, or it came awake, as seconds of the Unix epoch; None likewise."""
    wake_ups: int = 0
    """How often it was woken."""
    wake_p50_s: float | None = None
    """The time within which half of its wake-ups were over, in seconds; None without any."""
    wake_p95_s: float | None = None
    """The time within which 95 of 100 were."""
    is_pinned: bool = False
    """Whether its workers run on although another model needs their memory."""
    min_processes: int | None = None
    """How many of `processes` run at least; None where all do."""
    running_processes: int | None = None
    """How many of them serve it now; None where their number stays, and while the server does not run."""

    @property
    def inputs(self) -> str:
        """Its inputs in one line, such as `text: str as BYTES[1], times?: int as INT64[1]`."""
        return describe_tensors(self.config.inputs or ())

    @property
    def outputs(self) -> str:
        """Its outputs in one line."""
        return describe_tensors(self.config.outputs or ())

    @property
    def triton_config(self) -> dict[str, Any]:
        """Its configuration in the form of Triton's JSON, as a running server shows it."""
        config: dict[str, Any] = json.loads(render_config_json(self.config))
        return config

    @property
    def facts(self) -> str:
        """How it is served, such as `max_batch_size=16, 1 thread`."""
        config = self.config
        facts = [f"version {self.version}"] if self.version != 1 else []
        facts += [f"max_batch_size={config.max_batch_size}"] if config.batching else []
        facts += ["decoupled"] if config.decoupled else []
        facts += [_counted(self.threads, "thread")] if self.threads else []
        fewest = "" if self.min_processes is None else f"{self.min_processes} to "
        facts += [fewest + _counted(self.processes, "process", "es")] if self.processes else []
        facts += [f"sleeps after {self.idle_timeout_s:g} s"] if self.idle_timeout_s is not None else []
        facts += ["wakes from a parent"] if self.has_parent else []
        facts += ["pinned"] if self.is_pinned else []
        return ", ".join(facts)

    def __str__(self) -> str:
        state = [] if self.is_ready is None else ["ready" if self.is_ready else "not attached"]
        state = ["asleep"] if self.is_asleep else state
        if self.running_processes and not self.is_asleep:
            state.append(f"{self.running_processes} running")
        if self.memory_bytes and not self.is_asleep:
            state.append(size_text(self.memory_bytes))
        if self.wake_ups:
            state.append(
                f"woken {_counted(self.wake_ups, 'time')} in {self.wake_p50_s:.3g} s (p95 {self.wake_p95_s:.3g} s)"
            )
        return f"{self.name}({self.inputs}) -> {self.outputs}; {', '.join([*state, self.facts])}"


@dataclass(frozen=True)
class TritonDescription:
    """A server with its models. Its text has a line for each model."""

    models: tuple[ModelDescription, ...]
    """The bound callables, each version of a name by itself."""
    is_running: bool
    start_s: float
    """How long it took until the models were served, in seconds; 0 before that."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """The models that `bind_model` has added, by name."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """The addresses, by `http`, `grpc`, `metrics`, `sagemaker` and `vertex_ai`; empty while it does not run."""
    memory_budget_bytes: int | None = None
    """How much memory its worker processes may take together; None is any amount."""
    memory_used_bytes: int | None = None
    """How much they take; None without a budget."""
    ports: tuple[int, ...] = ()
    """Its ports; while it does not run, those of its settings."""
    address: str = ""
    """Where it listens, such as 0.0.0.0; empty for a server of somebody else."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages browsers let read its answers."""

    def __str__(self) -> str:
        lines = [*map(str, self.models), *(f"{name}; of {path}" for name, path in self.folders.items())]
        if self.memory_budget_bytes is not None:
            used = "" if self.memory_used_bytes is None else f"{size_text(self.memory_used_bytes)} of "
            lines.append(f"memory of worker processes: {used}{size_text(self.memory_budget_bytes)}")
        return "\n".join(lines)


def describe_triton(
    models: tuple[ModelDescription, ...], budget: MemoryBudget, *, is_running: bool, start_s: float
) -> TritonDescription:
    """Describe a server with its models, as far as all servers have that."""
    limit = budget.limit_bytes
    used = None if limit is None or not is_running else budget.used_bytes
    return TritonDescription(models, is_running, start_s, memory_budget_bytes=limit, memory_used_bytes=used)


def describe_model(model: WorkerService, *, is_running: bool) -> ModelDescription:
    """Describe a model of a server that runs or does not."""
    facts = model.read_sleep() if is_running else None
    scaling, limits = None if facts is None else facts.scaling, model.definition.scaling
    quantiles_s = None if facts is None else facts.wake_quantiles_s
    return ModelDescription(
        model.name,
        model.version,
        model.definition.triton_config,
        threads=sum(not isinstance(each, ProcessWorker) for each in model.definition.callables),
        processes=sum(each.copies for each in model.definition.callables if isinstance(each, ProcessWorker)),
        is_ready=model.is_attached if is_running else None,
        is_asleep=is_running and model.is_asleep,
        idle_timeout_s=model.definition.idle_timeout_s,
        has_parent=any(isinstance(each, ProcessWorker) and each.sleep == PARENT for each in model.definition.callables),
        memory_bytes=None if facts is None else facts.memory,
        last_used=None if facts is None else float(facts.last_used),
        wake_ups=0 if facts is None else facts.wakes.count,
        wake_p50_s=None if quantiles_s is None else quantiles_s[0],
        wake_p95_s=None if quantiles_s is None else quantiles_s[1],
        is_pinned=model.definition.is_pinned,
        min_processes=None if limits is None else limits.fewest,
        running_processes=None if scaling is None else scaling.running,
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
