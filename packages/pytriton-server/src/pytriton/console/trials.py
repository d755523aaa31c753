"""Calls of models that somebody makes from the page, and what they answer."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytriton.catalog.tensors import result_as_text
from pytriton.client import DecoupledModelClient, ModelClient, ModelResult, ModelSpec, TlsSettings
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from pytriton.console.media import MOST_PARTS, Part, describe_parts, find_parts

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""How long an answer may take, and each one of a stream, in seconds."""

MOST_TRIALS = 8
"""How many calls may run at the same time."""

_MOST_LINES = 500
_MOST_CHARACTERS = 20_000
_MAX_RESPONSE_BYTES = 64 << 20


@dataclass(frozen=True)
class Caller:
    """Makes calls of the models of one server."""

    url: str
    stream_url: str
    access_token: str | None
    tls: TlsSettings | None

    def begin(self, spec: ModelSpec, inputs: Mapping[str, Any], *, is_batch: bool) -> "Trial":
        """Begin a call, and return it at once."""
        trial = Trial(lambda: self._client(spec), spec, inputs, is_batch=is_batch)
        trial.start()
        return trial

    def _client(self, spec: ModelSpec) -> ModelClient:
        kind = DecoupledModelClient if spec.decoupled else ModelClient
        return kind(
            self.stream_url if spec.decoupled else self.url,
            spec.model_name,
            init_timeout_s=TIMEOUT_S,
            inference_timeout_s=TIMEOUT_S,
            model_config=spec,
            ensure_model_is_ready=False,
            access_token=self.access_token,
            tls=self.tls,
            max_response_bytes=_MAX_RESPONSE_BYTES,
        )


class Trial:
    """One call, in a thread of its own."""

    _slots = threading.BoundedSemaphore(MOST_TRIALS)

    def __init__(
        self, make_client: Callable[[], ModelClient], spec: ModelSpec, inputs: Mapping[str, Any], *, is_batch: bool
    ) -> None:
        self._make_client = make_client
        self._spec = spec
        self._inputs = dict(inputs)
        self._is_batch = is_batch
        self._client: ModelClient | None = None
        self._is_stopped = False
        self._began = time.monotonic()
        self.answers: deque[str] = deque(maxlen=_MOST_LINES)
        """The answers, only the last ones of a long stream."""
        self.parts: deque[Part] = deque(maxlen=MOST_PARTS)
        """Images, sounds, bytes and long texts among them, likewise."""
        self.count = 0
        """How many answers came."""
        self.seconds = 0.0
        """How long the call has taken."""
        self.error = ""
        """Why it failed."""
        self.is_done = False
        """Whether nothing more will come."""

    def start(self) -> None:
        """Begin the call; if too many are running, it ends at once with an error."""
        threading.Thread(target=self._run, name="pytriton-console-trial", daemon=True).start()

    def stop(self) -> None:
        """Cancel the call."""
        self._is_stopped = True
        client = self._client
        if client is not None:
            client.close()

    def _run(self) -> None:
        if not self._slots.acquire(blocking=False):
            self.error = f"{MOST_TRIALS} calls are under way: wait for one of them to end."
            self.is_done = True
            return
        try:
            with contextlib.closing(self._make_client()) as client:
                self._client = client
                if not self._is_stopped:
                    self._call(client)
        except PyTritonClientInferenceServerError as error:
            self.error = error.server_message or str(error)
        except PyTritonClientError as error:
            self.error = "Stopped." if self._is_stopped else str(error)
        except Exception as error:
            logger.exception("A call of the console failed.")
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._slots.release()
            self.seconds = time.monotonic() - self._began
            self.is_done = True

    def _call(self, client: ModelClient) -> None:
        # Numbers in a form have no type, so they may be cast. Inputs go by position if possible, because their names
        # may be any.
        call = client.with_options(casting="same_kind", timeout_s=TIMEOUT_S)
        ordered: tuple[Any, ...] = ()
        named = self._inputs
        if len(named) == len(self._spec.inputs):
            ordered, named = tuple(named[tensor.name] for tensor in self._spec.inputs), {}
        method = call.infer_batch if self._is_batch else call.infer_sample
        answer: Any = method(*ordered, **named)
        if not self._spec.decoupled:
            self._take(answer)
            return
        with contextlib.closing(answer) as answers:
            for each in answers:
                self._take(each)

    def _take(self, result: ModelResult) -> None:
        self.parts.extend(find_parts(result))
        text = result_as_text(describe_parts(result), one_line=self._spec.decoupled)
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]} ... ({len(text) - _MOST_CHARACTERS:,} more characters)"
        self.answers.append(text)
        self.count += 1
        self.seconds = time.monotonic() - self._began
