"""The specification of a model, read from the server's model configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..exceptions import PyTritonClientError, PyTritonClientValueError
from .dtypes import datatype_of, dtype_of
from .untrusted import UNREADABLE, describe

# Servers of ours write into the parameters of a model what its author calls the types of its tensors.
_HINTS_PARAMETER = "pytriton_hints"
_MOST_OF_HINT = 400


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: The name in requests.
        shape: Without the batch axis where the model has one; -1 is any length.
        dtype: The numpy scalar type of an element; ``np.bytes_`` for strings.
        optional: Whether a request may leave it out.
        hint: What the author of the model calls its type, such as ``"list[str]"``; empty if nobody tells.
    """

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    optional: bool = False
    hint: str = ""

    @functools.cached_property
    def datatype(self) -> str:
        """The name of ``dtype`` in the protocol, such as ``"FP32"``."""
        name = datatype_of(self.dtype)
        if name is None:
            raise PyTritonClientValueError(
                f"Expected the tensor {self.name!r} to be of a type that the protocol knows; received {self.dtype!r}.",
                input_name=self.name,
                received=repr(self.dtype),
            )
        return name


@dataclass(frozen=True)
class ModelSpec:
    """What a client knows about its model.

    Attributes:
        model_name: The name on the server.
        model_version: The version that the client asked for; ``None`` is the latest.
        max_batch_size: The most samples in one request; 0 if the model takes one sample at a time.
        batching: Whether requests carry a batch axis.
        decoupled: Whether one request may get any number of responses.
        inputs: In the order of positional arguments.
        outputs: In the order of the configuration.
    """

    model_name: str
    model_version: int | None = None
    max_batch_size: int = 0
    batching: bool = False
    decoupled: bool = False
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


def parse_model_config(config: Mapping[str, Any], version: str | None) -> ModelSpec:
    """Read a model configuration as the server returns it."""
    try:
        max_batch_size = int(config.get("max_batch_size", 0))
        hints = _read_hints(config)
        return ModelSpec(
            model_name=str(config["name"]),
            model_version=None if version is None else int(version),
            max_batch_size=max_batch_size,
            batching=max_batch_size > 0,
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            inputs=tuple(_parse_tensor(tensor, hints, "inputs") for tensor in config.get("input", ())),
            outputs=tuple(_parse_tensor(tensor, hints, "outputs") for tensor in config.get("output", ())),
        )
    except UNREADABLE as error:
        raise PyTritonClientError(
            f"Expected a model configuration of Triton's model configuration extension; could not read "
            f"{describe(config)} ({type(error).__name__}: {error}). Is the server a Triton?"
        ) from error


def _read_hints(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hints of a model's author, by kind of tensor and name; what is not readable is no reason to fail."""
    try:
        hints = json.loads(config["parameters"][_HINTS_PARAMETER]["string_value"])
    except UNREADABLE:
        return {}
    return hints if isinstance(hints, Mapping) else {}


def _find_hint(hints: Mapping[str, Any], kind: str, name: str) -> str:
    named = hints.get(kind)
    hint = named.get(name) if isinstance(named, Mapping) else None
    return hint[:_MOST_OF_HINT] if isinstance(hint, str) else ""


def _parse_tensor(tensor: Mapping[str, Any], hints: Mapping[str, Any], kind: str) -> TensorSpec:
    return TensorSpec(
        name=str(tensor["name"]),
        shape=tuple(_parse_length(length) for length in tensor["dims"]),
        dtype=dtype_of(tensor["data_type"]),
        optional=bool(tensor.get("optional", False)),
        hint=_find_hint(hints, kind, str(tensor["name"])),
    )


def _parse_length(length: Any) -> int:
    number = int(length)
    if not -1 <= number < 2**63:
        raise ValueError(f"expected a length of at least 0, or -1 for any, received {describe(length)}")
    return number


def to_model_spec(model_config: object) -> ModelSpec:
    """Take a model configuration that the user brought: a ``ModelSpec``, or an object with attributes of those names.

    The server's own ``TritonModelConfig`` is such an object; this module needs no import of it.
    """
    if isinstance(model_config, ModelSpec):
        return model_config
    source: Any = model_config
    try:
        batching = bool(source.batching)
        return ModelSpec(
            model_name=str(source.model_name),
            model_version=None if source.model_version is None else int(source.model_version),
            max_batch_size=int(source.max_batch_size) if batching else 0,
            batching=batching,
            decoupled=bool(source.decoupled),
            inputs=_to_tensor_specs(source.inputs),
            outputs=_to_tensor_specs(source.outputs),
        )
    except (AttributeError, TypeError, ValueError) as error:
        expected = "an object with model_name, model_version, max_batch_size, batching, decoupled, inputs and outputs"
        raise PyTritonClientValueError(
            f"Expected model_config to be {expected}; received {model_config!r} ({error}).",
            input_name="model_config",
            expected=expected,
            received=repr(model_config),
        ) from error


def _to_tensor_specs(tensors: Sequence[Any] | None) -> tuple[TensorSpec, ...]:
    specs = []
    for tensor in tensors or ():
        dtype = np.dtype(tensor.dtype)
        name = datatype_of(dtype)
        scalar: type[np.generic] = np.bytes_ if name == "BYTES" else dtype.type
        hint = getattr(tensor, "hint", None) or ""
        specs.append(TensorSpec(str(tensor.name), tuple(tensor.shape), scalar, bool(tensor.optional), hint))
    return tuple(specs)
