"""Triton's gRPC service in Ray's proxies, which hand the messages to replicas in other processes.

Neither takes a message apart: what came from the caller goes to Triton, and what came from there to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

SERVICE = "inference.GRPCInferenceService"
METHODS = (
    *("ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
    *("ServerLive", "ServerReady", "ServerMetadata"),
)
"""The methods with one request and one response that are passed on."""
STREAM_METHOD = "ModelStreamInfer"


class Message:
    """A message as it came, in the form of gRPC; to Ray it looks like any message."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes."""
        return self.data


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802
    """Announce the service to a server of Ray's, as the function of this name of generated code does."""
    server.add_generic_rpc_handlers((_Handlers(servicer),))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]
    """The handlers of the methods; Ray replaces them by its own."""

    def __init__(self, servicer: Any) -> None:
        kinds = dict.fromkeys(METHODS, grpc.unary_unary_rpc_method_handler)
        kinds[STREAM_METHOD] = grpc.stream_stream_rpc_method_handler
        # Ray looks for the handlers here, as gRPC's generated code has them.
        self._method_handlers = {
            f"/{SERVICE}/{method}": make(getattr(servicer, method), request_deserializer=Message)
            for method, make in kinds.items()
        }

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; `None` if it belongs to another service."""
        found = self._method_handlers.get(handler_call_details.method)
        if found is None or not found.request_streaming:
            return found
        return grpc.stream_stream_rpc_method_handler(_always_waiting(found.stream_stream), Message)


def _always_waiting(stream: Callable[[Any, Any], AsyncIterator[bytes]]) -> Callable[[Any, Any], Awaitable[None]]:
    """Have Ray cancel a stream at its replica when its caller leaves.

    Ray does so while it waits for an answer, but not while it sends one, so such a stream would run to its end.
    """

    async def answer(requests: Any, context: Any) -> None:
        came: asyncio.Queue[bytes | None] = asyncio.Queue()  # without a limit, because Ray's own queue has none

        async def wait() -> None:
            try:
                async for message in stream(requests, context):
                    came.put_nowait(message)
            finally:
                came.put_nowait(None)

        waiting = asyncio.create_task(wait())
        try:
            while (message := await came.get()) is not None:
                await context.write(message)
            await waiting
        finally:
            waiting.cancel()
            # Ray asks for the peer's name at the end, which crashes the process if the call is gone.
            await asyncio.wait((waiting,))

    return answer
