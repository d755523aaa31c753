"""The configuration of a model, as the user gives it to `Triton.bind`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from pytriton.model_config._checks import (
    INT32_MAX,
    INT64_MAX,
    check_bool,
    check_integer,
    check_seconds,
    is_list,
    parameter_error,
)
from pytriton.model_config.common import DynamicBatcher, ModelWarmup
from pytriton.model_config.cost import Cost
from pytriton.model_config.warmup import TensorLike

__all__ = ["ModelConfig", "ModelOptions"]


@dataclass
class ModelConfig:
    """How a model is served.

    The fields may be changed until the model is bound; that is when the server calls `validate`.
    """

    batching: bool = True
    """Whether inputs and outputs have a leading batch axis. Without it, the callable gets one request at a time."""
    max_batch_size: int = 4
    """The most rows that one call of the callable gets. Has no meaning without batching."""
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    """How Triton queues requests and joins them to batches; without batching, its queue policies and priorities hold
    alike. None (kept for old scripts) leaves requests as they come."""
    response_cache: bool = False
    """Whether the server answers a request that it has answered before from its cache, without calling the callable.
    That has to give equal answers to equal requests."""
    decoupled: bool = False
    """Whether the callable is a generator whose every yield is a response of its own."""
    model_warmup: list[ModelWarmup] | None = None
    """Requests that every callable of the model answers before the model is reported as ready. One that fails fails
    the load of the model."""
    arena_budget_bytes: int = 4 << 30
    """Shared memory that the tensors of one callable may take, in bytes; as much again for what it returns. Memory is
    taken when it is needed and given back when it was not for a while."""
    attach_timeout_s: float = 10.0
    """How long a request waits while no process serves the model, in seconds; then it fails as unavailable."""

    send_tracebacks: bool = False
    """Whether a client gets the traceback of an error in the callable. It is always in the log; a client that is not
    the owner of the model should not learn its paths and code."""
    warmup_timeout_s: float = 600.0
    """How long the warm-up may take, in seconds; then the load of the model fails."""

    execution_timeout_s: float | None = None
    """How long the callable may take for one batch, in seconds, and for each further response where the model is
    decoupled. Then the requests of the batch fail as unavailable; a worker in a process of its own is replaced, a
    callable in a thread gets no more batches until it has returned. None lets it take as long as it likes, and so long
    do its callers wait."""
    repeatable: bool = False
    """Whether a request may be carried out twice. Then the requests of a worker that died before it answered any of
    its batch go to another worker, once; otherwise they fail at once."""

    stream_backlog_bytes: int = 4 << 20
    """How many bytes of a stream may wait for a caller who reads slowly, each response counting 1 KiB at least. Then
    the generator is not asked for more until half of that was taken. 0 lets any number wait."""
    stream_stall_timeout_s: float | None = 60.0
    """How long a caller may take less than a sixteenth of that (256 KiB at most) of a stream that waits for it, in
    seconds; then the stream ends with an error. None waits as long as the caller stays connected."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    """Entries of `parameters` in Triton's configuration of the model, by name. Everybody who asks the server for the
    configuration sees them: `chat_template` is what the OpenAI endpoints make prompts with."""

    cost: Cost | None = None
    """What a batch may cost where requests differ in length: those of different shapes join a batch then. None joins
    requests of equal shapes only, as many as `max_batch_size` says."""

    def validate(self, inputs: "Iterable[TensorLike] | None" = None) -> None:
        """Check the present values, also against each other.

        Args:
            inputs: The model's inputs (each with `name`, `shape`, `dtype` and `optional`), to hold the warm-up against;
                None leaves that out.

        Raises:
            PyTritonBadParameterError: A value breaks a rule that Triton, too, would refuse the model for, or that the
                warm-up needs; the error names field, value and rule.
        """
        for name in ("batching", "response_cache", "decoupled", "send_tracebacks", "repeatable"):
            check_bool(f"ModelConfig.{name}", getattr(self, name))
        if self.response_cache and self.decoupled:
            raise parameter_error(
                "ModelConfig.response_cache",
                True,
                "False for a decoupled model",
                "A request with several responses cannot be cached.",
            )
        check_integer("ModelConfig.arena_budget_bytes", self.arena_budget_bytes, 1, INT64_MAX)
        check_seconds("ModelConfig.attach_timeout_s", self.attach_timeout_s)
        check_seconds("ModelConfig.warmup_timeout_s", self.warmup_timeout_s)
        # The proxy counts in milliseconds.
        check_seconds("ModelConfig.execution_timeout_s", self.execution_timeout_s, 0.001, optional=True)
        check_integer("ModelConfig.stream_backlog_bytes", self.stream_backlog_bytes, 0, INT64_MAX)
        check_seconds("ModelConfig.stream_stall_timeout_s", self.stream_stall_timeout_s, 0.001, optional=True)
        if self.batcher is not None and not isinstance(self.batcher, DynamicBatcher):
            raise parameter_error("ModelConfig.batcher", self.batcher, "a DynamicBatcher, or None")
        if self.batching:
            why = "For a model without a batch axis set batching=False."
            check_integer("ModelConfig.max_batch_size", self.max_batch_size, 1, INT32_MAX, why=why)
        elif self.max_batch_size is not None:
            check_integer("ModelConfig.max_batch_size", self.max_batch_size, 0, INT32_MAX)
        if self.batcher is not None:
            self.batcher.validate(self.max_batch_size if self.batching else 0)
        pairs = self.parameters.items() if isinstance(self.parameters, Mapping) else [(None, None)]
        if not all(isinstance(name, str) and name and isinstance(value, str) for name, value in pairs):
            raise parameter_error("ModelConfig.parameters", self.parameters, "a mapping of names to texts")
        specs = None if inputs is None else list(inputs)
        self._validate_cost(specs)
        self._validate_warmup(specs)

    def _validate_cost(self, inputs: "Sequence[TensorLike] | None") -> None:
        name, cost = "ModelConfig.cost", self.cost
        if cost is None:
            return
        if not isinstance(cost, Cost):
            raise parameter_error(name, cost, "a Cost, or None")
        if not self.batching or self.batcher is None:
            raise parameter_error(name, cost, "None for a model without batching, or without a batcher")
        if self.decoupled:
            raise parameter_error(name, cost, "None for a decoupled model")
        cost.validate(inputs)

    def _validate_warmup(self, specs: "Sequence[TensorLike] | None") -> None:
        name = "ModelConfig.model_warmup"
        warmups = self.model_warmup
        if warmups is not None and not is_list(warmups):
            raise parameter_error(name, warmups, "a list of ModelWarmup, or None")
        for index, warmup in enumerate(warmups or ()):
            if not isinstance(warmup, ModelWarmup):
                raise parameter_error(f"{name}[{index}]", warmup, "a ModelWarmup")
            limit = self.max_batch_size if self.batching else None
            warmup.validate(limit, specs, where=f"{name}[{index}]")


class ModelOptions(TypedDict, total=False):
    """The fields of `ModelConfig` that do not follow from the function: the options of `@model`."""

    max_batch_size: int
    batcher: DynamicBatcher | None
    cost: Cost | None
    response_cache: bool
    model_warmup: list[ModelWarmup] | None
    arena_budget_bytes: int
    attach_timeout_s: float
    send_tracebacks: bool
    warmup_timeout_s: float
    execution_timeout_s: float | None
    repeatable: bool
    stream_backlog_bytes: int
    stream_stall_timeout_s: float | None
    parameters: Mapping[str, str]
