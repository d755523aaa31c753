"""What the server counts of models of every kind, and what models are told of each other: as with Triton's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.python_models.pair import Pair, Side, text
from support.waiting import eventually


def row(*values: float) -> dict[str, Any]:
    return {"INPUT": np.array([values], np.float32)}


def counted(side: Side, model: str, requests: int) -> dict[str, Any]:
    """Return what the server says of a model, by a call and on its page of metrics."""
    return {"statistics": side.statistics(model, requests), "metrics": side.metrics(model)}


def test_coroutines_and_ensembles_are_counted(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        for value in (1, 2):
            side.infer("twice", row(value, 0, 0, 0))
        side.infer("asynchronous", row(5, 0, 0, 0), protocol="grpc")
        # Both end with an error; what a request of the model itself got is the other model's.
        side.infer("asynchronous", row(-1, 0, 0, 0))
        return {
            "twice": counted(side, "twice", 2),
            "asynchronous": counted(side, "asynchronous", 6),
            "types": counted(side, "types", 10),
        }

    with pair.loaded("types", "asynchronous", "twice"):
        answers = pair.compare(ask)
    assert answers["types"]["statistics"]["requests"]["success"] == 10
    assert answers["asynchronous"]["statistics"]["requests"]["fail"] == 1


def test_senders_of_models_with_one_response_are_counted(pair: Pair) -> None:
    commands = ["send(response(1), FINAL)", "nothing(send(response(1)), send(flags=FINAL))", "[response(3)]"]

    def ask(side: Side) -> dict[str, Any]:
        for command in commands:
            side.infer("streams", {"COMMAND": text(command)})
        return counted(side, "streams", len(commands))

    with pair.loaded("streams", edit={"decoupled: true": "decoupled: false"}):
        answers = pair.compare(ask)
    assert answers["statistics"]["requests"]["success"] == len(commands)


def test_a_request_without_a_stream_goes_back_into_the_queue(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        return {
            str(value): side.infer(
                "steps", {"INPUT": np.array([[value]], np.int32)}, sequence_id=10 + value, sequence_start=True
            )
            for value in (1, 2, 5)
        }

    with pair.loaded("steps"):
        answers = pair.compare(ask)
    assert [answers[value]["outputs"]["OUTPUT"]["data"] for value in "125"] == [[1, 1], [2, 2], [5, 5]]


CONTROLS = {
    "numbers": {},
    "floats": {"kind: CONTROL_SEQUENCE_START int32_false_true": "kind: CONTROL_SEQUENCE_START fp32_false_true"},
    "booleans": {"int32_false_true: [ 0, 1 ] }": "bool_false_true: [ false, true ] }"},
    "small identities": {"data_type: TYPE_UINT64": "data_type: TYPE_INT32"},
}


@pytest.mark.parametrize("what", CONTROLS)
def test_sequences_side_by_side(pair: Pair, what: str) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers = []
        for step in range(3):
            for sequence in (7, 8, 9):
                told = side.infer(
                    "sequence",
                    {"INPUT": np.array([[sequence * 10 + step]], np.int64)},
                    sequence_id=sequence,
                    sequence_start=step == 0,
                    sequence_end=step == 2,
                )
                answers.append(told["outputs"]["OUTPUT"]["data"] if "outputs" in told else told)
        return {"answers": answers, **counted(side, "sequence", len(answers))}

    with pair.loaded("sequence", edit={"direct { }": "oldest { }", **CONTROLS[what]}):
        answers = pair.compare(ask)
    assert answers["answers"][-1] == [0, 1, 1, 9, 273]


CORRID = 'control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'


def test_identities_of_sequences_that_are_texts(pair: Pair) -> None:
    source = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sequence = request.correlation_id()
        self.sums[sequence] = self.sums.get(sequence, 0) + 1
        told = [sequence == "one", sequence == "zażółć", request.flags(), len(sequence), self.sums[sequence]]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([told], np.int64))])
"""

    def ask(side: Side) -> list[Any]:
        # Without the control: Triton 2.51 hands a text over with 128 bytes, which is no tensor of one text.
        assert not side.load("sequence", source, edit={"direct { }": "oldest { }", CORRID: ""})
        try:
            return [
                side.infer(
                    "sequence",
                    {"INPUT": np.array([[1]], np.int64)},
                    protocol=protocol,
                    sequence_id=sequence,
                    sequence_start=start,
                    sequence_end=not start,
                )
                for protocol in ("http", "grpc")
                for start in (True, False)
                for sequence in ("one", "zażółć")
            ]
        finally:
            side.unload("sequence")

    answers = pair.compare(ask)
    assert [each["outputs"]["OUTPUT"]["data"] for each in answers[:2]] == [[1, 0, 1, 3, 1], [0, 1, 1, 6, 1]]


def test_a_cancelled_request_is_counted(pair: Pair) -> None:
    def ask(side: Side) -> Any:
        side.cancel("cancellable", row(1), side.file("cancellable", "started"))
        eventually(side.file("cancellable", "told").exists)
        return counted(side, "cancellable", 1)

    with pair.loaded("cancellable", edit={"dims: [ 1 ]": "dims: [ -1, -1 ]"}):
        pair.compare(ask)


def test_instances_are_counted_as_one_model(pair: Pair) -> None:
    def ask(side: Side) -> Any:
        answers = side.infer_together("files", [{"INPUT": np.zeros(1, np.float32)}] * 9)
        assert all("outputs" in answer for answer in answers)
        return counted(side, "files", 9)

    with pair.loaded("files", edit={"count: 3": "count: 2"}):
        answers = pair.compare(ask)
    assert answers["statistics"]["executions"] == 9


SEQUENCES = [
    f"request_to('sequence', pb_utils.Tensor('INPUT', np.array([[{value}]])), outputs=['OUTPUT'], "
    f"correlation_id=77, flags={flags}).exec()"
    for value, flags in ((5, 1), (6, 0), (7, 2), (8, 0), (9, 3))
]
SLOW = "request_to('types', pb_utils.Tensor('fp32', np.zeros((1, 1), np.float32)), outputs=['fp32_out'], timeout={})"
FURTHER = [
    SLOW.format(10_000_000) + ".exec()",
    "list(request_to('steps', pb_utils.Tensor('INPUT', np.array([[3]], np.int32)), outputs=['OUTPUT'], "
    "correlation_id=5, flags=1).exec(decoupled=True))",
    "request_to('', outputs=['OUTPUT']).exec()",
    "request_to('types', outputs=['fp32_out'], model_version=-1).exec()",
    "request_to('types', pb_utils.Tensor('fp32', np.zeros((1, 1), np.float32)), outputs=['fp32_out']).exec(True)",
    "request_to('types', pb_utils.Tensor('fp32', np.zeros((9, 1), np.float32)), outputs=['fp32_out']).exec()",
]


def test_requests_to_models_with_a_state(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers: dict[str, Any] = {expression: told(side, expression) for expression in (*SEQUENCES, *FURTHER)}
        answers["counts"] = counted(side, "sequence", 4)
        return answers

    with pair.loaded("types", "steps", "sequence", "expressions", edit=None):
        answers = pair.compare(ask)
    assert "[[0, 1, 1, 77, 18]]" in answers[SEQUENCES[2]]


def told(side: Side, expression: str) -> Any:
    """What an expression comes to in a model."""
    answer = side.infer("expressions", {"EXPRESSION": text(expression)}, protocol="grpc")
    return side.neutral(answer["outputs"]["RESULT"]["data"][0]) if "outputs" in answer else answer
