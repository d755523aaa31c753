"""The texts that answer one request, as chats and as completions."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytriton.openai._backend import Asked, Backend, Link
from pytriton.openai._errors import OpenAIError
from pytriton.openai._requests import MOST_CHOICES, Generating, encode_text
from pytriton.openai._texts import Part, merged, read_parts

__all__ = ["CHAT", "COMPLETION", "Generation"]

_DONE = "[DONE]"


@dataclass(frozen=True)
class Form:
    """How an endpoint writes texts.

    Attributes:
        prefix: What ids begin with.
        whole: The kind of an answer at once.
        chunk: The kind of an event.
        param: The field with the prompt.
        begins: Whether a choice of a stream begins with an event of its own, which names the role.
        choice: Makes a choice of its text and its reason.
        delta: Makes that of an event.
    """

    prefix: str
    whole: str
    chunk: str
    param: str
    begins: bool
    choice: Callable[[str, str | None], dict[str, Any]]
    delta: Callable[[str, str | None], dict[str, Any]]


def _text(text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "logprobs": None, "finish_reason": reason}


def _message(text: str, reason: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"message": message, "logprobs": None, "finish_reason": reason}


def _delta(text: str, reason: str | None) -> dict[str, Any]:
    return {"delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": reason}


CHAT = Form("chatcmpl-", "chat.completion", "chat.completion.chunk", "messages", True, _message, _delta)
COMPLETION = Form("cmpl-", "text_completion", "text_completion", "prompt", False, _text, _text)


class Generation:
    """The choices of one request: `n` for each prompt.

    Args:
        form: How they are written.
        backend: Who is asked.
        link: The model.
        body: The request.
        prompts: The prompts.
        asked: What goes to the model beside them.

    Raises:
        OpenAIError: The request cannot be answered.
    """

    def __init__(
        self, form: Form, backend: Backend, link: Link, body: Generating, prompts: Sequence[str], asked: Asked
    ) -> None:
        self._form = form
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
        self._asked = asked
        self._head = {
            "id": f"{form.prefix}{asked.request_id}",
            "created": int(time.time()),
            "model": body.model,
        }
        self._counts: dict[int, Mapping[str, int]] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the answer, when all of it is there.

        Raises:
            OpenAIError: The model fails.
        """
        texts = [""] * len(self._prompts)
        reasons: list[str | None] = [None] * len(self._prompts)
        async with aclosing(self._parts()) as parts:
            async for number, part in parts:
                texts[number] += part.text
                reasons[number] = part.finish_reason
        choices = [
            {"index": number, **self._form.choice(text, reason)}
            for number, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        usage = self._usage()
        return {**self._head, "object": self._form.whole, "choices": choices, **({"usage": usage} if usage else {})}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the data of the events.

        Raises:
            OpenAIError: The model fails before the first one; later it is an event.
        """
        begun: set[int] = set()
        try:
            async with aclosing(self._parts()) as parts:
                async for number, part in parts:
                    if self._form.begins and number not in begun:
                        begin = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                        yield self._event([{"index": number, **begin}])
                    begun.add(number)
                    if part.text:
                        yield self._event([{"index": number, **self._form.delta(part.text, None)}])
                    if part.finish_reason is not None:
                        yield self._event([{"index": number, **self._form.delta("", part.finish_reason)}])
        except OpenAIError as error:
            if not begun:
                raise
            # Without the end that a whole answer has.
            yield json.dumps(error.body)
            return
        if self._tells_usage and (usage := self._usage()):
            yield self._event([], usage=usage)
        yield _DONE

    async def _parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        sources = [self._source(number, prompt) for number, prompt in enumerate(self._prompts)]
        async with aclosing(merged(sources)) as parts:
            async for number, part in parts:
                if part.finish_reason is not None:
                    self._counts[number] = part.counts
                yield number, part

    def _source(self, number: int, prompt: bytes) -> AsyncGenerator[Part, None]:
        model = self._link.model
        text = np.full((1,) * len(model.prompt.shape), prompt, object)
        asked = self._asked if len(self._prompts) == 1 else self._variant(number % self._each)
        answers = self._backend.ask(self._link, {model.prompt.name: text}, asked)
        return read_parts(answers, model, self._stops)

    def _variant(self, number: int) -> Asked:
        """Return what goes to the model for one of several choices, which are to differ with a seed, too."""
        inputs, parameters = dict(self._asked.inputs), dict(self._asked.parameters)
        for values in (inputs, parameters):
            if number and "seed" in values:
                values["seed"] = values["seed"] + number
        return replace(self._asked, inputs=inputs, parameters=parameters)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        # Readers of a stream that asked for counts are told in every event that they are not there yet.
        usage = {"usage": None} if self._tells_usage and self._link.model.counts else {}
        return json.dumps({**self._head, "object": self._form.chunk, "choices": choices, **usage, **more})

    def _usage(self) -> dict[str, int] | None:
        """Return the counts of tokens; None where the model does not tell them all."""
        names = self._link.model.counts
        if not names or any(not counts.keys() >= set(names) for counts in self._counts.values()):
            return None
        # All choices of a prompt have that one prompt.
        prompts = sum(self._counts[at]["prompt_tokens"] for at in range(0, len(self._prompts), self._each))
        texts = sum(counts["completion_tokens"] for counts in self._counts.values())
        return {"prompt_tokens": prompts, "completion_tokens": texts, "total_tokens": prompts + texts}
