"""Parser of model configurations: of a `config.pbtxt`, or of the JSON that Triton reports."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonModelConfigError
from pytriton.model_config._hints import HINTS_PARAMETER, read_hints
from pytriton.model_config._prototxt import parse_prototxt
from pytriton.model_config.common import (
    DeviceKind,
    DynamicBatcher,
    ModelWarmup,
    QueuePolicy,
    TimeoutAction,
    WarmupInput,
)
from pytriton.model_config.dtypes import type_from_config_name
from pytriton.model_config.triton_model_config import ResponseCache, TensorSpec, TritonModelConfig

__all__ = ["ModelConfigParser", "parse_prototxt"]


class ModelConfigParser:
    """Makes a `TritonModelConfig` of a model's configuration: a dictionary (as from Triton's `/config`), or a file."""

    @classmethod
    def from_dict(cls, model_config_dict: Mapping[str, Any]) -> TritonModelConfig:
        """Read a configuration from its JSON form.

        Args:
            model_config_dict: The configuration; names may be in snake case or camel case. What `TritonModelConfig`
                does not have is left out.

        Raises:
            PyTritonModelConfigError: A name, a data type or the dims of a tensor are missing, or a value is unknown.
            PyTritonBadParameterError: A value breaks one of its own rules.
            TypeError: `parameters` is not a mapping of mappings.
        """
        config = _Fields(model_config_dict, "model configuration")
        name = config.text("name")
        if not name:
            raise PyTritonModelConfigError("A model configuration must have a name.")
        max_batch_size = config.integer("max_batch_size")
        cache = config.message("response_cache")
        made = TritonModelConfig(
            model_name=name,
            max_batch_size=max_batch_size,
            batching=max_batch_size > 0,
            batcher=_batcher(config.message("dynamic_batching")) if config.has("dynamic_batching") else None,
            instance_group={
                group.one_of("kind", DeviceKind.KIND_AUTO): group.integer("count") if group.has("count") else None
                for group in config.messages("instance_group")
            },
            decoupled=config.message("model_transaction_policy").boolean("decoupled"),
            backend_parameters=_parameters(config.get("parameters", {})),
            inputs=_tensors(cls, config, "input"),
            outputs=_tensors(cls, config, "output"),
            response_cache=ResponseCache(enable=cache.boolean("enable")) if config.has("response_cache") else None,
            model_warmup=[_warmup(item) for item in config.messages("model_warmup")] or None,
        )
        hints = made.backend_parameters.get(HINTS_PARAMETER)
        if hints is not None and read_hints(hints, made):
            del made.backend_parameters[HINTS_PARAMETER]
        return made

    @classmethod
    def from_file(cls, *, config_path: str | os.PathLike[str]) -> TritonModelConfig:
        """Read a configuration from a `config.pbtxt`.

        Args:
            config_path: Path of the file.

        Raises:
            OSError: The file cannot be read.
            PyTritonModelConfigError: It is not in protobuf's text format, or as `from_dict`.
        """
        text = Path(config_path).read_text(encoding="utf-8")
        return cls.from_dict(parse_prototxt(text, where=os.fspath(config_path)))

    @classmethod
    def rewrite_io_spec(cls, item: Mapping[str, Any], io_type: str, idx: int) -> TensorSpec:
        """Make the description of one input or output.

        Args:
            item: Its entry in the configuration.
            io_type: `"input"` or `"output"`.
            idx: Its place, for errors.

        Raises:
            PyTritonModelConfigError: Name, data type or dims are missing, or the data type is unknown.
        """
        fields = _Fields(item, f"{io_type} {idx}")
        name = fields.text("name")
        if not name:
            raise PyTritonModelConfigError(f"{io_type} {idx} of a model configuration has no name.")
        data_type = fields.text("data_type")
        if not data_type:
            raise PyTritonModelConfigError(f"{io_type} {name!r} of a model configuration has no data_type.")
        dims = fields.integers("dims")
        if not dims:
            raise PyTritonModelConfigError(f"{io_type} {name!r} of a model configuration has no dims.")
        return TensorSpec(
            name=name,
            shape=tuple(dims),
            dtype=type_from_config_name(data_type),
            optional=fields.boolean("optional"),
        )


def _tensors(parser: type[ModelConfigParser], config: _Fields, io_type: str) -> list[TensorSpec]:
    items = config.get(io_type, ())
    if not isinstance(items, (list, tuple)):
        raise PyTritonModelConfigError(f"model configuration.{io_type} is not a list: {items!r}.")
    return [parser.rewrite_io_spec(item, io_type, place) for place, item in enumerate(items, 1)]


class _Fields:
    """A message whose field names are in snake case or camel case."""

    def __init__(self, message: Any, where: str) -> None:
        if not isinstance(message, Mapping):
            raise PyTritonModelConfigError(f"{where} must be a mapping; got {message!r}.")
        self._message = message
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        first, *others = name.split("_")
        camel = first + "".join(other.capitalize() for other in others)
        found = self._message.get(name, self._message.get(camel))
        return default if found is None else found

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def text(self, name: str) -> str:
        return str(self._checked(name, "", str))

    def boolean(self, name: str) -> bool:
        return bool(self._checked(name, False, (bool, int)))

    def integer(self, name: str) -> int:
        return _integer(self.get(name, 0), f"{self._where}.{name}")

    def integers(self, name: str) -> list[int]:
        return [_integer(value, f"{self._where}.{name}") for value in self._checked(name, (), (list, tuple))]

    def message(self, name: str) -> _Fields:
        return _Fields(self.get(name, {}), f"{self._where}.{name}")

    def messages(self, name: str) -> list[_Fields]:
        found = self._checked(name, (), (list, tuple))
        return [_Fields(item, f"{self._where}.{name}[{place}]") for place, item in enumerate(found)]

    def messages_by_key(self, name: str) -> dict[Any, _Fields]:
        found = self._checked(name, {}, Mapping)
        return {key: _Fields(item, f"{self._where}.{name}[{key!r}]") for key, item in found.items()}

    def one_of(self, name: str, default: enum.Enum) -> Any:
        known = type(default).__members__
        value = self.get(name, default.name)
        if value not in known:
            raise PyTritonModelConfigError(f"{self._where}.{name} must be one of {', '.join(known)}; got {value!r}.")
        return known[value]

    def _checked(self, name: str, default: Any, kind: Any) -> Any:
        found = self.get(name, default)
        if not isinstance(found, kind):
            raise PyTritonModelConfigError(f"{self._where}.{name} is not of its kind: {found!r}.")
        return found


def _integer(value: Any, where: str) -> int:
    try:
        # Some writers of JSON write 64-bit numbers as strings.
        return int(value)
    except (TypeError, ValueError) as error:
        raise PyTritonModelConfigError(f"{where} must be an integer; got {value!r}.") from error


def _batcher(batcher: _Fields) -> DynamicBatcher:
    policies = batcher.messages_by_key("priority_queue_policy")
    return DynamicBatcher(
        max_queue_delay_microseconds=batcher.integer("max_queue_delay_microseconds"),
        preferred_batch_size=batcher.integers("preferred_batch_size") or None,
        preserve_ordering=batcher.boolean("preserve_ordering"),
        priority_levels=batcher.integer("priority_levels"),
        default_priority_level=batcher.integer("default_priority_level"),
        default_queue_policy=(
            _queue_policy(batcher.message("default_queue_policy")) if batcher.has("default_queue_policy") else None
        ),
        priority_queue_policy=(
            {_integer(level, "priority_queue_policy"): _queue_policy(policy) for level, policy in policies.items()}
            or None
        ),
    )


def _queue_policy(policy: _Fields) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=policy.one_of("timeout_action", TimeoutAction.REJECT),
        default_timeout_microseconds=policy.integer("default_timeout_microseconds"),
        allow_timeout_override=policy.boolean("allow_timeout_override"),
        max_queue_size=policy.integer("max_queue_size"),
    )


def _parameters(parameters: Any) -> dict[str, str]:
    if not isinstance(parameters, Mapping) or not all(isinstance(value, Mapping) for value in parameters.values()):
        raise TypeError(
            "The parameters of a model configuration must be a mapping from names to {'string_value': ...}; got "
            f"{parameters!r}."
        )
    return {key: _Fields(value, f"parameters[{key!r}]").text("string_value") for key, value in parameters.items()}


def _warmup(warmup: _Fields) -> ModelWarmup:
    return ModelWarmup(
        name=warmup.text("name"),
        batch_size=warmup.integer("batch_size"),
        inputs={
            name: WarmupInput(
                dtype=type_from_config_name(item.text("data_type")),
                shape=tuple(item.integers("dims")),
                zero_data=item.boolean("zero_data"),
                random_data=item.boolean("random_data"),
                input_data_file=item.text("input_data_file") or None,
            )
            for name, item in warmup.messages_by_key("inputs").items()
        },
        count=warmup.integer("count"),
    )
