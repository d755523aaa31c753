"""The tokens of texts, and the texts of tokens, as vLLM tells them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from pytriton.openai._backend import Link
from pytriton.openai._chats import render_prompt
from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.strict_json import JsonAnswer
from pytriton.openai._models import TOKENIZER
from pytriton.openai._requests import DetokenizeRequest, TokenizeRequest, encode_text, read_texts
from pytriton.openai._tokens.tokenizer import Tokenizer

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def add_tokens(app: FastAPI, desk: Desk) -> None:
    """Add the endpoints to an application."""

    @app.post(TOKENIZE)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await answered(request, _tokenize(desk, body))

    @app.post(DETOKENIZE)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await answered(request, _detokenize(desk, body))


async def _tokenize(desk: Desk, body: TokenizeRequest) -> Response:
    link, tokenizer = await _find(desk, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise OpenAIError(400, "Expected a prompt or messages, one of the two.", param="prompt", code="invalid_value")
    if body.messages is not None:
        text = render_prompt(body, link.model)
        # A template adds special tokens itself.
        special = body.add_special_tokens or False
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    encode_text(text, "prompt" if body.messages is None else "messages")
    tokens = await asyncio.to_thread(tokenizer.encode, text, special=special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": link.model.most_tokens, "tokens": tokens}
    answer["token_strs"] = tokenizer.pieces(tokens) if body.return_token_strs else None
    return JsonAnswer(answer)


async def _detokenize(desk: Desk, body: DetokenizeRequest) -> Response:
    link, _ = await _find(desk, body.model)
    if not body.tokens:
        return JsonAnswer({"prompt": ""})
    [text] = await asyncio.to_thread(read_texts, body.tokens, "tokens", 1, link.model)
    return JsonAnswer({"prompt": text})


async def _find(desk: Desk, name: str | None) -> tuple[Link, Tokenizer]:
    """Return a model and its tokenizer; without a name the only one that there is."""
    if name is None:
        links = {id(link): link for link in (await desk.backend.find_all()).values() if link.model.tokenizer}
        if len(links) != 1:
            raise OpenAIError(
                400, f"model: expected a name; there are {len(links)} models that declare a tokenizer.",
                param="model", code="invalid_value",
            )  # fmt: skip
        link = next(iter(links.values()))
    else:
        link = await desk.backend.find(name)
    tokenizer = link.model.tokenizer
    if tokenizer is None:
        raise OpenAIError(
            400,
            f"model: expected one that declares a tokenizer, as its parameter {TOKENIZER!r}: the path of a "
            f"tokenizer.json; {link.model.spec.model_name!r} declares none.",
            param="model",
            code="unsupported_parameter",
        )
    return link, tokenizer
