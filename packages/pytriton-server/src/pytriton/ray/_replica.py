"""One replica: a Triton with the models, and what hands Ray's requests on to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import grpc
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from pytriton.ray._grpc import METHODS, GRPCInferenceServiceStub
from pytriton.triton import Triton, TritonConfig

__all__ = ["Replica"]

_LOOPBACK = "127.0.0.1"
# They are about one connection and not the request (RFC 9110, 7.6.1), or follow from what is sent.
_OF_CONNECTION = frozenset(
    (
        *("connection", "content-length", "host", "keep-alive", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    )
)
_CONNECT_S = 10


class Replica:
    """Serve models on a Triton of this replica; Ray makes it, in a process of its own.

    Args:
        models: Functions and classes under `@model`.
        config: Settings of each replica's Triton. Where it listens is not among them: on loopback, at free ports.

    Raises:
        PyTritonError: A model cannot be bound, or Triton does not start.
    """

    def __init__(self, models: Sequence[Any], config: TritonConfig | None = None) -> None:
        own = dataclasses.replace(config or TritonConfig(), http_port=0, grpc_port=0, metrics_port=0)
        own.http_address = own.grpc_address = own.metrics_address = _LOOPBACK
        self._triton = Triton(config=own)
        self._session: aiohttp.ClientSession | None = None
        self._channel: grpc.aio.Channel | None = None
        for model in models:
            self._triton.bind(model)
        self._triton.run()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    async def __call__(self, request: Request) -> Response:
        """Hand an HTTP request on, and the answer back as it comes."""
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        url = f"{self._triton.http_url}{path}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self._http().request(
                request.method, url, data=body or None, headers=_forwarded(request.headers)
            )
            if answer.content_length is not None:
                content = await answer.read()
                return Response(content, answer.status, _forwarded(answer.headers))
        except aiohttp.ClientError as error:
            text = json.dumps({"error": f"the Triton of this replica does not answer: {error}"})
            return Response(text, 503, media_type="application/json")
        return StreamingResponse(
            _parts(answer), answer.status, _forwarded(answer.headers), background=BackgroundTask(answer.release)
        )

    def _http(self) -> aiohttp.ClientSession:
        # Made where the loop of the replica runs.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Ray says how many requests a replica has at a time, and how long they may take.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        return self._session

    # -- gRPC --------------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, request: Any, context: Any) -> Any:
        if self._channel is None:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            self._channel = grpc.aio.insecure_channel(str(self._triton.grpc_url).removeprefix("grpc://"), options)
        stub = GRPCInferenceServiceStub(self._channel)
        metadata = [(name, value) for name, value in context.invocation_metadata() if not name.startswith(":")]
        try:
            return await getattr(stub, method)(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            context.set_code(error.code())
            context.set_details(error.details())
            raise

    # -- life --------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise where the Triton of this replica is gone for good; Ray asks now and then, and replaces the replica."""
        if not self._triton.is_connected():
            raise RuntimeError("the Triton of this replica has ended")

    async def close(self) -> None:
        """Let go of the connections, and stop Triton."""
        if self._session is not None:
            await self._session.close()
        if self._channel is not None:
            await self._channel.close()
        self._triton.stop()

    def __del__(self) -> None:
        """Stop Triton; Ray calls this when the replica ends, after its last request."""
        if hasattr(self, "_triton"):
            self._triton.stop()


def _hand_on(method: str) -> Any:
    async def ask(self: Replica, request: Any, grpc_context: Any) -> Any:
        return await self._ask(method, request, grpc_context)

    ask.__name__ = method
    return ask


# Ray calls the method of the replica that has the name of the service's method.
for _method in METHODS:
    setattr(Replica, _method, _hand_on(_method))


def _forwarded(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_CONNECTION}


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for part, _ in answer.content.iter_chunks():
        yield part
