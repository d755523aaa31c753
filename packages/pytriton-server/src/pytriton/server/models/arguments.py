"""Validate the arguments of `Triton.bind`, and convert them to the types that the server works with."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.dtypes import array_dtype
from pytriton.model_config.triton_model_config import TensorSpec
from pytriton.proxy_backend import TensorSpec as WireSpec
from pytriton.server.models.process_workers import ProcessWorker

InferFunc = Callable[..., Any]
Servable = InferFunc | ProcessWorker | Sequence[InferFunc | ProcessWorker]
"""The callable of a model, or several that serve it in parallel."""


class BindOptions(TypedDict, total=False):
    """The keyword arguments of `bind` on every way to serve; see there."""

    model_version: int
    config: ModelConfig | None
    strict: bool
    trace_config: list[str] | None


_NAME = re.compile(r"[a-zA-Z0-9._-]+")
# Triton reads the version from the name of a folder.
_MAX_VERSION = 2**63 - 1
# The most axes in every version of numpy, with that of the batch.
_MOST_AXES = 32


def checked_name(name: str) -> str:
    """Return the name of a model; raise PyTritonValidationError unless Triton and a file system take it."""
    if not isinstance(name, str):
        raise PyTritonValidationError(f"Model name must be a string; got {name!r}.", expected="a string", received=name)
    if not name:
        raise PyTritonValidationError("Model name cannot be empty", expected="a non-empty string", received=name)
    rule = "Model name can only contain alphanumeric characters, dots, underscores and dashes"
    if not _NAME.fullmatch(name):
        raise PyTritonValidationError(f"{rule}; got {name!r}.", expected=rule, received=name)
    if not name.strip("."):
        raise PyTritonValidationError(f"{rule}, and not only dots; got {name!r}.", expected=rule, received=name)
    return name


def checked_version(version: Any, name: str) -> int:
    """Return the version of a model; raise PyTritonValidationError unless it is an integer from 1."""
    # numpy's integers are accepted, too.
    is_integer = isinstance(version, (int, np.integer)) and not isinstance(version, bool)
    if not is_integer or not 1 <= version <= _MAX_VERSION:
        raise PyTritonValidationError(
            f"Model {name!r}: model_version must be an integer of at least 1, of 64 bits; got {version!r}.",
            expected="an integer of at least 1",
            received=version,
        )
    return int(version)


def checked_callables(infer_func: Any, name: str) -> list[InferFunc | ProcessWorker]:
    """Return the callables of a model; raise PyTritonValidationError unless there is one."""
    if _can_serve(infer_func):
        return [infer_func]
    if isinstance(infer_func, Sequence) and len(infer_func) and all(map(_can_serve, infer_func)):
        return list(infer_func)
    raise PyTritonValidationError(
        f"Model {name!r}: infer_func has to be a callable or a non-empty sequence of callables, each also a "
        f"ProcessWorker; got {infer_func!r}.",
        expected="a callable, or a non-empty sequence of callables",
        received=infer_func,
    )


def _can_serve(infer_func: Any) -> bool:
    return callable(infer_func) or isinstance(infer_func, ProcessWorker)


def checked_tensors(tensors: Any, argument: str, name: str) -> tuple[Any, ...]:
    """Return tensors as a tuple; raise PyTritonValidationError unless they come as some kind of list."""
    if isinstance(tensors, Iterable) and not isinstance(tensors, (str, bytes, Mapping)):
        return tuple(tensors)
    raise PyTritonValidationError(
        f"Model {name!r}: {argument} has to be a list of Tensor; got {tensors!r}.",
        expected="a list of pytriton.model_config.Tensor",
        received=tensors,
    )


def named_specs(tensors: Sequence[Tensor], kind: str, model: str) -> list[TensorSpec]:
    """Return every tensor its name."""
    specs: list[TensorSpec] = []
    for number, tensor in enumerate(tensors, 1):
        if not isinstance(tensor, Tensor):
            raise PyTritonValidationError(
                f"Model {model!r}: {kind.lower()} {number} must be a Tensor; got {tensor!r}.",
                expected="a pytriton.model_config.Tensor",
                received=tensor,
            )
        name = tensor.name or f"{kind}_{number}"
        if any(spec.name == name for spec in specs):
            raise PyTritonValidationError(
                f"Model {model!r} has two {kind.lower()}s of the name {name!r}. Give each a name of its own.",
                tensor=name,
                expected="different names",
                received=name,
            )
        if kind == "OUTPUT" and tensor.optional:
            raise PyTritonValidationError(
                f"Output tensors cannot be optional. Model {model!r}, output {name!r}: leave out optional=True.",
                tensor=name,
                expected="optional=False",
                received=True,
            )
        if not tensor.shape:
            raise PyTritonValidationError(
                f"Model {model!r}, {kind.lower()} {name!r}: Triton has no tensors without an axis; got shape=(). "
                "Declare shape=(1,).",
                tensor=name,
                expected="at least one axis",
                received=(),
            )
        specs.append(
            TensorSpec(
                name=name, shape=tensor.shape, dtype=tensor.dtype, optional=bool(tensor.optional), hint=tensor.hint
            )
        )
    return specs


def wire_specs(specs: "Sequence[TensorSpec] | None") -> tuple[WireSpec, ...]:
    """Convert tensors to the form in which workers describe them."""
    return tuple(
        WireSpec(name=spec.name, dtype=array_dtype(spec.dtype), shape=tuple(spec.shape), optional=bool(spec.optional))
        for spec in specs or ()
    )


def checked_config(config: Any, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> ModelConfig:
    """Return the configuration of a model, to which its tensors have to fit."""
    if not isinstance(config, ModelConfig):
        raise PyTritonValidationError(
            f"Model {name!r}: config has to be a ModelConfig; got {config!r}.",
            expected="a pytriton.model_config.ModelConfig",
            received=config,
        )
    config.validate(inputs)
    if config.cost is not None:
        config.cost.validate(inputs, outputs)
    for spec in (*inputs, *outputs):
        axes = len(spec.shape) + bool(config.batching)
        if axes > _MOST_AXES:
            raise PyTritonValidationError(
                f"Model {name!r}, tensor {spec.name!r}: an array has at most {_MOST_AXES} axes; got {axes}"
                f"{', with that of the batch' if config.batching else ''}. Declare fewer.",
                tensor=spec.name,
                expected=f"at most {_MOST_AXES} axes",
                received=axes,
            )
    return config
