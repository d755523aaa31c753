"""What worker and proxy backend must know of a model."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import EndpointError
from .wire.dtypes import code_of

SIDE_FILE_NAME = "pytriton.conf"
"""Name of the file in the folder of a model version that holds its `ProxySettings`."""
SOCKET_SUFFIX = ".sock"
"""What the names of the sockets of native proxies end with."""
ZMQ_SUFFIX = ".zmq"
"""What the names of the sockets of Python proxies end with, where `add` chose them."""
# sockaddr_un.sun_path less its closing zero byte, see unix(7).
MAX_ENDPOINT_BYTES = 107
# In nanoseconds it fits into 64 bits.
_LONGEST_S = 9e9


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

    @property
    def tensors_digest(self) -> str:
        """Digest of all names, dtypes and shapes, in hexadecimal digits: the same for models with the same tensors."""
        tensors = [
            [[tensor.name, code_of(tensor.dtype), list(tensor.shape), tensor.optional] for tensor in side]
            for side in (self.inputs, self.outputs)
        ]
        return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """What the native proxy must know and Triton's API does not tell it: the side file in the model's version folder.

    Attributes:
        endpoint: Path of the unix socket that the proxy will listen on, at most 107 bytes.
        batching: Whether tensors have a batch axis in front (Triton's `max_batch_size` is above 0).
        decoupled: Whether a request may get any number of responses.
        attach_timeout_s: How long a request waits for a worker where none is attached, in seconds.
        max_waiting: How many requests wait so outside of Triton's queue, which fills when there are more; 0 is any
            number. It is for a queue that has a limit itself.
        arena_budget_bytes: Shared memory per direction and worker, in bytes.
        arena_idle_s: Memory beyond the first MiB that nobody used for so long goes back, in seconds.
        execution_timeout_s: How long a worker may take for a batch, or for the next response of a stream, in seconds;
            None is as long as it likes.
        repeatable: Whether the requests of a worker that was lost before it answered may go to another one, once.
        tensors_digest: `ModelSpec.tensors_digest`: workers that were made for other tensors are refused. Empty
            compares nothing.
    """

    endpoint: Path
    batching: bool
    decoupled: bool = False
    attach_timeout_s: float = 10.0
    max_waiting: int = 0
    arena_budget_bytes: int = 4 << 30
    arena_idle_s: float = 10.0
    execution_timeout_s: float | None = None
    repeatable: bool = False
    tensors_digest: str = ""

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint)
        for name in ("attach_timeout_s", "max_waiting", "arena_budget_bytes", "arena_idle_s"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
            if value < 0 or (value == 0 and name == "arena_budget_bytes"):
                bound = "above" if name == "arena_budget_bytes" else "at least"
                raise ValueError(f"{name} must be {bound} 0, got {value}")
        limit_s = self.execution_timeout_s
        if limit_s is not None and not 0.001 <= limit_s <= _LONGEST_S:
            raise ValueError(f"execution_timeout_s must be from 0.001 to {_LONGEST_S:g}, or None, got {limit_s}")

    def to_text(self) -> str:
        """Return the content of the side file, `pytriton.conf`."""
        values: dict[str, object] = {
            "format": 1,
            "endpoint": self.endpoint,
            "batching": str(self.batching).lower(),
            "decoupled": str(self.decoupled).lower(),
            "attach_timeout_ms": round(self.attach_timeout_s * 1000),
            "arena_budget_bytes": int(self.arena_budget_bytes),
            "arena_idle_ms": round(self.arena_idle_s * 1000),
            "execution_timeout_ms": round((self.execution_timeout_s or 0) * 1000),
            "repeatable": str(self.repeatable).lower(),
        }
        if self.max_waiting:
            values["max_waiting"] = int(self.max_waiting)
        if self.tensors_digest:
            values["tensors_digest"] = self.tensors_digest
        lines = [f"{key} = {value}" for key, value in values.items()]
        return "\n".join(["# Written by pytriton-proxy-backend, read by libtriton_pytriton.so.", *lines, ""])


def check_endpoint(path: Path) -> None:
    """Check that a unix socket can have this path.

    Raises:
        EndpointError: If it is relative, too long, or has a line break or blanks at its end.
    """
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
