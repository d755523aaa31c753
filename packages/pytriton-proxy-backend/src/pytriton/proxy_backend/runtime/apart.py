"""The requests of a batch apart from each other, where one of them has what the callable cannot take.

Only the callable can tell some mistakes of callers, such as a text that is not UTF-8 where its hint says `str`. What is
wrong with one request ends that request alone: the batch is halved until the requests with mistakes are by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from .failures import is_of_caller

InferenceCall = Callable[[Sequence[Any]], Any]


class Refused(NamedTuple):
    """Requests that a callable has refused together, since one of them at least is wrong."""

    requests: Sequence[Any]
    error: Exception

    def halves(self) -> list[Sequence[Any]]:
        """Return the requests in two parts."""
        middle = len(self.requests) // 2
        return [self.requests[:middle], self.requests[middle:]]


def refused_by(error: Exception, requests: Sequence[Any]) -> Refused:
    """Return requests that were refused with an error; raise it where that is not why, or no request is left."""
    if not is_of_caller(error) or not requests:
        raise error
    # Its frames refer to the inputs.
    error.__traceback__ = None
    return Refused(requests, error)


def call_apart(call: InferenceCall, refused: Refused, run_async: Callable[[Awaitable[Any]], Any]) -> list[Any]:
    """Return the result of each request, or the error in its place, after the callable has refused them together.

    A result that unexpectedly is a coroutine is driven by `run_async`.
    """
    if len(refused.requests) == 1:
        return [refused.error]
    results: list[Any] = []
    for part in refused.halves():
        try:
            given = call(part)
            results += _results(run_async(given) if inspect.isawaitable(given) else given, len(part))
        except Exception as error:
            results += call_apart(call, refused_by(error, part), run_async)
    return results


async def call_apart_async(call: InferenceCall, refused: Refused) -> list[Any]:
    """Do the same for a callable that returns an awaitable."""
    if len(refused.requests) == 1:
        return [refused.error]
    results: list[Any] = []
    for part in refused.halves():
        try:
            given = call(part)
            results += _results(await given if inspect.isawaitable(given) else given, len(part))
        except Exception as error:
            results += await call_apart_async(call, refused_by(error, part))
    return results


def _results(given: Any, count: int) -> list[Any]:
    """Return what a callable has returned for so many requests; a generator gives it as its first step."""
    if inspect.isgenerator(given):
        given, steps = next(given, None), given
        steps.close()
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise TypeError(
            f"the callable returned {given!r:.200} for {count} requests: expected a list of as many results"
        )
    return list(given)
