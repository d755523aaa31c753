"""Callables of every kind, and results of every form, for models with an input `X` and an output `Y`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from pytriton.model_config import Tensor
from pytriton.proxy.types import Request, Response

X = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(-1,))]


def double(requests: Any) -> list[Any]:
    return [{"y": request["x"] * 2} for request in requests]


def identity(requests: Any) -> list[Any]:
    return [{"y": request["x"]} for request in requests]


def thrice(requests: Any) -> Iterator[list[Any]]:
    for _ in range(3):
        yield identity(requests)


# ---- callables of every kind: x = 13 is bad luck --------------------------------------------------------------------


def function(requests: list[Request]) -> list[Any]:
    for request in requests:
        if request["x"].item() == 13:
            raise ValueError("thirteen")
    return [{"y": request["x"] * 2} for request in requests]


async def coroutine(requests: list[Request]) -> list[Any]:
    await asyncio.sleep(0)
    return function(requests)


def generator(requests: list[Request]) -> Iterator[list[Any]]:
    yield function(requests)


async def async_generator(requests: list[Request]) -> AsyncIterator[list[Any]]:
    await asyncio.sleep(0)
    yield function(requests)


class WithFactory:
    """Has its event loop make tasks in its own way, as one that runs them at once would be."""

    def __init__(self) -> None:
        self.made: list[str] = []  # the coroutines that it has made tasks of

    async def __call__(self, requests: list[Request]) -> list[Any]:
        asyncio.get_running_loop().set_task_factory(self._make)
        await asyncio.create_task(coroutine(requests))
        return function(requests)

    def _make(self, loop: asyncio.AbstractEventLoop, awaited: Any, **options: Any) -> asyncio.Task[Any]:
        self.made.append(awaited.__name__)
        return asyncio.Task(awaited, loop=loop, **options)


def scaled(factor: int, requests: list[Request]) -> list[Any]:
    return [{"y": result["y"] * factor / 2} for result in function(requests)]


async def scaled_async(factor: int, requests: list[Request]) -> list[Any]:
    return scaled(factor, requests)


class Model:
    def method(self, requests: list[Request]) -> list[Any]:
        return function(requests)

    @staticmethod
    def static(requests: list[Request]) -> list[Any]:
        return function(requests)

    @classmethod
    async def class_method(cls, requests: list[Request]) -> list[Any]:
        return function(requests)

    def generate(self, requests: list[Request]) -> Iterator[list[Any]]:
        yield function(requests)

    async def agenerate(self, requests: list[Request]) -> AsyncIterator[list[Any]]:
        yield function(requests)

    def __call__(self, requests: list[Request]) -> list[Any]:
        return function(requests)


class Coroutine:
    async def __call__(self, requests: list[Request]) -> list[Any]:
        return function(requests)


class Generator:
    def __call__(self, requests: list[Request]) -> Iterator[list[Any]]:
        yield function(requests)


class AsyncGenerator:
    async def __call__(self, requests: list[Request]) -> AsyncIterator[list[Any]]:
        yield function(requests)


KINDS: dict[str, Callable[..., Any]] = {
    "function": function,
    "lambda": lambda requests: function(requests),
    "lambda of a coroutine": lambda requests: coroutine(requests),
    "lambda of a generator": lambda requests: generator(requests),
    "lambda of an async generator": lambda requests: async_generator(requests),
    "method": Model().method,
    "static method": Model.static,
    "class method": Model.class_method,
    "object": Model(),
    "partial": functools.partial(scaled, 2),
    "partial of a coroutine": functools.partial(scaled_async, 2),
    "partial of an object": functools.partial(Coroutine()),
    "coroutine": coroutine,
    "generator": generator,
    "async generator": async_generator,
    "generator method": Model().generate,
    "async generator method": Model().agenerate,
    "object with a coroutine": Coroutine(),
    "object with a generator": Generator(),
    "object with an async generator": AsyncGenerator(),
}


def name_of(kind: str, decoupled: bool) -> str:
    return f"{kind.replace(' ', '_')}.{'decoupled' if decoupled else 'coupled'}"


def yields_twice(requests: list[Request]) -> Iterator[Any]:
    yield function(requests)
    yield function(requests)


def yields_nothing(requests: list[Request]) -> Iterator[Any]:
    yield from ()


# ---- results of every form ------------------------------------------------------------------------------------------

ONE = np.ones((1, 1), np.float32)
GOOD: dict[str, Any] = {
    "dictionary": {"y": ONE},
    "mapping": MappingProxyType({"y": ONE}),
    "list": [ONE],
    "tuple": (ONE,),
    "response": Response({"y": ONE}),
    "float64": {"y": ONE.astype(np.float64)},
    "another byte order": {"y": ONE.astype(">f4")},
    "column-major": {"y": np.asfortranarray(ONE)},
    "not contiguous": {"y": np.ones((2, 2), np.float32)[::2, ::2]},
    "integers": {"y": np.ones((1, 1), np.int8)},
    "text": {"y": np.array([["1"]])},
    "bytes": {"y": np.array([[b"1"]])},
    "objects": {"y": np.array([[1.0]], object)},
    "undeclared": {"y": ONE, "unknown": object()},
    "subclass": {"y": ONE.view(np.recarray)},
    "masked": {"y": np.ma.masked_array(ONE, mask=False)},
}
STRICT = {
    "dictionary", "mapping", "list", "tuple", "response", "another byte order", "column-major", "not contiguous",
    "integers",
}  # fmt: skip


BAD: dict[str, tuple[Any, str]] = {
    "None": (None, "a list of 1, got NoneType"),
    "a dictionary": ({"y": ONE}, "a list of 1, got dict"),
    "an array": (ONE, "a list of 1, got ndarray"),
    "too few": ([], "a list of 1, got a list of 0"),
    "too many": ([{"y": ONE}] * 2, "a list of 1, got a list of 2"),
    "an element that is nothing": ([None], "got NoneType: None"),
    "an element that is text": (["y"], "got str: 'y'"),
    "a list of outputs that is too long": ([[ONE, ONE]], "1 (y), got 2"),
    "an output that is a list": ([{"y": [[1.0]]}], "a numpy array, got list: [[1.0]]"),
    "an output that is a number": ([{"y": 1.0}], "a numpy array, got float: 1.0"),
    "an output that is None": ([{"y": None}], "a numpy array, got None"),
    "a scalar of numpy": ([{"y": np.float32(1)}], "got shape ()"),
    "an array without axes": ([{"y": np.array(1, np.float32)}], "got shape ()"),
    "complex numbers": ([{"y": np.array([[1j]])}], "got dtype complex128"),
    "dates": ([{"y": np.array([["2020-01-01"]], "datetime64[D]")}], "got dtype datetime64[D]"),
    "records": ([{"y": np.zeros((1, 1), [("a", "f4")])}], "expected dtype float32"),
    "a parameter of no type": ([Response({"y": ONE}, {"p": cast(Any, [1])})], "response parameter 'p'"),
}  # fmt: skip
UNCASTABLE = {
    "text that is no number": ([{"y": np.array([["one"]])}], "<U3"),
    "objects that are no numbers": ([{"y": np.array([[object()]], object)}], "object"),
    "numbers that are too large": ([{"y": np.array([[10**400]], object)}], "object"),
}
