"""Texts that come in parts: where they end, and several of them at a time."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from pytriton.openai._errors import model_failed
from pytriton.openai._formats.strict_json import make_decoder
from pytriton.openai._formats.tool_calls import CallDeltas, ToolText, longest_begin
from pytriton.openai._models import (
    FINISH_REASON,
    LOGPROBS,
    REASONING,
    REFUSAL,
    TOOL_CALLS,
    EndpointModel,
)
from pytriton.proxy_backend.rota import rota_of

T = TypeVar("T")

# More parts at once would block the event loop for too long.
_MOST_TOGETHER = 16
# How many streams that have given as many go on in one turn of the loop.
_MOST_IN_A_TURN = 8

# JSON has no -Infinity, so the log probability of an impossible token is -9999, as in OpenAI's API.
_LOGPROBS_DECODER = make_decoder({"-Infinity": -9999.0})

# The values of these outputs are a part of the answer beside its text.
_SAID_BESIDE = frozenset({FINISH_REASON, LOGPROBS, REASONING, REFUSAL, TOOL_CALLS})


# The counts of a part whose model counts nothing.
_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


class Texts(list[str]):
    """Parts of a text about which a model tells nothing else, as most do, so that they cost little."""

    def parts(self) -> list[Part]:
        """Return them as parts."""
        return [Part(text, None, _NO_COUNTS) for text in self]


class Stops:
    """Ends a text before the first of some texts, wherever the borders between its parts are."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_over = False
        """Whether one of them has come."""

    def feed(self, text: str) -> str:
        """Take the next part; return the text that surely precedes the stop texts."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.is_over = "", True
            # The stop text that ends first counts, not the one that begins first: the former has ended the text before
            # the latter is complete.
            return text[: min(found)[1]]
        begin = longest_begin(text, self._stops)
        self._held = text[begin:]
        return text[:begin]

    def end(self) -> str:
        """Return the text that was held back, when no part follows."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class Part:
    """A part of a text."""

    text: str = ""  # what follows the parts before
    finish_reason: str | None = None  # why the text ends with it; None where it goes on
    # How many tokens there were so far, by name, as far as the model reports them.
    counts: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[Mapping[str, Any]] = ()  # deltas of calls of tools
    reasoning: str = ""  # what the model thought
    refusal: str = ""  # why it answers nothing
    logprobs: Sequence[Any] = ()  # what it tells of the tokens

    @property
    def is_text_alone(self) -> bool:
        """Whether it has only a text, besides its finish reason."""
        return bool(self.text) and not (self.calls or self.reasoning or self.refusal or self.logprobs)

    @property
    def is_empty(self) -> bool:
        """Whether it has no content besides its finish reason."""
        return not (self.text or self.calls or self.reasoning or self.refusal or self.logprobs)

    @property
    def said(self) -> str:
        """All of its text: answer, reasoning and refusal."""
        if not (self.calls or self.reasoning or self.refusal):
            return self.text
        calls = "".join(call["function"].get(name, "") for call in self.calls for name in ("name", "arguments"))
        return self.reasoning + self.text + self.refusal + calls


async def read_texts(
    groups: AsyncGenerator[list[bytes], None], stops: Sequence[str]
) -> AsyncGenerator[list[Part] | Texts, None]:
    """Yield the parts of a text about which a model tells nothing else, as `read_parts` does."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    filtered = Stops(stops)
    is_whole = True
    last: list[Part] = []
    rota = rota_of(asyncio.get_running_loop())
    async with aclosing(groups):
        async for texts in groups:
            found = Texts()
            for data in texts:
                if is_whole:
                    try:
                        # In most cases, no character is cut.
                        text = data.decode()
                    except UnicodeDecodeError:
                        is_whole = False
                if not is_whole:
                    text = decoder.decode(data)
                    is_whole = not decoder.getstate()[0]
                if stops:
                    text = filtered.feed(text)
                if text:
                    found.append(text)
                if filtered.is_over:
                    break
            if filtered.is_over:
                last = [*found.parts(), Part("", "stop")]
                break
            if found:
                yield found
            if len(texts) >= _MOST_TOGETHER:
                # More parts may be there already, so other tasks get a turn first.
                await rota.next_turn(_MOST_IN_A_TURN)
    # The last part comes after the model was told to stop, because the caller may be slow to take it.
    yield last or [Part(filtered.feed(decoder.decode(b"", True)) + filtered.end(), "stop")]


async def read_parts(
    answers: AsyncGenerator[Any, None],
    model: EndpointModel,
    stops: Sequence[str],
    *,
    tools: frozenset[str],
    tells_logprobs: bool,
) -> AsyncGenerator[list[Part], None]:
    """Yield the parts of one text, grouped if they come together; the last one has a reason.

    `answers` is closed when the text is over.
    """
    name = model.spec.model_name
    # A part may end within a character.
    decode, decode_reasoning, decode_refusal = (
        codecs.getincrementaldecoder("utf-8")("replace").decode for _ in range(3)
    )
    filtered = Stops(stops)
    output, counted = model.output.name, model.counts
    is_text_alone = not tools and tells_text_alone(model)
    calling = ToolText(model.tool_parser, tools) if tools and model.tool_parser is not None else None
    deltas = CallDeltas(name)
    reason = "stop"
    counts: dict[str, int] = {}
    rota = rota_of(asyncio.get_running_loop())

    def without_calls(text: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        if calling is None:
            return text, []
        text, calls = calling.feed(text)
        if is_last:
            more, others = calling.end()
            text, calls = text + more, [*calls, *others]
        return text, [deltas.make(call) for call in calls]

    def last(text: str) -> Part:
        text, calls = without_calls(text, is_last=True)
        ended = "tool_calls" if reason == "stop" and deltas.any else reason
        return Part(text, ended, counts, calls)

    parts: list[Part] = []
    async with aclosing(answers):
        try:
            async for answer in answers:
                text = filtered.feed(decode(_output(answer, output)))
                if is_text_alone:
                    part = Part(text)
                else:
                    if counted:
                        counts = {**counts, **{name: int(np.sum(answer[name])) for name in counted if name in answer}}
                    if FINISH_REASON in answer:
                        reason = _join(answer[FINISH_REASON]).decode("utf-8", "replace") or reason
                    text, calls = without_calls(text)
                    part = Part(
                        text,
                        counts=counts,
                        calls=[*deltas.read(_output(answer, TOOL_CALLS).decode("utf-8", "replace")), *calls],
                        reasoning=decode_reasoning(_output(answer, REASONING)),
                        refusal=decode_refusal(_output(answer, REFUSAL)),
                        logprobs=_logprobs(_output(answer, LOGPROBS), name) if tells_logprobs else (),
                    )
                if not part.is_empty:
                    parts.append(part)
                if filtered.is_over:
                    reason = "stop"
                    break
                if len(parts) >= _MOST_TOGETHER:
                    # Other tasks get a turn.
                    yield parts
                    parts = []
                    await rota.next_turn(_MOST_IN_A_TURN)
                elif parts and not answer.is_followed:
                    yield parts
                    parts = []
            end = last("" if filtered.is_over else filtered.feed(decode(b"", True)) + filtered.end())
        except Exception:
            if parts:
                yield parts
            raise
        yield [*parts, end]


def tells_text_alone(model: EndpointModel) -> bool:
    """Return whether a model has no output that says something about its text."""
    return not (model.counts or model.output_names & _SAID_BESIDE)


def _output(answer: Any, name: str) -> bytes:
    return _join(answer[name]) if name in answer else b""


def _logprobs(text: bytes, model: str) -> list[Any]:
    """Return a model's log probabilities: JSON of a list, or of an object with the list as its `content`."""
    if not text:
        return []
    try:
        value = _LOGPROBS_DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        value = None
    told = value.get("content") if isinstance(value, dict) else value
    if not isinstance(told, list):
        raise model_failed(model, f"expected logprobs as JSON of a list of tokens; got {text!r:.100}.")
    return told


def _join(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"".join(value.ravel().tolist())


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several generators as they come, each with the number of its generator; then close them."""
    if len(sources) == 1:
        # The most frequent case needs no task for each item.
        async with aclosing(sources[0]):
            async for item in sources[0]:
                yield 0, item
        return
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
