"""Texts that come in parts: where they end, and several of them at a time."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pytriton.openai._models import COUNTS, FINISH_REASON, ServedModel

__all__ = ["Part", "Stops", "merged", "read_parts"]

T = TypeVar("T")


class Stops:
    """Ends a text before the first of some texts, wherever the borders between its parts are.

    Args:
        stops: The texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_over = False
        """Whether one of them has come."""

    def feed(self, text: str) -> str:
        """Take the next part and return what is certainly before them."""
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held, self.is_over = "", True
            return text[: min(found)]
        # The longest end that one of them may begin with.
        longest = max(map(len, self._stops), default=1) - 1
        begin = next(
            (
                at
                for at in range(max(0, len(text) - longest), len(text))
                if any(stop.startswith(text[at:]) for stop in self._stops)
            ),
            len(text),
        )
        self._held = text[begin:]
        return text[:begin]

    def end(self) -> str:
        """Return what was held back, where no other part follows."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Part:
    """A part of a text.

    Attributes:
        text: What follows the parts before.
        finish_reason: Why the text ends with it; None where it goes on.
        counts: Of the last part: how many tokens there were, by name, as far as the model tells.
    """

    text: str
    finish_reason: str | None = None
    counts: dict[str, int] = field(default_factory=dict)


async def read_parts(
    answers: AsyncGenerator[Any, None], model: ServedModel, stops: Sequence[str]
) -> AsyncGenerator[Part, None]:
    """Yield the parts of one text; the last one has a reason.

    Args:
        answers: The answers of the model. Closed when the text is over, whatever else would follow.
        model: The model.
        stops: Texts that it ends before.
    """
    # A character may be cut in two.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    filtered = Stops(stops)
    reason = "stop"
    counts: dict[str, int] = {}
    async with aclosing(answers):
        async for answer in answers:
            counts |= {name: int(np.sum(answer[name])) for name in COUNTS if name in answer}
            if FINISH_REASON in answer:
                reason = _join(answer[FINISH_REASON]).decode("utf-8", "replace") or reason
            if model.output.name in answer and (
                text := filtered.feed(decoder.decode(_join(answer[model.output.name])))
            ):
                yield Part(text)
            if filtered.is_over:
                yield Part("", "stop", counts)
                return
    yield Part(filtered.feed(decoder.decode(b"", final=True)) + filtered.end(), reason, counts)


def _join(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"".join(np.ravel(value).tolist())


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what several generators yield as it comes, each with the number of its generator; in the end close them."""
    pending: dict[asyncio.Future[T], int] = {}

    def ask(number: int) -> None:
        pending[asyncio.ensure_future(anext(sources[number]))] = number

    try:
        for number in range(len(sources)):
            ask(number)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number = pending.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield number, item
                ask(number)
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()
