"""How well texts fit each other: ranks in the forms of Jina and Cohere, and scores, both as vLLM tells them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from pytriton.openai._backend import Link
from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._endpoints.vectors import read_numbers, usage_of
from pytriton.openai._errors import OpenAIError, model_failed
from pytriton.openai._formats.strict_json import JsonAnswer
from pytriton.openai._requests import MOST_TEXTS, Body, RerankRequest, ScoreRequest, encode_text

RERANK, COHERE, SCORE = "/v1/rerank", "/v2/rerank", "/v1/score"


def add_ranks(app: FastAPI, desk: Desk) -> None:
    """Add the endpoints to an application."""

    # The short paths are those of vLLM.
    @app.post("/rerank")
    @app.post(RERANK)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return await answered(request, _rerank(desk, body, request, RERANK))

    @app.post(COHERE)
    async def cohere(body: RerankRequest, request: Request) -> Response:
        return await answered(request, _rerank(desk, body, request, COHERE))

    @app.post("/score")
    @app.post(SCORE)
    async def score(body: ScoreRequest, request: Request) -> Response:
        return await answered(request, _score(desk, body, request))


async def _rerank(desk: Desk, body: RerankRequest, request: Request, endpoint: str) -> Response:
    link = await desk.find(body.model, endpoint)
    documents = [_text_of(it, f"documents[{at}]") for at, it in enumerate(body.documents)]
    scores, usage = await _compare(desk, link, body, request, [body.query], documents, ("query", "documents"))
    results = []
    for index in sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        # Cohere's API does not return the documents; Jina's does, unless the caller declines.
        if body.return_documents or (body.return_documents is None and endpoint != COHERE):
            result["document"] = {"text": documents[index]}
        results.append(result)
    answer = {"id": f"rerank-{request.state.request_id}", "model": body.model, "usage": usage, "results": results}
    if endpoint == COHERE:
        answer["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return JsonAnswer(answer)


async def _score(desk: Desk, body: ScoreRequest, request: Request) -> Response:
    link = await desk.find(body.model, SCORE)
    names, (firsts, seconds) = body.sides
    if len(firsts) not in (1, len(seconds)):
        raise OpenAIError(
            400,
            f"{names[0]}: expected one text, or as many as {names[1]} has; got {len(firsts)} and {len(seconds)}.",
            param=names[0],
            code="invalid_value",
        )
    scores, usage = await _compare(desk, link, body, request, firsts, seconds, names)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{request.state.request_id}", "object": "list", "created": int(time.time())}
    return JsonAnswer({**head, "model": body.model, "data": data, "usage": {**usage, "completion_tokens": 0}})


async def _compare(
    desk: Desk, link: Link, body: Body, request: Request, firsts: Sequence[str], seconds: Sequence[str],
    names: Sequence[str],
) -> tuple[list[float], dict[str, int]]:  # fmt: skip
    """Return a score for each pair, and the counts of tokens; `firsts` is one text, or one for each of `seconds`."""
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not 0 < len(texts) <= MOST_TEXTS:
            raise OpenAIError(
                400, f"{name}: expected 1 to {MOST_TEXTS} texts; got {len(texts)}.", param=name, code="invalid_value"
            )
    encoded = [[encode_text(text, name) for text in side] for name, side in zip(names, (firsts, seconds), strict=True)]
    asked = desk.asked(body, link, request)
    if link.model.kind == "embedding":
        answers = await desk.backend.ask_batch(link, [(text,) for side in encoded for text in side], asked)
        vectors = [read_numbers(answer, link, f"text {at}") for at, answer in enumerate(answers)]
        if len({vector.size for vector in vectors}) != 1:
            raise model_failed(body.model, "it gave vectors of several sizes, which cannot be compared.")
        units = np.array([vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors], np.float64)
        scores = (units[: len(firsts)] * units[len(firsts) :]).sum(1).tolist()
        return scores, await usage_of(answers, [*firsts, *seconds], link)
    pairs = [(encoded[0][at if len(firsts) > 1 else 0], text) for at, text in enumerate(encoded[1])]
    answers = await desk.backend.ask_batch(link, pairs, asked)
    numbers = [read_numbers(answer, link, f"pair {at}") for at, answer in enumerate(answers)]
    if any(number.size != 1 for number in numbers):
        raise model_failed(body.model, "it gave more than one number for a pair of texts.")
    said = [first.decode() + second.decode() for first, second in pairs]
    return [float(number[0]) for number in numbers], await usage_of(answers, said, link)


def _text_of(document: Any, where: str) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise OpenAIError(
            400, f'{where}: expected a text, or {{"text": ...}}; got {document!r:.100}.',
            param="documents", code="invalid_value",
        )  # fmt: skip
    return text
