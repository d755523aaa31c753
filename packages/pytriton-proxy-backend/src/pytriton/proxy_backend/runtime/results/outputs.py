"""What a callable returned -> checked arrays, one dictionary per request."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pytriton.proxy.types import ParameterValue, Request, Response

from ...errors import OutputError
from ...model import ModelSpec, TensorSpec
from ...wire.accelerator import accelerator
from ..texts import is_utf8, shortened, shown
from .casts import cast, changed_value, is_safe

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]

logger = logging.getLogger(__name__)

# The warnings that were given, by the identity of a model. All workers of a model in this process share them.
_TOLD: dict[int, set[str]] = {}


def _fits(declared: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(wanted in (-1, got) for wanted, got in zip(declared, shape, strict=True))


def _listed(names: Iterable[object]) -> str:
    return shortened(", ".join(map(str, names))) or "none"


class OutputChecker:
    """Checks what the callable of one model returns.

    Without `strict`, arrays are cast to their declared dtypes if possible, undeclared outputs are dropped, and missing
    outputs and other shapes are accepted; each is warned of once, as is a cast that changes a value. With `strict`,
    names, dtypes and shapes must be the model's, except for casts that change no value. An answer without any wanted
    output is an error, unless it is one response of a stream.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._specs = {spec.name: spec for spec in model.outputs}
        self._names = [spec.name for spec in model.outputs]
        told = _TOLD.get(id(model))
        if told is None:
            told = _TOLD[id(model)] = set()
            weakref.finalize(model, _TOLD.pop, id(model), None)
        self._told = told
        self._wanted: dict[tuple[str, ...], tuple[str, ...]] = {}

    def results(self, results: object, count: int) -> Sequence[object]:
        """Check the whole result of a callable: one element per request."""
        if isinstance(results, (list, tuple)):
            if len(results) == count:
                return results
            received = f"a {type(results).__name__} of {len(results)}"
        else:
            received = f"{type(results).__name__}: {shown(results)}"
        raise self._error(
            "the inference callable must return a list with one element per request",
            expected=f"a list of {count}",
            received=received,
        )

    def wanted(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """Return the declared outputs that are requested, in the order of their declaration."""
        names = self._wanted.get(requested)
        if names is None:
            names = self._wanted[requested] = tuple(name for name in self._names if name in requested)
        return names

    def fits_columns(self, outputs: Outputs, names: tuple[str, ...]) -> bool:
        """Return whether numeric arrays over the whole batch can be sent as they are."""
        return self.fits_results([outputs], names)

    def fits_results(self, results: Sequence[Outputs], names: tuple[str, ...]) -> bool:
        """Return whether the numeric arrays of each request can be sent as they are."""
        for result in results:
            if self._model.strict and not len(names) == len(self._names) == len(result):
                return False
            if len(result) != len(names):
                self._tell_superfluous(result)
        return all(self.fits(result[name], name) for name in names for result in results)

    def fits(self, array: Array, name: str) -> bool:
        """Return whether a numeric array can be sent for an output as it is."""
        spec = self._specs[name]
        if array.dtype != spec.dtype or not array.dtype.isnative or spec.dtype.kind == "O":
            return False
        if self._has_shape(array, spec):
            return True
        self._tell_shape(array, spec)
        return not self._model.strict

    def shapes(self, results: Sequence[Outputs], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...] | None:
        """Return the shapes that outputs may have, -1 for any size; `None` if they have others."""
        specs = [self._specs[name] for name in names]
        if not all(self._has_shape(result[spec.name], spec) for spec in specs for result in results):
            return None
        return tuple((-1, *spec.shape) if self._model.batching else tuple(spec.shape) for spec in specs)

    def one(
        self, result: object, index: int, requested: Sequence[str] | None
    ) -> tuple[Outputs, Mapping[str, ParameterValue]]:
        """Check the outputs of one request.

        They are a mapping, a list or tuple in the declared order, a `Response`, or the request itself. Returns the
        wanted outputs in their declared dtypes, and the response parameters.
        """
        values: Mapping[str, object]
        parameters: Mapping[str, ParameterValue]
        values, parameters = (result, {}) if type(result) is dict else self._by_name(result, index)
        self._check_names(values, index, requested)
        outputs: Outputs = {}
        batching = self._model.batching
        for name, spec in self._specs.items():
            value = values.get(name)
            if value is None:
                if name in values:
                    raise self._error("an output must be a numpy array", name, index, "a numpy array", "None")
                continue
            if requested is not None and name not in requested:
                continue
            if type(value) is not np.ndarray or value.dtype is not spec.dtype:
                value = self._convert(value, spec, index)
            if value.dtype.kind in "OUT":
                self._check_strings(value, name, index)
            if batching and value.ndim == 0:
                raise self._error(
                    "an output of a model that batches needs a batch axis in front",
                    name,
                    index,
                    f"shape (batch, {', '.join(map(str, spec.shape))})",
                    "shape ()",
                )
            if not self._has_shape(value, spec):
                if self._model.strict:
                    raise self._error("the shape is not the declared one", name, index, *self._shapes(value, spec))
                self._tell_shape(value, spec)
            outputs[name] = value
        return outputs, parameters

    def _by_name(self, result: object, index: int) -> tuple[Mapping[str, object], Mapping[str, ParameterValue]]:
        """Return the outputs of one request by name, and its response parameters."""
        if isinstance(result, Response):
            return result.data, self._parameters(result.parameters, index)
        if isinstance(result, Request):
            return result.data, {}
        if isinstance(result, Mapping):
            return result, {}
        if not isinstance(result, (list, tuple)):
            raise self._error(
                "each element of the result must be a mapping from output names to numpy arrays",
                index=index,
                expected="a dictionary, a Response, or a list of arrays in the order of the declared outputs",
                received=f"{type(result).__name__}: {shown(result)}",
            )
        if len(result) != len(self._names):
            raise self._error(
                "a list of outputs must have one array per declared output",
                index=index,
                expected=f"{len(self._names)} ({', '.join(self._names)})",
                received=str(len(result)),
            )
        return dict(zip(self._names, result, strict=True)), {}

    def _check_names(self, values: Mapping[str, object], index: int, requested: Sequence[str] | None) -> None:
        unknown = [name for name in values if name not in self._specs]
        # A callable may omit outputs that its caller does not want.
        wanted = self._names if requested is None else [name for name in self._names if name in requested]
        missing = [name for name in wanted if name not in values]
        if not unknown and not missing:
            return
        if self._model.strict:
            raise self._error(
                "the outputs must be the declared ones"
                + (f"; not declared: {', '.join(map(str, unknown))}" if unknown else "")
                + (f"; missing: {', '.join(missing)}" if missing else ""),
                index=index,
                expected=", ".join(self._names),
                received=", ".join(map(str, values)),
            )
        for name in unknown:
            if not isinstance(name, str):
                raise self._error(
                    "the name of an output must be a string", index=index, expected="str", received=shown(name)
                )
        if self._model.decoupled:
            # A response of a stream may omit outputs that come later, even all of them.
            missing = []
            has_none = len(unknown) == len(values) > 0
        else:
            has_none = missing == wanted != []
        if has_none:
            raise self._error(
                "the callable returned none of the outputs that are asked for",
                index=index,
                expected=", ".join(wanted),
                received=_listed(values),
            )
        if unknown:
            self._tell_superfluous(values)
        if missing:
            self._tell(
                "missing",
                f"the callable left out what its callers ask for ({', '.join(missing)}), who get a response without it",
                ", ".join(wanted),
                _listed(values),
            )

    def _tell_superfluous(self, values: Iterable[str]) -> None:
        unknown = [name for name in values if name not in self._specs]
        if unknown:
            self._tell(
                "superfluous",
                f"the callable returned outputs that the model has not ({_listed(unknown)}), which are dropped",
                ", ".join(self._names),
                _listed(values),
            )

    def _tell_shape(self, value: Array, spec: TensorSpec) -> None:
        if "shape" not in self._told:
            self._tell(
                "shape",
                f"output '{spec.name}' has not the declared shape, and is sent as it is",
                *self._shapes(value, spec),
            )

    def _tell_changed(self, array: Array, result: Array, name: str) -> None:
        """Warn of a cast that changes values."""
        kind = f"cast of {name}"
        if kind not in self._told and (changed := changed_value(array, result)) is not None:
            before, after = changed
            self._tell(
                kind,
                f"output '{name}' has values that its dtype has not, which are sent as others",
                f"values of {result.dtype}",
                f"{shown(before)} of dtype {array.dtype}, which becomes {after!r}",
            )

    def _tell(self, kind: str, what: str, expected: str, received: str) -> None:
        """Warn of something that goes on all the same, once for each kind."""
        if self._model.strict or kind in self._told:
            return
        self._told.add(kind)
        logger.warning(
            "model '%s': %s: expected %s, got %s. This is said once; with strict=True it is an error.",
            self._model.name,
            what,
            expected,
            received,
        )

    def _convert(self, value: object, spec: TensorSpec, index: int) -> Array:
        array = self._array_of(value, spec, index)
        kind = array.dtype.kind
        if spec.dtype.kind == "O":
            if kind in "OSUT":
                return array
        elif array.dtype == spec.dtype or (
            # Types that are always native, such as StringDType, refuse to be asked for another byte order.
            not array.dtype.isnative and array.dtype.newbyteorder("=") == spec.dtype
        ):
            return array.astype(spec.dtype, copy=False)
        elif (kind in "biufOSUT" or array.dtype.name == "bfloat16") and (
            not self._model.strict or is_safe(array.dtype, spec.dtype)
        ):
            try:
                result = cast(array, spec.dtype)
                self._tell_changed(array, result, spec.name)
                return result
            except (ArithmeticError, TypeError, ValueError) as error:
                self._check_not_ragged(array, spec, index)
                raise self._error(
                    f"its values cannot be cast: {error}",
                    spec.name,
                    index,
                    f"dtype {spec.dtype}",
                    f"dtype {array.dtype}",
                ) from error
        raise self._error(
            f"the dtype {'is not' if self._model.strict else 'cannot be cast to'} the declared one",
            spec.name,
            index,
            "strings (dtype object of bytes, S, U or StringDType)"
            if spec.dtype.kind == "O"
            else f"dtype {spec.dtype}{', or one that it has all values of' if self._model.strict else ''}",
            f"dtype {array.dtype}",
        )

    def _array_of(self, value: object, spec: TensorSpec, index: int) -> Array:
        """Return a value as an array: arrays of other libraries give their elements to numpy, lists have no type."""
        if isinstance(value, np.ma.MaskedArray) and value.dtype.names is None and np.any(value.mask):
            # numpy.asarray would give what lies below the mask.
            raise self._error(
                "it has masked values, of which a tensor knows nothing; fill them, such as by value.filled(0)",
                spec.name,
                index,
                "a value in every place",
                f"{int(np.sum(value.mask))} masked of {value.size}",
            )
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__"):
            try:
                return np.asarray(value)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        else:
            reason = ""
        raise self._error(
            "an output must be a numpy array"
            + (f", and cannot become one ({reason})" if reason else " (numpy.asarray makes one)"),
            spec.name,
            index,
            "a numpy array",
            f"{type(value).__name__}: {shown(value)}",
        )

    def _check_not_ragged(self, array: Array, spec: TensorSpec, index: int) -> None:
        """Raise an error if it is an array of arrays or lists, as columns of lists become."""
        rows = [row for row in array.ravel() if isinstance(row, (np.ndarray, list, tuple))]
        if not rows:
            return
        shapes = {str(row.shape) if isinstance(row, np.ndarray) else f"({len(row)},)": None for row in rows}
        kind = "arrays" if isinstance(rows[0], np.ndarray) else f"{type(rows[0]).__name__}s"
        advice = (
            "pad them to one shape, such as by numpy.pad, and stack them"
            if len(shapes) > 1
            else "numpy.stack makes one array of them"
        )
        raise self._error(
            f"it is an array of {kind}; {advice}",
            spec.name,
            index,
            f"one array of dtype {spec.dtype}",
            f"{kind} of the shape{'s' * (len(shapes) > 1)} {_listed(shapes)}",
        )

    def _check_strings(self, value: Array, name: str, index: int) -> None:
        flat = value.ravel()
        native = accelerator()
        if native is not None and flat.dtype == object and flat.__class__ is np.ndarray and native.are_strings(flat):
            return
        for place, element in enumerate(flat.tolist()):
            if not isinstance(element, (bytes, bytearray, str)):
                raise self._error(
                    f"element {place} of an object array is no string",
                    name,
                    index,
                    "bytes or str",
                    f"{type(element).__name__}: {shown(element)}",
                )
            if isinstance(element, str) and not is_utf8(element):
                raise self._error(f"element {place} has no form in UTF-8", name, index, "text", shown(element))

    def _has_shape(self, value: Array, spec: TensorSpec) -> bool:
        return _fits(spec.shape, value.shape[1:] if self._model.batching else value.shape)

    def _shapes(self, value: Array, spec: TensorSpec) -> tuple[str, str]:
        """Return the declared shape and the one that came, for people."""
        wanted = ", ".join(["batch"] * self._model.batching + [str(dim) for dim in spec.shape])
        return f"shape ({wanted})", f"shape {value.shape}"

    def _parameters(self, parameters: Mapping[str, object], index: int) -> Mapping[str, ParameterValue]:
        if any(isinstance(value, np.generic) for value in parameters.values()):
            parameters = {
                name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()
            }
        for name, value in parameters.items():
            if not isinstance(name, str) or not isinstance(value, (str, bool, int, float)):
                raise self._error(
                    f"response parameter {name!r} has a type that Triton cannot carry",
                    index=index,
                    expected="str, bool, int or float",
                    received=type(value).__name__,
                )
            if not is_utf8(name) or (isinstance(value, str) and not is_utf8(value)):
                raise self._error(
                    f"response parameter {name!r} has no form in UTF-8",
                    index=index,
                    expected="text",
                    received=shown(value),
                )
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise self._error(
                    f"response parameter {name!r} is too large",
                    index=index,
                    expected="an integer of 64 bits",
                    received=str(value),
                )
        return parameters  # type: ignore[return-value] # checked above

    def _error(
        self,
        what: str,
        name: str | None = None,
        index: int | None = None,
        expected: str = "",
        received: str = "",
    ) -> OutputError:
        where = f"model '{self._model.name}'"
        if name is not None:
            where += f", output '{name}'"
        if index is not None:
            where += f", request {index} of the batch"
        return OutputError(
            f"{where}: {what}: expected {expected}, got {received}",
            model_name=self._model.name,
            output_name=name,
            request_index=index,
            expected=expected,
            received=received,
        )
