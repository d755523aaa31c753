"""Descriptions of models: their inputs and outputs, and from them the reason of a refused request.

Triton checks every request itself, but for inputs that are missing in a model that has optional ones. The description
is asked for once per model, and again where Triton's own error does not say enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pytriton.inprocess.capi.enums import DataType
from pytriton.inprocess.capi.errors import InvalidArgumentError, NotFoundError, TritonError
from pytriton.inprocess.requests.named import NamedModel, access_of
from pytriton.inprocess.requests.specs import InputSpec, ModelInterface


def describe(model: NamedModel) -> str:
    """Name a model in an error."""
    return f"model {model.name!r}" if model.version < 0 else f"model {model.name!r} version {model.version}"


def fetch_spec(model: NamedModel) -> ModelInterface:
    """Ask the server for the description of a model, and keep it."""
    metadata, config = model.metadata(), model.config()
    configured = {entry["name"]: entry for entry in config.get("input", ())}
    inputs = {}
    for entry in metadata.get("inputs", ()):
        name = entry["name"]
        details = configured.get(name, {})
        data_type = DataType.__members__.get(entry["datatype"])
        if data_type is not None:
            special = details.get("is_shape_tensor") or details.get("allow_ragged_batch")
            dims = tuple(int(dim) for dim in entry["shape"])
            inputs[name] = InputSpec(data_type, dims, bool(details.get("optional")), not special)
    outputs = tuple(entry["name"] for entry in metadata.get("outputs", ()))
    required = frozenset(name for name, entry in inputs.items() if not entry.optional)
    spec = ModelInterface(inputs, outputs, int(config.get("max_batch_size", 0)), required)
    access_of(model).model_specs[model.name, model.version] = spec
    return spec


def known_spec(model: NamedModel) -> ModelInterface:
    """Return the description that was fetched last, or fetch it."""
    return access_of(model).model_specs.get((model.name, model.version)) or fetch_spec(model)


def forget_spec(model: NamedModel) -> bool:
    """Forget a description that may be out of date; return whether there was one."""
    with contextlib.suppress(TritonError):
        return access_of(model).model_specs.pop((model.name, model.version), None) is not None
    return False


def explain(
    error: TritonError,
    model: NamedModel,
    inputs: Mapping[str, tuple[DataType, tuple[int, ...]]],
    requested_outputs: Sequence[str] = (),
) -> TritonError:
    """Find out why Triton refused a request.

    Returns an error with what was expected and received, or Triton's own error if nothing is wrong with the request.
    """
    place = describe(model)
    try:
        spec = fetch_spec(model)
    except TritonError as unknown:
        # The model does not exist or does not answer, so that is the error.
        kind = type(error) if isinstance(error, NotFoundError) else type(unknown)
        return kind(
            f"{_sentence(place)}: expected a model that is loaded and ready, received: {error.args[0]}",
            expected="a model that is loaded and ready",
            received=(model.name, model.version),
            where=place,
        )
    found = _mismatch_in_inputs(spec, place, inputs) or _mismatch_in_outputs(spec, place, requested_outputs)
    if found is not None:
        return found
    if error.where is None:
        error.where = place
    return error


def _mismatch_in_inputs(
    spec: ModelInterface, place: str, inputs: Mapping[str, tuple[DataType, tuple[int, ...]]]
) -> TritonError | None:
    names = tuple(spec.inputs)
    for name in inputs:
        if name not in spec.inputs:
            return _refusal(
                f"{place}, input {name!r}",
                f"an input of {_listed(names)}",
                "an input that the model does not have",
                names,
                name,
            )
    missing = tuple(name for name in names if name in spec.required and name not in inputs)
    if missing:
        return _refusal(f"{place}, input {missing[0]!r}", "a value", "none", missing, tuple(inputs))
    for name, (data_type, shape) in inputs.items():
        entry = spec.inputs[name]
        where = f"{place}, input {name!r}"
        if entry.data_type is not data_type:
            return _refusal(
                where, entry.data_type.name, f"{data_type.name} of shape {shape}", entry.data_type, data_type
            )
        if not entry.fixed_rank:
            continue
        if len(shape) != len(entry.dims) or any(
            wanted not in (-1, dim) for wanted, dim in zip(entry.dims, shape, strict=True)
        ):
            batch = ", the first dimension being the batch" if spec.max_batch_size else ""
            return _refusal(where, f"shape {entry.dims} (-1 is any size{batch})", f"shape {shape}", entry.dims, shape)
        if spec.max_batch_size and not 0 < shape[0] <= spec.max_batch_size:
            return _refusal(
                where,
                f"a batch of 1 to {spec.max_batch_size} (max_batch_size)",
                f"one of {shape[0]}",
                spec.max_batch_size,
                shape[0],
            )
    batches = {shape[0] for _, shape in inputs.values()} if spec.max_batch_size else set()
    if len(batches) > 1:
        sizes = {name: shape[0] for name, (_, shape) in inputs.items()}
        return _refusal(place, "the same batch size in all inputs", str(sizes), "one batch size", sizes)
    return None


def _mismatch_in_outputs(spec: ModelInterface, place: str, requested: Sequence[str]) -> TritonError | None:
    for name in requested:
        if name not in spec.outputs:
            return _refusal(
                f"{place}, output {name!r}",
                f"an output of {_listed(spec.outputs)}",
                "an output that the model does not have",
                spec.outputs,
                name,
            )
    return None


def _refusal(where: str, expected: str, received: str, expected_value: Any, received_value: Any) -> TritonError:
    return InvalidArgumentError(
        f"{_sentence(where)}: expected {expected}, received {received}.",
        expected=expected_value,
        received=received_value,
        where=where,
    )


def _sentence(place: str) -> str:
    return place[:1].upper() + place[1:]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
