"""Triton's gRPC service in Ray's proxies, which hand the messages to replicas in other processes.

Neither takes a message apart: what came from the caller goes to Triton, and what came from there to the caller.
"""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["METHODS", "SERVICE", "Message", "add_GRPCInferenceServiceServicer_to_server"]

SERVICE = "inference.GRPCInferenceService"
METHODS = (
    *("ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
    *("ServerLive", "ServerReady", "ServerMetadata"),
)
"""Those that are handed on; ModelStreamInfer has streams both ways, which Ray's proxies do not carry."""


class Message:
    """A message as it came, in the form of gRPC; to Ray it looks like any message.

    Args:
        data: The bytes.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes."""
        return self.data


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802
    """Announce the service to a server of Ray's, as the function of this name of generated code does.

    Args:
        servicer: Something in the place of a servicer: Ray calls the methods of replicas instead.
        server: The server.
    """
    handlers = {
        method: grpc.unary_unary_rpc_method_handler(getattr(servicer, method), request_deserializer=Message)
        for method in METHODS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
