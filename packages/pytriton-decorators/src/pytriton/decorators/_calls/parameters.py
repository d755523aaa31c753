"""Whether a model of type hints reads the parameters of requests, as far as that can be told before it runs."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytriton.decorators._calls.context import get_triton_context
from pytriton.decorators._calls.requests import get_requests, get_row_requests
from pytriton.decorators._calls.signatures import layers_of
from pytriton.decorators._calls.wrapping import is_decorated

# A callable of arrays gets at its requests by one of these functions.
_WAYS = (get_requests, get_row_requests, get_triton_context)
_NAMES = {way.__name__ for way in _WAYS}
_PACKAGE = "pytriton.decorators"
# How many levels of called functions are searched, and how many functions in all.
_MOST_STEPS = 3
_MOST_FUNCTIONS = 1000


def reads_parameters(infer_func: Any) -> bool:
    """Return whether a function or class under `model` may read the parameters of requests.

    It may if it uses `triton_context` or a function of this package that returns requests, directly or in a function
    that it calls. If a decorator of another package hides its code, the answer is yes.
    """
    layers, _, function = layers_of(infer_func)
    owner: type | None = None
    if isinstance(function, types.MethodType):
        owner, function = _class_of(function.__self__), function.__func__
    elif not inspect.isroutine(function):
        owner = _class_of(function)
        bases = [base for base in owner.__mro__ if "__call__" in vars(base)]
        more, _, function = layers_of(vars(bases[0])["__call__"] if bases else None)
        layers += more
    if any(layer.traits.added_arguments for layer in layers):
        return True
    if type(function) is not types.FunctionType or hasattr(function, "__wrapped__"):
        return True
    return any(map(_asks, _reached([function] if owner is None else [function, owner])))


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _reached(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield functions, the methods of classes, and the functions that these call by name."""
    seen = set[types.FunctionType]()
    step = [function for value in values for function in _functions(value)]
    for _ in range(1 + _MOST_STEPS):
        found: list[types.FunctionType] = []
        for function in step:
            if function in seen:
                continue
            if len(seen) == _MOST_FUNCTIONS:
                return
            seen.add(function)
            yield function
            found += [called for value in _used(function) for called in _functions(value) if not _is_ours(called)]
        step = found


def _is_ours(function: types.FunctionType) -> bool:
    return str(function.__module__).startswith(f"{_PACKAGE.partition('.')[0]}.")


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions that a value calls, including those below decorators."""
    if issubclass(type(value), type):
        for own in value.__mro__:
            for member in list(vars(own).values()):
                if not issubclass(type(member), type):
                    yield from _functions(member)
        return
    while value is not None:
        if type(value) is types.FunctionType:
            yield value
        value = _below(value)


def _below(value: Any) -> Any:
    """Return the callable inside a function, method or decorator; None if it is not known."""
    # Attributes of unknown objects are not read: some raise outside of a request, or import large modules.
    kind = type(value)
    if kind in (types.MethodType, classmethod, staticmethod):
        return value.__func__
    if kind is property:
        return value.fget
    if kind is functools.partial:
        return value.func
    if kind is types.FunctionType or kind.__module__ == "functools":
        return getattr(value, "__dict__", {}).get("__wrapped__")
    if hasattr(kind, "__wrapped__") and is_decorated(value):
        return value.__wrapped__
    return None


def _used(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function uses from outside, except attributes of other values."""
    names = set(_names(function.__code__))
    spaces: list[Mapping[str, Any]] = [function.__globals__]
    modules = set[Any]()
    for space in spaces:
        for value in [space.get(name) for name in names]:
            if not issubclass(type(value), types.ModuleType):
                yield value
            elif value not in modules:
                modules.add(value)
                spaces.append(vars(value))
    yield from _closure(function)


def _asks(function: types.FunctionType) -> bool:
    at_hand = [*list(function.__globals__.values()), *_closure(function)]
    if any(any(value is way for way in _WAYS) or _is_package(value) for value in at_hand):
        return True
    return not _NAMES.isdisjoint(_names(function.__code__))


def _closure(function: types.FunctionType) -> list[Any]:
    """Return the values of the variables that a function closes over."""
    found = []
    for cell in function.__closure__ or ():
        # The cell is empty until the enclosing function has assigned it.
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _is_package(value: Any) -> bool:
    return issubclass(type(value), types.ModuleType) and value.__name__ in (_PACKAGE, _PACKAGE.partition(".")[0])


def _names(code: types.CodeType) -> Iterator[str]:
    """Return the names that a function and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
