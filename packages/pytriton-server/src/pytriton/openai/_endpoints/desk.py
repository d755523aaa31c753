"""What every endpoint does first: find the model, and say what goes to it beside the text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pytriton.openai._backend import Asked, Backend, Link
from pytriton.openai._errors import OpenAIError
from pytriton.openai._gate import CALLER_GONE, until_gone
from pytriton.openai._models import NOUNS
from pytriton.openai._requests import Body, inputs_and_parameters, read_texts

_HANDED_ON = ("traceparent", "tracestate")
_SAMPLED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf](-.*)?")


class Desk:
    """The common first part of all endpoints: it finds the model, and reads the inputs."""

    def __init__(self, backend: Backend, strict: bool) -> None:
        self.backend = backend
        self._strict = strict

    async def find(self, name: str, endpoint: str) -> Link:
        """Return a model that an endpoint asks."""
        link = await self.backend.find(name)
        if endpoint not in link.model.endpoints:
            raise OpenAIError(
                400,
                f"Model {name!r} gives {NOUNS[link.model.kind]}: ask it at "
                f"{' or '.join(link.model.endpoints)}, not at {endpoint}.",
                param="model",
                code="invalid_value",
            )
        return link

    def asked(self, body: Body, link: Link, request: Request) -> Asked:
        """Return the inputs and parameters of a model besides the text."""
        inputs, parameters = inputs_and_parameters(body, link.model, strict=self._strict)
        # Triton traces every request that has a context, even if its flag says that it is not sampled.
        is_sampled = _SAMPLED.fullmatch(request.headers.get(_HANDED_ON[0], "")) is not None
        headers = {name: request.headers[name] for name in _HANDED_ON if is_sampled and name in request.headers}
        return Asked(inputs, parameters, headers, request.state.request_id)

    async def texts(self, given: str | Sequence[Any], param: str, most: int, link: Link) -> list[str]:
        """Return the texts of a prompt or an input; see `read_texts`."""
        if isinstance(given, str) or link.model.tokenizer is None:
            return read_texts(given, param, most, link.model)
        # Decoding many tokens takes time, so a thread does it.
        return await asyncio.to_thread(read_texts, given, param, most, link.model)


async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of some work, which is cancelled if its caller leaves first."""
    return await until_gone(request.receive, work) or Response(status_code=CALLER_GONE)
