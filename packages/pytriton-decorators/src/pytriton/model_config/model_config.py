"""The configuration of a model, as the user gives it to `Triton.bind`."""

from dataclasses import dataclass, field

from pytriton.model_config._checks import integer, rejected
from pytriton.model_config.common import DynamicBatcher, ModelWarmup

__all__ = ["ModelConfig"]


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
    """How Triton joins requests to batches. None (kept for old scripts) leaves requests as they come."""
    response_cache: bool = False
    """Whether Triton answers a repeated request from its cache, without calling the callable."""
    decoupled: bool = False
    """Whether the callable is a generator whose every yield is a response of its own."""
    model_warmup: list[ModelWarmup] | None = None
    """Requests that are answered before the model is reported as ready."""
    arena_budget_bytes: int = 4 << 30
    """Shared memory that the tensors of one callable may take, in bytes; as much again for what it returns. Memory is
    taken when it is needed and given back when it was not for a while."""
    attach_timeout_s: float = 10.0
    """How long a request waits while no process serves the model, in seconds; then it fails as unavailable."""

    def validate(self) -> None:
        """Checks the present values, also against each other.

        Raises:
            PyTritonBadParameterError: A value breaks a rule that Triton, too, would refuse the model for; the error
                names field, value and rule.
        """
        if self.response_cache and self.decoupled:
            raise rejected(
                "ModelConfig.response_cache",
                True,
                "False for a decoupled model",
                "Triton cannot cache several responses.",
            )
        integer("ModelConfig.arena_budget_bytes", self.arena_budget_bytes, 1)
        if not isinstance(self.attach_timeout_s, (int, float)) or not 0 <= self.attach_timeout_s < float("inf"):
            raise rejected("ModelConfig.attach_timeout_s", self.attach_timeout_s, "a number of seconds, 0 or more")
        if not self.batching:
            return
        integer(
            "ModelConfig.max_batch_size",
            self.max_batch_size,
            1,
            why="For a model without a batch axis set batching=False.",
        )
        if self.batcher is not None:
            self.batcher.validate(self.max_batch_size)
