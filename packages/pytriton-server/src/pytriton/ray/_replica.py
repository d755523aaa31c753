"""One replica: a Triton with the models, and what hands Ray's requests on to it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import grpc
from starlette.requests import Request
from starlette.responses import Response

from pytriton.client.management import NO_GRPC_PROXY
from pytriton.ray._grpc import METHODS, SERVICE, STREAM_METHOD, Message
from pytriton.ray._upstream import Upstream
from pytriton.triton import Triton, TritonConfig

_LOOPBACK = "127.0.0.1"
# These headers belong to the connection (RFC 9110, 7.6.1), or follow from the message. The caller's server has already
# answered `expect`.
_OF_CONNECTION = frozenset(
    (
        *(b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_PATH_CHARACTERS = "/:@!$&'()*+,;=~"


class Replica:
    """Serve models on a Triton of this replica; Ray makes it, in a process of its own, and awaits `__init__`.

    Args:
        models: Functions and classes under `@model`.
        config: Settings of each replica's Triton. Where it listens is not among them: on loopback, at free ports.

    Raises:
        PyTritonError: A model cannot be bound, or Triton does not start.
    """

    # In a thread, because Ray asks the replica for its state on the event loop.
    async def __init__(self, models: Sequence[Any], config: TritonConfig | None = None) -> None:  # type: ignore[misc]
        own = dataclasses.replace(config or TritonConfig(), http_port=0, grpc_port=0, metrics_port=0)
        own.http_address = own.grpc_address = own.metrics_address = _LOOPBACK
        self._triton = Triton(config=own)
        await asyncio.to_thread(self._start, models)
        self._upstream = Upstream(lambda: str(self._triton.http_url))
        self._http = _Ingress(self._upstream)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        options += [NO_GRPC_PROXY]  # only this process reaches the server
        self._channel = grpc.aio.insecure_channel(str(self._triton.grpc_url).removeprefix("grpc://"), options)
        self._methods = {name: self._channel.unary_unary(f"/{SERVICE}/{name}") for name in METHODS}
        self._stream = self._channel.stream_stream(f"/{SERVICE}/{STREAM_METHOD}")

    def _start(self, models: Sequence[Any]) -> None:
        for model in models:
            self._triton.bind(model)
        self._triton.run()

    async def __call__(self, request: Request) -> Response:
        """Return the ASGI application that answers an HTTP request; Ray calls it."""
        return self._http

    async def _ask(self, method: str, request: Any, context: Any) -> Message:
        try:
            return Message(await self._methods[method](request.SerializeToString(), metadata=_metadata(context)))
        except grpc.aio.AioRpcError as error:
            _tell(error, context)
            raise

    async def ModelStreamInfer(self, requests: Any, grpc_context: Any) -> AsyncIterator[Message]:  # noqa: N802
        """Answer a stream of requests, which Ray calls for the method of this name."""
        call = self._stream(metadata=_metadata(grpc_context))
        sending = asyncio.create_task(_send(requests, call))
        try:
            async for answer in call:
                yield Message(answer)
        except grpc.aio.AioRpcError as error:
            _tell(error, grpc_context)
            raise
        finally:
            sending.cancel()
            call.cancel()  # does nothing if the call is over

    async def check_health(self) -> None:
        """Raise an error if this replica's Triton is gone for good; Ray asks regularly, and replaces the replica."""
        if not self._triton.is_connected():
            raise RuntimeError("the Triton of this replica has ended")

    async def close(self) -> None:
        """Close the connections, and stop Triton."""
        self._upstream.close()
        await self._channel.close()
        await asyncio.to_thread(self._triton.stop)

    def __del__(self) -> None:
        """Stop Triton; Ray calls this when the replica ends, after its last request."""
        if hasattr(self, "_triton"):
            self._triton.stop()


def _metadata(context: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in context.invocation_metadata() if not name.startswith(":")]


def _tell(error: grpc.aio.AioRpcError, context: Any) -> None:
    context.set_code(error.code())
    context.set_details(error.details())


async def _send(requests: Any, call: Any) -> None:
    """Pass on the caller's messages until it has no more, or has left."""
    try:
        async for request in requests:
            await call.write(request.SerializeToString())
        if requests.is_cancelled():
            call.cancel()
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the call is over, and its reader gets the error
    except Exception:
        call.cancel()  # Ray's proxy is gone, so nobody else could cancel the call
        raise


def _hand_on(method: str) -> Any:
    async def ask(self: Replica, request: Any, grpc_context: Any) -> Any:
        return await self._ask(method, request, grpc_context)

    ask.__name__ = method
    return ask


# Ray calls the method of the replica that has the name of the service's method.
for _method in METHODS:
    setattr(Replica, _method, _hand_on(_method))


class _Ingress(Response):
    """An ASGI application that passes HTTP requests on, and streams the answers back.

    Ray accepts it as an answer because it is a `Response`; Starlette's own would first take the answer apart.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        path = quote(scope["path"].removeprefix(scope.get("root_path", "")), safe=_PATH_CHARACTERS) or "/"
        if scope["query_string"]:
            path += f"?{scope['query_string'].decode('latin-1')}"
        try:
            answer = await self._upstream.ask(scope["method"], path, _forwarded(scope["headers"]), body)
        except (OSError, asyncio.TimeoutError) as error:
            text = json.dumps({"error": f"the Triton of this replica does not answer: {error}"})
            await Response(text, 503, media_type="application/json")(scope, receive, send)
            return
        try:
            # An answer of known length has two messages without a pause, which Ray sends as one.
            content = b"" if answer.is_stream else await answer.read()
            headers = _forwarded(answer.headers)
            if not answer.is_stream:
                headers.append((b"content-length", b"%d" % len(content)))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if answer.is_stream:
                while part := await answer.read():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": content})
        finally:
            self._upstream.release(answer)


def _forwarded(headers: Any) -> list[tuple[bytes, bytes]]:
    return [header for header in headers if header[0].lower() not in _OF_CONNECTION]
