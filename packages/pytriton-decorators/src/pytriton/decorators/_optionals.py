"""`fill_optionals`: defaults in place of optional inputs that a caller left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pytriton.decorators._calls.carry_out import Once
from pytriton.decorators._calls.context import get_model_config
from pytriton.decorators._calls.inputs import (
    arrays_of,
    get_inference_request_batch_size,
    inputs_of_all,
    requests_among,
    requests_of,
    rows_of,
    with_data,
)
from pytriton.decorators._calls.requests import CURRENT_SCOPE, Scope
from pytriton.decorators._calls.wrapping import decorator, made_again
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

__all__ = ["fill_optionals"]

CallableT = TypeVar("CallableT")


def fill_optionals(**defaults: np.ndarray[Any, Any]) -> Callable[[CallableT], CallableT]:
    """Return requests that lack an optional input a default for it.

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

    def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Once | None:
        if args and instance is None:
            instance = args[0]
        config = get_model_config(wrapped, instance)
        values = filler.values(config)
        requests = requests_among(args)
        if requests is not None:
            filled = _fill_requests(requests, values, config.batching)
            return (*args[:-1], filled), kwargs, Scope(filled), None
        if args and isinstance(args[-1], Mapping):
            requests_of("fill_optionals", args)
        missing = [name for name in values if name not in kwargs]
        if not missing:
            return None
        rows = rows_of("fill_optionals", kwargs, CURRENT_SCOPE.get())[0] if config.batching else None
        inputs = {**kwargs, **{name: _repeated(values[name], rows) for name in missing}}
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
        filled = {**inputs, **{name: _repeated(values[name], rows) for name in missing}}
        return below(filled, sizes, lambda: _fill_requests(requests(), values, batching=True))

    again = made_again(fill_optionals, **defaults)
    return decorator(prepare, name="fill_optionals", again=again, relay=relay, fills=tuple(defaults))


class _Filler:
    """The defaults of one decorator, checked for the model that they are used for."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        # Of the last model; one callable seldom serves several.
        self._checked: tuple[TritonModelConfig, dict[str, Any]] | None = None

    def values(self, config: TritonModelConfig) -> dict[str, Any]:
        """Return the defaults as a server would send them.

        Raises:
            PyTritonBadParameterError: One does not fit to the model's inputs.
        """
        checked = self._checked
        if checked is None or checked[0] is not config:
            specs = {spec.name: spec for spec in config.inputs or ()}
            values = {name: _checked(name, value, specs, config.model_name) for name, value in self._defaults.items()}
            self._checked = checked = (config, values)
        return checked[1]


def _checked(name: str, value: Any, specs: Mapping[str, TensorSpec], model_name: str) -> Any:
    spec = specs.get(name)
    if spec is None:
        raise _rejected(
            name, value, f"for an input of model {model_name!r}, which has {sorted(specs)}", f"one for {name!r}"
        )
    if not isinstance(value, np.ndarray):
        raise _rejected(name, value, f"a numpy array of shape {spec.shape}", f"a {type(value).__name__} {value!r:.100}")
    dtype = np.dtype(spec.dtype)
    if dtype.kind in "OSU":
        if value.dtype.kind not in "OSU":
            raise _rejected(name, value, "an array of strings (bytes)", f"dtype {value.dtype}")
        strings = _as_bytes(value)
        if strings is None:
            raise _rejected(name, value, "an array of strings (bytes)", "an array of other objects")
        value = strings
    elif value.dtype != dtype:
        raise _rejected(name, value, f"of dtype {dtype}", f"one of dtype {value.dtype}")
    shape = tuple(spec.shape)
    if len(shape) != value.ndim or any(wanted not in (-1, got) for wanted, got in zip(shape, value.shape, strict=True)):
        raise _rejected(name, value, f"of shape {shape}, without a batch axis", f"one of shape {value.shape}")
    return value


def _as_bytes(value: Any) -> Any:
    """Return strings as the server hands them out: objects of bytes. None where they are no strings."""
    strings = np.empty(value.shape, object)
    flat = [element.encode() if isinstance(element, str) else element for element in value.reshape(-1).tolist()]
    strings.reshape(-1)[:] = flat
    return strings if all(isinstance(element, bytes) for element in flat) else None


def _fill_requests(requests: Sequence[Any], values: Mapping[str, Any], batching: bool) -> list[Any]:
    inputs = inputs_of_all(requests)
    if inputs is not None and values.keys() <= inputs.keys():
        return list(requests)
    datas = [request if type(request) is dict else arrays_of(request, index) for index, request in enumerate(requests)]
    filled: list[Any] | None = None
    for name, value in values.items():
        places = [place for place, data in enumerate(datas) if name not in data]
        if not places:
            continue
        filled = list(requests) if filled is None else filled
        sizes = [get_inference_request_batch_size(datas[place]) for place in places] if batching else []
        # One array for all of them: each gets its own rows of it.
        repeated = _repeated(value, sum(sizes)) if batching else value
        stop = 0
        for index, place in enumerate(places):
            start, stop = stop, stop + sizes[index] if batching else 0
            datas[place] = data = {**datas[place], name: repeated[start:stop] if batching else value.copy()}
            filled[place] = with_data(requests[place], data)
    return list(requests) if filled is None else filled


def _repeated(value: Any, rows: int | None) -> Any:
    """Return a copy of a default, for callables may write into their inputs; for every row, where there are rows."""
    if rows is None:
        return value.copy()
    array = np.empty((rows, *value.shape), value.dtype)
    array[...] = value
    return array


def _rejected(name: str, value: Any, rule: str, received: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(
        f"@fill_optionals: the default of {name!r} has to be {rule}; received {received}. For example "
        f"{name}=np.array([0.7], np.float32) for an input declared with shape (1,) and float32.",
        parameter=name,
        value=value,
        rule=rule,
    )
