import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.triton_model_config import ResponseCache, TensorSpec, TritonModelConfig


def test_defaults() -> None:
    config = TritonModelConfig("m")
    assert (config.model_version, config.max_batch_size, config.batching) == (1, 4, True)
    assert (config.batcher, config.inputs, config.outputs, config.response_cache) == (None, None, None, None)
    assert config.instance_group is not TritonModelConfig("m").instance_group
    assert config.backend == "pytriton"
    with pytest.raises(AttributeError):
        config.backend = "python"  # type: ignore[misc] # it is what serves the model, not a choice


def test_equality_is_that_of_values() -> None:
    one, other = (TritonModelConfig("m", response_cache=ResponseCache(enable=True)) for _ in range(2))
    assert one == other


def test_a_spec_keeps_the_scalar_type() -> None:
    assert TensorSpec("x", (1,), np.dtype("int8")) == TensorSpec("x", (1,), np.int8, False)
    with pytest.raises(PyTritonBadParameterError, match="tensor 'x'"):
        TensorSpec("x", (1,), np.complex64)
