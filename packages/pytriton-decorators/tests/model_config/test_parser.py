from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError, PyTritonModelConfigError
from pytriton.model_config import DeviceKind, TimeoutAction
from pytriton.model_config._hints import HINTS_PARAMETER
from pytriton.model_config._prototxt import parse_prototxt
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.parser import ModelConfigParser
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [1]}

TEXT = """
# Written by hand, in all the forms that the format has.
name: "model"; platform: "onnxruntime_onnx",
max_batch_size: 0x10
input [
  { name: 'first' data_type: TYPE_FP32 dims: [ -1, 3 ] },
  { name: "sec" "ond" data_type: TYPE_STRING dims: 2 dims: 3 optional: true }
]
output < name: "\\303\\274\\x62\\u00e9\\"" data_type: TYPE_BOOL dims: [010] >
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching {
  preferred_batch_size: [4, 8]
  priority_queue_policy { key: 1 value: { timeout_action: DELAY } }
  priority_queue_policy { key: 2 value { max_queue_size: 5 } }
  priority_levels: 2 default_priority_level: 2
}
parameters: { key: "k" value: { string_value: "v" } }
parameters { key: "empty" }
batch_input { kind: BATCH_ELEMENT_COUNT }
batch_input { kind: BATCH_ITEM_SHAPE }
model_warmup { name: "w" count: 1 batch_size: 1 inputs { key: "first" value { data_type: TYPE_FP32 dims: [1, 3] zero_data: true } } }
optimization { cuda { graphs: true } gather_kernel_buffer_threshold: 1.5e3 }
"""  # noqa: E501


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(TEXT, encoding="utf-8")
    config = ModelConfigParser.from_file(config_path=path)
    assert config.model_name == "model"
    assert (config.batching, config.max_batch_size) == (True, 16)
    assert config.inputs is not None
    assert [(spec.name, spec.shape, spec.dtype, spec.optional) for spec in config.inputs] == [
        ("first", (-1, 3), np.float32, False),
        ("second", (2, 3), np.bytes_, True),
    ]
    assert config.outputs is not None
    assert [(spec.name, spec.shape, spec.dtype) for spec in config.outputs] == [('übé"', (8,), np.bool_)]
    assert config.instance_group == {DeviceKind.KIND_CPU: 2}
    assert config.backend_parameters == {"k": "v", "empty": ""}
    assert config.batcher is not None
    assert config.batcher.preferred_batch_size == [4, 8]
    assert config.batcher.priority_queue_policy is not None
    assert config.batcher.priority_queue_policy[1].timeout_action is TimeoutAction.DELAY
    assert config.batcher.priority_queue_policy[2].max_queue_size == 5
    assert config.model_warmup is not None
    assert config.model_warmup[0].inputs["first"].shape == (1, 3)


def test_what_triton_reports_is_read() -> None:
    reported = {
        "name": "m",
        "max_batch_size": 0,
        "input": [{**TENSOR, "reshape": {}, "is_shape_tensor": False, "format": "FORMAT_NONE"}],
        "output": [{**TENSOR, "label_filename": ""}],
        "instance_group": [{"name": "m", "kind": "KIND_CPU", "count": 1, "gpus": []}],
        "dynamic_batching": {"max_queue_delay_microseconds": "0", "preferred_batch_size": []},
        "model_transaction_policy": {"decoupled": True},
        "response_cache": {"enable": False},
        "parameters": {},
        "model_warmup": [],
    }
    config = ModelConfigParser.from_dict(reported)
    assert (config.batching, config.max_batch_size, config.decoupled) == (False, 0, True)
    assert config.response_cache is not None
    assert not config.response_cache.enable
    assert config.model_warmup is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "must have a name"),
        ({"name": 3}, "name is not of its kind"),
        ({"max_batch_size": "many"}, "max_batch_size must be an integer"),
        ({"input": [{**TENSOR, "name": ""}]}, "input 1 of a model configuration has no name"),
        ({"input": [TENSOR, {**TENSOR, "data_type": ""}]}, "input 'x' .* no data_type"),
        ({"output": [{**TENSOR, "dims": []}]}, "output 'x' .* no dims"),
        ({"output": [{**TENSOR, "dims": ["a"]}]}, "dims must be an integer"),
        ({"output": [{**TENSOR, "data_type": "TYPE_COMPLEX"}]}, "TYPE_COMPLEX"),
        ({"output": TENSOR}, "output is not a list"),
        ({"output": [3]}, "must be a mapping; got 3"),
        ({"instance_group": [{"kind": "KIND_MODEL"}]}, "KIND_AUTO, KIND_CPU, KIND_GPU; got 'KIND_MODEL'"),
        ({"dynamic_batching": [1]}, "dynamic_batching must be a mapping"),
        ({"dynamic_batching": {"default_queue_policy": {"timeout_action": "WAIT"}}}, "REJECT, DELAY; got 'WAIT'"),
        ({"dynamic_batching": {"preserve_ordering": "yes"}}, "preserve_ordering is not of its kind"),
    ],
)
def test_what_cannot_be_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PyTritonModelConfigError, match=message):
        ModelConfigParser.from_dict({"name": "m", "input": [TENSOR], "output": [TENSOR], **changes})


def test_other_errors() -> None:
    with pytest.raises(TypeError, match="parameters"):
        ModelConfigParser.from_dict({"name": "m", "parameters": {"key": "value"}})
    with pytest.raises(TypeError, match="parameters"):
        ModelConfigParser.from_dict({"name": "m", "parameters": ["key"]})
    with pytest.raises(PyTritonBadParameterError, match="max_queue_delay_microseconds=-1"):
        ModelConfigParser.from_dict({"name": "m", "dynamic_batching": {"max_queue_delay_microseconds": -1}})
    with pytest.raises(PyTritonModelConfigError, match="must be a mapping"):
        ModelConfigParser.from_dict([])  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name "x"', r"line 1: expected ':' or a message, got '\"x\"'"),
        ("name: ", r"expected a value, got its end"),
        ("input {", r"expected '}', got its end"),
        ("input { name: 'x' >", r"expected the name of a field, got '>'"),
        ("dims: [1 2]", r"expected ',' or '\]', got '2'"),
        ("name: 'x'\n\n= 3", r"line 3: expected a name, a value or a sign"),
        ("name: 'x", r"got \"'\""),
        ('name: "\\377"', r"not UTF-8"),
        (": 3", r"expected the name of a field, got ':'"),
        ("a {" * 100, r"at most 64 messages in each other"),
    ],
)
def test_text_that_is_not_in_the_format(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PyTritonModelConfigError, match=message) as caught:
        ModelConfigParser.from_file(config_path=path)
    assert str(path) in str(caught.value)


def test_values() -> None:
    text = r'a: -3 b: 1.5 c: -.5e1 d: true e: false f: SOME_WORD g: "a\tb\a\0\x0a\U0001f600" h: 017 i: 08.5 j: 2f'
    assert parse_prototxt(text) == {
        "a": -3,
        "b": 1.5,
        "c": -5.0,
        "d": True,
        "e": False,
        "f": "SOME_WORD",
        "g": "a\tb\a\0\n😀",
        "h": 15,
        "i": 8.5,
        "j": 2.0,
    }
    assert parse_prototxt("") == {}
    assert parse_prototxt("a: 1 a: 2 a: 3") == {"a": [1, 2, 3]}


@pytest.mark.parametrize("hint", ["str", "list[float]", 'Annotated[NDArray[np.float32], Shape("batch", -1)]', "é\n\\"])
def test_hints_go_there_and_back(hint: str) -> None:
    specs = [TensorSpec("x", (1,), np.float32, hint=hint), TensorSpec("y", (1,), np.float32)]
    generator = ModelConfigGenerator(
        TritonModelConfig("m", inputs=specs, outputs=specs[1:], backend_parameters={"k": "v"})
    )
    for written in (generator.get_config(), parse_prototxt(generator.get_text())):
        read = ModelConfigParser.from_dict(written)
        assert read.backend_parameters == {"k": "v"}
        assert [spec.hint for spec in (*(read.inputs or ()), *(read.outputs or ()))] == [hint, None, None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "[" * 100_000,
        '{"inputs": {}}',
        '{"inputs": {"z": "str"}, "outputs": {}}',
        '{"inputs": {"x": 1}, "outputs": {}}',
        '{"inputs": ["x"], "outputs": {}}',
    ],
)
def test_hints_of_somebody_else_stay_a_parameter(text: str) -> None:
    config = {"name": "m", "input": [TENSOR], "parameters": {HINTS_PARAMETER: {"string_value": text}}}
    read = ModelConfigParser.from_dict(config)
    assert read.inputs is not None
    assert (read.inputs[0].hint, read.backend_parameters) == (None, {HINTS_PARAMETER: text})
    # What was given by hand is not replaced.
    read.inputs[0].hint = "float"
    assert ModelConfigGenerator(read).get_config()["parameters"][HINTS_PARAMETER] == {"string_value": text}
