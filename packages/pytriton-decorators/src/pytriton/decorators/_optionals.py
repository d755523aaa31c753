"""The decorator `fill_optionals`, which adds defaults for optional inputs that a caller left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pytriton.decorators._calls.context import get_model_config
from pytriton.decorators._calls.execution import SingleCall
from pytriton.decorators._calls.inputs import (
    find_requests,
    get_all_arrays,
    get_batched_inputs,
    get_inference_request_batch_size,
    replace_arrays,
    require_requests,
)
from pytriton.decorators._calls.requests import Scope, current_scope, find_batched_arrays
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, picklable
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

CallableT = TypeVar("CallableT")


def fill_optionals(**defaults: np.ndarray[Any, Any]) -> Callable[[CallableT], CallableT]:
    """Add a default to requests that lack an optional input.

    Place it above `@batch` (or `@sample`), which then finds the same inputs in all requests:

    ```python
    @fill_optionals(temperature=np.array([0.7], np.float32))
    @batch
    def infer(prompt, temperature):
        ...
    ```

    A default has the dtype and shape that the input is declared with, without the batch axis; for a model with batching
    every row of a request gets it. The requests themselves are not changed: those that lacked an input are replaced by
    copies, with the same parameters. A default may be as many as `(-1,)` in the declaration allows. Below `@batch` it
    works, too, where all requests of a batch lack the input. Works on all kinds of callables that `batch` does.

    Args:
        **defaults: Arrays `tensor.shape` by input name.

    Returns:
        The decorator.

    Raises:
        PyTritonBadParameterError: At once: there are no defaults. When called, as the next one: a default is no array,
            has not the declared dtype or shape, or is for an input that the model does not have.
        PyTritonValidationError: The callable is not bound to a model.
    """
    if not defaults:
        raise PyTritonBadParameterError(
            "@fill_optionals expected defaults by input name, as in "
            "@fill_optionals(temperature=np.array([0.7], np.float32)), received none.",
            parameter="fill_optionals.defaults",
            value=defaults,
            rule="one or more arrays by input name",
        )
    filler = _Filler(defaults)

    def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SingleCall | None:
        if args and instance is None:
            instance = args[0]
        config = get_model_config(wrapped, instance)
        values = filler.values(config)
        requests = find_requests(args)
        if requests is not None:
            filled = _fill_requests(requests, values, config.batching)
            return (*args[:-1], filled), kwargs, Scope(filled), None
        if args and isinstance(args[-1], Mapping):
            require_requests("fill_optionals", args)
        missing = [name for name in values if name not in kwargs]
        if not missing:
            return None
        rows = find_batched_arrays("fill_optionals", kwargs, current_scope())[0] if config.batching else None
        inputs = {**kwargs, **{name: _repeat(values[name], rows) for name in missing}}
        return args, inputs, None, None

    def relay(
        below: Callable[..., Any],
        wrapped: Any,
        instance: Any,
        inputs: Mapping[str, Any],
        sizes: list[int],
        requests: Callable[[], Sequence[Any]],
    ) -> Any:
        values = filler.values(get_model_config(wrapped, instance))
        missing = [name for name in values if name not in inputs]
        if not missing:
            return below(inputs, sizes, requests)
        rows = sum(sizes)
        filled = {**inputs, **{name: _repeat(values[name], rows) for name in missing}}
        return below(filled, sizes, lambda: _fill_requests(requests(), values, batching=True))

    redecorate = picklable(fill_optionals, **defaults)
    return decorator(
        prepare, DecoratorTraits("fill_optionals", redecorate=redecorate, relay=relay, filled_inputs=tuple(defaults))
    )


class _Filler:
    """The defaults of one decorator, checked for the model that they are used for."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        # The defaults for the last model; a callable seldom serves several.
        self._checked: tuple[TritonModelConfig, dict[str, Any]] | None = None

    def values(self, config: TritonModelConfig) -> dict[str, Any]:
        """Return the defaults as a server would send them; defaults that do not fit the inputs are an error."""
        checked = self._checked
        if checked is None or checked[0] is not config:
            specs = {spec.name: spec for spec in config.inputs or ()}
            values = {name: _checked(name, value, specs, config.model_name) for name, value in self._defaults.items()}
            self._checked = checked = (config, values)
        return checked[1]


def _checked(name: str, value: Any, specs: Mapping[str, TensorSpec], model_name: str) -> Any:
    spec = specs.get(name)
    if spec is None:
        raise _default_error(
            name, value, f"for an input of model {model_name!r}, which has {sorted(specs)}", f"one for {name!r}"
        )
    if not isinstance(value, np.ndarray):
        raise _default_error(
            name, value, f"a numpy array of shape {spec.shape}", f"a {type(value).__name__} {value!r:.100}"
        )
    dtype = np.dtype(spec.dtype)
    if dtype.kind in "OSUT":
        if value.dtype.kind not in "OSUT":
            raise _default_error(name, value, "an array of strings (bytes)", f"dtype {value.dtype}")
        strings = _as_bytes(value)
        if strings is None:
            raise _default_error(name, value, "an array of strings (bytes)", "an array of other objects")
        value = strings
    elif value.dtype != dtype:
        raise _default_error(name, value, f"of dtype {dtype}", f"one of dtype {value.dtype}")
    shape = tuple(spec.shape)
    if len(shape) != value.ndim or any(wanted not in (-1, got) for wanted, got in zip(shape, value.shape, strict=True)):
        raise _default_error(name, value, f"of shape {shape}, without a batch axis", f"one of shape {value.shape}")
    return value


def _as_bytes(value: Any) -> Any:
    """Return an object array of `bytes`, the form in which callables get strings; None if they are not strings."""
    strings = np.empty(value.shape, object)
    flat = [element.encode() if isinstance(element, str) else element for element in value.reshape(-1).tolist()]
    strings.reshape(-1)[:] = flat
    return strings if all(isinstance(element, bytes) for element in flat) else None


def _fill_requests(requests: Sequence[Any], values: Mapping[str, Any], batching: bool) -> list[Any]:
    inputs = get_batched_inputs(requests)
    if inputs is not None and values.keys() <= inputs.keys():
        return list(requests)
    all_arrays = get_all_arrays(requests)
    filled: list[Any] | None = None
    for name, value in values.items():
        positions = [position for position, data in enumerate(all_arrays) if name not in data]
        if not positions:
            continue
        filled = list(requests) if filled is None else filled
        sizes = [get_inference_request_batch_size(all_arrays[position]) for position in positions] if batching else []
        # All requests share one array, and each gets its own rows of it.
        repeated = _repeat(value, sum(sizes)) if batching else value
        stop = 0
        for index, position in enumerate(positions):
            start, stop = stop, stop + sizes[index] if batching else 0
            all_arrays[position] = data = {
                **all_arrays[position],
                name: repeated[start:stop] if batching else value.copy(),
            }
            filled[position] = replace_arrays(requests[position], data)
    return list(requests) if filled is None else filled


def _repeat(value: Any, rows: int | None) -> Any:
    """Return a copy of a default, since callables may write into their inputs; it is repeated for every row."""
    if rows is None:
        return value.copy()
    array = np.empty((rows, *value.shape), value.dtype)
    array[...] = value
    return array


def _default_error(name: str, value: Any, rule: str, received: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(
        f"@fill_optionals: the default of {name!r} has to be {rule}; received {received}. For example "
        f"{name}=np.array([0.7], np.float32) for an input declared with shape (1,) and float32.",
        parameter=name,
        value=value,
        rule=rule,
    )
