"""Requests that a callable has refused together, and what each of them gets."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytriton.proxy_backend.runtime.apart import Refused, call_apart, call_apart_async, refused_by


class WrongInput(Exception):
    """What a caller has sent."""

    __pytriton_of_caller__ = True


def infer(requests: Sequence[int]) -> list[int]:
    wrong = [request for request in requests if request < 0]
    if wrong:
        raise WrongInput(*wrong)
    return [2 * request for request in requests]


def inferring(requests: Sequence[int]) -> Iterator[list[int]]:
    yield infer(requests)


async def infer_async(requests: Sequence[int]) -> list[int]:
    return infer(requests)


def run(awaitable: Awaitable[Any]) -> Any:
    async def awaited() -> Any:
        return await awaitable

    return asyncio.run(awaited())


def refused(requests: Sequence[int]) -> Refused:
    return refused_by(WrongInput(), requests)


def told(results: list[Any]) -> list[Any]:
    return [("wrong", *each.args) if isinstance(each, WrongInput) else each for each in results]


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=40).filter(lambda numbers: min(numbers) < 0))
@settings(deadline=None)
def test_each_has_its_own_result(requests: list[int]) -> None:
    expected = [("wrong", number) if number < 0 else 2 * number for number in requests]
    for call in (infer, inferring, infer_async):
        assert told(call_apart(call, refused(requests), run)) == expected
    assert told(run(call_apart_async(infer_async, refused(requests)))) == expected
    assert told(run(call_apart_async(infer, refused(requests)))) == expected


def test_few_calls_find_one_that_is_wrong() -> None:
    calls = []

    def counted(requests: Sequence[int]) -> list[int]:
        calls.append(len(requests))
        return infer(requests)

    call_apart(counted, refused([*range(63), -1]), run)
    assert len(calls) == 12


def test_one_alone_is_not_called_again() -> None:
    error = WrongInput("x")
    assert call_apart(lambda _: pytest.fail("called"), refused_by(error, [1]), run) == [error]


def test_another_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        refused_by(ZeroDivisionError(), [1, 2])
    with pytest.raises(WrongInput):
        refused_by(WrongInput(), ())

    def fails(requests: Sequence[int]) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_apart(fails, refused([1, 2]), run)
    with pytest.raises(TypeError, match="returned \\[\\] for 1 requests"):
        call_apart(lambda _: [], refused([1, 2]), run)
