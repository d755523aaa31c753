"""Python models of every kind: answers, errors, statistics and metrics are those of Triton's Python backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.python_models.commands import FAULTS, STREAMS
from support.python_models.pair import Pair, Side, text


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_plain_model(pair: Pair, protocol: str) -> None:
    def ask(side: Side) -> list[Any]:
        def pair_of(rows: int, dtype: type = np.float32) -> dict[str, Any]:
            left: Any = np.arange(rows * 4, dtype=dtype).reshape(rows, 4)
            return {"INPUT0": left, "INPUT1": left * 3}

        answers = [
            side.infer("add_sub", pair_of(4), protocol=protocol, request_id="seven"),
            side.infer("add_sub", pair_of(8), protocol=protocol, outputs=["OUTPUT1"]),
            side.infer("add_sub", pair_of(9), protocol=protocol),
            side.infer("add_sub", pair_of(4, np.float64), protocol=protocol),
            side.infer("add_sub", {"INPUT0": np.zeros((4, 4), np.float32)}, protocol=protocol),
            side.infer("add_sub", pair_of(4), protocol=protocol, outputs=["OUTPUT2"]),
            side.infer("add_sub", {**pair_of(4), "INPUT1": np.zeros((4, 5), np.float32)}, protocol=protocol),
            side.infer("add_sub", pair_of(4), protocol=protocol, model_version="2"),
        ]
        if protocol == "http":
            answers.append(side.infer("add_sub", pair_of(4), binary=False, outputs=["OUTPUT0", "OUTPUT1"]))
        else:
            answers.append(side.infer_together("add_sub", [pair_of(1)] * 4))
        answers.append(side.statistics("add_sub", 3 if protocol == "http" else 6))
        answers.append(side.metrics("add_sub"))
        return answers

    with pair.loaded("add_sub"):
        answers = pair.compare(ask)
    assert answers[0]["outputs"]["OUTPUT1"]["data"] == [-2 * value for value in range(16)]
    assert set(answers[1]["outputs"]) == {"OUTPUT1"}
    assert all("error" in answer for answer in answers[2:8])
    assert answers[-2]["executions"] == 3
    assert answers[-1]


NUMBERS = {
    "bool": np.array([[True, False]]),
    "uint8": np.array([[0, 255]], np.uint8),
    "uint16": np.array([[0, 65535]], np.uint16),
    "uint32": np.array([[0, 2**32 - 1]], np.uint32),
    "uint64": np.array([[0, 2**64 - 1]], np.uint64),
    "int8": np.array([[-128, 127]], np.int8),
    "int16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "int32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "int64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "fp16": np.array([[0.5, -65504]], np.float16),
    "fp32": np.array([[0.1, -1e38]], np.float32),
    "fp64": np.array([[0.1, -1e300]], np.float64),
    "string": np.array([["", "zażółć", "x" * 5000]], np.object_),
}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_type(pair: Pair, protocol: str) -> None:
    def ask(side: Side) -> dict[str, Any]:
        def echo(**inputs: Any) -> Any:
            return side.infer("types", inputs, protocol=protocol)

        return {
            "all": echo(**NUMBERS),
            "one each": {name: echo(**{name: array}) for name, array in NUMBERS.items()},
            "nothing in it": {name: echo(**{name: array[:, :0]}) for name, array in NUMBERS.items()},
            "several rows": {name: echo(**{name: np.tile(array, (3, 1))}) for name, array in NUMBERS.items()},
        }

    with pair.loaded("types"):
        answers = pair.compare(ask)
    for name, array in NUMBERS.items():
        assert answers["all"]["outputs"][f"{name}_out"]["data"] == array.ravel().tolist()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bf16(pair: Pair, protocol: str) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    with pair.loaded("types"):
        answer = pair.compare(
            lambda side: side.infer("types", {"bf16": np.array([[1.5, -2]], dtype)}, protocol=protocol)
        )
    assert answer["outputs"]["bf16_out"] == {"datatype": "BF16", "shape": [1, 2], "data": [1.5, -2]}


FAULTS_OF_TYPE = [
    "[pb_utils.InferenceResponse([5])]",
    "[response(np.float32(1))]",
    "[pb_utils.InferenceResponse(pb_utils.Tensor('OUTPUT', np.float32([1])))]",
    "[pb_utils.InferenceResponse(error='text')]",
    "[pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT', [1.0])])]",
]


def test_what_execute_returns_and_raises(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers = {fault: side.infer("faults", {"COMMAND": text(fault)}, protocol="grpc") for fault in FAULTS}
        answers["over HTTP"] = {
            fault: side.infer("faults", {"COMMAND": text(fault)}) for fault in FAULTS if fault.startswith("[error")
        }
        answers["statistics"] = side.statistics("faults", len(FAULTS) + len(answers["over HTTP"]))
        answers["metrics"] = side.metrics("faults")
        return answers

    meant = {f"{fault}/error": "text of a TypeError" for fault in FAULTS_OF_TYPE}
    meant["fail(UnspeakableError())/error"] = "error that cannot be told"
    meant["statistics"] = meant["metrics"] = "errors are failures"
    with pair.loaded("faults"):
        answers = pair.compare(ask, meant)
    right = sum("outputs" in answer for answer in answers.values())
    assert answers["statistics"]["requests"]["success"] == right
    assert answers["statistics"]["requests"]["fail"] == len(FAULTS) + len(answers["over HTTP"]) - right
    assert answers["[ok]"]["outputs"]["OUTPUT"]["data"] == [1, 2]
    assert "no such value" in answers["fail(ValueError('no such value'))"]["error"]


def test_what_senders_send(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers: dict[str, Any] = {command: side.stream("streams", {"COMMAND": text(command)}) for command in STREAMS}
        answers["three on one stream"] = side.stream(
            "streams", *({"COMMAND": text(f"send(response({number}), FINAL)")} for number in range(3))
        )
        answers["not on a stream"] = [
            side.infer("streams", {"COMMAND": text("send(response(1), FINAL)")}, protocol=protocol)
            for protocol in ("http", "grpc")
        ]
        answers["statistics"] = side.statistics("streams", len(STREAMS) + 3)
        return answers

    with pair.loaded("streams"):
        answers = pair.compare(ask, {"statistics": "errors are failures"})
    assert [answer["parameters"] for answer in answers["send(response(1), FINAL)"]] == [{"triton_final_response": True}]
