"""Plans of decorators, and their execution for every kind of callable.

A plan says which calls of the decorated function one call of the decorated callable becomes, and how their results are
combined. What the function returns decides what the decorated callable returns:

| the callable below returns | the decorated callable returns |
|---|---|
| a value | `plan.finish` of it |
| an awaitable (`async def`) | a coroutine that awaits it, then as above |
| an iterator (generator function) | a generator; `plan.finish` of every step |
| an asynchronous iterator | an asynchronous generator; `plan.finish` of every step |

Where there are several calls, they are made one after the other, and their generators advance together: the n-th step
is made of the n-th steps of all. One that ended before the others leaves `EXHAUSTED` in its place.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from contextvars import Token
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pytriton.decorators._calls.requests import CURRENT_SCOPE, PendingScope, Scope

Call = tuple[tuple[Any, ...], Mapping[str, Any], Scope | None]
"""Positional and keyword arguments of a call of the callable below, and the scope in which it is made; without one, in
that of the decorated callable."""
Finish = Callable[[list[Any]], Any]
SingleCall = tuple[tuple[Any, ...], Mapping[str, Any], Scope | None, Finish | None]
"""A plan with one call, the usual case: a `Call` and its `finish`, or None if the result stays as it is."""
Prepare = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], "Plan | SingleCall | None"]
"""`(wrapped, instance, args, kwargs)`, as in wrapt: `wrapped` is already bound to `instance`, the object of a method
call, the class of a class method call, else None. No plan means that the call is made as it is."""

_PLAIN_RESULTS = frozenset({dict, list, tuple, np.ndarray})


class _Exhausted:
    """Marks a generator that ended before the others."""


EXHAUSTED: Final = _Exhausted()


@dataclass(slots=True)
class Plan:
    """The calls that a decorator makes from one call, and how it combines their results."""

    calls: Sequence[Call]
    """The calls of the callable below, at least one."""
    finish: Finish
    """Makes the result of the decorated callable of the results of the calls, in their order. For generators it runs
    for every step; where one of several has ended, `EXHAUSTED` is in its place."""


def _first_result(results: list[Any]) -> Any:
    return results[0]


def execute(wrapped: Any, plan: Plan | SingleCall) -> Any:
    """Make the calls of a plan and return what the decorated callable returns."""
    if isinstance(plan, tuple):
        args, kwargs, scope, finish = plan
        if scope is None:
            result = wrapped(*args, **kwargs)
        else:
            token = CURRENT_SCOPE.set(scope)
            try:
                result = wrapped(*args, **kwargs)
            finally:
                CURRENT_SCOPE.reset(token)
        if type(result) in _PLAIN_RESULTS:
            return result if finish is None else finish([result])
        # Without a scope, the steps of a generator need nothing either.
        return result if finish is None and scope is None else combine([result], _to_plan(plan))
    results: list[Any] = []
    try:
        for args, kwargs, scope in plan.calls:
            if scope is None:
                results.append(wrapped(*args, **kwargs))
                continue
            token = CURRENT_SCOPE.set(scope)
            try:
                results.append(wrapped(*args, **kwargs))
            finally:
                CURRENT_SCOPE.reset(token)
    except BaseException:
        _close_all(results)
        raise
    return combine(results, plan)


async def execute_async(wrapped: Any, plan: Plan | SingleCall) -> Any:
    """Do what `execute` does for a coroutine function."""
    if isinstance(plan, tuple):
        plan = _to_plan(plan)
    results: list[Any] = []
    for args, kwargs, scope in plan.calls:
        token = _enter(scope)
        try:
            # The calls are made one after the other, so that a failed call leaves no coroutine that is never awaited.
            results.append(await wrapped(*args, **kwargs))
        finally:
            _leave(token)
    return combine(results, plan)


def _to_plan(plan: SingleCall) -> Plan:
    args, kwargs, scope, finish = plan
    return Plan([(args, kwargs, scope)], _first_result if finish is None else finish)


def combine(results: list[Any], plan: Plan) -> Any:
    """Combine the results of the calls of a plan, whatever their kind, into the result of the decorated callable."""
    kind = results[0]
    if type(kind) in _PLAIN_RESULTS:
        return plan.finish(results)
    if inspect.isawaitable(kind):
        return _combine_awaited(results, plan)
    if isinstance(kind, AsyncIterator):
        return _combine_async_steps(results, plan)
    if isinstance(kind, Iterator):
        return _combine_steps(results, plan)
    return plan.finish(results)


async def _combine_awaited(awaitables: list[Awaitable[Any]], plan: Plan) -> Any:
    results: list[Any] = []
    try:
        for awaitable, (_, _, scope) in zip(awaitables, plan.calls, strict=True):
            token = _enter(scope)
            try:
                results.append(await awaitable)
            finally:
                _leave(token)
    except BaseException:
        _close_all(awaitables[len(results) + 1 :])
        raise
    return combine(results, plan)


def _combine_steps(iterators: list[Iterator[Any]], plan: Plan) -> Iterator[Any]:
    scopes = [scope for _, _, scope in plan.calls]
    try:
        while True:
            step: list[Any] = []
            for index, scope in enumerate(scopes):
                # The scope is entered for each step, because the caller's own scope holds between the steps.
                token = _enter(scope)
                try:
                    step.append(next(iterators[index], EXHAUSTED))
                finally:
                    _leave(token)
            if all(result is EXHAUSTED for result in step):
                return
            yield plan.finish(step)
    finally:
        _close_all(iterators)


async def _combine_async_steps(iterators: list[AsyncIterator[Any]], plan: Plan) -> AsyncIterator[Any]:
    scopes = [scope for _, _, scope in plan.calls]
    finish = plan.finish
    try:
        if len(iterators) == 1:
            # A short way for one call, which is the usual case and runs once for each token of a language model.
            [iterator], [scope] = iterators, scopes
            while True:
                token = None if scope is None else CURRENT_SCOPE.set(scope)
                try:
                    result = await anext(iterator, EXHAUSTED)
                finally:
                    if token is not None:
                        _leave(token)
                if result is EXHAUSTED:
                    return
                yield finish([result])
        while True:
            step: list[Any] = []
            for index, scope in enumerate(scopes):
                token = _enter(scope)
                try:
                    step.append(await anext(iterators[index], EXHAUSTED))
                finally:
                    _leave(token)
            if all(result is EXHAUSTED for result in step):
                return
            yield finish(step)
    finally:
        async with AsyncExitStack() as stack:
            for iterator in iterators:
                close = getattr(iterator, "aclose", None)
                if close is not None:
                    stack.push_async_callback(close)


def _enter(scope: Scope | None) -> Token[Scope | PendingScope] | None:
    return None if scope is None else CURRENT_SCOPE.set(scope)


def _leave(token: Token[Scope | PendingScope] | None) -> None:
    if token is None:
        return
    try:
        CURRENT_SCOPE.reset(token)
    except ValueError:
        # The garbage collector closes an unfinished coroutine in a context in which the scope was never entered.
        return


def _close_all(results: Sequence[Any]) -> None:
    """Close coroutines and generators that nobody will finish (a coroutine would warn that it was never awaited)."""
    with ExitStack() as stack:
        for result in results:
            close = getattr(result, "close", None)
            if close is not None and (inspect.iscoroutine(result) or isinstance(result, Iterator)):
                stack.callback(close)
