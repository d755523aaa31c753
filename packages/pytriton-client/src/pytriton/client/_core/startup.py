"""How a client waits for its server and its model and learns about it, as generators that both kinds of clients run.

Such a generator, a plan, yields an ``Ask`` for each question to the server and a ``Pause`` before it asks again. The
client that runs it sends back the server's answer, or throws in the error of the transport, and sleeps in the pauses.

If the model is ready, two questions are enough: whether it is ready, and what its configuration is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ..exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelNotReadyError,
    PyTritonClientTimeoutError,
)
from .deadline import Deadline
from .spec import ModelSpec, parse_model_config
from .translate import is_permanent

__all__ = [
    "Ask",
    "Exchange",
    "ModelInfo",
    "Pause",
    "PlanStep",
    "Question",
    "Target",
    "ask_server",
    "find_change",
    "prepare",
    "wait_for_model",
    "wait_for_server",
]

# One question may take this long; a server that takes longer is asked again on a fresh connection.
_QUESTION_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.01
_NOT_FOUND_TEXT = "is not found"
_MAX_PAUSE_S = 0.5
# A caller who errs again and again has the server asked whether the model has changed no more often than this.
_LEAST_AGE_S = 1.0


class Question(enum.Enum):
    """What a plan asks the server."""

    SERVER_READY = "server ready"
    MODEL_READY = "model ready"
    ANY_VERSION_READY = "model ready in any version"
    MODEL_CONFIG = "model configuration"


@dataclass(frozen=True)
class Ask:
    """Answer the question within ``timeout_s`` seconds, or throw why that is impossible."""

    question: Question
    timeout_s: float


@dataclass(frozen=True)
class Pause:
    """Sleep for ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Call ``carry`` with the transport; with an asyncio one, await what it returns."""

    carry: Callable[[Any], Any]


class TargetFields(TypedDict):
    """A ``Target`` as keyword arguments of errors."""

    url: str
    model_name: str
    model_version: str | None


@dataclass(frozen=True)
class Target:
    """The model that a client talks to, for its requests and the texts of errors.

    Attributes:
        url: The server.
        model_name: The model.
        model_version: The version; ``None`` is the latest.
    """

    url: str
    model_name: str
    model_version: str | None

    @property
    def model(self) -> str:
        """The model and its version, in words."""
        return f"{self.model_name}/{self.model_version or '<latest>'}"

    @property
    def fields(self) -> TargetFields:
        """The keyword arguments that every error about the target has."""
        return {"url": self.url, "model_name": self.model_name, "model_version": self.model_version}


@dataclass
class ModelInfo:
    """What a client and all its views have learnt about their model.

    Attributes:
        given: The specification that the user brought, of which the server is to judge.
        spec: What is known of it.
        was_ready: Whether it was seen ready.
        is_prepared: Whether the first inference has all that it needs.
        confirmed_s: When the server was last asked whether it has changed, and it had not; by a monotonic clock.
    """

    given: ModelSpec | None
    spec: ModelSpec | None
    was_ready: bool = False
    is_prepared: bool = False
    confirmed_s: float = -_LEAST_AGE_S


PlanStep = Ask | Pause | Exchange


def ask_server(transport: Any, target: Target, step: Ask | Exchange) -> Any:
    """Ask the server through a ``Transport``, or an ``AsyncTransport``, whose answer is to be awaited."""
    if isinstance(step, Exchange):
        return step.carry(transport)
    name, version, timeout_s = target.model_name, target.model_version, step.timeout_s
    if step.question is Question.SERVER_READY:
        return transport.is_server_ready(timeout_s)
    if step.question is Question.MODEL_CONFIG:
        return transport.get_model_config(name, version, timeout_s)
    return transport.is_model_ready(name, version if step.question is Question.MODEL_READY else None, timeout_s)


def prepare(
    target: Target, deadline: Deadline, *, wait: bool, spec: ModelSpec | None
) -> Generator[PlanStep, Any, ModelSpec]:
    """Get a client ready for its first inference.

    Args:
        target: The model.
        deadline: For all of it together.
        wait: Whether to ask for readiness, again and again, before all else.
        spec: What is known about the model already; then its configuration is not asked for.

    Raises:
        PyTritonClientModelNotReadyError: The model was not ready in time.
    """
    if wait:
        yield from wait_for_model(target, deadline)
    if spec is None:
        config = yield Ask(Question.MODEL_CONFIG, deadline.remaining_s())
        spec = parse_model_config(config, target.model_version)
    return spec


def find_change(
    target: Target, deadline: Deadline, info: ModelInfo, known: ModelSpec
) -> Generator[PlanStep, Any, ModelSpec | None]:
    """Find out whether a model has changed, which a caller may know who seems to have made a mistake.

    Args:
        target: The model.
        deadline: For the question.
        info: What the client knows; a change is noted there.
        known: By what the call seemed to be wrong.

    Returns:
        What the model is now; ``None`` where it is as it was, or that cannot be told.
    """
    if info.given is not None:
        return None
    if info.spec is not None and info.spec is not known:
        return info.spec  # another call has found it
    if time.monotonic() - info.confirmed_s < _LEAST_AGE_S:
        return None
    info.confirmed_s = time.monotonic()
    try:
        config = yield _ask(Question.MODEL_CONFIG, deadline)
        spec = parse_model_config(config, target.model_version)
    except PyTritonClientError:
        return None  # what is to be told is the mistake
    if spec == known:
        return None
    info.spec = spec
    info.confirmed_s = -_LEAST_AGE_S
    return spec


def wait_for_server(target: Target, deadline: Deadline) -> Generator[PlanStep, Any, None]:
    """Wait until the server says that it is ready.

    Raises:
        PyTritonClientTimeoutError: It did not in time.
        PyTritonClientConnectionError: Its certificate is not trusted, or it has none; told at once.
    """
    reason: PyTritonClientError | None = None
    for pause_s in _pauses():
        try:
            if (yield _ask(Question.SERVER_READY, deadline)):
                return
            reason = None
        except (PyTritonClientConnectionError, PyTritonClientTimeoutError) as error:
            _raise_if_permanent(error)
            if isinstance(error, PyTritonClientConnectionError) or reason is None or not deadline.is_over:
                reason = error
        yield Pause(min(pause_s, deadline.remaining_s()))
        if deadline.is_over:
            break
    raise PyTritonClientTimeoutError(
        (f"The server at {target.url} answers that it is not ready." if reason is None else reason.message)
        + f" Waiting for server to be ready timed out. Waited {deadline.timeout_s:g} s for {target.url}.",
        url=target.url,
        timeout_s=deadline.timeout_s,
        waited_for="server ready",
        missing="server",
    ) from reason


def wait_for_model(target: Target, deadline: Deadline) -> Generator[PlanStep, Any, None]:
    """Wait until the server says that the model is ready.

    Raises:
        PyTritonClientModelNotReadyError: It did not in time. The error says whether the server, the model or only this
            version of it was missing. A version that is not among those of a loaded model cannot come any more, so that
            is told at once.
        PyTritonClientConnectionError: The certificate of the server is not trusted, or it has none; told at once.
    """
    missing: Literal["server", "model", "version"] = "server"
    reason: PyTritonClientError | None = None
    unknown: PyTritonClientInferenceServerError | None = None
    for pause_s in _pauses():
        try:
            if (yield _ask(Question.MODEL_READY, deadline)):
                return
            missing, reason = "model", None
            if target.model_version is not None and (yield _ask(Question.ANY_VERSION_READY, deadline)):
                missing = "version"
                unknown = yield from _find_unknown_version(deadline)
        except (PyTritonClientConnectionError, PyTritonClientTimeoutError) as error:
            _raise_if_permanent(error)
            # A question cut short by the deadline says nothing new where something is known.
            is_known = missing != "server" or reason is not None
            if isinstance(error, PyTritonClientConnectionError) or not is_known or not deadline.is_over:
                missing, reason = "server", error
        if unknown is not None:
            raise _unknown_version_error(target, deadline) from unknown
        yield Pause(min(pause_s, deadline.remaining_s()))
        if deadline.is_over:
            break
    raise PyTritonClientModelNotReadyError(
        {
            "server": f"There is no answer from {target.url}." if reason is None else reason.message,
            "model": f"The server at {target.url} answers, but the model {target.model_name} is missing or not ready: "
            "check its name and the server's log.",
            "version": f"The model {target.model_name} is ready, but its version {target.model_version} is missing.",
        }[missing]
        # In PyTriton one of these is the text of one client, the other of another one, and scripts look for them.
        + f" Waiting for model {target.model} to be ready timed out. Timeout while waiting for model "
        f"{target.model_name} to be ready: {deadline.timeout_s:g} s at {target.url}.",
        **target.fields,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
        missing=missing,
    ) from reason


def _raise_if_permanent(error: PyTritonClientError) -> None:
    if isinstance(error, PyTritonClientConnectionError) and is_permanent(error):
        raise error


def _find_unknown_version(deadline: Deadline) -> Generator[PlanStep, Any, PyTritonClientInferenceServerError | None]:
    """Return what the server says of a version that it neither has nor is about to have."""
    try:
        yield _ask(Question.MODEL_CONFIG, deadline)
    except PyTritonClientInferenceServerError as error:
        # Of a version that is being loaded, Triton says that it is not at ready state.
        if _NOT_FOUND_TEXT in (error.server_message or ""):
            return error
    return None


def _unknown_version_error(target: Target, deadline: Deadline) -> PyTritonClientModelNotReadyError:
    return PyTritonClientModelNotReadyError(
        f"The model {target.model_name} at {target.url} is loaded, and has no version {target.model_version}. Waiting "
        "would not bring it: ask for another version, or for the latest with model_version=None.",
        **target.fields,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
        missing="version",
    )


def _ask(question: Question, deadline: Deadline) -> Ask:
    return Ask(question, min(_QUESTION_TIMEOUT_S, deadline.remaining_s()))


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
