"""The texts that answer one request, as chats and as completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from pytriton.openai._backend import Asked, Backend, Link
from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.schemas import AnswerCheck
from pytriton.openai._formats.tool_calls import joined_calls
from pytriton.openai._gate import encoded_events
from pytriton.openai._requests import MOST_CHOICES, Generating, encode_text
from pytriton.openai._texts import Part, Texts, merged, read_parts, read_texts, tells_text_alone
from pytriton.openai._tokens.tokenizer import Tokenizer
from pytriton.openai._tokens.usage import Usage

_DONE = "[DONE]"
_BEGIN = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
# Stands for a text; no model name contains it.
_MARK = "\0"


@dataclass(frozen=True)
class Form:
    """How an endpoint writes texts."""

    prefix: str  # what ids begin with
    whole: str  # the kind of an answer at once
    chunk: str  # the kind of an event
    param: str  # the field with the prompt
    begins: bool  # whether a choice of a stream begins with an event of its own, which names the role
    choice: Callable[[Part], dict[str, Any]]  # makes a choice of all that was said, as one part
    delta: Callable[[Part], dict[str, Any]]  # makes that of an event of a part


def _text(part: Part) -> dict[str, Any]:
    return {"text": part.text, "logprobs": None, "finish_reason": part.finish_reason}


def _message(part: Part) -> dict[str, Any]:
    is_silent = not part.text and (part.calls or part.refusal)
    message: dict[str, Any] = {"role": "assistant", "content": None if is_silent else part.text}
    message["refusal"] = part.refusal or None
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["tool_calls"] = joined_calls(part.calls)
    return {"message": message, "logprobs": _logprobs(part), "finish_reason": part.finish_reason}


def _delta(part: Part) -> dict[str, Any]:
    said = {
        "content": part.text,
        "reasoning_content": part.reasoning,
        "refusal": part.refusal,
        "tool_calls": list(part.calls),
    }
    delta = {name: value for name, value in said.items() if value}
    return {"delta": delta, "logprobs": _logprobs(part), "finish_reason": part.finish_reason}


def _logprobs(part: Part) -> dict[str, Any] | None:
    return {"content": list(part.logprobs), "refusal": None} if part.logprobs else None


def _parts_of(group: list[Part] | Texts) -> list[Part]:
    return group.parts() if isinstance(group, Texts) else group


def joined(parts: Sequence[Part]) -> Part:
    """Return all that parts say, as one."""
    return Part(
        "".join(part.text for part in parts),
        parts[-1].finish_reason if parts else None,
        calls=[call for part in parts for call in part.calls],
        reasoning="".join(part.reasoning for part in parts),
        refusal="".join(part.refusal for part in parts),
        logprobs=[token for part in parts for token in part.logprobs],
    )


CHAT = Form("chatcmpl-", "chat.completion", "chat.completion.chunk", "messages", True, _message, _delta)
COMPLETION = Form("cmpl-", "text_completion", "text_completion", "prompt", False, _text, _text)


@dataclass(frozen=True)
class Wishes:
    """What a request wants of the answer beside the text."""

    tools: frozenset[str] = frozenset()  # the names of those that the model may call
    logprobs: bool = False  # whether the caller wants to know of the tokens
    check: AnswerCheck | None = None  # what the text is to be; None where any text will do


class Generation:
    """The choices of one request: `n` for each prompt."""

    def __init__(
        self,
        form: Form,
        backend: Backend,
        link: Link,
        body: Generating,
        prompts: Sequence[str],
        asked: Asked,
        wishes: Wishes | None = None,
    ) -> None:
        self._form = form
        self._wishes = wishes or Wishes()
        self._backend = backend
        self._link = link
        self._each = body.n or 1
        self._prompts = [encode_text(prompt, form.param) for prompt in prompts for _ in range(self._each)]
        if len(self._prompts) > MOST_CHOICES:
            raise OpenAIError(
                400,
                f"n: expected at most {MOST_CHOICES} choices for all prompts; got {len(self._prompts)}.",
                param="n",
                code="invalid_value",
            )
        self._stops = body.stops
        self._tells_usage = body.tells_usage
        self._tells_usage_always = body.tells_usage_always
        self._asked = asked
        self._head = {
            "id": f"{form.prefix}{asked.request_id}",
            "created": int(time.time()),
            "model": body.model,
        }
        # A template adds special tokens itself.
        self.usage = Usage(self._prompts, self._each, link.model.tokenizer, special=form is COMPLETION)
        self._around: dict[int, tuple[str, str]] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        told: list[list[Part]] = [[] for _ in self._prompts]
        async with aclosing(self.parts()) as parts:
            async for number, part in parts:
                told[number].append(part)
        wholes = [joined(each) for each in told]
        for whole in wholes:
            await self.check(whole)
        choices = [{"index": number, **self._form.choice(whole)} for number, whole in enumerate(wholes)]
        return {**self._head, "object": self._form.whole, "choices": choices, "usage": await self.usage.total()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events as they are sent; parts that come together are joined."""
        begun: set[int] = set()
        ended = 0
        last: list[str] = []  # the events that end the last choice go together with the end of the stream
        said = [Part()] * len(self._prompts)
        # Whether a part that only continues a text needs nothing else done.
        wants_text_alone = not self._tells_usage_always and self._wishes.check is None
        if self._tells_usage_always:
            await self.usage.begin()
        try:
            async with aclosing(self._groups()) as groups:
                async for number, group in groups:
                    if wants_text_alone and isinstance(group, Texts) and number in begun:
                        yield self._text_events(number, group)
                        continue
                    parts = _parts_of(group)
                    if self._wishes.check is not None:
                        # The text is kept only if it has to be checked at the end.
                        said[number] = joined([said[number], *parts])
                    events = list(self._part_events(number, parts, begins=self._form.begins and number not in begun))
                    begun.add(number)
                    if parts[-1].finish_reason is not None:
                        try:
                            await self.check(said[number])
                        except OpenAIError:
                            if events:
                                yield encoded_events(events)
                            raise
                        choice = self._form.delta(Part("", parts[-1].finish_reason))
                        events.append(self._event([{"index": number, **choice}]))
                        ended += 1
                    if ended == len(self._prompts):
                        last = events
                    elif events:
                        yield encoded_events(events)
        except OpenAIError as error:
            if not begun:
                raise
            # An error ends the stream, without the event that ends a whole answer.
            yield encoded_events([*last, json.dumps(error.body)])
            return
        ends = [self._event([], usage=await self.usage.total())] if self._tells_usage else []
        yield encoded_events([*last, *ends, _DONE])

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the model."""
        return self._link.model.tokenizer

    async def parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        """Ask the model, and yield each part as it comes, with the number of its choice."""
        async with aclosing(self._groups()) as groups:
            async for number, group in groups:
                for part in _parts_of(group):
                    self.usage.add(number, part.counts, part.said)
                    yield number, part

    def _groups(self) -> AsyncGenerator[tuple[int, list[Part] | Texts], None]:
        """Yield groups of parts that have come together."""
        return merged([self._source(number, prompt) for number, prompt in enumerate(self._prompts)])

    async def check(self, whole: Part) -> None:
        """Check a whole text if a format was asked for."""
        # A text that was cut is not checked, nor is one with a call or a refusal in place of an answer.
        if self._wishes.check is not None and whole.finish_reason == "stop" and not (whole.calls or whole.refusal):
            # The check runs in a thread, because some schemas make it slow.
            await asyncio.to_thread(self._wishes.check.check, whole.text, self._link.model.spec.model_name)

    def _source(self, number: int, prompt: bytes) -> AsyncGenerator[list[Part] | Texts, None]:
        model = self._link.model
        # `np.full` would drop zeros at the end of bytes.
        text = np.array([prompt], object).reshape((1,) * len(model.prompt.shape))
        asked = self._asked if len(self._prompts) == 1 else self._variant(number % self._each)
        if model.spec.decoupled and not self._wishes.tools and tells_text_alone(model):
            return read_texts(self._backend.ask_texts(self._link, {model.prompt.name: text}, asked), self._stops)
        answers = self._backend.ask(self._link, {model.prompt.name: text}, asked)
        return read_parts(
            answers,
            model,
            self._stops,
            tools=self._wishes.tools,
            tells_logprobs=self._wishes.logprobs,
        )

    def _variant(self, number: int) -> Asked:
        """Return the inputs for one of several choices; a seed differs for each."""
        inputs, parameters = dict(self._asked.inputs), dict(self._asked.parameters)
        for values in (inputs, parameters):
            if number and "seed" in values:
                values["seed"] = values["seed"] + number
        return replace(self._asked, inputs=inputs, parameters=parameters)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        usage: dict[str, Any] = {}
        if self._tells_usage:
            # If a caller asked for counts, every event has the field, even if the counts are not known yet.
            usage = {"usage": self.usage.of(choices[0]["index"]) if choices and self._tells_usage_always else None}
        return json.dumps({**self._head, "object": self._form.chunk, "choices": choices, **usage, **more})

    def _part_events(self, number: int, parts: Sequence[Part], *, begins: bool) -> Iterator[str]:
        """Yield the events of what parts say; before them the one that `begins` a choice."""
        for part in parts:
            self.usage.add(number, part.counts, part.said)
            if begins:
                yield self._event([{"index": number, **_BEGIN}])
                begins = False
            if part.is_text_alone and not self._tells_usage_always:
                yield self._text_event(number, part.text)
            elif not part.is_empty:
                choice = self._form.delta(replace(part, finish_reason=None))
                yield self._event([{"index": number, **choice}])

    def _text_event(self, number: int, text: str) -> str:
        """Return the event of a part that is only text, as most are."""
        before, after = self._around_text(number)
        return f"{before}{encode_basestring_ascii(text)}{after}"

    def _text_events(self, number: int, texts: Sequence[str]) -> bytes:
        """Return the events of parts that are only text, as they are sent."""
        self.usage.add_texts(number, texts)
        before, after = self._around_text(number)
        return "".join([f"data: {before}{encode_basestring_ascii(text)}{after}\n\n" for text in texts]).encode()

    def _around_text(self, number: int) -> tuple[str, str]:
        """Return what is around the text in such an event, which is made once."""
        around = self._around.get(number)
        if around is None:
            event = self._event([{"index": number, **self._form.delta(Part(_MARK))}])
            before, _, after = event.rpartition(json.dumps(_MARK))
            around = self._around[number] = (before, after)
        return around
