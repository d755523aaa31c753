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


def test_a_batcher_does_not_matter_without_batching() -> None:
    ModelConfig(batching=False, batcher=DynamicBatcher(preferred_batch_size=[8])).validate()
    ModelConfig(batcher=None).validate()


def test_a_decoupled_model_cannot_be_cached() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"response_cache=True"):
        ModelConfig(response_cache=True, decoupled=True).validate()


@pytest.mark.parametrize(
    ("field", "value"), [("arena_budget_bytes", 0), ("attach_timeout_s", -1), ("attach_timeout_s", "10")]
)
def test_limits_of_the_way_to_the_callable(field: str, value: object) -> None:
    config = ModelConfig(**{field: value})  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(PyTritonBadParameterError, match=field) as caught:
        config.validate()
    assert caught.value.value == value
