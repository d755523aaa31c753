"""Generator of model configurations in the forms that Triton reads: JSON and `config.pbtxt`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytriton.model_config._checks import check_integer, parameter_error
from pytriton.model_config._hints import HINTS_PARAMETER, write_hints
from pytriton.model_config._prototxt import render
from pytriton.model_config.common import DynamicBatcher, ModelWarmup, QueuePolicy, WarmupInput
from pytriton.model_config.dtypes import config_name
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

__all__ = ["ModelConfigGenerator"]

# Triton lets a request shorten the timeout of its queue, but nothing is shorter than "no limit"; a year is.
_LONGEST_TIMEOUT_US = 366 * 24 * 3600 * 10**6


class ModelConfigGenerator:
    """Writes the configuration of a model for Triton: as a dictionary, and as the text of `config.pbtxt`.

    Args:
        config: The configuration, read when a method is called.
    """

    def __init__(self, config: TritonModelConfig) -> None:
        self._config = config

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as a dictionary that Triton takes as JSON.

        Returns:
            Dictionaries, lists, strings, numbers and booleans, laid out as Triton's message `ModelConfig`. What has
            Triton's own default is left out.

        Raises:
            PyTritonBadParameterError: A value breaks a rule that Triton would refuse the model for; the error names
                field, value and rule.
        """
        config = self._config
        _validate(config)
        result: dict[str, Any] = {
            "name": config.model_name,
            "backend": config.backend,
            "max_batch_size": int(config.max_batch_size) if config.batching else 0,
            "version_policy": {"all": {}},
            "input": [_tensor(spec, is_ragged=config.cost is not None) for spec in config.inputs or ()],
            "output": [_tensor(spec) for spec in config.outputs or ()],
            "instance_group": [
                {**({} if count is None else {"count": int(count)}), "kind": kind.value}
                for kind, count in config.instance_group.items()
            ],
        }
        # Without batching, Triton's dynamic batcher sends each request alone, but its queue still has limits.
        if config.batcher is not None and (config.batching or config.batcher != DynamicBatcher()):
            result["dynamic_batching"] = _batcher(config.batcher)
        if config.decoupled:
            result["model_transaction_policy"] = {"decoupled": True}
        if config.response_cache is not None and config.response_cache.enable:
            result["response_cache"] = {"enable": True}
        hints = write_hints(config)
        parameters = {**({HINTS_PARAMETER: hints} if hints else {}), **config.backend_parameters}
        if parameters:
            result["parameters"] = {key: {"string_value": str(value)} for key, value in parameters.items()}
        if config.model_warmup:
            result["model_warmup"] = [_warmup(warmup) for warmup in config.model_warmup]
        return {key: value for key, value in result.items() if value != []}

    def get_text(self) -> str:
        """Return the text of `config.pbtxt`, in protobuf's text format.

        Raises:
            PyTritonBadParameterError: As `get_config`.
        """
        return render(self.get_config())

    def to_file(self, config_path: str | os.PathLike[str]) -> str:
        """Write `config.pbtxt`, and the folders that lead to it.

        Args:
            config_path: Path of the file. One that exists is replaced.

        Returns:
            What was written.

        Raises:
            PyTritonBadParameterError: As `get_config`; nothing is written then.
            OSError: The file cannot be written.
        """
        text = self.get_text()
        path = Path(config_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return text


def _validate(config: TritonModelConfig) -> None:
    if config.batching:
        check_integer("TritonModelConfig.max_batch_size", config.max_batch_size, 1)
    if config.batcher is not None:
        config.batcher.validate(config.max_batch_size if config.batching else 0)
    if config.decoupled and config.response_cache is not None and config.response_cache.enable:
        raise parameter_error("TritonModelConfig.response_cache", config.response_cache, "off for a decoupled model")
    for spec in config.outputs or ():
        if spec.optional:
            raise parameter_error(
                f"TritonModelConfig.outputs[{spec.name!r}].optional", True, "False: no output is optional"
            )
    for index, warmup in enumerate(config.model_warmup or ()):
        warmup.validate(
            config.max_batch_size if config.batching else None, where=f"TritonModelConfig.model_warmup[{index}]"
        )


def _tensor(spec: TensorSpec, *, is_ragged: bool = False) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": spec.name, "dims": _integers(spec.shape), "data_type": config_name(spec.dtype)
    }  # fmt: skip
    if is_ragged and -1 in spec.shape:
        # Triton joins requests in which it differs.
        result["allow_ragged_batch"] = True
    return {**result, "optional": True} if spec.optional else result


def _batcher(batcher: DynamicBatcher) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if batcher.max_queue_delay_microseconds:
        result["maxQueueDelayMicroseconds"] = int(batcher.max_queue_delay_microseconds)
    if batcher.preferred_batch_size:
        result["preferredBatchSize"] = _integers(batcher.preferred_batch_size)
    if batcher.preserve_ordering:
        result["preserveOrdering"] = True
    if batcher.priority_levels:
        result["priorityLevels"] = int(batcher.priority_levels)
        result["defaultPriorityLevel"] = int(batcher.default_priority_level)
    if batcher.default_queue_policy is not None:
        result["defaultQueuePolicy"] = _queue_policy(batcher.default_queue_policy)
    if batcher.priority_queue_policy:
        result["priorityQueuePolicy"] = {
            int(level): _queue_policy(policy) for level, policy in batcher.priority_queue_policy.items()
        }
    return result


def _queue_policy(policy: QueuePolicy) -> dict[str, Any]:
    timeout_us = int(policy.default_timeout_microseconds)
    if policy.allow_timeout_override and not timeout_us:
        timeout_us = _LONGEST_TIMEOUT_US
    return {
        "timeoutAction": policy.timeout_action.value,
        "defaultTimeoutMicroseconds": timeout_us,
        "allowTimeoutOverride": bool(policy.allow_timeout_override),
        "maxQueueSize": int(policy.max_queue_size),
    }


def _warmup(warmup: ModelWarmup) -> dict[str, Any]:
    return {
        "name": warmup.name,
        "batch_size": int(warmup.batch_size),
        "inputs": {name: _warmup_input(given) for name, given in warmup.inputs.items()},
        "count": int(warmup.count),
    }


def _warmup_input(given: WarmupInput) -> dict[str, Any]:
    result: dict[str, Any] = {"data_type": config_name(given.dtype), "dims": _integers(given.shape)}
    if given.zero_data:
        result["zero_data"] = True
    elif given.random_data:
        result["random_data"] = True
    else:
        result["input_data_file"] = str(given.input_data_file)
    return result


def _integers(values: Sequence[int]) -> list[int]:
    return [int(value) for value in values]
