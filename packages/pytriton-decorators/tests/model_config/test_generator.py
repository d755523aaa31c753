import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.parser import ModelConfigParser
from pytriton.model_config.triton_model_config import ResponseCache, TensorSpec, TritonModelConfig

BASE = TritonModelConfig(
    "model",
    inputs=[TensorSpec("a", (-1, 3), np.float32), TensorSpec("b", (1,), np.bytes_, optional=True)],
    outputs=[TensorSpec("c", (2,), np.bool_)],
)
FULL = dataclasses.replace(
    BASE,
    max_batch_size=16,
    batcher=DynamicBatcher(
        max_queue_delay_microseconds=100,
        preferred_batch_size=[2, 4],
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(TimeoutAction.DELAY, 5, True, 7),
        priority_queue_policy={2: QueuePolicy(max_queue_size=3)},
    ),
    instance_group={DeviceKind.KIND_CPU: 2, DeviceKind.KIND_GPU: None},
    backend_parameters={"key": "value"},
    response_cache=ResponseCache(enable=True),
    model_warmup=[
        ModelWarmup(
            "w",
            4,
            {
                "a": WarmupInput(np.float32, (1, 3), zero_data=True),
                "b": WarmupInput(np.bytes_, (1,), input_data_file="b.npy"),
                "c": WarmupInput(np.int8, (1,), random_data=True),
            },
            2,
        )
    ],
)


def generated(config: TritonModelConfig) -> dict[str, Any]:
    return ModelConfigGenerator(config).get_config()


def test_a_plain_model() -> None:
    assert generated(BASE) == {
        "name": "model",
        "backend": "pytriton",
        "max_batch_size": 4,
        "version_policy": {"all": {}},
        "input": [
            {"name": "a", "dims": [-1, 3], "data_type": "TYPE_FP32"},
            {"name": "b", "dims": [1], "data_type": "TYPE_STRING", "optional": True},
        ],
        "output": [{"name": "c", "dims": [2], "data_type": "TYPE_BOOL"}],
    }


def test_everything() -> None:
    config = generated(FULL)
    assert config["dynamic_batching"] == {
        "maxQueueDelayMicroseconds": 100,
        "preferredBatchSize": [2, 4],
        "priorityLevels": 2,
        "defaultPriorityLevel": 1,
        "defaultQueuePolicy": {
            "timeoutAction": "DELAY",
            "defaultTimeoutMicroseconds": 5,
            "allowTimeoutOverride": True,
            "maxQueueSize": 7,
        },
        "priorityQueuePolicy": {
            2: {
                "timeoutAction": "REJECT",
                "defaultTimeoutMicroseconds": 0,
                "allowTimeoutOverride": False,
                "maxQueueSize": 3,
            }
        },
    }
    assert config["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}, {"kind": "KIND_GPU"}]
    assert config["parameters"] == {"key": {"string_value": "value"}}
    assert config["response_cache"] == {"enable": True}
    assert config["model_warmup"] == [
        {
            "name": "w",
            "batch_size": 4,
            "inputs": {
                "a": {"data_type": "TYPE_FP32", "dims": [1, 3], "zero_data": True},
                "b": {"data_type": "TYPE_STRING", "dims": [1], "input_data_file": "b.npy"},
                "c": {"data_type": "TYPE_INT8", "dims": [1], "random_data": True},
            },
            "count": 2,
        }
    ]
    assert generated(dataclasses.replace(BASE, decoupled=True))["model_transaction_policy"] == {"decoupled": True}


def test_numbers_of_numpy_are_plain_numbers() -> None:
    number: Any = np.int64(3)
    batcher = DynamicBatcher(number, [number], priority_levels=number, default_priority_level=number)
    config = dataclasses.replace(BASE, max_batch_size=number, batcher=batcher)
    assert json.loads(json.dumps(generated(config)))["dynamic_batching"]["preferredBatchSize"] == [3]


def test_a_request_may_shorten_a_timeout_that_is_without_limit() -> None:
    # Triton ignores the override where the default is 0.
    batcher = DynamicBatcher(default_queue_policy=QueuePolicy(allow_timeout_override=True))
    policy = generated(dataclasses.replace(BASE, batcher=batcher))["dynamic_batching"]["defaultQueuePolicy"]
    assert policy["defaultTimeoutMicroseconds"] > 10**6 * 3600 * 24 * 365


@pytest.mark.parametrize("config", [BASE, FULL, TritonModelConfig("other", batching=False, inputs=[], outputs=[])])
def test_what_is_written_is_read_again(config: TritonModelConfig, tmp_path: Path) -> None:
    expected = config if config.batching else dataclasses.replace(config, max_batch_size=0)
    assert ModelConfigParser.from_dict(generated(config)) == expected
    # JSON knows no keys but strings.
    assert ModelConfigParser.from_dict(json.loads(json.dumps(generated(config)))) == expected
    path = tmp_path / "new" / "model" / "config.pbtxt"
    written = ModelConfigGenerator(config).to_file(path)
    assert path.read_text(encoding="utf-8") == written
    assert ModelConfigParser.from_file(config_path=path) == expected


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"max_batch_size": 0}, "TritonModelConfig.max_batch_size"),
        (
            {"batcher": DynamicBatcher(priority_levels=1, default_priority_level=2)},
            "DynamicBatcher.default_priority_level",
        ),
        ({"batcher": DynamicBatcher(preferred_batch_size=[5])}, "DynamicBatcher.preferred_batch_size"),
        ({"outputs": [TensorSpec("c", (1,), np.int8, optional=True)]}, "TritonModelConfig.outputs['c'].optional"),
        ({"decoupled": True, "response_cache": ResponseCache(enable=True)}, "TritonModelConfig.response_cache"),
        (
            {"model_warmup": [ModelWarmup("w", 1, {"a": WarmupInput(np.int8, (1,))}, 1)]},
            "TritonModelConfig.model_warmup[0].inputs['a']",
        ),
        (
            {"model_warmup": [ModelWarmup("w", 9, {"a": WarmupInput(np.int8, (1,), True)}, 1)]},
            "TritonModelConfig.model_warmup[0].batch_size",
        ),
    ],
)
def test_what_breaks_a_rule_is_not_written(changes: dict[str, Any], parameter: str, tmp_path: Path) -> None:
    generator = ModelConfigGenerator(dataclasses.replace(BASE, **changes))
    with pytest.raises(PyTritonBadParameterError) as caught:
        generator.to_file(tmp_path / "config.pbtxt")
    assert caught.value.parameter == parameter
    assert not (tmp_path / "config.pbtxt").exists()
