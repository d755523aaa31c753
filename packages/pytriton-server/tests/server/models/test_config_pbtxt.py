import dataclasses
import importlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pytriton.model_config import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction
from pytriton.model_config._prototxt import parse_prototxt
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.model_config.parser import ModelConfigParser
from pytriton.model_config.triton_model_config import ResponseCache, TensorSpec, TritonModelConfig
from pytriton.proxy_backend import BACKEND_NAME
from pytriton.server.models.definition import render_config, render_config_json

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
    config = parsed(dataclasses.replace(BASE, backend_parameters={"key": "value"}))
    assert parsed(dataclasses.replace(BASE, decoupled=True))["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"] == {"key": {"string_value": "value"}}
    for enable in (False, True):
        # The proxy keeps answers itself.
        assert "response_cache" not in parsed(dataclasses.replace(BASE, response_cache=ResponseCache(enable=enable)))


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


# ---- any configuration: Triton's definition of it is the judge ----------------------------------------------------

DTYPES = [np.bool_, np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64, np.bytes_]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
MICROSECONDS = st.integers(0, 9 * 10**15)


@st.composite
def policies(draw: st.DrawFn, *, may_delay: bool) -> QueuePolicy:
    actions = [TimeoutAction.REJECT, TimeoutAction.DELAY] if may_delay else [TimeoutAction.REJECT]
    return QueuePolicy(
        draw(st.sampled_from(actions)), draw(MICROSECONDS), draw(st.booleans()), draw(st.integers(0, 2**32 - 1))
    )


@st.composite
def batchers(draw: st.DrawFn, max_batch_size: int) -> DynamicBatcher:
    levels = draw(st.sampled_from([0, 0, 1, 2, 5, 2**64 - 1]))
    ordered = draw(st.booleans()) and levels < 2
    policy = policies(may_delay=not ordered)
    level = st.integers(1, levels) if levels else st.nothing()
    return DynamicBatcher(
        max_queue_delay_microseconds=draw(MICROSECONDS),
        preferred_batch_size=draw(st.none() | st.lists(st.integers(1, max_batch_size), max_size=3)),
        preserve_ordering=ordered,
        priority_levels=levels,
        default_priority_level=draw(level) if levels else 0,
        default_queue_policy=draw(st.none() | policy),
        priority_queue_policy=draw(st.none() | st.dictionaries(level, policy, max_size=3)) if levels else None,
    )


@st.composite
def configs(draw: st.DrawFn) -> TritonModelConfig:
    shapes = st.lists(st.just(-1) | st.integers(1, 2**63 - 1), min_size=1, max_size=3).map(tuple)
    tensors = st.builds(TensorSpec, TEXTS, shapes, st.sampled_from(DTYPES))
    optional = st.builds(TensorSpec, TEXTS, shapes, st.sampled_from(DTYPES), st.booleans())
    batching = draw(st.booleans())
    max_batch_size = draw(st.integers(1, 2**31 - 1)) if batching else 0
    decoupled = draw(st.booleans())
    return TritonModelConfig(
        model_name=draw(TEXTS),
        max_batch_size=max_batch_size,
        batching=batching,
        batcher=draw(st.none() | batchers(max_batch_size)) if batching else None,
        instance_group=draw(
            st.dictionaries(st.sampled_from(list(DeviceKind)), st.none() | st.integers(1, 2**31 - 1), max_size=2)
        ),
        decoupled=decoupled,
        backend_parameters=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
        inputs=draw(st.lists(optional, max_size=3)),
        outputs=draw(st.lists(tensors, max_size=3)),
        response_cache=None if decoupled else draw(st.none() | st.builds(ResponseCache, st.booleans())),
    )


@pytest.mark.slow
@given(configs())
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_text_and_json_say_the_same_and_can_be_read(config: TritonModelConfig) -> None:
    from_text = text_format.Parse(render_config(config), model_config_pb2.ModelConfig())
    assert json_format.Parse(render_config_json(config), model_config_pb2.ModelConfig()) == from_text
    # And our reader understands what protobuf writes itself.
    read = ModelConfigParser.from_dict(parse_prototxt(text_format.MessageToString(from_text)))
    assert read == ModelConfigParser.from_dict(json_format.MessageToDict(from_text))
    expected = dataclasses.replace(config, response_cache=read.response_cache, batcher=read.batcher)
    assert read == dataclasses.replace(expected, instance_group=read.instance_group)
    assert (config.batcher is None) == (read.batcher is None)


def test_the_warmup_is_not_told_to_triton() -> None:
    config = dataclasses.replace(BASE, model_warmup=[ModelWarmup("w", 1, {"a": WarmupInput("int8", (1,), True)}, 1)])
    assert "model_warmup" not in render_config(config)
    assert "model_warmup" not in render_config_json(config)


def test_the_backend_is_the_one_that_is_installed() -> None:
    assert parsed(BASE)["backend"] == BACKEND_NAME
