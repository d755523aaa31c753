"""Models of further kinds: coroutines, sequences, ensembles, instances, files beside `model.py`, cancelled requests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.python_models.pair import Pair, Side, text
from support.waiting import eventually


def row(*values: float) -> dict[str, Any]:
    return {"INPUT": np.array([values], np.float32)}


def test_coroutines_and_ensembles(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        return {
            "answered": side.infer("asynchronous", row(1, 2, 3, 4)),
            "several": side.infer_together("asynchronous", [row(number + 1, 0, 0, 0) for number in range(8)]),
            "raised": side.infer("asynchronous", row(-1, 0, 0, 0)),
            "the other model's error": side.infer("asynchronous", row(0, 0, 0, 0)),
            "ensemble": side.infer("twice", row(1, 2, 3, 4), protocol="grpc"),
            "error in an ensemble": side.infer("twice", row(-1, 2, 3, 4), protocol="grpc"),
        }

    with pair.loaded("types", "asynchronous", "twice"):
        answers = pair.compare(ask)
    assert answers["answered"]["outputs"]["OUTPUT"]["data"] == [11, 22, 33, 44]
    assert answers["ensemble"]["outputs"]["OUTPUT"]["data"] == [121, 242, 363, 484]
    assert "negative" in answers["raised"]["error"]
    assert "none" in answers["the other model's error"]["error"]


SENDERS = [
    "send(response(1), FINAL)",
    "nothing(send(response(1)), send(flags=FINAL))",
    "send(error('an error', pb_utils.TritonError.NOT_FOUND), FINAL)",
    "self.later(lambda: send(response(1), FINAL))",
    "[response(3)]",
    "nothing(send(response(1), FINAL)) or [None]",
]
# Of ours alone: after it one of some sixty models of Triton 2.51 unloads for ever. Without a response before it: after
# that Triton 2.51 corrupts its memory.
FAILURE = "fail(ValueError('before any response'))"
AFTERWARDS = "nothing(send(response(1), FINAL), fail(ValueError('after the last')))"


def test_senders_of_models_with_one_response(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        return {command: side.infer("streams", {"COMMAND": text(command)}, protocol="grpc") for command in SENDERS}

    with pair.loaded("streams", edit={"decoupled: true": "decoupled: false"}):
        answers = pair.compare(ask)
        raised = pair.workers.infer("streams", {"COMMAND": text(FAILURE)}, protocol="grpc")
    assert answers[SENDERS[0]]["outputs"]["OUTPUT"]["data"] == [1]
    assert raised["error"].startswith(
        "Failed to process the request(s) for model 'streams_0', message: ValueError: before any response"
    )


def after_the_last_response(side: Side, call: Any) -> dict[str, Any]:
    return {
        "answers": [call("streams", {"COMMAND": text(AFTERWARDS)}) for _ in range(3)],
        "next": call("streams", {"COMMAND": text("send(response(2), FINAL)")}),
        "requests": side.statistics("streams", 4)["requests"],
    }


def test_an_error_after_the_last_response(pair: Pair) -> None:
    meant = {"requests": "answers are successes"}
    with pair.loaded("streams"):
        answers = pair.compare(lambda side: after_the_last_response(side, side.stream), meant)
    assert answers["requests"]["success"] == 4
    # Of ours alone: Triton 2.51 answers a model that has one response once more, and its server dies of that.
    side = pair.workers
    assert not side.load("streams", edit={"decoupled: true": "decoupled: false"})
    answers = after_the_last_response(side, side.infer)
    side.unload("streams")
    told = [answer["outputs"]["OUTPUT"]["data"] for answer in (*answers["answers"], answers["next"])]
    assert told == [[1], [1], [1], [2]]
    assert (answers["requests"]["success"], answers["requests"]["fail"]) == (4, 0)


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_sequences(pair: Pair, strategy: str) -> None:
    def ask(side: Side) -> list[Any]:
        def step(sequence: int, value: int, *, start: bool = False, end: bool = False, **options: Any) -> Any:
            told = side.infer(
                "sequence",
                {"INPUT": np.array([[value]], np.int64)},
                sequence_id=sequence,
                sequence_start=start,
                sequence_end=end,
                **options,
            )
            return told["outputs"]["OUTPUT"]["data"] if "outputs" in told else told

        return [
            step(7, 1, start=True),
            step(8, 10, start=True, protocol="grpc"),
            step(7, 2, protocol="grpc"),
            step(8, 20, end=True),
            step(7, 3, end=True),
            step(8, 100, start=True, end=True),
            step(7, 4),
            step(0, 4),
            side.statistics("sequence", 6)["requests"],
        ]

    with pair.loaded("sequence", edit={"direct { }": f"{strategy} {{ }}"}):
        answers = pair.compare(ask)
    assert answers[4] == [0, 1, 1, 7, 6]
    assert "error" in answers[6]


def test_a_request_goes_back_into_the_queue(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        def count(value: int, **options: Any) -> Any:
            return side.stream("iterative", {"INPUT": np.array([[value]], np.int32)}, **options)

        return {
            "once": count(0, sequence_id=5, sequence_start=True),
            "four times": count(3, sequence_id=6, sequence_start=True),
            "never": count(-1, sequence_id=7, sequence_start=True),
        }

    with pair.loaded("iterative"):
        answers = pair.compare(ask)
    assert [answer["outputs"]["OUTPUT"]["data"][0] for answer in answers["four times"]] == [3, 2, 1, 0]


def test_a_cancelled_request(pair: Pair) -> None:
    def ask(side: Side) -> Any:
        error = side.cancel("cancellable", row(1), side.file("cancellable", "started"))
        told = side.file("cancellable", "told")
        eventually(told.exists)
        return error, told.read_text()

    with pair.loaded("cancellable", edit={"dims: [ 1 ]": "dims: [ -1, -1 ]"}):
        _, told = pair.compare(ask)
    assert told == "[False, True, True]"


def test_files_and_instances(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        begun = {
            path.name: {key: side.neutral(value) for key, value in json.loads(path.read_text()).items()}
            for path in (side.repository / "files").glob("*.begun")
        }
        answer = side.infer("files", {"INPUT": np.zeros(1, np.float32)})
        found = [side.neutral(each) for each in answer["outputs"]["OUTPUT"]["data"]]
        # The folder that processes run in.
        del found[6]
        return {"begun": begun, "found": found}

    with pair.loaded("files"):
        answers = pair.compare(ask)
    assert len(answers["begun"]) == 3


COMPLETED = {
    "tensors": (
        "config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [-1, 4]})",
        "config.add_input({'name': 'o', 'data_type': 'TYPE_STRING', 'dims': [1], 'optional': True})",
        "config.add_output({'name': 'y', 'data_type': 'TYPE_BF16', 'dims': [4]})",
    ),
    "a batch size": ("config.set_max_batch_size(16)", "config.set_dynamic_batching()"),
    "dynamic batching first": ("config.set_dynamic_batching()", "config.set_max_batch_size(16)"),
    "decoupled": ("config.set_model_transaction_policy({'decoupled': True})",),
    "a tensor twice": ("config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [1]})",) * 2,
    "a tensor that contradicts": (
        "config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [1]})",
        "config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [2]})",
    ),
    "no name": ("config.add_input({'data_type': 'TYPE_FP32', 'dims': [1]})",),
    "no type": ("config.add_output({'name': 'x', 'dims': [1]})",),
    "no dims": ("config.add_output({'name': 'x', 'data_type': 'TYPE_FP32'})",),
    "a field that is none": ("config.add_output({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [1], 'size': 1})",),
    "a type that is none": ("config.add_output({'name': 'x', 'data_type': 'FLOAT', 'dims': [1]})",),
    "a policy that is none": ("config.set_model_transaction_policy({'coupled': True})",),
    "a batch size that is none": ("config.set_max_batch_size('many')",),
    "a negative batch size": ("config.set_max_batch_size(-1)",),
    "what it was": ("raise ValueError(repr(config.as_dict()))",),
}


@pytest.mark.parametrize("what", COMPLETED)
def test_a_configuration_is_completed(pair: Pair, what: str) -> None:
    steps = "".join(f"        {step}\n" for step in COMPLETED[what])
    source = (
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
        f"{steps}        return config\n\n    def execute(self, requests):\n        return []\n"
    )

    def ask(side: Side) -> Any:
        error = side.load("completed", source)
        config = None if error else side.config("completed")
        side.unload("completed")
        return {"load": error, "config": config}

    meant = {"load": "types are checked", "config": "types are checked"} if what == "a type that is none" else {}
    answers = pair.compare(ask, meant)
    assert bool(answers["load"]) == (answers["config"] is None)


ENDS = {
    "it raises": "raise ValueError('at the end')",
    "it exits": "sys.exit(3)",
    "its process ends": "os._exit(3)",
    "its process is killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("what", ENDS)
def test_what_finalize_does_keeps_nobody(pair: Pair, what: str) -> None:
    source = f"""
import os
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.ended = Path(args["model_repository"]).parents[1] / "ended"

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.float32([5]))]) for _ in requests]

    def finalize(self):
        self.ended.touch()
        {ENDS[what]}
"""

    def ask(side: Side) -> Any:
        ended = side.repository.parent / "ended"
        answers = []
        for _ in range(2):
            ended.unlink(missing_ok=True)
            answers.append(side.load("faults", source))
            answers.append(side.infer("faults", {"COMMAND": text("")}))
            side.unload("faults")
            eventually(ended.exists)
        return answers

    answers = pair.compare(ask)
    assert answers[1]["outputs"]["OUTPUT"]["data"] == [5]
