"""Triton's gRPC service in Ray's proxies, which hand the messages to replicas in other processes."""

from __future__ import annotations

import copyreg
from typing import Any

from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)

__all__ = ["METHODS", "GRPCInferenceServiceStub", "add_GRPCInferenceServiceServicer_to_server"]

METHODS = (
    *("ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
    *("ServerLive", "ServerReady", "ServerMetadata"),
)
"""Those that are handed on; ModelStreamInfer has streams both ways, which Ray's proxies do not carry."""


def _parse(name: str, data: bytes) -> Any:
    return getattr(service_pb2, name).FromString(data)


def _reduce(message: Any) -> tuple[Any, tuple[str, bytes]]:
    return _parse, (type(message).__name__, message.SerializeToString())


# The classes say that they are of a module `grpc_service_pb2`, which there is not, so that pickle does not find them.
for _method in METHODS:
    for _kind in ("Request", "Response"):
        copyreg.pickle(getattr(service_pb2, f"{_method}{_kind}"), _reduce)
