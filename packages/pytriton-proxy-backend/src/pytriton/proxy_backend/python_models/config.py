"""The configuration of a model: what `auto_complete_config` completes, and what `initialize` looks up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..wire.dtypes import BYTES_CODE, dtype_of

_NAMES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING",
)  # fmt: skip
_TYPE_OF_NUMBER: dict[int, Any] = {number: dtype_of(number).type for number in range(1, BYTES_CODE + 1)}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{name}": bool if name == "BOOL" else _TYPE_OF_NUMBER[number] for number, name in enumerate(_NAMES, 1)
}
"""numpy's types by the names of a configuration's data types."""


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return numpy's type of a data type such as `TYPE_FP32`.

    Raises `KeyError` where there is none, as for `TYPE_BF16`.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return numpy's type of a number of Triton's; `None` if there is none."""
    return _TYPE_OF_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of Triton's data type of a type of numpy's; `None` if there is none."""
    for number, known in _TYPE_OF_NUMBER.items():
        if data_type == known:
            return number
    return BYTES_CODE if data_type == np.bytes_ else None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of an input; `None` if it has none of that name."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of an output; `None` if it has none of that name."""
    return _named(model_config.get("output", ()), name)


def _named(tensors: Any, name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration lets a request have any number of responses."""
    return (
        bool(model_config["model_transaction_policy"]["decoupled"])
        if "model_transaction_policy" in model_config
        else False
    )


class ModelConfig:
    """A configuration that `auto_complete_config` may complete.

    Args:
        model_config: The configuration as a JSON text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration; it is to be read."""
        return self._model_config

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch; raises `ValueError` if the configuration has a larger one."""
        given = self._model_config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have Triton's dynamic batcher make the batches.

        Raises `ValueError` if the configuration has another scheduler.
        """
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input of `name`, `data_type`, `dims` and perhaps `optional`, or complete one of the same name.

        Raises `ValueError` if a property is missing or unknown, or the configuration says otherwise.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output of `name`, `data_type` and `dims`, or complete one of its name. Raises as `add_input` does."""
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, side: str, tensor: Mapping[str, Any], known: tuple[str, ...]) -> None:
        if any(key not in known for key in tensor):
            names = "', '".join(known[:-1])
            raise ValueError(
                f"{side} '{tensor['name']}' in auto-complete-config function for model '{self._name}' contains "
                f"property other than '{names}' and '{known[-1]}'."
            )
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                called = side if key == "name" else f"{side} '{tensor['name']}'"
                raise ValueError(
                    f"{called} in auto-complete-config function for model '{self._name}' is missing '{key}' property."
                )
        name = tensor["name"]
        given = _named(self._model_config[side], name)
        if given is None:
            self._model_config[side].append(tensor)
            return
        if given["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {given['data_type']} for {side} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            differs = key in tensor and key in given and given[key] != tensor[key]
            if differs and (key == "optional" or given[key]):
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} {tensor[key]} but the model "
                    f"configuration specifies {key} {given[key]}"
                )
        given.update(tensor)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether a request may have many responses: `decoupled`, true or false. Raises as `add_input` does."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )
