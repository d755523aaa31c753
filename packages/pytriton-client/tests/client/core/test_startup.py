from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest

from pytriton.client._core import startup
from pytriton.client._core.deadline import Deadline
from pytriton.client._core.spec import ModelSpec
from pytriton.client._core.startup import (
    Ask,
    Pause,
    Question,
    Target,
    join_states,
    prepare,
    wait_for_model,
    wait_for_server,
)
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
    spec, asked, pauses = drive(prepare(LATEST, Deadline(5), wait=True, spec=None, patience_s=None), answers)
    assert spec == ModelSpec("m")
    assert asked == [Question.MODEL_READY, Question.MODEL_CONFIG]
    assert pauses == []


def test_known_model_costs_none() -> None:
    spec = ModelSpec("m")
    with pytest.raises(StopIteration) as end:
        next(prepare(LATEST, Deadline(5), wait=False, spec=spec, patience_s=None))
    assert end.value.value is spec


def test_pauses_grow_to_a_limit() -> None:
    loading = PyTritonClientInferenceServerError("...", server_message="'m' is not at ready state")
    answers: dict[Question, list[Any]] = {
        Question.MODEL_READY: [False, REFUSED, PyTritonClientTimeoutError("slow"), *[False] * 7, True],
        Question.MODEL_CONFIG: [loading],
    }
    _, asked, pauses = drive(wait_for_model(LATEST, Deadline(1000)), answers)
    assert asked.count(Question.MODEL_READY) == 11
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
        Question.SERVER_READY: [False],
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
        assert getattr(plan.send(False), "question", None) is Question.MODEL_CONFIG
        assert isinstance(plan.throw(PyTritonClientInferenceServerError("...")), Pause)
        plan.send(None)
        time.sleep(deadline.remaining_s())
        plan.throw(PyTritonClientTimeoutError("cut short"))
        next(plan)

    with pytest.raises(PyTritonClientModelNotReadyError) as caught:
        ask_until_the_end()
    assert caught.value.missing == "model"


UNKNOWN = PyTritonClientInferenceServerError("no", server_message="Request for unknown model: 'm' is not found")
COMPLETE = PyTritonClientInferenceServerError(
    "no", server_message="Request for unknown model: 'm' is not found. The server has all of its models"
)
DENIED = PyTritonClientInferenceServerError("no", server_message="This API is restricted, expecting header")


def ask_for_unknown(config: Any, listed: Any, *, patience_s: float | None, timeout_s: float = 0.3) -> str:
    answers: dict[Question, list[Any]] = {
        Question.MODEL_READY: [False],
        Question.MODEL_CONFIG: [config],
        Question.SERVER_READY: [True],
        Question.MODEL_LIST: [listed],
    }
    with pytest.raises(PyTritonClientModelNotReadyError) as error:
        drive(wait_for_model(LATEST, Deadline(timeout_s), patience_s), answers)
    assert error.value.missing == "model"
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "listed", "told"),
    [
        (COMPLETE, DENIED, "for callers with its access token"),
        (COMPLETE, {}, "nor any other so far"),
        (UNKNOWN, {"n": "READY", "o": "UNAVAILABLE"}, "has no model 'm', but n."),
    ],
)
def test_wait_for_a_model_that_a_complete_server_has_not_is_short(
    config: Any, listed: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    # No patience at all: the first look ends the wait.
    text = ask_for_unknown(config, listed, patience_s=0.0, timeout_s=60)
    assert told in text
    assert "to be ready: 0 s." in text


@pytest.mark.parametrize(
    ("config", "listed"),
    [
        (UNKNOWN, DENIED),
        (UNKNOWN, {}),
        (UNKNOWN, {"n": "READY", "o": "LOADING"}),
        (UNKNOWN, PyTritonClientInferenceServerError("no", server_message="broken")),
    ],
)
def test_model_that_may_still_come_is_waited_for(config: Any, listed: Any, caplog: pytest.LogCaptureFixture) -> None:
    # As before the script of a server has bound all of its models.
    text = ask_for_unknown(config, listed, patience_s=0.0)
    assert "0.3 s" in text
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "is ready and has no model 'm'" in record.message
    assert "up to 0.3 s" in record.message


def test_unknown_model_is_told_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    ask_for_unknown(COMPLETE, {"mm": "READY", "n": "READY"}, patience_s=None)
    (record,) = caplog.records
    assert "but mm, n. Did you mean 'mm'?" in record.message


def test_server_that_is_not_ready_is_waited_for_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    answers: dict[Question, list[Any]] = {
        Question.MODEL_READY: [False],
        Question.MODEL_CONFIG: [COMPLETE],
        Question.SERVER_READY: [False],
    }
    with pytest.raises(PyTritonClientModelNotReadyError):
        drive(wait_for_model(LATEST, Deadline(0.2), 0.0), answers)
    assert not caplog.records


@pytest.mark.parametrize(
    ("url", "ready", "told"),
    [
        ("http://host:1", REFUSED, "refused Still waiting, up to 0.5 s (init_timeout_s"),
        ("http://host:1/v2", False, "requests go to http://host:1/v2/v2/...: is that right? Still waiting"),
    ],
)
def test_long_wait_is_told_of_now_and_then(
    url: str, ready: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "_WARNING_PAUSE_S", 0.1)
    broken = PyTritonClientInferenceServerError("no", server_message="broken")
    answers: dict[Question, Any] = {Question.MODEL_READY: [ready], Question.MODEL_CONFIG: [broken]}
    with pytest.raises(PyTritonClientModelNotReadyError):
        drive(wait_for_model(Target(url, "m", None), Deadline(0.5)), answers)
    assert 1 <= len(caplog.records) <= 5
    assert all(told in record.message for record in caplog.records)


def test_states_of_several_versions_are_joined() -> None:
    listed = [("a", "READY"), ("a", "UNAVAILABLE"), ("b", "UNAVAILABLE"), ("b", "READY"), ("pytriton-draining", "X")]
    assert join_states(listed) == {"a": "READY", "b": "READY"}
