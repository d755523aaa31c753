"""What a decorator makes of a call, and how that is carried out for every kind of callable.

What comes back from the callable below decides how its results are taken:

| the callable below returns | the decorated callable returns |
|---|---|
| a value | `plan.finish` of it |
| an awaitable (`async def`) | a coroutine that awaits it, then as above |
| an iterator (generator function) | a generator; `plan.finish` of every step |
| an asynchronous iterator | an asynchronous generator; `plan.finish` of every step |

Where there are several calls, they are made one after the other, and their generators advance together: the n-th step
is made of the n-th steps of all. One that ended before the others leaves `ENDED` in its place.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from contextvars import Token
from dataclasses import dataclass
from typing import Any, Final

from pytriton.decorators._calls.requests import CURRENT_SCOPE, Scope

__all__ = ["ENDED", "Call", "Once", "Plan", "Prepare", "carry_out", "carry_out_awaiting", "deliver"]

Call = tuple[tuple[Any, ...], Mapping[str, Any], Scope | None]
"""Positional and keyword arguments of a call of the callable below, and the scope in which it is made; without one, in
that of the decorated callable."""
Finish = Callable[[list[Any]], Any]
Once = tuple[tuple[Any, ...], Mapping[str, Any], Scope | None, Finish | None]
"""A plan with one call, as nearly all have: a `Call` and its `finish`, or None where the result stays as it is."""
Prepare = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], "Plan | Once | None"]
"""`(wrapped, instance, args, kwargs)`, as in wrapt: `wrapped` is already bound to `instance`, the object of a method
call, the class of a class method call, else None. No plan means that the call is made as it is."""

_VALUES = frozenset({dict, list, tuple})


class _Ended:
    """Marks a generator that ended before the others."""


ENDED: Final = _Ended()


@dataclass(slots=True)
class Plan:
    """What a decorator makes of one call."""

    calls: Sequence[Call]
    """The calls of the callable below, at least one."""
    finish: Finish
    """Makes the result of the decorated callable of the results of the calls, in their order. For generators it runs
    for every step; where one of several has ended, `ENDED` is in its place."""


def _as_it_is(results: list[Any]) -> Any:
    return results[0]


def carry_out(wrapped: Any, plan: Plan | Once) -> Any:
    """Make the calls of a plan and give what the decorated callable returns."""
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
        if type(result) in _VALUES:
            return result if finish is None else finish([result])
        # Without a scope there is nothing to be done about the steps of a generator, either.
        return result if finish is None and scope is None else deliver([result], _general(plan))
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
        _discard(results)
        raise
    return deliver(results, plan)


async def carry_out_awaiting(wrapped: Any, plan: Plan | Once) -> Any:
    """Do the same for a coroutine function."""
    if isinstance(plan, tuple):
        plan = _general(plan)
    results: list[Any] = []
    for args, kwargs, scope in plan.calls:
        token = _enter(scope)
        try:
            # One after the other: where a call fails, the coroutines of the later ones do not exist yet.
            results.append(await wrapped(*args, **kwargs))
        finally:
            _leave(token)
    return deliver(results, plan)


def _general(plan: Once) -> Plan:
    args, kwargs, scope, finish = plan
    return Plan([(args, kwargs, scope)], _as_it_is if finish is None else finish)


def deliver(results: list[Any], plan: Plan) -> Any:
    """Return the result of the decorated callable, whatever kind of results the calls below had."""
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


async def _deliver_awaited(awaitables: list[Awaitable[Any]], plan: Plan) -> Any:
    results: list[Any] = []
    try:
        for awaitable, (_, _, scope) in zip(awaitables, plan.calls, strict=True):
            token = _enter(scope)
            try:
                results.append(await awaitable)
            finally:
                _leave(token)
    except BaseException:
        _discard(awaitables[len(results) + 1 :])
        raise
    return deliver(results, plan)


def _deliver_steps(iterators: list[Iterator[Any]], plan: Plan) -> Iterator[Any]:
    scopes = [scope for _, _, scope in plan.calls]
    try:
        while True:
            step: list[Any] = []
            for index, scope in enumerate(scopes):
                # Entered for each step, not for the whole run: between the steps the caller's own scope is in force.
                token = _enter(scope)
                try:
                    step.append(next(iterators[index], ENDED))
                finally:
                    _leave(token)
            if all(result is ENDED for result in step):
                return
            yield plan.finish(step)
    finally:
        _discard(iterators)


async def _deliver_async_steps(iterators: list[AsyncIterator[Any]], plan: Plan) -> AsyncIterator[Any]:
    scopes = [scope for _, _, scope in plan.calls]
    try:
        while True:
            step: list[Any] = []
            for index, scope in enumerate(scopes):
                token = _enter(scope)
                try:
                    step.append(await anext(iterators[index], ENDED))
                finally:
                    _leave(token)
            if all(result is ENDED for result in step):
                return
            yield plan.finish(step)
    finally:
        async with AsyncExitStack() as stack:
            for iterator in iterators:
                close = getattr(iterator, "aclose", None)
                if close is not None:
                    stack.push_async_callback(close)


def _enter(scope: Scope | None) -> Token[Scope] | None:
    return None if scope is None else CURRENT_SCOPE.set(scope)


def _leave(token: Token[Scope] | None) -> None:
    if token is None:
        return
    try:
        CURRENT_SCOPE.reset(token)
    except ValueError:
        # A coroutine that nobody finished is closed by the garbage collector, in whatever context that runs: there the
        # scope was never entered, so there is nothing to leave.
        return


def _discard(results: Sequence[Any]) -> None:
    """Close coroutines and generators that nobody will finish (a coroutine would warn that it was never awaited)."""
    with ExitStack() as stack:
        for result in results:
            close = getattr(result, "close", None)
            if close is not None and (inspect.iscoroutine(result) or isinstance(result, Iterator)):
                stack.callback(close)
