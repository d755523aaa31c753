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

__all__ = ["reads_parameters"]

# By which a callable that gets the inputs alone has the requests as well.
_WAYS = (get_requests, get_row_requests, get_triton_context)
_NAMES = {way.__name__ for way in _WAYS}
_PACKAGE = "pytriton.decorators"
# How far functions that it calls are looked at: those that these call, and so on, and how many of them.
_MOST_STEPS = 3
_MOST_FUNCTIONS = 1000


def reads_parameters(infer_func: Any) -> bool:
    """Return whether a function or class under `model` may read the parameters of requests.

    Its hints are all that it takes, unless it asks for the requests: by `triton_context`, or by a function of this
    package that returns them, which is then at hand where it is written, or a function that it calls. Where the code
    that is called is not its own, as under a decorator of somebody else's, it may.

    Args:
        infer_func: The function or class, or an object of the class.
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
    """Yield functions, the methods of classes, and functions that these call, as far as they have names there."""
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
    """Yield the functions in Python that are called by way of a value, those below decorators of others included."""
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
    """Return what a function, method or decorator calls in its turn; None where that is not known."""
    # Attributes of other objects are not asked for: some do not like that outside of a request, or import what is big.
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
    """Yield what a function has from elsewhere, in so far as it is not a part of some value."""
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
    """Return what a function has from those around it."""
    found = []
    for cell in function.__closure__ or ():
        # It has nothing before the function around it has got so far.
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _is_package(value: Any) -> bool:
    return issubclass(type(value), types.ModuleType) and value.__name__ in (_PACKAGE, _PACKAGE.partition(".")[0])


def _names(code: types.CodeType) -> Iterator[str]:
    """Return the names that a function uses, those of the functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
