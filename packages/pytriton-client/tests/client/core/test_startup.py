from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest

from pytriton.client._core.deadline import Deadline
from pytriton.client._core.spec import ModelSpec
from pytriton.client._core.startup import Ask, Pause, Question, Target, prepare, wait_for_model, wait_for_server
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelNotReadyError,
    PyTritonClientTimeoutError,
)

LATEST = Target("http://host:1", "m", None)
VERSION = Target("http://host:1", "m", "3")
REFUSED = PyTritonClientConnectionError("refused")


def drive(
    plan: Generator[Any, Any, Any], answers: dict[Question, list[Any]]
) -> tuple[Any, list[Question], list[float]]:
    """Answer from the lists, whose last element is repeated; return the result, the questions and the pauses."""
    asked: list[Question] = []
    pauses: list[float] = []
    step = next(plan)
    try:
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = plan.send(None)
                continue
            assert isinstance(step, Ask)
            asked.append(step.question)
            queue = answers[step.question]
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            step = plan.throw(answer) if isinstance(answer, Exception) else plan.send(answer)
    except StopIteration as end:
        return end.value, asked, pauses


def test_ready_model_costs_two_questions() -> None:
    answers: dict[Question, Any] = {Question.MODEL_READY: [True], Question.MODEL_CONFIG: [{"name": "m"}]}
    spec, asked, pauses = drive(prepare(LATEST, Deadline(5), wait=True, spec=None), answers)
    assert spec == ModelSpec("m")
    assert asked == [Question.MODEL_READY, Question.MODEL_CONFIG]
    assert pauses == []


def test_known_model_costs_none() -> None:
    spec = ModelSpec("m")
    with pytest.raises(StopIteration) as end:
        next(prepare(LATEST, Deadline(5), wait=False, spec=spec))
    assert end.value.value is spec


def test_pauses_grow_to_a_limit() -> None:
    answers = {Question.MODEL_READY: [False, REFUSED, PyTritonClientTimeoutError("slow"), *[False] * 7, True]}
    _, asked, pauses = drive(wait_for_model(LATEST, Deadline(1000)), answers)
    assert len(asked) == 11
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.01
    assert pauses[-1] == 0.5


def test_refusal_is_not_waited_for() -> None:
    denied = PyTritonClientInferenceServerError("restricted")
    for plan in (wait_for_model(LATEST, Deadline(1000)), wait_for_server(LATEST, Deadline(1000))):
        with pytest.raises(PyTritonClientInferenceServerError) as caught:
            drive(plan, {Question.MODEL_READY: [denied], Question.SERVER_READY: [denied]})
        assert caught.value is denied


@pytest.mark.parametrize(
    ("target", "ready", "any_version", "missing"),
    [
        (LATEST, REFUSED, None, "server"),
        (LATEST, False, None, "model"),
        (VERSION, False, False, "model"),
        (VERSION, False, True, "version"),
    ],
)
def test_what_is_missing(target: Target, ready: Any, any_version: Any, missing: str) -> None:
    loading = PyTritonClientInferenceServerError("...", server_message="'m' version 3 is not at ready state")
    answers = {
        Question.MODEL_READY: [ready],
        Question.ANY_VERSION_READY: [any_version],
        Question.MODEL_CONFIG: [loading],
    }
    with pytest.raises(PyTritonClientModelNotReadyError) as caught:
        # A deadline that is over still allows one question.
        drive(wait_for_model(target, Deadline(0)), answers)
    assert caught.value.missing == missing
    assert caught.value.model_version == target.model_version
    assert caught.value.__cause__ is (ready if isinstance(ready, Exception) else None)


def test_version_that_cannot_come_is_not_waited_for() -> None:
    unknown = PyTritonClientInferenceServerError("...", server_message="'m' version 3 is not found")
    answers: dict[Question, list[Any]] = {
        Question.MODEL_READY: [False],
        Question.ANY_VERSION_READY: [False, True],
        Question.MODEL_CONFIG: [unknown],
    }
    with pytest.raises(PyTritonClientModelNotReadyError, match="is loaded, and has no version 3") as caught:
        drive(wait_for_model(VERSION, Deadline(1e6)), answers)
    assert caught.value.missing == "version"
    assert caught.value.__cause__ is unknown


def test_version_that_is_being_loaded_is_waited_for() -> None:
    loading = PyTritonClientInferenceServerError("...", server_message="'m' version 3 is not at ready state")
    answers: dict[Question, list[Any]] = {
        Question.MODEL_READY: [False, False, True],
        Question.ANY_VERSION_READY: [True],
        Question.MODEL_CONFIG: [loading, {"name": "m"}],
    }
    _, asked, pauses = drive(wait_for_model(VERSION, Deadline(1000)), answers)
    assert asked.count(Question.MODEL_READY) == 3
    assert len(pauses) == 2


def test_last_question_cut_short_does_not_hide_what_is_known() -> None:
    deadline = Deadline(0.05)

    def ask_until_the_end() -> None:
        plan = wait_for_model(LATEST, deadline)
        next(plan)
        plan.send(False)
        plan.send(None)
        time.sleep(deadline.remaining_s())
        plan.throw(PyTritonClientTimeoutError("cut short"))
        next(plan)

    with pytest.raises(PyTritonClientModelNotReadyError) as caught:
        ask_until_the_end()
    assert caught.value.missing == "model"
