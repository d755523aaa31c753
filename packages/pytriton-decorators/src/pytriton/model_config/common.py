"""How requests of a model are queued and batched, where it runs, and how it is warmed up."""

import enum
from dataclasses import dataclass
from typing import Any

from pytriton.model_config._checks import integer, rejected
from pytriton.model_config._dtypes import canonical_type

__all__ = ["DeviceKind", "DynamicBatcher", "ModelWarmup", "QueuePolicy", "TimeoutAction", "WarmupInput"]


class DeviceKind(enum.Enum):
    """Where Triton places the instances of a model."""

    KIND_AUTO = "KIND_AUTO"
    """On a GPU if there is one, else on the CPU."""
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


class TimeoutAction(enum.Enum):
    """What happens to a request that waited in the queue longer than its timeout."""

    REJECT = "REJECT"
    """It fails at once."""
    DELAY = "DELAY"
    """It is served after all requests that did not time out."""


@dataclass
class QueuePolicy:
    """How long, and how many, requests may wait in the queue of a model.

    Raises:
        PyTritonBadParameterError: A value is not of its kind or below its minimum.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    """What happens to a request whose timeout is over."""
    default_timeout_microseconds: int = 0
    """How long a request may wait, in microseconds; 0 is without limit."""
    allow_timeout_override: bool = False
    """Whether a request may bring a shorter timeout of its own."""
    max_queue_size: int = 0
    """How many requests may wait; further ones are rejected. 0 is without limit."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self, where: str = "QueuePolicy") -> None:
        """Checks the present values.

        Args:
            where: What to call this policy in an error.

        Raises:
            PyTritonBadParameterError: A value is not of its kind or below its minimum.
        """
        if not isinstance(self.timeout_action, TimeoutAction):
            raise rejected(
                f"{where}.timeout_action", self.timeout_action, "TimeoutAction.REJECT or TimeoutAction.DELAY"
            )
        integer(f"{where}.default_timeout_microseconds", self.default_timeout_microseconds, 0)
        integer(f"{where}.max_queue_size", self.max_queue_size, 0)


@dataclass
class DynamicBatcher:
    """How Triton forms batches from single requests.

    Values that are wrong on their own are refused here; how they fit together, and to the model's `max_batch_size`, is
    checked by `validate`, which the server calls when the model is bound.

    Raises:
        PyTritonBadParameterError: A value is not of its kind or below its minimum.
    """

    max_queue_delay_microseconds: int = 0
    """How long a request may be held back for others to join its batch, in microseconds."""
    preferred_batch_size: list[int] | None = None
    """Batch sizes, in rows, that are sent as soon as they are reached."""
    preserve_ordering: bool = False
    """Whether responses leave in the order in which their requests came."""
    priority_levels: int = 0
    """How many priorities there are, 1 being the highest; 0 is without priorities."""
    default_priority_level: int = 0
    """Priority of a request that brings none; needed where there are priorities."""
    default_queue_policy: QueuePolicy | None = None
    """Policy of every queue that has none of its own."""
    priority_queue_policy: dict[int, QueuePolicy] | None = None
    """Policies by priority."""

    def __post_init__(self) -> None:
        self._validate_single()

    def _validate_single(self) -> None:
        integer("DynamicBatcher.max_queue_delay_microseconds", self.max_queue_delay_microseconds, 0)
        integer("DynamicBatcher.priority_levels", self.priority_levels, 0)
        integer("DynamicBatcher.default_priority_level", self.default_priority_level, 0)
        for size in self.preferred_batch_size or ():
            integer("DynamicBatcher.preferred_batch_size", size, 1)

    def validate(self, max_batch_size: int | None = None) -> None:
        """Checks the present values, also against each other.

        Args:
            max_batch_size: The model's maximum batch size, in rows; None leaves out what depends on it.

        Raises:
            PyTritonBadParameterError: A value breaks a rule; the error names field, value and rule.
        """
        self._validate_single()
        if max_batch_size is not None:
            for size in self.preferred_batch_size or ():
                integer(
                    "DynamicBatcher.preferred_batch_size",
                    size,
                    1,
                    max_batch_size,
                    why="The model's max_batch_size is the limit.",
                )
        levels = self.priority_levels
        if levels:
            integer(
                "DynamicBatcher.default_priority_level",
                self.default_priority_level,
                1,
                levels,
                why=f"There are priority_levels={levels}.",
            )
        elif self.default_priority_level:
            raise rejected(
                "DynamicBatcher.default_priority_level",
                self.default_priority_level,
                "0 without priorities",
                "Set priority_levels, too.",
            )
        if levels > 1 and self.preserve_ordering:
            raise rejected(
                "DynamicBatcher.preserve_ordering",
                True,
                f"False with priority_levels={levels}",
                "One of the two has to go.",
            )
        if self.default_queue_policy is not None:
            self.default_queue_policy.validate("DynamicBatcher.default_queue_policy")
        for level, policy in (self.priority_queue_policy or {}).items():
            name = "DynamicBatcher.priority_queue_policy"
            if not levels:
                raise rejected(name, self.priority_queue_policy, "None without priorities", "Set priority_levels, too.")
            integer(f"{name} key", level, 1, levels, why=f"There are priority_levels={levels}.")
            policy.validate(f"{name}[{level}]")


@dataclass
class WarmupInput:
    """One input of a warm-up request.

    Raises:
        PyTritonBadParameterError: `dtype` is no element type that Triton can carry.
    """

    dtype: Any
    """Element type, as in `Tensor`."""
    shape: tuple[int, ...]
    """Shape of one row, without the batch axis."""
    zero_data: bool | None = False
    """Fill with zeros (empty strings)."""
    random_data: bool | None = False
    """Fill with random values."""
    input_data_file: str | None = None
    """Fill from this `.npy` file."""

    def __post_init__(self) -> None:
        self.dtype = canonical_type(self.dtype, parameter="WarmupInput.dtype")


@dataclass
class ModelWarmup:
    """Requests that a model answers before it is reported as ready."""

    name: str
    """What to call this warm-up in logs."""
    batch_size: int
    """Rows of each request."""
    inputs: dict[str, WarmupInput]
    """By name of the input."""
    count: int
    """How often the request is sent."""
