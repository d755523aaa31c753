"""Values between the arrays of requests and what the hints of a function promise, in both directions.

Shapes: `(*sample)` is the shape of a value of one sample, `(batch, *sample)` of a batch. Triton has no tensors without
axes, so a value without axes travels as one of shape `(1,)`.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pytriton.decorators._casts import as_array, cast_numbers, describe_value, has_mask
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.model_config.dtypes import array_dtype

Form = Literal["scalar", "list", "array", "object", "objects"]
JSON_HINTS = {"object": ("dict", "dict[str, Any]", "{}"), "objects": ("list[dict", "list[dict[str, Any]]", "[]")}
"""Of forms that travel as the text of JSON: how their hints begin, by which callers know them, the usual hint, and the
shortest text."""

_KINDS = {"b": "a bool", "i": "an int", "u": "an int", "f": "a number"}


@dataclass(frozen=True)
class Value:
    """What a hint says about an argument or an output."""

    # Whether it is one number or string, a list of them, an array; or a dictionary or a list of dictionaries, which
    # travel as the text of JSON.
    form: Form
    dtype: Any  # the element type, as `Tensor` takes it
    # Its axes: a size, or -1 or a name for one that may vary; the first is that of the batch where `batched`.
    dims: tuple[int | str, ...]
    batched: bool  # whether it holds all samples of a batch
    shown: str  # the hint as text
    optional: bool = False  # whether it may be left out

    def tensor(self, name: str) -> Tensor:
        """Return the description of the input or output for Triton."""
        shape = tuple(-1 if isinstance(size, str) else size for size in self._sample_dims)
        # However its author has written it.
        begins, usual, _ = JSON_HINTS.get(self.form, ("", "", ""))
        hint = self.shown if self.shown.startswith(begins) else usual
        return Tensor(shape or (1,), self.dtype, name, self.optional, hint=hint)

    def to_argument(self, array: Any, name: str) -> Any:
        """Return what the function gets for the array of an input.

        Text that is not UTF-8, and JSON that does not match the hint, are errors.
        """
        if self.form in ("object", "objects"):
            return self._read_json(self._element(array.item(), name), name)
        if self.form == "scalar":
            return self._element(array.item() if self._is_builtin else array[0], name)
        if not self._sample_dims:
            array = array[..., 0]
        if self.form == "array":
            return array if self.dtype is not str else self._texts(array, name)
        if self.dtype is str:
            return [self._element(element, name) for element in array.tolist()]
        return array.tolist() if self._is_builtin else list(array)

    def to_array(self, value: Any, name: str, model: str) -> np.ndarray[Any, Any]:
        """Return the array of an output for what the function returned.

        It has the dtype of the hint, unless the cast would change values.
        """
        if self.form == "array":
            array = self._checked_array(value, name, model)
        elif self.form == "scalar":
            if value.__class__ is self.dtype is str:
                text = np.empty(1, object)
                text[0] = value
                return text
            if isinstance(value, np.ndarray) and value.ndim == 0:
                value = value[()]
            array = self._filled([value], name, model)
        elif self.form in ("object", "objects"):
            return self._filled([self._written_json(value, name, model)], name, model)
        elif isinstance(value, (list, tuple)):
            array = self._filled(value, name, model)
        else:
            advice = " (.tolist() makes a list)" if isinstance(value, np.ndarray) else ""
            raise self._rejected(name, model, describe_value(value), f"a list{advice}")
        return array if self._sample_dims or self.form == "scalar" else array[..., np.newaxis]

    @functools.cached_property
    def _array_dtype(self) -> np.dtype[Any]:
        return array_dtype(self.dtype)

    @functools.cached_property
    def _largest(self) -> float:
        """The largest float; numpy does not know it for bfloat16, which has the range of float32."""
        return float(np.finfo(self._array_dtype if self._array_dtype.kind == "f" else np.float32).max)

    @functools.cached_property
    def _fixed_sizes(self) -> list[tuple[int, int]]:
        """The axes that have a fixed size, with that size."""
        return [(axis, size) for axis, size in enumerate(self.dims) if isinstance(size, int) and size != -1]

    @functools.cached_property
    def _sample_dims(self) -> tuple[int | str, ...]:
        return self.dims[1:] if self.batched else self.dims

    @functools.cached_property
    def _is_builtin(self) -> bool:
        """Whether elements are Python's own types instead of numpy's."""
        return self.dtype in (str, bytes, bool, int, float)

    def _element(self, element: Any, name: str) -> Any:
        if self.dtype is not str or isinstance(element, str):
            return element
        try:
            return element.decode()
        except UnicodeDecodeError as error:
            raise _of_caller(
                f"Input {name!r}: its hint is {self.shown}, received bytes that are not UTF-8 ({error}). Send text, or "
                "declare it as bytes.",
                tensor=name,
                expected=self.shown,
                received=element,
            ) from error

    def _is_json(self, value: Any) -> bool:
        elements = [value] if self.form == "object" else value if isinstance(value, list) else [None]
        return all(isinstance(element, Mapping) for element in elements)

    def _read_json(self, text: str, name: str) -> Any:
        problem = None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = f"text that is no JSON ({error})"
        else:
            if not self._is_json(value):
                problem = describe_value(value)
        if problem is None:
            return value
        raise _of_caller(
            f"Input {name!r}: its hint is {self.shown}, so expected the text of a JSON {self._json_kind}, received "
            f"{problem}.",
            tensor=name,
            expected=self.shown,
            received=text,
        )

    def _written_json(self, value: Any, name: str, model: str) -> str:
        expected = "a dictionary" if self.form == "object" else "a list of dictionaries"
        if not self._is_json(value):
            raise self._rejected(name, model, describe_value(value), expected)
        try:
            return json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            received = f"{describe_value(value)}, which JSON cannot say ({error})"
            raise self._rejected(name, model, received, expected) from error

    @property
    def _json_kind(self) -> str:
        return "object" if self.form == "object" else "array of objects"

    def _texts(self, array: Any, name: str) -> Any:
        texts = np.empty(array.shape, np.object_)
        texts.ravel()[:] = [self._element(element, name) for element in array.ravel().tolist()]
        return texts

    def _checked_array(self, value: Any, name: str, model: str) -> np.ndarray[Any, Any]:
        dtype = self._array_dtype
        if not (isinstance(value, np.generic) and self.dims):
            value = as_array(value)
        if not isinstance(value, np.ndarray):
            raise self._rejected(name, model, describe_value(value), "a numpy array (numpy.asarray makes one)")
        if has_mask(value):
            raise self._rejected(name, model, "an array with masked values", "a value in every place")
        shape = value.shape
        fits = len(shape) == len(self.dims) and all(shape[axis] == size for axis, size in self._fixed_sizes)
        if not fits:
            wanted = ", ".join(map(str, self.dims)) + ("," if len(self.dims) == 1 else "")
            raise self._rejected(name, model, f"an array of shape {value.shape}", f"shape ({wanted})")
        if value.dtype == dtype:
            return value
        if dtype.kind == "O":
            if value.dtype.kind in "SUT":
                return value
        elif value.dtype.kind in "biuf" and np.can_cast(value.dtype, dtype, "same_kind"):
            result, is_changed = cast_numbers(value, dtype)
            # The server or worker casts the array, and logs the change.
            return value if is_changed else result
        wanted = (
            "strings" if dtype.kind == "O" else f"{dtype}, or a dtype that can be cast to it by casting='same_kind'"
        )
        raise self._rejected(name, model, f"an array of {value.dtype}", wanted)

    def _filled(self, values: Sequence[Any], name: str, model: str) -> np.ndarray[Any, Any]:
        dtype = self._array_dtype
        for place, element in enumerate(values):
            problem = self._problem(element)
            if problem is not None:
                where = f"element {place}, " if self.form == "list" else ""
                raise self._rejected(name, model, where + describe_value(element), problem)
        if dtype.kind in "fV" and any(self._largest < abs(float(element)) < math.inf for element in values):
            # In the dtype of the hint, the value would become infinite.
            return np.array(values, np.float64)
        array = np.empty(len(values), dtype)
        array[:] = values
        return array

    def _problem(self, element: Any) -> str | None:
        """Return what was expected instead of an element or scalar; None if it is right."""
        dtype = self._array_dtype
        if dtype.kind == "O":
            wanted = str if self.dtype is str else bytes
            return None if isinstance(element, wanted) else f"{wanted.__name__}"
        if isinstance(element, (bool, np.bool_)):
            return None if dtype.kind == "b" else _KINDS.get(dtype.kind, "a number")
        if isinstance(element, (int, np.integer)) and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return None if limits.min <= element <= limits.max else f"a number from {limits.min} to {limits.max}"
        # numpy gives bfloat16 the kind "V".
        if isinstance(element, (int, float, np.number)) and dtype.kind in "fV" and not isinstance(element, complex):
            # Python's integers have no limit.
            is_float = not isinstance(element, int) or abs(element) <= sys.float_info.max
            return None if is_float else f"a number of at most {sys.float_info.max:.2g}"
        return _KINDS.get(dtype.kind, "a number")

    def _rejected(self, name: str, model: str, received: str, expected: str) -> PyTritonValidationError:
        return PyTritonValidationError(
            f"Model {model!r}, output {name!r}: its hint is {self.shown}, so expected {expected}; the function "
            f"returned {received}.",
            tensor=name,
            expected=self.shown,
            received=received,
        )


def _of_caller(message: str, **facts: Any) -> PyTritonValidationError:
    """Return an error that ends the request of its caller alone, with the status of a mistake of the caller's."""
    error = PyTritonValidationError(message, **facts)
    setattr(error, "__pytriton_of_caller__", True)  # noqa: B010 - the worker looks for it
    return error
