"""The Responses API, without storage."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._endpoints.texts import prepare_chat
from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.strict_json import JsonAnswer
from pytriton.openai._gate import EventStream, encoded_events
from pytriton.openai._generation import Generation, joined
from pytriton.openai._responses.output import Output
from pytriton.openai._responses.request import ResponseRequest, named_as_asked, read_response_request
from pytriton.openai._texts import Part
from pytriton.openai._tokens.usage import count_tokens

RESPONSES = "/v1/responses"
# Why an answer is incomplete, by the reason that chats give.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def add_responses(app: FastAPI, desk: Desk) -> None:
    """Add the endpoint to an application."""

    @app.post(RESPONSES)
    async def respond(body: ResponseRequest, request: Request) -> Response:
        async def begin() -> Response:
            chat = read_response_request(body)
            try:
                generation = await prepare_chat(desk, chat, request, RESPONSES)
            except OpenAIError as error:
                raise named_as_asked(error) from error
            answer = _Answer(body, generation, request.state.request_id)
            if not body.stream:
                return JsonAnswer(await answer.whole())
            events = answer.events()
            # An error before the first part has an HTTP status of its own.
            return EventStream(await anext(events), events)

        return await answered(request, begin())

    @app.api_route(f"{RESPONSES}/{{name:path}}", methods=["GET", "POST", "DELETE"])
    async def kept(name: str) -> Response:
        text = f"There is no answer {name!r}: this server keeps none. What a program needs, it has got already."
        raise OpenAIError(404, text, code="not_found")


class _Answer:
    """The answer to one request."""

    def __init__(self, body: ResponseRequest, generation: Generation, request_id: str) -> None:
        self._body = body
        self._generation = generation
        self._id = f"resp_{request_id}"
        self._created = int(time.time())
        self._output = Output()
        self._parts: list[Part] = []
        self._number = -1

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        async with aclosing(self._generation.parts()) as parts:
            async for _, part in parts:
                self._parts.append(part)
                list(self._output.add(part))
        list(await self._end())
        return await self._final()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events."""
        has_begun = False
        try:
            async with aclosing(self._generation.parts()) as parts:
                async for _, part in parts:
                    if not has_begun:
                        has_begun = True
                        yield self._event({"type": "response.created", "response": self._response("in_progress")})
                        yield self._event({"type": "response.in_progress", "response": self._response("in_progress")})
                    self._parts.append(part)
                    for event in self._output.add(part):
                        yield self._event(event)
            for event in await self._end():
                yield self._event(event)
            final = await self._final()
        except OpenAIError as error:
            if not has_begun:
                raise
            final = self._response("failed", error={"code": "server_error", "message": error.message})
        yield self._event({"type": f"response.{final['status']}", "response": final})

    async def _end(self) -> Any:
        whole = joined(self._parts)
        await self._generation.check(whole)
        return self._output.end(is_whole=whole.finish_reason not in _INCOMPLETE)

    async def _final(self) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self._parts[-1].finish_reason or "")
        counts = await self._generation.usage.total()
        thoughts = count_tokens(self._output.thoughts, self._generation.tokenizer)
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(thoughts, counts["completion_tokens"])},
            "total_tokens": counts["total_tokens"],
        }
        more: dict[str, Any] = {"usage": usage, "completed_at": int(time.time())}
        if reason is None:
            return self._response("completed", **more)
        return self._response("incomplete", **more, incomplete_details={"reason": reason})

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._body
        tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [] if status == "in_progress" else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "service_tier": "default",
            # Always False, because nothing is stored.
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _event(self, event: dict[str, Any]) -> bytes:
        self._number += 1
        told = json.dumps({**event, "sequence_number": self._number})
        # The fields of an event may have any order.
        return encoded_events([f"{told}\nevent: {event['type']}"])
