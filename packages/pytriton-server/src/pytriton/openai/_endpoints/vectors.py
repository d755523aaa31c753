"""Embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from fastapi.responses import Response

from pytriton.openai._backend import Link
from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._errors import OpenAIError, model_failed
from pytriton.openai._formats.strict_json import JsonAnswer
from pytriton.openai._requests import MOST_TEXTS, EmbeddingRequest, encode_text
from pytriton.openai._tokens.usage import count_tokens

EMBEDDINGS = "/v1/embeddings"


def add_vectors(app: FastAPI, desk: Desk) -> None:
    """Add the endpoint to an application."""

    @app.post(EMBEDDINGS)
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        return await answered(request, _embed(desk, body, request))


async def _embed(desk: Desk, body: EmbeddingRequest, request: Request) -> Response:
    link = await desk.find(body.model, EMBEDDINGS)
    texts = await desk.texts(body.input, "input", MOST_TEXTS, link)
    encoded = [(encode_text(text, "input"),) for text in texts]
    size = link.model.output.shape[0]
    # Few models allow a vector to be cut, and those take the size as an input.
    takes_size = "dimensions" in link.model.options
    if body.dimensions is not None and body.dimensions != size and not takes_size:
        raise OpenAIError(
            400,
            f"dimensions: model {body.model!r} gives vectors of {'one size' if size < 0 else size}, which are not cut: "
            f"leave it out; got {body.dimensions}.",
            param="dimensions",
            code="unsupported_parameter",
        )
    answers = await desk.backend.ask_batch(link, encoded, desk.asked(body, link, request))
    data = []
    for index, answer in enumerate(answers):
        vector = read_numbers(answer, link, f"input[{index}]")
        if takes_size and body.dimensions not in (None, vector.size):
            given = f"it gave a vector of {vector.size} for input[{index}]"
            raise model_failed(body.model, f"{given}, where {body.dimensions} are asked for.")
        shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = await usage_of(answers, texts, link)
    return JsonAnswer({"object": "list", "data": data, "model": body.model, "usage": usage})


def read_numbers(answer: Mapping[str, Any], link: Link, where: str) -> npt.NDArray[np.float32]:
    """Return the numbers that a model gave for a text."""
    numbers = np.asarray(answer[link.model.output.name], "<f4").ravel()
    if not np.isfinite(numbers).all():
        name = link.model.spec.model_name
        raise model_failed(name, f"it gave for {where} numbers that are not finite.")
    return numbers


async def usage_of(answers: Sequence[Mapping[str, Any]], texts: Sequence[str], link: Link) -> dict[str, int]:
    """Return the number of tokens of texts: as the model or its tokenizer counts them, otherwise an estimate."""
    model = link.model
    if "prompt_tokens" in model.counts:
        count = sum(int(np.sum(answer["prompt_tokens"])) for answer in answers)
    elif model.tokenizer is None:
        count = sum(count_tokens(text, None) for text in texts)
    else:
        tokenizer = model.tokenizer
        count = await asyncio.to_thread(lambda: sum(count_tokens(text, tokenizer, special=True) for text in texts))
    return {"prompt_tokens": count, "total_tokens": count}
