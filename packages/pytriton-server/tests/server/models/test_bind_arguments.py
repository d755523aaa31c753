from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.models.arguments import (
    checked_callables,
    checked_config,
    checked_name,
    checked_tensors,
    checked_version,
    named_specs,
    wire_specs,
)

X = Tensor((1,), np.float32, "x")


def test_names() -> None:
    assert checked_name("a.B-c_1") == "a.B-c_1"
    for wrong in ("", "a b", "a/b", "..", "ü", None, 3):
        with pytest.raises(PyTritonValidationError, match="Model name"):
            checked_name(wrong)  # type: ignore[arg-type] # wrong on purpose


def test_versions() -> None:
    assert checked_version(3, "m") == 3
    assert type(checked_version(np.int64(3), "m")) is int
    for wrong in (0, -1, True, 1.0, "1", None, 2**63):
        with pytest.raises(PyTritonValidationError, match=r"Model 'm': model_version must be an integer") as caught:
            checked_version(wrong, "m")
        assert caught.value.received is wrong


def test_callables() -> None:
    assert checked_callables(print, "m") == [print]
    assert checked_callables((print, print), "m") == [print, print]
    for wrong in (None, [], "print", [print, None], {print: print}):
        with pytest.raises(PyTritonValidationError, match=r"Model 'm': infer_func has to be a callable"):
            checked_callables(wrong, "m")


def test_tensors() -> None:
    assert checked_tensors([X], "inputs", "m") == (X,)
    assert checked_tensors((tensor for tensor in [X, X]), "inputs", "m") == (X, X)
    for wrong in (None, X, "x", {"x": X}):
        with pytest.raises(PyTritonValidationError, match=r"Model 'm': outputs has to be a list of Tensor"):
            checked_tensors(wrong, "outputs", "m")


def test_names_of_tensors() -> None:
    tensors = [Tensor((1,), np.int8), X, Tensor((1,), np.int8)]
    assert [spec.name for spec in named_specs(tensors, "INPUT", "m")] == ["INPUT_1", "x", "INPUT_3"]
    assert [spec.name for spec in named_specs(tensors, "OUTPUT", "m")] == ["OUTPUT_1", "x", "OUTPUT_3"]
    assert named_specs([], "INPUT", "m") == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([np.float32], "input 1 must be a Tensor"),
        ([X, X], "two inputs of the name 'x'"),
        ([Tensor((1,), np.int8, "INPUT_2"), Tensor((1,), np.int8)], "'INPUT_2'"),
        ([Tensor((), np.int8, "scalar")], r"'scalar'.*Declare shape=\(1,\)"),
    ],
)
def test_tensors_that_make_no_model(tensors: Any, message: str) -> None:
    with pytest.raises(PyTritonValidationError, match=message):
        named_specs(tensors, "INPUT", "m")


def test_outputs_are_not_optional() -> None:
    tensor = Tensor((1,), np.int8, "x", optional=True)
    assert named_specs([tensor], "INPUT", "m")[0].optional
    with pytest.raises(PyTritonValidationError, match=r"Output tensors cannot be optional\."):
        named_specs([tensor], "OUTPUT", "m")


def test_what_the_worker_is_told() -> None:
    specs = named_specs([X, Tensor((-1,), str, "s", optional=True)], "INPUT", "m")
    assert [(spec.name, spec.dtype, spec.shape, spec.optional) for spec in wire_specs(specs)] == [
        ("x", np.dtype(np.float32), (1,), False),
        ("s", np.dtype(object), (-1,), True),
    ]
    assert wire_specs(None) == ()


def test_configurations() -> None:
    config = ModelConfig()
    assert checked_config(config, "m", [], []) is config
    for wrong in ({"max_batch_size": 4}, 4, None, ModelConfig):
        with pytest.raises(PyTritonValidationError, match=r"Model 'm': config has to be a ModelConfig"):
            checked_config(wrong, "m", [], [])
    with pytest.raises(PyTritonBadParameterError, match="max_batch_size"):
        checked_config(ModelConfig(max_batch_size=0), "m", [], [])


@pytest.mark.parametrize(
    ("axes", "batching", "fits"), [(31, True, True), (32, True, False), (32, False, True), (33, False, False)]
)
@pytest.mark.parametrize("kind", ["INPUT", "OUTPUT"])
def test_no_array_has_more_axes(axes: int, batching: bool, fits: bool, kind: str) -> None:
    specs = named_specs([Tensor(dtype=np.float32, shape=(1,) * axes)], kind, "m")
    tensors = (specs, []) if kind == "INPUT" else ([], specs)
    config = ModelConfig(batching=batching, max_batch_size=8 if batching else 0)
    if fits:
        checked_config(config, "m", *tensors)
        return
    with pytest.raises(PyTritonValidationError, match=rf"tensor '{kind}_1': an array has at most 32 axes; got"):
        checked_config(config, "m", *tensors)
