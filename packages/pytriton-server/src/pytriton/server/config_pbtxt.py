"""The text of a model's `config.pbtxt`.

A writer for the few parts of protobuf's text format that are needed, so that no protobuf is.
"""

from collections.abc import Iterator, Sequence

from pytriton.model_config import DynamicBatcher, QueuePolicy
from pytriton.model_config._dtypes import config_name
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

__all__ = ["render_config"]

_INDENT = "  "
# What the text format has a short escape for, or would end or change a string.
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def render_config(config: TritonModelConfig) -> str:
    """Gives the text of `config.pbtxt` for a model.

    All versions found in the model's folder are served.
    """
    return "\n".join(_model(config)) + "\n"


def _model(config: TritonModelConfig) -> Iterator[str]:
    yield f"name: {_quoted(config.model_name)}"
    yield f"backend: {_quoted(config.backend)}"
    yield f"max_batch_size: {config.max_batch_size if config.batching else 0}"
    yield from _message("version_policy", ["all { }"])
    for spec in config.inputs or ():
        yield from _message("input", _tensor(spec))
    for spec in config.outputs or ():
        yield from _message("output", _tensor(spec))
    for kind, count in config.instance_group.items():
        yield from _message("instance_group", [f"count: {count}"] * (count is not None) + [f"kind: {kind.value}"])
    if config.batching and config.batcher is not None:
        yield from _message("dynamic_batching", _batcher(config.batcher))
    if config.decoupled:
        yield from _message("model_transaction_policy", ["decoupled: true"])
    if config.response_cache is not None and config.response_cache.enable:
        yield from _message("response_cache", ["enable: true"])
    for key, value in config.backend_parameters.items():
        yield from _message("parameters", _map_entry(_quoted(key), [f"string_value: {_quoted(value)}"]))


def _tensor(spec: TensorSpec) -> Iterator[str]:
    yield f"name: {_quoted(spec.name)}"
    yield f"data_type: {config_name(spec.dtype)}"
    yield f"dims: {_numbers(spec.shape)}"
    if spec.optional:
        yield "optional: true"


def _batcher(batcher: DynamicBatcher) -> Iterator[str]:
    # What has its default is left out, so that Triton's own defaults stay visible as such.
    if batcher.max_queue_delay_microseconds:
        yield f"max_queue_delay_microseconds: {batcher.max_queue_delay_microseconds}"
    if batcher.preferred_batch_size:
        yield f"preferred_batch_size: {_numbers(batcher.preferred_batch_size)}"
    if batcher.preserve_ordering:
        yield "preserve_ordering: true"
    if batcher.priority_levels:
        yield f"priority_levels: {batcher.priority_levels}"
        yield f"default_priority_level: {batcher.default_priority_level}"
    if batcher.default_queue_policy is not None:
        yield from _message("default_queue_policy", _queue_policy(batcher.default_queue_policy))
    for level, policy in (batcher.priority_queue_policy or {}).items():
        yield from _message("priority_queue_policy", _map_entry(str(level), _queue_policy(policy)))


def _queue_policy(policy: QueuePolicy) -> Iterator[str]:
    yield f"timeout_action: {policy.timeout_action.value}"
    yield f"default_timeout_microseconds: {policy.default_timeout_microseconds}"
    yield f"allow_timeout_override: {str(bool(policy.allow_timeout_override)).lower()}"
    yield f"max_queue_size: {policy.max_queue_size}"


def _map_entry(key: str, value: "Iterator[str] | Sequence[str]") -> Iterator[str]:
    yield f"key: {key}"
    yield from _message("value", value)


def _message(name: str, lines: "Iterator[str] | Sequence[str]") -> Iterator[str]:
    yield f"{name} {{"
    for line in lines:
        yield _INDENT + line
    yield "}"


def _numbers(values: Sequence[int]) -> str:
    return "[" + ", ".join(str(int(value)) for value in values) + "]"


def _quoted(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(char) or _plain(char) for char in text) + '"'


def _plain(char: str) -> str:
    if char.isprintable():
        return char
    # Three digits always, so that a digit that follows is not taken for one of the escape.
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogatepass"))
