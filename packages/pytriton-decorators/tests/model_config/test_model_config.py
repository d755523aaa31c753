import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import DynamicBatcher, ModelConfig


def test_defaults() -> None:
    config = ModelConfig()
    assert config == ModelConfig(True, 4, DynamicBatcher(), False, False, None)
    assert config.batcher is not ModelConfig().batcher
    config.validate()


def test_construction_leaves_combinations_to_validate() -> None:
    config = ModelConfig(max_batch_size=0)
    with pytest.raises(PyTritonBadParameterError, match=r"max_batch_size=0 .* at least 1.*batching=False") as caught:
        config.validate()
    assert caught.value.parameter == "ModelConfig.max_batch_size"
    config.batching = False
    config.validate()


def test_the_batcher_is_held_against_the_maximum_batch_size() -> None:
    config = ModelConfig(max_batch_size=4, batcher=DynamicBatcher(preferred_batch_size=[8]))
    with pytest.raises(PyTritonBadParameterError, match=r"preferred_batch_size=8 .* from 1 to 4.*max_batch_size"):
        config.validate()
    config.max_batch_size = 8
    config.validate()


def test_without_batching_a_batcher_has_a_queue_and_joins_nothing() -> None:
    ModelConfig(batching=False, batcher=DynamicBatcher(priority_levels=2, default_priority_level=1)).validate()
    ModelConfig(batching=False, batcher=None).validate()
    for batcher in (DynamicBatcher(preferred_batch_size=[1]), DynamicBatcher(max_queue_delay_microseconds=1)):
        with pytest.raises(PyTritonBadParameterError, match=r"for a model without batching\. Each request is alone"):
            ModelConfig(batching=False, batcher=batcher).validate()
    with pytest.raises(PyTritonBadParameterError, match="default_priority_level"):
        ModelConfig(batching=False, batcher=DynamicBatcher(priority_levels=2)).validate()


def test_a_decoupled_model_cannot_be_cached() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"response_cache=True"):
        ModelConfig(response_cache=True, decoupled=True).validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arena_budget_bytes", 0),
        ("arena_budget_bytes", 2**63),
        ("attach_timeout_s", -1),
        ("attach_timeout_s", "10"),
        ("attach_timeout_s", float("nan")),
        ("attach_timeout_s", True),
        ("warmup_timeout_s", float("inf")),
        ("warmup_timeout_s", None),
        ("execution_timeout_s", 0),
        ("execution_timeout_s", -1.0),
        ("execution_timeout_s", "2"),
        ("execution_timeout_s", 1e12),
        ("execution_timeout_s", float("nan")),
        ("repeatable", "no"),
        ("repeatable", None),
        ("parameters", {"chat_template": 1}),
        ("parameters", {"": "x"}),
        ("parameters", "chat_template"),
        ("parameters", None),
        ("batching", "no"),
        ("batching", None),
        ("decoupled", 2),
        ("response_cache", "false"),
        ("send_tracebacks", "yes"),
        ("batcher", {"max_queue_delay_microseconds": 1}),
        ("max_batch_size", 4.0),
        ("max_batch_size", True),
        ("max_batch_size", 2**31),
    ],
)
def test_every_value_is_checked(field: str, value: object) -> None:
    config = ModelConfig(**{field: value})  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(PyTritonBadParameterError, match=rf"ModelConfig\.{field}=.* must be ") as caught:
        config.validate()
    assert caught.value.parameter == f"ModelConfig.{field}"
    assert caught.value.value is value


def test_values_of_numpy_are_taken() -> None:
    true, number, seconds = np.bool_(True), np.int64(8), np.float32(0.5)
    ModelConfig(
        batching=true,  # type: ignore[arg-type] # numpy's are as good
        max_batch_size=number,
        attach_timeout_s=seconds,
        execution_timeout_s=seconds,
        repeatable=true,  # type: ignore[arg-type] # numpy's are as good
    ).validate()
