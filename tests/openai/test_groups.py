"""Parts of a text that are there together are handed on together, and none is kept back that nothing follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from pytriton.client import ModelResult
from pytriton.openai._errors import OpenAIError
from pytriton.openai._models import read_model
from pytriton.openai._texts import Part, read_parts

TEXT = {"data_type": "TYPE_STRING", "dims": [1]}
CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 0,
    "input": [{"name": "text", **TEXT}],
    "output": [{"name": "said", **TEXT}, {"name": "tool_calls", **TEXT}],
    "model_transaction_policy": {"decoupled": True},
}


async def told(
    answers: Sequence[tuple[dict[str, bytes], bool]], error: Exception | None = None, stops: Sequence[str] = ()
) -> tuple[list[list[Part]], list[int]]:
    """Return the groups, and how many answers had been taken when each of them came."""
    taken = 0

    async def given() -> AsyncGenerator[ModelResult, None]:
        nonlocal taken
        for outputs, is_followed in answers:
            taken += 1
            yield ModelResult(outputs, is_followed=is_followed)
        if error is not None:
            raise error

    groups: list[list[Part]] = []
    counts: list[int] = []
    async for group in read_parts(given(), read_model(CONFIG), stops, tools=frozenset(), tells_logprobs=False):
        groups.append(group)
        counts.append(taken)
    return groups, counts


def said(text: str, is_followed: bool = False) -> tuple[dict[str, bytes], bool]:
    return {"said": text.encode()}, is_followed


def texts(groups: list[list[Part]]) -> list[list[str]]:
    return [[part.text for part in group] for group in groups]


def test_what_is_there_together_comes_together() -> None:
    groups, counts = asyncio.run(told([said("a"), said("b", True), said("c", True), said("d"), said("e", True)]))
    assert texts(groups) == [["a"], ["b", "c", "d"], ["e", ""]]
    assert counts == [1, 4, 5]
    assert [part.finish_reason for part in groups[-1]] == [None, "stop"]


def test_a_flood_is_parted() -> None:
    groups, _ = asyncio.run(told([said(str(at), True) for at in range(1000)]))
    assert [text for group in texts(groups) for text in group] == [*map(str, range(1000)), ""]
    assert max(map(len, groups)) <= 64


@pytest.mark.parametrize("error", [OpenAIError(500, "it failed"), ValueError("no number")])
def test_what_came_before_an_error_comes(error: Exception) -> None:
    groups: list[list[Part]] = []

    async def main() -> None:
        async def given() -> AsyncGenerator[ModelResult, None]:
            yield ModelResult({"said": b"a"}, is_followed=True)
            yield ModelResult({"said": b"b"}, is_followed=True)
            raise error

        parts = read_parts(given(), read_model(CONFIG), (), tools=frozenset(), tells_logprobs=False)
        async for group in parts:
            groups.append(group)

    with pytest.raises(type(error)):
        asyncio.run(main())
    assert texts(groups) == [["a", "b"]]


def test_a_stop_ends_a_group() -> None:
    groups, counts = asyncio.run(told([said("a", True), said("b.c", True), said("d", True)], stops=["."]))
    assert texts(groups) == [["a", "b", ""]]
    assert counts == [2]
