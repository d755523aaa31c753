"""How a client waits for its server and its model and learns about it, as generators that both kinds of clients run.

Such a generator, a plan, yields an ``Ask`` for each question to the server and a ``Pause`` before it asks again. The
client that runs it sends back the server's answer, or throws in the error of the transport, and sleeps in the pauses.

If the model is ready, two questions are enough: whether it is ready, and what its configuration is.
"""

from __future__ import annotations

import difflib
import enum
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

from ..exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelNotReadyError,
    PyTritonClientTimeoutError,
)
from .deadline import Deadline
from .spec import ModelSpec, parse_model_config
from .translate import Operation, is_permanent

# One question may take this long; a server that takes longer is asked again on a fresh connection.
_QUESTION_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.01
_NOT_FOUND_TEXT = "is not found"
_MAX_PAUSE_S = 0.5
# However often callers make mistakes, the server is asked at most once in this time whether the model has changed.
_LEAST_AGE_S = 1.0
# How often a server that is ready is asked whether it knows the model at all, and how often the user is told of that,
# or of what else a long wait is for.
_UNKNOWN_PAUSE_S = 1.0
_WARNING_PAUSE_S = 10.0
_LIMIT = "init_timeout_s, or the time that the call was given"
_READY = "READY"
_LOADING = "LOADING"
SHOWN = "SHOWN"
"""The state of a model that a server shows to everybody, on its page: ready, and nothing is known of those to come."""
# A server of this library adds this text once its script has bound all of its models.
_COMPLETE_TEXT = "The server has all of its models"
# Names with this prefix are no models of users: a server that is not ready announces that by one.
_INTERNAL_PREFIX = "pytriton-"
_MOST_NAMES = 10

logger = logging.getLogger("pytriton.client")


class Question(enum.Enum):
    """What a client asks its server beside inference: in the words of errors, and what of the target it is about."""

    SERVER_READY = "server readiness request", "server"
    MODEL_READY = "model readiness request", "version"
    ANY_VERSION_READY = "model readiness request", "model"
    MODEL_CONFIG = "model configuration request", "version"
    MODEL_LIST = "request for the list of models", "server"
    LOAD = "loading of the model", "model"
    UNLOAD = "unloading of the model", "model"
    REGISTER_REGION = "registration of shared memory", "server"
    UNREGISTER_REGION = "unregistering of shared memory", "server"
    LIST_REGIONS = "request for the regions of shared memory", "server"


IF_READY = (Question.SERVER_READY, Question.MODEL_READY, Question.ANY_VERSION_READY)
"""Questions that are answered by yes or no."""


@dataclass(frozen=True)
class Ask:
    """Answer the question within ``timeout_s`` seconds, or throw why that is impossible."""

    question: Question
    timeout_s: float
    config: str | None = None  # of a model to load, as JSON
    files: Mapping[str, bytes] | None = None  # of a model to load
    region: str = ""  # the name of a region of shared memory, and that of its file
    size: int = 0  # of the region, in bytes

    def operation(self, target: Target) -> Operation:
        """Return what is being done, for errors and for the request."""
        doing, about = self.question.value
        name = None if about == "server" else target.model_name
        return Operation(doing, target.url, self.timeout_s, name, target.model_version if about == "version" else None)


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
    """The model that a client talks to, for its requests and the texts of errors."""

    url: str  # the server
    model_name: str  # the model
    model_version: str | None  # the version; ``None`` is the latest

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
    """What a client and all its views have learnt about their model."""

    given: ModelSpec | None  # the specification that the user brought, of which the server is to judge
    spec: ModelSpec | None  # what is known of it
    was_ready: bool = False  # whether it was seen ready
    is_prepared: bool = False  # whether the first inference has all that it needs
    # When the server was last asked whether it has changed, and it had not; by a monotonic clock.
    confirmed_s: float = -_LEAST_AGE_S


PlanStep = Ask | Pause | Exchange


def ask_server(transport: Any, target: Target, step: Ask | Exchange) -> Any:
    """Ask the server through a ``Transport``, or an ``AsyncTransport``, whose answer has to be awaited."""
    return step.carry(transport) if isinstance(step, Exchange) else transport.ask(step, target)


def prepare(
    target: Target, deadline: Deadline, *, wait: bool, spec: ModelSpec | None, patience_s: float | None
) -> Generator[PlanStep, Any, ModelSpec]:
    """Get a client ready for its first inference.

    This waits for the model if ``wait`` is set, and reads its configuration unless ``spec`` is known.
    """
    if wait:
        yield from wait_for_model(target, deadline, patience_s)
    if spec is None:
        config = yield Ask(Question.MODEL_CONFIG, deadline.remaining_s())
        spec = parse_model_config(config, target.model_version)
    return spec


def find_change(
    target: Target, deadline: Deadline, info: ModelInfo, known: ModelSpec
) -> Generator[PlanStep, Any, ModelSpec | None]:
    """Find out whether a model has changed, after a call that did not fit what is known of it.

    Returns the changed model, or ``None`` if it is the same or the server does not answer.
    """
    if info.given is not None:
        return None
    if info.spec is not None and info.spec is not known:
        return info.spec  # another call has found the change
    if time.monotonic() - info.confirmed_s < _LEAST_AGE_S:
        return None
    info.confirmed_s = time.monotonic()
    try:
        config = yield _ask(Question.MODEL_CONFIG, deadline)
        spec = parse_model_config(config, target.model_version)
    except PyTritonClientError:
        return None  # the caller gets the error of the mistake instead
    if spec == known:
        return None
    info.spec = spec
    info.confirmed_s = -_LEAST_AGE_S
    return spec


def wait_for_server(target: Target, deadline: Deadline) -> Generator[PlanStep, Any, None]:
    """Wait until the server says that it is ready. A certificate that is not trusted ends the wait at once."""
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


def wait_for_model(
    target: Target, deadline: Deadline, patience_s: float | None = None
) -> Generator[PlanStep, Any, None]:
    """Wait until the server says that the model is ready; the error says what was missing.

    It ends early if the certificate is not trusted, if a loaded model has no such version, or if a ready server has had
    no such model for ``patience_s`` seconds (``None`` is no such limit).
    """
    missing: Literal["server", "model", "version"] = "server"
    reason: PyTritonClientError | None = None
    unknown: PyTritonClientInferenceServerError | None = None
    watch = _UnknownModel(target, deadline, patience_s)
    final: PyTritonClientModelNotReadyError | None = None
    told_s = time.monotonic()
    for pause_s in _pauses():
        try:
            if (yield _ask(Question.MODEL_READY, deadline)):
                return
            missing, reason = "model", None
            if target.model_version is not None and (yield _ask(Question.ANY_VERSION_READY, deadline)):
                missing = "version"
                unknown = yield from _find_unknown(deadline)
            else:
                final = yield from watch.look()
        except (PyTritonClientConnectionError, PyTritonClientTimeoutError) as error:
            _raise_if_permanent(error)
            # If the deadline cut the question short, what was learnt before stays the reason.
            is_known = missing != "server" or reason is not None
            if isinstance(error, PyTritonClientConnectionError) or not is_known or not deadline.is_over:
                missing, reason = "server", error
        if final is not None:
            raise final
        if unknown is not None:
            raise _unknown_version_error(target, deadline) from unknown
        yield Pause(min(pause_s, deadline.remaining_s()))
        if deadline.is_over:
            break
        if time.monotonic() - max(told_s, watch.told_s) >= _WARNING_PAUSE_S:
            told_s = time.monotonic()
            logger.warning(
                "%s Still waiting, up to %g s (%s).", _state(target, missing, reason), deadline.timeout_s, _LIMIT
            )
    if missing == "model" and watch.is_unknown:
        raise watch.error(deadline.timeout_s)
    raise PyTritonClientModelNotReadyError(
        _state(target, missing, reason)
        # In PyTriton one of these is the text of one client, the other of another one, and scripts look for them.
        + f" Waiting for model {target.model} to be ready timed out. Timeout while waiting for model "
        f"{target.model_name} to be ready: {deadline.timeout_s:g} s at {target.url}.",
        **target.fields,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
        missing=missing,
    ) from reason


def _state(target: Target, missing: str, reason: PyTritonClientError | None) -> str:
    """Say what a wait for a model has found."""
    if missing == "server":
        return f"There is no answer from {target.url}." if reason is None else reason.message
    if missing == "version":
        return f"The model {target.model_name} is ready, but its version {target.model_version} is missing."
    path = f" Its address has a path, so requests go to {target.url}/v2/...: is that right?"
    found = f"The server at {target.url} answers, but the model {target.model_name} is missing or not ready"
    return f"{found}: check its name and the server's log.{path if urlsplit(target.url).path else ''}"


def _raise_if_permanent(error: PyTritonClientError) -> None:
    if isinstance(error, PyTritonClientConnectionError) and is_permanent(error):
        raise error


class _UnknownModel:
    """Looks whether a ready server lacks the model, writes that to the log, and ends the wait after its patience."""

    def __init__(self, target: Target, deadline: Deadline, patience_s: float | None) -> None:
        self._target = target
        self._deadline = deadline
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._asked_s = -_UNKNOWN_PAUSE_S
        self.told_s = -_WARNING_PAUSE_S
        self._states: Mapping[str, str] | None = None

    def look(self) -> Generator[PlanStep, Any, PyTritonClientModelNotReadyError | None]:
        """Ask the server, unless it was just asked; return the error that ends the wait once patience is over."""
        now_s = time.monotonic()
        if now_s - self._asked_s < _UNKNOWN_PAUSE_S:
            return None
        self._asked_s = now_s
        error = yield from _find_unknown(self._deadline)
        if error is None or not (yield _ask(Question.SERVER_READY, self._deadline)):
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = now_s
        has_waited = self._patience_s is not None and now_s - self._since_s >= self._patience_s
        is_to_tell = now_s - self.told_s >= _WARNING_PAUSE_S
        if not (has_waited or is_to_tell):
            return None
        self._states = yield from _list_models(self._deadline)
        if has_waited and self._is_final(error):
            return self.error(self._patience_s)
        if is_to_tell:
            self.told_s = now_s
            logger.warning("%s %s", self._finding(), self._outlook(error))
        return None

    @property
    def is_unknown(self) -> bool:
        """Whether the server was ready and without the model when it was last looked."""
        return self._since_s is not None

    def error(self, waited_s: float | None) -> PyTritonClientModelNotReadyError:
        """Say what the server has in place of the model."""
        target = self._target
        return PyTritonClientModelNotReadyError(
            f"{self._finding()} Waiting for model {target.model} to be ready timed out. Timeout while waiting for "
            f"model {target.model_name} to be ready: {waited_s:g} s. Where it is yet to come, say how long to wait: "
            "init_timeout_s=300.",
            **target.fields,
            timeout_s=waited_s,
            waited_for="model ready",
            missing="model",
        )

    def _is_final(self, error: PyTritonClientInferenceServerError) -> bool:
        """Return whether the server will get no other model, as far as is known."""
        if _COMPLETE_TEXT in (error.server_message or ""):
            return True
        # A server without any model may belong to a script that is about to bind one.
        states = [] if self._states is None else self._states.values()
        return _READY in states and _LOADING not in states

    def _finding(self) -> str:
        name = self._target.model_name
        found = f"The server at {self._target.url} is ready and has no model {name!r}"
        if self._states is None:
            return f"{found}; the names that it has are for callers with its access token (access_token=...)."
        names = sorted(each for each, state in self._states.items() if state in (_READY, SHOWN))
        if not names:
            return f"{found}, nor any other so far."
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        likely = difflib.get_close_matches(name, names, 1)
        return f"{found}, but {shown}." + (f" Did you mean {likely[0]!r}?" if likely else "")

    def _outlook(self, error: PyTritonClientInferenceServerError) -> str:
        limit_s, setting = self._deadline.timeout_s, _LIMIT
        if self._patience_s is not None and self._patience_s < limit_s and self._is_final(error):
            limit_s, setting = self._patience_s, "unknown_model_timeout_s"
        return f"Waiting for it, up to {limit_s:g} s ({setting})."


def join_states(models: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the models of a server with their states: one of several versions that is ready counts."""
    joined: dict[str, str] = {}
    for name, state in models:
        if not name.startswith(_INTERNAL_PREFIX) and joined.get(name) != _READY:
            joined[name] = state
    return joined


def _list_models(deadline: Deadline) -> Generator[PlanStep, Any, Mapping[str, str] | None]:
    """Return the models with their states; ``None`` if the server does not list them for this caller."""
    try:
        states: Mapping[str, str] = yield _ask(Question.MODEL_LIST, deadline)
    except PyTritonClientInferenceServerError:
        return None
    return states


def _find_unknown(deadline: Deadline) -> Generator[PlanStep, Any, PyTritonClientInferenceServerError | None]:
    """Return the server's error if it neither has the model or version nor is loading it."""
    try:
        yield _ask(Question.MODEL_CONFIG, deadline)
    except PyTritonClientInferenceServerError as error:
        # Triton says of a version that is being loaded that it is "not at ready state".
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
