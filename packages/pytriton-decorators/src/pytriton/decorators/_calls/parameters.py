"""Whether a callable reads the parameters of requests, as far as that can be told before it runs."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from pytriton.decorators._calls.context import get_triton_context
from pytriton.decorators._calls.requests import get_requests, get_row_requests
from pytriton.decorators._calls.signatures import layers_of
from pytriton.decorators._calls.wrapping import undecorated

__all__ = ["reads_parameters"]

# By which a callable that gets the inputs alone has the requests as well.
_WAYS = (get_requests, get_row_requests, get_triton_context)
_NAMES = {way.__name__ for way in _WAYS}
_PACKAGE = "pytriton.decorators"


def reads_parameters(infer_func: Any, *, gets_values: bool = False) -> bool:
    """Return whether a callable may read the parameters of requests.

    One that gets the inputs alone cannot, unless it asks for the requests: by `triton_context`, or by a function of
    this package that returns them, which its module then has by some name.

    Args:
        infer_func: The callable.
        gets_values: Whether it is known to get the inputs alone, as a function under `model`.
    """
    layers, _, function = layers_of(infer_func)
    if not gets_values and not any(layer.traits.unpacks_requests for layer in layers):
        return True
    if any(layer.traits.added_arguments for layer in layers):
        return True
    function = undecorated(function)
    while isinstance(function, functools.partial):
        function = undecorated(function.func)
    if not inspect.isroutine(function):
        owner = function if isinstance(function, type) else type(function)
        function = undecorated(getattr(owner, "__call__", None))  # noqa: B004
    function = getattr(function, "__func__", function)
    known = getattr(function, "__globals__", {})
    if any(any(value is way for way in _WAYS) or _is_package(value) for value in list(known.values())):
        return True
    return not _NAMES.isdisjoint(_names(getattr(function, "__code__", None)))


def _is_package(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ in (_PACKAGE, _PACKAGE.partition(".")[0])


def _names(code: types.CodeType | None) -> Iterator[str]:
    """Return the names that a function uses, those of the functions in it included."""
    if code is None:
        return
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
