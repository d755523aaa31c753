"""How every decorator wraps a callable; the only module that imports wrapt.

A decorator is one function, `prepare`: it looks at a call and says, as a `Plan`, with which arguments the callable
below is to be called, once or several times, and how the results become one. `decorator(prepare)` does the rest for
every kind of callable. What comes back from the callable below decides how its results are taken:

| the callable below returns | the decorated callable returns |
|---|---|
| a value | `plan.finish` of it |
| an awaitable (`async def`) | a coroutine that awaits it, then as above |
| an iterator (generator function) | a generator; `plan.finish` of every step |
| an asynchronous iterator | an asynchronous generator; `plan.finish` of every step |

For a coroutine function everything happens when the coroutine is awaited. For all others `prepare` and the calls happen
when the decorated callable is called, so a request that does not fit is refused there, not in the first step of a
generator.
"""

import functools
import importlib
import inspect
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import wrapt  # type: ignore[import-untyped, unused-ignore]

from pytriton.decorators._requests import CURRENT_REQUESTS
from pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError

__all__ = ["Plan", "Prepare", "decorator", "takes_requests", "undecorated"]

# wrapt 2 put a base below ObjectProxy.
_PROXY: Any = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)
# Only wrapt 2 brings types, and they know less of these classes than what is used here.
_FunctionWrapper: Any = wrapt.FunctionWrapper
_BoundFunctionWrapper: Any = wrapt.BoundFunctionWrapper
_VALUES = frozenset({dict, list, tuple})


@dataclass(slots=True)
class Plan:
    """What a decorator makes of one call."""

    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
    """Positional and keyword arguments of every call of the callable below, at least one."""
    finish: Callable[[list[Any]], Any]
    """Makes the result of the decorated callable of the results of the calls, in their order. For generators it runs
    for every step; the calls advance together."""
    requests: Sequence[Any] | None = None
    """What `get_requests()` is to give during the calls; None leaves it as it is."""


Prepare = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Plan]
"""`(wrapped, instance, args, kwargs)`, as in wrapt: `wrapped` is already bound to `instance`, the object of a method
call, the class of a class method call, else None."""
Outward = Callable[[inspect.Signature], inspect.Signature]
"""Signature of the callable below, without `self`, to that of the decorated callable."""


WholeCall = Callable[[Any, Any, Mapping[str, Any], list[int], Callable[[], Sequence[Any]]], Any]
"""`(wrapped, instance, inputs, sizes, requests)`: the call of a server that has the batch as one array per input.

`sizes` has the rows of each request, `requests` makes the requests. The result is a dictionary of arrays over the whole
batch, or, as anything else, what the decorated callable itself would have returned."""


def decorator(
    prepare: Prepare, *, name: str, outward: Outward | None = None, whole: WholeCall | None = None
) -> Callable[[Any], Any]:
    """Makes a decorator.

    Args:
        prepare: Makes the plan of each call.
        name: Name of the decorator, for errors.
        outward: Makes the signature that `inspect.signature` shows; None shows that of the callable below.
        whole: Makes calls for whole batches, with nothing made and taken apart for each request. The decorated callable
            offers it as `__pytriton_whole__(inputs, sizes, requests)`, unless it is a coroutine function.

    Returns:
        A function that takes a callable of any kind and returns it decorated.
    """

    def invoke(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _carry_out(wrapped, prepare(wrapped, instance, args, kwargs))

    async def invoke_coroutine(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await _carry_out_awaiting(wrapped, prepare(wrapped, instance, args, kwargs))

    def apply(func: Any) -> Any:
        if not callable(func) and not isinstance(func, (classmethod, staticmethod)):
            raise PyTritonBadParameterError(
                f"@{name} decorates a callable, not {func!r}.", parameter=name, value=func, rule="a callable"
            )
        kind = _Decorated if _code_of_object(func) is None else _DecoratedObject
        decorated = kind(func, invoke, outward, whole=whole)
        function = func.__func__ if isinstance(func, (classmethod, staticmethod)) else decorated
        return kind(func, invoke_coroutine, outward) if inspect.iscoroutinefunction(function) else decorated

    return apply


def takes_requests(inner: inspect.Signature) -> inspect.Signature:
    """Signature of a decorated callable that takes the requests of a batch in place of arrays."""
    requests = inspect.Parameter("requests", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([requests])


def undecorated(func: Any) -> Any:
    """Gives what is below all decorators of `func`; a bound method stays bound."""
    while isinstance(func, _PROXY):
        func = func.__wrapped__
    return func


# --- carrying out a plan ---------------------------------------------------------------------------------------------


def _carry_out(wrapped: Any, plan: Plan) -> Any:
    results: list[Any] = []
    token = _enter(plan)
    try:
        for args, kwargs in plan.calls:
            results.append(wrapped(*args, **kwargs))
    except BaseException:
        _discard(results)
        raise
    finally:
        _leave(token)
    return deliver(results, plan)


def deliver(results: list[Any], plan: Plan) -> Any:
    """Gives the result of the decorated callable, whatever kind of results the calls below had."""
    kind = results[0]
    if type(kind) in _VALUES:
        return plan.finish(results)
    if inspect.isawaitable(kind):
        return _deliver_awaited(results, plan)
    if isinstance(kind, AsyncIterator):
        return _deliver_async_steps(results, plan)
    if isinstance(kind, Iterator):
        return _deliver_steps(results, plan)
    return plan.finish(results)


async def _carry_out_awaiting(wrapped: Any, plan: Plan) -> Any:
    results: list[Any] = []
    token = _enter(plan)
    try:
        for args, kwargs in plan.calls:
            # One after the other: where a call fails, the coroutines of the later ones do not exist yet.
            results.append(await wrapped(*args, **kwargs))
    finally:
        _leave(token)
    return deliver(results, plan)


async def _deliver_awaited(awaitables: list[Awaitable[Any]], plan: Plan) -> Any:
    results: list[Any] = []
    token = _enter(plan)
    try:
        for awaitable in awaitables:
            results.append(await awaitable)
    except BaseException:
        _discard(awaitables[len(results) + 1 :])
        raise
    finally:
        _leave(token)
    return deliver(results, plan)


def _deliver_steps(iterators: list[Iterator[Any]], plan: Plan) -> Iterator[Any]:
    try:
        while True:
            step: list[Any] = []
            # Entered for each step, not for the whole run: between the steps the caller's own context is in force.
            token = _enter(plan)
            try:
                for iterator in iterators:
                    try:
                        step.append(next(iterator))
                    except StopIteration:
                        continue
            finally:
                _leave(token)
            if not _is_whole(step, iterators):
                return
            yield plan.finish(step)
    finally:
        _discard(iterators)


async def _deliver_async_steps(iterators: list[AsyncIterator[Any]], plan: Plan) -> AsyncIterator[Any]:
    try:
        while True:
            step: list[Any] = []
            token = _enter(plan)
            try:
                for iterator in iterators:
                    try:
                        step.append(await iterator.__anext__())
                    except StopAsyncIteration:
                        continue
            finally:
                _leave(token)
            if not _is_whole(step, iterators):
                return
            yield plan.finish(step)
    finally:
        for iterator in iterators:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()


def _is_whole(step: list[Any], iterators: Sequence[Any]) -> bool:
    if step and len(step) != len(iterators):
        raise PyTritonRuntimeError(
            f"The callable was called {len(iterators)} times for one batch, and its generators yielded different "
            f"numbers of times: {len(iterators) - len(step)} ended while {len(step)} went on. Yield equally often for "
            "every group of requests."
        )
    return bool(step)


def _enter(plan: Plan) -> Any:
    return None if plan.requests is None else CURRENT_REQUESTS.set(plan.requests)


def _leave(token: Any) -> None:
    if token is not None:
        CURRENT_REQUESTS.reset(token)


def _discard(results: Sequence[Any]) -> None:
    """Closes coroutines and generators that nobody will finish (a coroutine would warn that it was never awaited)."""
    for result in results:
        close = getattr(result, "close", None)
        if close is not None and (inspect.iscoroutine(result) or isinstance(result, Iterator)):
            close()


# --- what a decorated callable looks like ----------------------------------------------------------------------------


class _Bound(_BoundFunctionWrapper):  # type: ignore[misc]
    """A decorated callable reached through an object or a class."""

    @property
    def __pytriton_whole__(self) -> Callable[..., Any] | None:
        whole = self._self_parent._self_whole
        if whole is None or self._self_instance is None:
            return None
        return functools.partial(whole, self.__wrapped__, self._self_instance)

    @property
    def __signature__(self) -> inspect.Signature:
        # Model.infer of an ordinary method: the object is still to be given.
        misses_object = self._self_instance is None and self._self_binding in ("function", "instancemethod")
        return _signature(self.__wrapped__, self._self_parent._self_outward, leading=misses_object)

    @property
    def __func__(self) -> "_Decorated":
        # inspect asks a bound method for its function, and takes the signature of that less its first parameter.
        return _Decorated(self.__wrapped__.__func__, self._self_wrapper, self._self_parent._self_outward, leading=True)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if inspect.ismethod(self.__wrapped__):
            return getattr, (self.__self__, self.__name__)
        # Not by name alone, as functions are: every access makes another object, which pickle would not accept.
        return _named, (self.__module__, self.__qualname__)


class _Decorated(_FunctionWrapper):  # type: ignore[misc]
    """A decorated callable; everything not named here is that of the callable below."""

    __bound_function_wrapper__ = _Bound

    def __init__(
        self,
        wrapped: Any,
        invoke: Callable[..., Any],
        outward: Outward | None,
        *,
        leading: bool | None = None,
        whole: WholeCall | None = None,
    ) -> None:
        super().__init__(wrapped, invoke)
        self._self_outward = outward
        self._self_whole = whole
        self._self_leading = leading

    @property
    def __pytriton_whole__(self) -> Callable[..., Any] | None:
        # What is below may be a method, which has to be reached through its object.
        if self._self_whole is None or isinstance(self.__wrapped__, (classmethod, staticmethod)):
            return None
        return functools.partial(self._self_whole, self.__wrapped__, getattr(self.__wrapped__, "__self__", None))

    @property
    def __signature__(self) -> inspect.Signature:
        return _signature(self.__wrapped__, self._self_outward, leading=self._self_leading)

    @property
    def __func__(self) -> "_Decorated":
        # For a bound method that was decorated afterwards; anything else has none.
        return _Decorated(self.__wrapped__.__func__, self._self_wrapper, self._self_outward, leading=True)

    def __reduce_ex__(self, protocol: Any) -> str:
        # By name, as functions are; the name leads to the decorated callable.
        name: str = self.__qualname__
        return name


class _DecoratedObject(_Decorated):
    """A decorated object with a `__call__` written in Python.

    `inspect.iscoroutinefunction` and its like look at the code of functions only. The object has none; with that of its
    `__call__` they tell the truth about the decorated object, too.
    """

    @property
    def __code__(self) -> Any:
        return _code_of_object(self.__wrapped__)

    @property
    def __name__(self) -> str:
        name: str = getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__)
        return name

    @property
    def __defaults__(self) -> None:
        return None

    @property
    def __kwdefaults__(self) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PyTritonRuntimeError(
            f"The decorated object {self.__wrapped__!r} cannot be pickled. Decorate its __call__ method instead of the "
            "object."
        )


def _named(module: str, qualified_name: str) -> Any:
    return operator.attrgetter(qualified_name)(importlib.import_module(module))


def _code_of_object(func: Any) -> Any:
    """Code of the `__call__` of an object; None for functions, methods, classes and objects without it."""
    if isinstance(func, (type, classmethod, staticmethod)) or hasattr(func, "__code__"):
        return None
    return getattr(undecorated(type(func).__call__), "__code__", None)


def _signature(inner: Any, outward: Outward | None, *, leading: bool | None) -> inspect.Signature:
    """Signature of a decorated callable.

    Args:
        inner: The callable below.
        outward: What the decorator makes of its signature.
        leading: Whether the first parameter is the object or class and stays. None: if it is called `self` or `cls`;
            since Python 3.13 a function that is still to become a class method cannot be told apart otherwise.
    """
    if outward is None:
        return inspect.signature(inner)
    try:
        signature = inspect.signature(inner)
    except ValueError:
        # A callable written in C may have none.
        return outward(inspect.Signature())
    parameters = list(signature.parameters.values())
    if leading is None:
        leading = bool(parameters) and parameters[0].name in ("self", "cls")
    if not leading or not parameters:
        return outward(signature)
    own = parameters[0].replace(kind=inspect.Parameter.POSITIONAL_ONLY, annotation=inspect.Parameter.empty)
    shown = outward(signature.replace(parameters=parameters[1:]))
    return shown.replace(parameters=[own, *shown.parameters.values()])
