"""The whole configuration of a bound model, as the decorators and the server see it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytriton.model_config.common import DeviceKind, DynamicBatcher, ModelWarmup
from pytriton.model_config.cost import Cost
from pytriton.model_config.dtypes import canonical_type

__all__ = ["ResponseCache", "TensorSpec", "TritonModelConfig"]


@dataclass
class ResponseCache:
    """Whether Triton answers repeated requests from its cache."""

    enable: bool


@dataclass
class TensorSpec:
    """One input or output of a bound model: a `Tensor` whose name is settled.

    Raises:
        PyTritonBadParameterError: `dtype` is no element type that Triton can carry.
    """

    name: str
    shape: tuple[int, ...]
    """Sizes of one row, without the batch axis; -1 is a size that may vary."""
    dtype: Any
    """Element type, kept as the scalar type, as in `Tensor`."""
    optional: bool | None = False
    hint: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    """What its author calls its type, as in `Tensor`."""

    def __post_init__(self) -> None:
        self.dtype = canonical_type(self.dtype, parameter=f"dtype of tensor {self.name!r}")


@dataclass
class TritonModelConfig:
    """The configuration of a bound model."""

    model_name: str
    model_version: int = 1
    max_batch_size: int = 4
    """The most rows of one batch. Has no meaning without batching."""
    batching: bool = True
    batcher: DynamicBatcher | None = None
    instance_group: dict[DeviceKind, int | None] = field(default_factory=dict)
    """How many instances Triton makes, by place."""
    decoupled: bool = False
    backend_parameters: dict[str, str] = field(default_factory=dict)
    inputs: Sequence[TensorSpec] | None = None
    outputs: Sequence[TensorSpec] | None = None
    response_cache: ResponseCache | None = None
    model_warmup: list[ModelWarmup] | None = None
    cost: Cost | None = None
    """What a batch may cost where requests of different shapes share one."""

    @property
    def backend(self) -> str:
        """Name of the Triton backend that serves the model."""
        return "pytriton"
