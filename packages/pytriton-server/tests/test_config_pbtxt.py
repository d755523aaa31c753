import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

from pytriton.model_config import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction
from pytriton.model_config.triton_model_config import ResponseCache, TensorSpec, TritonModelConfig
from pytriton.server.config_pbtxt import render_config

# Imported by name: whether protobuf brings type stubs depends on what else is installed.
json_format: Any = importlib.import_module("google.protobuf.json_format")
text_format: Any = importlib.import_module("google.protobuf.text_format")
model_config_pb2: Any = importlib.import_module("tritonclient.grpc.model_config_pb2")


def parsed(config: TritonModelConfig) -> dict[str, Any]:
    """What protobuf's own parser, with Triton's own definition, reads from the text."""
    message = text_format.Parse(render_config(config), model_config_pb2.ModelConfig())
    read: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return read


BASE = TritonModelConfig(
    model_name="model",
    inputs=[TensorSpec("a", (-1, 3), np.float32), TensorSpec("b", (1,), bytes, optional=True)],
    outputs=[TensorSpec("c", (2,), np.int64)],
    instance_group={DeviceKind.KIND_CPU: 1},
)


def test_a_model_without_batcher() -> None:
    assert parsed(BASE) == {
        "name": "model",
        "backend": "pytriton",
        "max_batch_size": 4,
        "version_policy": {"all": {}},
        "input": [
            {"name": "a", "data_type": "TYPE_FP32", "dims": ["-1", "3"]},
            {"name": "b", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
        ],
        "output": [{"name": "c", "data_type": "TYPE_INT64", "dims": ["2"]}],
        "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
    }


def test_a_model_without_batching_has_no_batcher() -> None:
    config = parsed(dataclasses.replace(BASE, batching=False, max_batch_size=8, batcher=DynamicBatcher()))
    assert "max_batch_size" not in config
    assert "dynamic_batching" not in config


def test_a_default_batcher_is_an_empty_one() -> None:
    assert parsed(dataclasses.replace(BASE, batcher=DynamicBatcher()))["dynamic_batching"] == {}


def test_everything_of_a_batcher() -> None:
    batcher = DynamicBatcher(
        max_queue_delay_microseconds=100,
        preferred_batch_size=[2, 4],
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(TimeoutAction.DELAY, 5, True, 7),
        priority_queue_policy={2: QueuePolicy(max_queue_size=3)},
    )
    assert parsed(dataclasses.replace(BASE, batcher=batcher))["dynamic_batching"] == {
        "max_queue_delay_microseconds": "100",
        "preferred_batch_size": [2, 4],
        "priority_levels": "2",
        "default_priority_level": "1",
        "default_queue_policy": {
            "timeout_action": "DELAY",
            "default_timeout_microseconds": "5",
            "allow_timeout_override": True,
            "max_queue_size": 7,
        },
        "priority_queue_policy": {"2": {"max_queue_size": 3}},
    }


def test_the_rest() -> None:
    config = parsed(
        dataclasses.replace(BASE, response_cache=ResponseCache(enable=True), backend_parameters={"key": "value"})
    )
    assert parsed(dataclasses.replace(BASE, decoupled=True))["model_transaction_policy"] == {"decoupled": True}
    assert config["response_cache"] == {"enable": True}
    assert config["parameters"] == {"key": {"string_value": "value"}}
    assert "response_cache" not in parsed(dataclasses.replace(BASE, response_cache=ResponseCache(enable=False)))


@pytest.mark.parametrize(
    "name",
    [
        'quote " and \\ backslash',
        "line\nbreak\r\ttab",
        "null \x00 then digits\x0012",
        "ünïcödé 数",
        "} { # : ' ,",
        "\u2028\x85\x7f",
    ],
)
def test_any_name_survives(name: str) -> None:
    config = dataclasses.replace(BASE, outputs=[TensorSpec(name, (1,), np.int8)], backend_parameters={name: name})
    read = parsed(config)
    assert read["output"][0]["name"] == name
    assert read["parameters"] == {name: {"string_value": name}}
