"""Chats and completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import Response

from pytriton.openai._chats import read_chat, read_check
from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._formats.strict_json import JsonAnswer
from pytriton.openai._gate import EventStream
from pytriton.openai._generation import CHAT, COMPLETION, Generation
from pytriton.openai._requests import MOST_CHOICES, ChatRequest, CompletionRequest, Generating

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def add_texts(app: FastAPI, desk: Desk) -> None:
    """Add the endpoints to an application."""

    @app.post(CHATS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _generate(lambda: prepare_chat(desk, body, request, CHATS), body, request)

    @app.post(COMPLETIONS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        async def prepare() -> Generation:
            link = await desk.find(body.model, COMPLETIONS)
            prompts = await desk.texts(body.prompt, "prompt", MOST_CHOICES, link)
            return Generation(COMPLETION, desk.backend, link, body, prompts, desk.asked(body, link, request))

        return await _generate(prepare, body, request)


async def prepare_chat(desk: Desk, body: ChatRequest, request: Request, endpoint: str) -> Generation:
    """Return the choices of a chat; the model is not asked yet."""
    link = await desk.find(body.model, endpoint)
    told = read_chat(body, link.model, await read_check(body, link.model))
    asked = desk.asked(body, link, request)
    asked = replace(asked, inputs={**asked.inputs, **told.inputs})
    return Generation(CHAT, desk.backend, link, body, [told.prompt], asked, told.wishes)


async def _generate(prepare: Callable[[], Awaitable[Generation]], body: Generating, request: Request) -> Response:
    """Answer a request for texts, at once or as a stream."""

    async def begin() -> Response:
        generation = await prepare()
        if not body.stream:
            return JsonAnswer(await generation.whole())
        events = generation.events()
        # An error before the first part has an HTTP status of its own.
        return EventStream(await anext(events), events)

    return await answered(request, begin())
