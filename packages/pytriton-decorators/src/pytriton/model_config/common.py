"""Parts of a model configuration: dynamic batching, queue policies, device kinds and warm-up."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pytriton.model_config._checks import (
    INT32_MAX,
    MICROSECONDS_MAX,
    UINT32_MAX,
    UINT64_MAX,
    check_bool,
    check_integer,
    is_list,
    parameter_error,
    to_microseconds,
)
from pytriton.model_config.warmup import ModelWarmup, WarmupInput, generate_warmup_data, generate_warmup_requests

__all__ = [
    "DeviceKind",
    "DynamicBatcher",
    "ModelWarmup",
    "QueuePolicy",
    "TimeoutAction",
    "WarmupInput",
    "generate_warmup_data",
    "generate_warmup_requests",
]


_NO_LIMIT = "0 is without limit."


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
    """Whether a request may bring a timeout of its own: a shorter one, or any where the default is without limit."""
    max_queue_size: int = 0
    """How many requests may wait; further ones are rejected. 0 is without limit."""

    def __post_init__(self) -> None:
        self.default_timeout_microseconds = to_microseconds(self.default_timeout_microseconds)
        self.validate()

    def validate(self, where: str = "QueuePolicy") -> None:
        """Check the present values.

        Args:
            where: What to call this policy in an error.

        Raises:
            PyTritonBadParameterError: A value is not of its kind or below its minimum.
        """
        if not isinstance(self.timeout_action, TimeoutAction):
            raise parameter_error(
                f"{where}.timeout_action", self.timeout_action, "TimeoutAction.REJECT or TimeoutAction.DELAY"
            )
        check_integer(
            f"{where}.default_timeout_microseconds",
            self.default_timeout_microseconds,
            0,
            MICROSECONDS_MAX,
            why=_NO_LIMIT,
        )
        check_bool(f"{where}.allow_timeout_override", self.allow_timeout_override)
        check_integer(f"{where}.max_queue_size", self.max_queue_size, 0, UINT32_MAX, why=_NO_LIMIT)

    @property
    def _delays(self) -> bool:
        """Whether a request may have to wait behind requests that came later."""
        has_timeout = bool(self.default_timeout_microseconds or self.allow_timeout_override)
        return has_timeout and self.timeout_action is TimeoutAction.DELAY


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
        self.max_queue_delay_microseconds = to_microseconds(self.max_queue_delay_microseconds)
        self._validate_single()

    def _validate_single(self) -> None:
        name = "DynamicBatcher"
        check_integer(f"{name}.max_queue_delay_microseconds", self.max_queue_delay_microseconds, 0, MICROSECONDS_MAX)
        check_bool(f"{name}.preserve_ordering", self.preserve_ordering)
        check_integer(f"{name}.priority_levels", self.priority_levels, 0, UINT64_MAX)
        check_integer(f"{name}.default_priority_level", self.default_priority_level, 0, UINT64_MAX)
        preferred = self.preferred_batch_size
        if preferred is not None and not is_list(preferred):
            raise parameter_error(f"{name}.preferred_batch_size", preferred, "a list of integers, or None")
        for size in preferred or ():
            check_integer(f"{name}.preferred_batch_size", size, 1, INT32_MAX)
        policy = self.default_queue_policy
        if policy is not None and not isinstance(policy, QueuePolicy):
            raise parameter_error(f"{name}.default_queue_policy", policy, "a QueuePolicy, or None")
        policies = self.priority_queue_policy
        if policies is not None and not isinstance(policies, Mapping):
            raise parameter_error(
                f"{name}.priority_queue_policy", policies, "a dictionary of QueuePolicy by priority, or None"
            )
        for level, policy in (policies or {}).items():
            check_integer(f"{name}.priority_queue_policy key", level, 1, UINT64_MAX, why="1 is the highest priority.")
            if not isinstance(policy, QueuePolicy):
                raise parameter_error(f"{name}.priority_queue_policy[{level}]", policy, "a QueuePolicy")

    def validate(self, max_batch_size: int | None = None) -> None:
        """Check the present values, also against each other.

        Args:
            max_batch_size: The model's maximum batch size, in rows; 0 is without batching, and None leaves out what
                depends on it.

        Raises:
            PyTritonBadParameterError: A value breaks a rule; the error names field, value and rule.
        """
        self._validate_single()
        if max_batch_size == 0:
            self._validate_alone()
        elif max_batch_size is not None:
            why = "The model's max_batch_size is the limit."
            for size in self.preferred_batch_size or ():
                check_integer("DynamicBatcher.preferred_batch_size", size, 1, max_batch_size, why=why)
        self._validate_priorities()
        for name, policy in self._policies():
            policy.validate(name)
            if self.preserve_ordering and policy._delays:
                raise parameter_error(
                    f"{name}.timeout_action",
                    policy.timeout_action,
                    "TimeoutAction.REJECT with preserve_ordering=True",
                    "A delayed request is answered out of its order: one of the two has to go.",
                )

    def _validate_alone(self) -> None:
        # Triton accepts both without batching, and ignores them.
        for field, none in (("max_queue_delay_microseconds", 0), ("preferred_batch_size", None)):
            if getattr(self, field):
                raise parameter_error(
                    f"DynamicBatcher.{field}",
                    getattr(self, field),
                    f"{none} for a model without batching",
                    "Each request is alone there, so none waits for others.",
                )

    def _validate_priorities(self) -> None:
        levels = self.priority_levels
        name = "DynamicBatcher.default_priority_level"
        if levels:
            why = f"There are priority_levels={levels}."
            check_integer(name, self.default_priority_level, 1, levels, why=why)
        elif self.default_priority_level:
            raise parameter_error(
                name, self.default_priority_level, "0 without priorities", "Set priority_levels, too."
            )
        if levels > 1 and self.preserve_ordering:
            raise parameter_error(
                "DynamicBatcher.preserve_ordering",
                True,
                f"False with priority_levels={levels}",
                "One of the two has to go.",
            )
        if self.priority_queue_policy and not levels:
            raise parameter_error(
                "DynamicBatcher.priority_queue_policy",
                self.priority_queue_policy,
                "None without priorities",
                "Set priority_levels, too.",
            )
        for level in self.priority_queue_policy or ():
            check_integer(
                "DynamicBatcher.priority_queue_policy key", level, 1, levels, why=f"There are priority_levels={levels}."
            )

    def _policies(self) -> list[tuple[str, QueuePolicy]]:
        policies = self.priority_queue_policy or {}
        named = [(f"DynamicBatcher.priority_queue_policy[{level}]", policy) for level, policy in policies.items()]
        if self.default_queue_policy is not None:
            named.insert(0, ("DynamicBatcher.default_queue_policy", self.default_queue_policy))
        return named
