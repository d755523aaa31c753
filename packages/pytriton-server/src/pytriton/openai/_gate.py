"""What every request passes before an endpoint: the key, the limit of its body, its id."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pytriton.guests.endpoints import given_key, is_of_another_site, is_right_key
from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.strict_json import JsonAnswer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN = ("/health",)
CALLER_GONE = 499
"""The status in the log of a request whose caller has left; nobody reads it."""


class Gate:
    """An ASGI application that lets requests pass."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body_bytes: int, cors_origins: Collection[str] = ()
    ) -> None:
        self._app = app
        self._key = api_key
        self._max_body_bytes = max_body_bytes
        self._cors_origins = cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # Once a stream has begun, its parts are sent by this function directly, because no layer in between changes
        # them.
        state["send"] = send

        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        problem = self._problem(path, headers, is_post=scope["method"] == "POST")
        if problem is not None:
            answer = JsonAnswer(problem.body, problem.status, problem.headers)
            await answer(scope, receive, send_with_id)
            return
        taken = 0

        async def receive_limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise self._too_large
            return message

        try:
            await self._app(scope, receive_limited, send_with_id)
        except Exception as error:
            # The error is answered here and not in an error handler of the application, because such a handler runs
            # outside of the middleware that adds the headers for browsers.
            if has_begun:
                raise
            logger.exception("A request cannot be answered")
            problem = OpenAIError(500, f"{type(error).__name__}: {error}", code="internal_error")
            await JsonAnswer(problem.body, problem.status, problem.headers)(scope, receive, send_with_id)

    @property
    def _too_large(self) -> OpenAIError:
        text = f"Expected a body of at most {self._max_body_bytes} bytes; got more. Send fewer texts at once."
        return OpenAIError(413, text, code="body_too_large")

    def _problem(self, path: str, headers: dict[bytes, bytes], *, is_post: bool) -> OpenAIError | None:
        if self._key is None:
            # With a key this is no question: browsers send none of their own accord.
            if is_post and is_of_another_site(headers, self._cors_origins):
                text = (
                    "The page that sends this request is of another site, which is not among the cors_origins of this "
                    "server."
                )
                return OpenAIError(403, text, code="other_site")
        elif path not in _OPEN:
            key = given_key(headers)
            if not is_right_key(key, self._key):
                text = "Expected the header Authorization: Bearer KEY with the API key of this server; got "
                text += "another key." if key else "none."
                problem = OpenAIError(401, text, code="invalid_api_key")
                problem.headers["WWW-Authenticate"] = "Bearer"
                return problem
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large
        return None


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of some work, or None if the caller leaves first, which cancels the work."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer of server-sent events, which ends with its caller and closes its events."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        # Proxies must not buffer the events.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await until_gone(receive, self._send(send, scope["state"]["send"]))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send, send_part: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send_part({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events:
            await send_part({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encoded_events(data: Sequence[str]) -> bytes:
    """Return events as they are sent."""
    return "".join([f"data: {each}\n\n" for each in data]).encode()
