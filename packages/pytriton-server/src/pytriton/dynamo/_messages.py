"""Requests and responses of Dynamo, which are dictionaries with lists of numbers, as messages of KServe v2."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2

__all__ = ["UnfitRequestError", "as_card_config", "as_message", "as_response"]

# Dynamo's name of a data type, KServe's, and that of its elements in numpy; the half precisions travel as their bits.
_TYPES = (
    ("Bool", "BOOL", "?"), ("Uint8", "UINT8", "u1"), ("Uint16", "UINT16", "<u2"), ("Uint32", "UINT32", "<u4"),
    ("Uint64", "UINT64", "<u8"), ("Int8", "INT8", "i1"), ("Int16", "INT16", "<i2"), ("Int32", "INT32", "<i4"),
    ("Int64", "INT64", "<i8"), ("Float16", "FP16", "<u2"), ("BFloat16", "BF16", "<u2"), ("Float32", "FP32", "<f4"),
    ("Float64", "FP64", "<f8"), ("Bytes", "BYTES", ""),
)  # fmt: skip
_FROM_DYNAMO = {dynamo: (kserve, np.dtype(code) if code else None) for dynamo, kserve, code in _TYPES}
_TO_DYNAMO = {kserve: (dynamo, np.dtype(code) if code else None) for dynamo, kserve, code in _TYPES}
_KINDS = ("bool", "int64", "string", "double", "uint64")
_LENGTH = struct.Struct("<I")
# The fields of a configuration that a front end reports. The others may differ between servers, whose cards have to be
# equal.
_ON_CARD = ("name", "platform", "backend", "max_batch_size", "input", "output", "model_transaction_policy")


class UnfitRequestError(ValueError):
    """A request that is none of tensors, or that says two things about one of them."""


def as_message(request: Mapping[str, Any], name: str, version: str) -> Any:
    """Return the `ModelInferRequest` for a request of Dynamo.

    Raises:
        UnfitRequestError: It has no tensors, or one that cannot be read.
    """
    if "tensors" not in request:
        raise UnfitRequestError(f"expected a request with tensors for model {name!r}, got {', '.join(sorted(request))}")
    message = service_pb2.ModelInferRequest(model_name=name, model_version=version, id=request.get("id") or "")
    for tensor in request["tensors"]:
        described = tensor["metadata"]
        try:
            datatype, dtype = _FROM_DYNAMO[described["data_type"]]
            content = _encoded(tensor["data"]["values"], dtype)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise UnfitRequestError(
                f"input {described.get('name')!r} of model {name!r}: expected values of the type "
                f"{described.get('data_type')!r}: {error}"
            ) from None
        added = message.inputs.add(name=described["name"], datatype=datatype, shape=described["shape"])
        _set_parameters(added.parameters, described.get("parameters"))
        message.raw_input_contents.append(content)
    for wanted in request.get("outputs") or ():
        _set_parameters(message.outputs.add(name=wanted["name"]).parameters, wanted.get("parameters"))
    _set_parameters(message.parameters, request.get("parameters"))
    return message


def as_response(message: Any, model: str) -> dict[str, Any]:
    """Return the response of Dynamo, under the name that the caller asked for, for a `ModelInferResponse`."""
    tensors = []
    for output, content in zip(message.outputs, message.raw_output_contents, strict=True):
        data_type, dtype = _TO_DYNAMO[output.datatype]
        described: dict[str, Any] = {"name": output.name, "shape": list(output.shape), "data_type": data_type}
        if output.parameters:
            described["parameters"] = _parameters(output.parameters)
        tensors.append(
            {"metadata": described, "data": {"data_type": data_type, "values": _decoded(content, dtype)}},
        )
    response: dict[str, Any] = {"id": message.id, "model": model, "tensors": tensors}
    if message.parameters:
        response["parameters"] = _parameters(message.parameters)
    return response


def as_card_config(config: Any, name: str) -> bytes:
    """Return what front ends tell of a model, from Triton's configuration: the same for each server that has it."""
    told = model_config_pb2.ModelConfig()
    told.CopyFrom(config)
    for field, _ in config.ListFields():
        if field.name not in _ON_CARD:
            told.ClearField(field.name)
    told.name = name
    data: bytes = told.SerializeToString(deterministic=True)
    return data


def _encoded(values: Sequence[Any], dtype: np.dtype[Any] | None) -> bytes:
    if dtype is not None:
        return np.array(values, dtype).tobytes()
    parts: list[bytes] = []
    for value in values:
        content = value.encode() if isinstance(value, str) else bytes(value)
        parts += (_LENGTH.pack(len(content)), content)
    return b"".join(parts)


def _decoded(content: bytes, dtype: np.dtype[Any] | None) -> list[Any]:
    if dtype is not None:
        numbers: list[Any] = np.frombuffer(content, dtype).tolist()
        return numbers
    values, at = [], 0
    while at < len(content):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(content, at)[0]
        values.append(list(content[start:at]))
    return values


def _set_parameters(target: Any, given: Mapping[str, Mapping[str, Any]] | None) -> None:
    for name, choice in (given or {}).items():
        for kind, value in choice.items():
            setattr(target[name], f"{kind}_param", value)


def _parameters(given: Any) -> dict[str, dict[str, Any]]:
    found = {}
    for name in given:
        kind = given[name].WhichOneof("parameter_choice")
        if kind and kind.removesuffix("_param") in _KINDS:
            found[name] = {kind.removesuffix("_param"): getattr(given[name], kind)}
    return found
