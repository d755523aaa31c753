"""What is known of the inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytriton.inprocess.capi.enums import DataType


@dataclass(frozen=True)
class InputSpec:
    """One input of a model."""

    data_type: DataType  # type of its elements
    dims: tuple[int, ...]  # the dimensions, with the batch dimension where the model has one; -1 stands for any size
    optional: bool = False  # whether a request may leave it out
    fixed_rank: bool = True  # whether the dimensions can be compared with those of a request


@dataclass(frozen=True)
class ModelInterface:
    """Inputs and outputs of a model, by name."""

    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]  # names of the outputs
    max_batch_size: int = 0  # the most rows of one request; 0 for a model without a batch dimension
    required: frozenset[str] = frozenset()  # names of the inputs that are not optional
