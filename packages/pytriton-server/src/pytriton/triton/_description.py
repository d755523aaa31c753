"""What `describe` returns: the models of a server, their tensors, where they are served, and whether they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytriton.decorators.serving import describe_tensors
from pytriton.model_config.triton_model_config import TritonModelConfig
from pytriton.server.models.definition import render_config_json
from pytriton.server.models.process_workers import PARENT, ProcessWorker
from pytriton.server.models.service import WorkerService

__all__ = ["ModelDescription", "TritonDescription", "describe_model"]


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
    """How many other processes serve it."""
    is_ready: bool | None
    """Whether a worker can answer; None while the server does not run."""
    is_asleep: bool = False
    """Whether its workers have ended until a request comes; it is ready all the same."""
    idle_timeout_s: float | None = None
    """After how many seconds without a request that is so; None is never."""
    has_parent: bool = False
    """Whether its workers are forked from a parent when they wake, with `ProcessWorker(sleep="parent")`."""
    is_pinned: bool = False
    """Whether its workers run on although another model needs their memory."""

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
        facts += [_counted(self.processes, "process", "es")] if self.processes else []
        facts += [f"sleeps after {self.idle_timeout_s:g} s"] if self.idle_timeout_s is not None else []
        facts += ["wakes from a parent"] if self.has_parent else []
        facts += ["pinned"] if self.is_pinned else []
        return ", ".join(facts)

    def __str__(self) -> str:
        state = [] if self.is_ready is None else ["ready" if self.is_ready else "not attached"]
        state = ["asleep"] if self.is_asleep else state
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
    ports: tuple[int, ...] = ()
    """Its ports; while it does not run, those of its settings."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self.models), *(f"{name}; of {path}" for name, path in self.folders.items())])


def describe_model(model: WorkerService, *, is_running: bool) -> ModelDescription:
    """Describe a model of a server that runs or does not."""
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
        is_pinned=model.definition.is_pinned,
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
