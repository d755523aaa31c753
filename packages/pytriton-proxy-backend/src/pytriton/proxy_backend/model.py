"""What worker and proxy backend must know of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import EndpointError
from .wire.dtypes import code_of

SOCKET_SUFFIX = ".sock"
"""The suffix of the sockets of native proxies."""
ZMQ_SUFFIX = ".zmq"
"""The suffix of the sockets of Python proxies whose names `add` chose."""
# The size of sockaddr_un.sun_path without the zero byte, see unix(7).
MAX_ENDPOINT_BYTES = 107


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: Its name.
        dtype: Its dtype; `object` for strings.
        shape: Its shape without the batch axis; -1 is a free dimension.
        optional: Whether a request may leave it out.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as its worker sees it.

    Attributes:
        name: The model's name.
        version: Its version.
        inputs: Its inputs.
        outputs: Its outputs, in the order in which a callable may return them as a list.
        batching: Whether tensors have a batch axis in front.
        max_batch_size: Rows of the largest batch; without meaning where the model does not batch.
        decoupled: Whether a request may get any number of responses.
        strict: Whether outputs must have the declared names, dtypes and shapes; else they are cast where possible.
        send_tracebacks: Whether callers get the traceback of what the callable raises; the log has it in any case.
        cost: What a batch may cost where requests of different shapes share one: the fields of
            `pytriton.model_config.Cost`, by which the decorators pad or pack; `None` where shapes are equal.
    """

    name: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: bool
    max_batch_size: int
    decoupled: bool = False
    strict: bool = False
    send_tracebacks: bool = False
    cost: Mapping[str, Any] | None = None

    @property
    def tensors_digest(self) -> str:
        """Digest of all names, dtypes and shapes, in hexadecimal digits: the same for models with the same tensors."""
        tensors = [
            [[tensor.name, code_of(tensor.dtype), list(tensor.shape), tensor.optional] for tensor in side]
            for side in (self.inputs, self.outputs)
        ]
        # Imported late, because it loads a library of cryptography.
        import hashlib

        return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:32]


def is_decoupled(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration of Triton lets a request have any number of responses."""
    return bool((config.get("model_transaction_policy") or {}).get("decoupled"))


def python_model_spec(name: str, version: int, config: Mapping[str, Any]) -> ModelSpec:
    """Return a `model.py` as its worker has to know it: its tensors are between `model.py` and its callers."""
    max_batch_size = int(config.get("max_batch_size") or 0)
    return ModelSpec(
        name=name,
        version=version,
        inputs=(),
        outputs=(),
        batching=max_batch_size > 0,
        max_batch_size=max_batch_size,
        decoupled=is_decoupled(config),
    )


def check_endpoint(path: Path) -> None:
    """Check that a unix socket can have this path."""
    text = os.fspath(path)
    length = len(os.fsencode(text))
    if length > MAX_ENDPOINT_BYTES:
        raise EndpointError(
            f"the socket '{text}' has a path of {length} bytes, Linux allows {MAX_ENDPOINT_BYTES}: choose a workspace "
            f"with a shorter path, or a shorter model name",
            path=text,
            length=length,
            limit=MAX_ENDPOINT_BYTES,
        )
    if not path.is_absolute() or text != text.strip() or "\n" in text or "\r" in text:
        raise EndpointError(
            f"the socket's path must be absolute and without line breaks, got {text!r}",
            path=text,
            length=length,
            limit=MAX_ENDPOINT_BYTES,
        )


def endpoint_path(directory: Path, model_name: str, model_version: int) -> Path:
    """Return the socket of a model version in a folder of endpoints.

    Raises:
        EndpointError: If the path is too long for a unix socket.
    """
    path = directory / f"{model_name}.{model_version}{SOCKET_SUFFIX}"
    check_endpoint(path)
    return path
