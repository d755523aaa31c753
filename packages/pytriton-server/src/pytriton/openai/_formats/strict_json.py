"""JSON as its standard has it: Python's reader takes more, and its writer fails on what that has read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute


def make_decoder(constants: Mapping[str, float] | None = None) -> json.JSONDecoder:
    """Return a reader that raises ValueError at numbers that JSON lacks.

    Args:
        constants: What stands for some of the names `NaN`, `Infinity` and `-Infinity`, instead.
    """

    def read_constant(name: str) -> float:
        return (constants or {}).get(name) or _refuse(name)

    def read_float(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else _refuse(text)

    return json.JSONDecoder(parse_constant=read_constant, parse_float=read_float)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no number that JSON and a 64-bit float have")


STRICT = make_decoder()
"""Reads what callers and models say."""


def depth_of(value: Any) -> int:
    """Return how many levels of objects and lists a value of JSON has."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level:
        depth += 1
        level = [
            it
            for each in level
            for it in (each.values() if isinstance(each, dict) else each)
            if isinstance(it, (dict, list))
        ]
    return depth


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the body as JSON, which is read once."""
        if not hasattr(self, "_json"):
            self._json = STRICT.decode((await self.body()).decode("utf-8-sig"))
        return self._json


class JsonRoute(APIRoute):
    """Refuses bodies that are no JSON, or no UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class JsonAnswer(JSONResponse):
    """An answer of JSON, also where a text of it has half of a character, as a model's escapes can have."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        try:
            return super().render(content)
        except UnicodeEncodeError:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
