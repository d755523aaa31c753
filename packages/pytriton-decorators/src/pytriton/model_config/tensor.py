"""The description of one input or output of a model."""

from dataclasses import dataclass, field
from typing import Any

from pytriton.model_config._checks import check_bool, parameter_error, to_shape
from pytriton.model_config.dtypes import canonical_type

__all__ = ["Tensor"]

_SHAPE_RULE = "an iterable of integers, each at least 1, or -1 for a size that may vary"


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model.

    Raises:
        PyTritonBadParameterError: A value breaks its rule; for `dtype` the error lists what is accepted.
    """

    shape: tuple[int, ...]
    """Sizes of one row, without the batch axis where the model has one; -1 is a size that may vary. Any iterable of
    integers is taken and kept as a tuple."""
    dtype: Any
    """Element type: a numpy dtype, a numpy scalar type, a name such as `"float32"`, `ml_dtypes.bfloat16`, or Python's
    `bool` (kept as `numpy.bool_`), `int` (`numpy.int64`), `float` (`numpy.float64`), `bytes` and `str` (both kept as
    `bytes`: strings). Kept as the scalar type, so `Tensor((1,), "float32").dtype is numpy.float32`."""
    name: str | None = None
    """Name in requests and results; None makes it `INPUT_<n>` or `OUTPUT_<n>` by its place, counted from 1."""
    optional: bool | None = False
    """Whether requests may leave this input out. Outputs are never optional."""
    hint: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    """What its author calls its type, such as `"list[str]"`, for people to read: in errors of clients, lists of models
    and the console. By `@model` it is the type hint."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", to_shape("Tensor.shape", self.shape, _SHAPE_RULE, 1, allow_variable=True))
        object.__setattr__(self, "dtype", canonical_type(self.dtype, parameter="Tensor.dtype"))
        if self.name is not None and (not isinstance(self.name, str) or not self.name or "\0" in self.name):
            rule = "a non-empty string without NUL, or None for a name by its place"
            raise parameter_error("Tensor.name", self.name, rule)
        if self.optional is not None:
            check_bool("Tensor.optional", self.optional)
        if self.hint is not None and (not isinstance(self.hint, str) or not self.hint):
            raise parameter_error("Tensor.hint", self.hint, "a non-empty string, or None")
