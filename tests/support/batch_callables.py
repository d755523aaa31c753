"""Callables for tests of the proxy backend alone, where there is no `@batch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Columns:
    """What `@batch` makes, as far as workers look at it: it takes the inputs of the whole batch, by name."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, requests: list[Any]) -> Any:
        raise AssertionError("the worker calls it for the whole batch")

    @property
    def __pytriton_whole__(self) -> Callable[..., Any]:
        return lambda columns, rows, requests: self.func(**columns)


class Listed:
    """The same as a callable of requests."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, requests: list[Any]) -> Any:
        return [self.func(**dict(request)) for request in requests]
