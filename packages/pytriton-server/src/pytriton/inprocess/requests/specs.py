"""What is known of the inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytriton.inprocess.capi.enums import DataType

__all__ = ["InputSpec", "ModelInterface"]


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    Attributes:
        data_type: Type of its elements.
        dims: The dimensions, with the batch dimension where the model has one; -1 stands for any size.
        optional: Whether a request may leave it out.
        fixed_rank: Whether the dimensions can be compared with those of a request.
    """

    data_type: DataType
    dims: tuple[int, ...]
    optional: bool = False
    fixed_rank: bool = True


@dataclass(frozen=True)
class ModelInterface:
    """Inputs and outputs of a model, by name.

    Attributes:
        inputs: The inputs.
        outputs: Names of the outputs.
        max_batch_size: The most rows of one request; 0 for a model without a batch dimension.
        required: Names of the inputs that are not optional.
    """

    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]
    max_batch_size: int = 0
    required: frozenset[str] = frozenset()
