"""Warm-up: what a model is called with before it is reported as ready, and where that data comes from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config._checks import UINT32_MAX, check_bool, check_integer, parameter_error, to_shape
from pytriton.model_config.dtypes import array_dtype, canonical_type, is_string, wire_name

Array = np.ndarray[Any, Any]

_SHAPE_RULE = "an iterable of integers, each at least 0"
_SOURCES = "zero_data=True, random_data=True or input_data_file='....npy'"
# Random integers stay small, because they are often used as indices or lengths.
_RANDOM_INTEGER_MAX = 100
_RANDOM_TEXT_MAX = 16


class TensorLike(Protocol):
    """The attributes of a `TensorSpec`, whose module imports this one."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, without the batch axis."""
        ...

    @property
    def dtype(self) -> Any:
        """Its element type."""
        ...


@dataclass
class WarmupInput:
    """One input of a warm-up request, and where its data comes from.

    Of several sources the first one in the order of the fields is taken.

    Raises:
        PyTritonBadParameterError: `dtype` is no element type that Triton can carry, or a value is not of its kind.
    """

    dtype: Any
    """Element type, as in `Tensor`."""
    shape: tuple[int, ...]
    """Shape of one row, without the batch axis. Every size has to be said, also those that the model leaves open."""
    zero_data: bool | None = False
    """Fill with zeros (empty strings)."""
    random_data: bool | None = False
    """Fill with random values: integers from 0 to 100 (or what the type can hold), numbers from 0 to 1, words."""
    input_data_file: str | None = None
    """Fill from this `.npy` file: the whole batch, rows, or one row. One row is repeated for the whole batch, too few
    rows are repeated from the first one on, and what is too much is left out."""

    def __post_init__(self) -> None:
        self.dtype = canonical_type(self.dtype, parameter="WarmupInput.dtype")
        self.shape = to_shape("WarmupInput.shape", self.shape, _SHAPE_RULE, 0, allow_variable=False)
        self._validate("WarmupInput")

    def _validate(self, where: str) -> None:
        for field in ("zero_data", "random_data"):
            if getattr(self, field) is not None:
                check_bool(f"{where}.{field}", getattr(self, field))
        file = self.input_data_file
        if file is not None and not isinstance(file, (str, os.PathLike)):
            raise parameter_error(f"{where}.input_data_file", file, "the path of a .npy file, or None")

    def _validate_source(self, where: str) -> None:
        self._validate(where)
        if not (self.zero_data or self.random_data or self.input_data_file):
            raise PyTritonBadParameterError(
                f"{where} says nothing about its data. Set one of {_SOURCES}.",
                parameter=where,
                value=self,
                rule=f"must have one of {_SOURCES}",
            )


@dataclass
class ModelWarmup:
    """Requests that every callable of a model answers before the model is reported as ready.

    Raises:
        PyTritonBadParameterError: A value is not of its kind.
    """

    name: str
    """What to call this warm-up in errors and logs."""
    batch_size: int
    """Rows of each request. Has no meaning for a model without batching."""
    inputs: dict[str, WarmupInput]
    """By name of the input. The callable gets these and no others, so leave out what it can do without."""
    count: int = 1
    """How often the request is made, for each callable."""

    def __post_init__(self) -> None:
        self._validate_single()

    def _validate_single(self, where: str = "ModelWarmup") -> None:
        if not isinstance(self.name, str):
            raise parameter_error(f"{where}.name", self.name, "a string")
        check_integer(f"{where}.batch_size", self.batch_size, 0, UINT32_MAX)
        check_integer(f"{where}.count", self.count, 0, UINT32_MAX)
        if not isinstance(self.inputs, Mapping):
            raise parameter_error(f"{where}.inputs", self.inputs, "a dictionary of WarmupInput by name of the input")
        for name, given in self.inputs.items():
            if not isinstance(given, WarmupInput):
                raise parameter_error(f"{where}.inputs[{name!r}]", given, "a WarmupInput")

    def validate(
        self,
        max_batch_size: int | None = None,
        inputs: Iterable[TensorLike] | None = None,
        *,
        where: str = "ModelWarmup",
    ) -> None:
        """Check the present values, also against the model. Files are looked at when the data is made.

        Args:
            max_batch_size: The most rows of a batch; None for a model without batching.
            inputs: The model's inputs; None leaves out what depends on them.
            where: What to call this warm-up in an error.

        Raises:
            PyTritonBadParameterError: A value breaks a rule; the error names field, value and rule.
        """
        self._validate_single(where)
        if max_batch_size is not None:
            why = "The model's max_batch_size is the limit."
            check_integer(f"{where}.batch_size", self.batch_size, 1, max_batch_size, why=why)
        for name, given in self.inputs.items():
            given._validate_source(f"{where}.inputs[{name!r}]")
        if inputs is not None:
            self._validate_against({spec.name: spec for spec in inputs}, where)

    def _validate_against(self, declared: dict[str, TensorLike], where: str) -> None:
        names = f"the model has the inputs {', '.join(map(repr, declared)) or '(none)'}"
        for name, given in self.inputs.items():
            field = f"{where}.inputs[{name!r}]"
            spec = declared.get(name)
            if spec is None:
                raise parameter_error(f"{where}.inputs", sorted(self.inputs), f"inputs of the model; {names}")
            if wire_name(given.dtype) != wire_name(spec.dtype):
                raise parameter_error(f"{field}.dtype", given.dtype, f"that of the model's input, {spec.dtype!r}")
            fits = len(given.shape) == len(spec.shape) and all(
                wanted in (-1, size) for size, wanted in zip(given.shape, spec.shape, strict=True)
            )
            if not fits:
                raise parameter_error(
                    f"{field}.shape",
                    given.shape,
                    f"a shape of the model's input, {spec.shape}",
                    "The batch axis is not part of it.",
                )


def generate_warmup_data(
    warmup_input: WarmupInput, batch_size: int | None, *, seed: int = 0, where: str = "WarmupInput"
) -> Array:
    """Make the array of one input of a warm-up request.

    Args:
        warmup_input: What to make.
        batch_size: Rows of the array; None makes no batch axis, as for a model without batching.
        seed: Chooses the random values. The same seed gives the same ones.
        where: What to call the input in an error.

    Returns:
        An array of its own, of shape `(batch_size, *warmup_input.shape)` and of the dtype that a callable gets:
        `object` (of `bytes`) for strings.

    Raises:
        PyTritonBadParameterError: There is neither zero nor random data nor a file, the file cannot be read, or what it
            holds does not fit.
    """
    warmup_input._validate_source(where)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    shape = warmup_input.shape if batch_size is None else (int(batch_size), *warmup_input.shape)
    if warmup_input.zero_data:
        fill: Any = b"" if is_string(warmup_input.dtype) else 0
        return np.full(shape, fill, dtype=array_dtype(warmup_input.dtype))
    if warmup_input.random_data:
        return _random(shape, warmup_input.dtype, np.random.default_rng(seed))
    return _from_file(warmup_input, shape, batch_size, f"{where}.input_data_file")


def warmup_request(warmup: ModelWarmup, index: int, *, batching: bool) -> dict[str, Array]:
    """Make the arrays of one request of a warm-up, which differ in their random values.

    Their shape is `(warmup.batch_size, *shape)`, without the batch axis if the model does not batch.
    """
    batch_size = warmup.batch_size if batching else None
    return {
        name: generate_warmup_data(
            given, batch_size, seed=index, where=f"ModelWarmup({warmup.name!r}).inputs[{name!r}]"
        )
        for name, given in warmup.inputs.items()
    }


def generate_warmup_requests(
    model_warmup: ModelWarmup, input_specs: Any = None, outputs_specs: Any = None, *, batching: bool = True
) -> list[dict[str, Array]]:
    """Make the inputs of all requests of a warm-up.

    Args:
        model_warmup: The warm-up.
        input_specs: Kept for old scripts; without effect.
        outputs_specs: Kept for old scripts; without effect.
        batching: Whether the model has a batch axis.

    Returns:
        `model_warmup.count` dictionaries of arrays by name of the input, each array of shape
        `(model_warmup.batch_size, *shape)`, without the first axis where the model does not batch.

    Raises:
        PyTritonBadParameterError: As `generate_warmup_data`.
    """
    return [warmup_request(model_warmup, index, batching=batching) for index in range(model_warmup.count)]


def _random(shape: tuple[int, ...], declared: Any, random: np.random.Generator) -> Array:
    dtype = array_dtype(declared)
    if dtype.kind == "O":
        words = np.empty(shape, dtype=dtype)
        for index in np.ndindex(shape):
            words[index] = bytes(
                random.integers(ord("a"), ord("z") + 1, random.integers(1, _RANDOM_TEXT_MAX + 1)).tolist()
            )
        return words
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return random.integers(0, _RANDOM_INTEGER_MAX + 1, shape).astype(dtype)
    return random.random(shape).astype(dtype)


def _from_file(warmup_input: WarmupInput, shape: tuple[int, ...], batch_size: int | None, where: str) -> Array:
    path = warmup_input.input_data_file
    try:
        # Without pickle, because a data file must not run code.
        loaded: Any = np.load(str(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        rule = "a .npy file that can be read, of numbers or fixed-width strings"
        raise parameter_error(where, path, rule, str(error)) from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise parameter_error(where, path, "a .npy file; this one is an archive of several (.npz)")
    rows = _rows(loaded, shape, batch_size)
    if rows is None:
        one = ", ".join(map(str, warmup_input.shape))
        accepted = f"({one})" if batch_size is None else f"({one}) for one row, or (rows, {one})"
        raise parameter_error(
            where, path, f"a file with an array of shape {accepted}", f"Its array has shape {loaded.shape}."
        )
    return _cast(rows, warmup_input.dtype, path, where)


def _rows(loaded: Array, shape: tuple[int, ...], batch_size: int | None) -> Array | None:
    """Bring the content of a file to the shape of the request; None if it does not fit."""
    if batch_size is None:
        return loaded if loaded.shape == shape else None
    if loaded.shape == shape[1:]:
        return np.broadcast_to(loaded, shape)
    if loaded.shape[1:] != shape[1:] or loaded.ndim != len(shape) or not len(loaded):
        return None
    repeated: Array = loaded[np.arange(batch_size) % len(loaded)]
    return repeated


def _cast(rows: Array, declared: Any, path: Any, where: str) -> Array:
    dtype = array_dtype(declared)
    if dtype.kind == "O":
        if rows.dtype.kind not in "SUT":
            raise parameter_error(
                where, path, "a file of strings (numpy's S or U)", f"Its array has dtype {rows.dtype}."
            )
        encoded = rows if rows.dtype.kind == "S" else np.char.encode(rows.astype(np.str_), "utf-8")
        return np.array(encoded, dtype=object)
    if rows.dtype.kind == "V" and rows.dtype.itemsize == dtype.itemsize and wire_name(declared) == "BF16":
        # Types that numpy has no name for are written as untyped bytes.
        return np.array(rows).view(dtype)
    if not np.can_cast(rows.dtype, dtype, "same_kind"):
        raise parameter_error(
            where, path, f"a file of {dtype} or what can be cast to it", f"Its array has dtype {rows.dtype}."
        )
    return np.array(rows, dtype=dtype, order="C")
