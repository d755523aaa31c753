"""Random requests of the soak, with the answers and errors that each may get."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.soak.models import HANGS_MS
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)

LARGEST = 2 << 20
_WORKER_LOST = "was lost while it worked on this request"


@dataclass(frozen=True)
class SoakRequest:
    """One request."""

    model: str  # the model that gets it
    inputs: Mapping[str, Any]  # one sample
    is_right: Callable[[Mapping[str, Any]], bool]  # returns whether outputs are the answer to it
    # Returns the name of the outcome for an error that may happen; `None` for others.
    allowed_outcome: Callable[[BaseException], str | None]
    timeout_s: float | None = None  # how long the call may take; `None` for the client's default


class Generations:
    """Which callables of a model that is bound anew time and again may answer at the moment."""

    def __init__(self) -> None:
        self.done = 0
        self.begun = 0


def allow_none(_error: BaseException) -> str | None:
    """Allow no error."""
    return None


def allow_worker_loss(error: BaseException) -> str | None:
    """Allow the error of a worker that was killed."""
    # Over gRPC it comes with the status of a lost connection.
    kinds = (PyTritonClientInferenceServerError, PyTritonClientConnectionError)
    return "worker lost" if isinstance(error, kinds) and _WORKER_LOST in str(error) else None


def allow_timeout(error: BaseException) -> str | None:
    """Allow a timeout of the caller."""
    return "timed out" if isinstance(error, PyTritonClientTimeoutError) else None


def allow_execution_timeout(error: BaseException) -> str | None:
    """Allow an execution timeout, which may be that of another request of the batch, and a killed worker."""
    kinds = (PyTritonClientInferenceServerError, PyTritonClientConnectionError)
    if isinstance(error, kinds) and "execution timeout" in str(error):
        return "execution timeout"
    return allow_worker_loss(error)


class RequestFactory:
    """Makes random requests; one for each caller, as it is not for several threads.

    Args:
        seed: Where the numbers start.
        generations: Of the model `bytes`.
    """

    def __init__(self, seed: str, generations: Generations) -> None:
        self.random = random.Random(seed)
        self._arrays = np.random.default_rng(abs(self.random.getrandbits(63)))
        self._generations = generations
        self._makers = [self.bytes, self.text, self.killed, self.repeated, self.waits, self.hangs, self.refuses]

    def any(self) -> SoakRequest:
        """Return a request of a random kind."""
        weights = [8, 4, 4, 4, 3, 1, 2]
        (make,) = self.random.choices(self._makers, weights)
        return make()

    def _size(self, largest: int) -> int:
        """Return a random size: small ones are more frequent, and some are zero."""
        return 0 if self.random.random() < 0.02 else int(largest ** self.random.random())

    def bytes(self) -> SoakRequest:
        """Return a request with up to megabytes of bytes, for the model that is bound anew."""
        x = self._arrays.integers(0, 256, self._size(LARGEST), np.uint8)
        earliest = self._generations.done

        def is_right(answer: Mapping[str, Any]) -> bool:
            generation = int(answer["generation"][0])
            is_current = earliest <= generation <= self._generations.begun
            return is_current and np.array_equal(answer["y"], x + np.uint8(generation % 256))

        return SoakRequest("bytes", {"x": x}, is_right, allow_none)

    def text(self) -> SoakRequest:
        """Return a request with strings of all lengths and with characters of several bytes."""
        letters = "abc äß€\U0001f600"
        number = self.random.choice([1, 1, 3, 30])
        texts = ["".join(self.random.choices(letters, k=self._size(2000))) for _ in range(number)]
        turned = [text[::-1].encode() for text in texts]
        return SoakRequest("text", {"text": texts}, lambda answer: answer["turned"].tolist() == turned, allow_none)

    def killed(self) -> SoakRequest:
        """Return a request with numbers, for the workers that are killed."""
        return self._numbers("killed")

    def repeated(self) -> SoakRequest:
        """Return the same for a model whose requests another worker may repeat."""
        return self._numbers("repeated")

    def _numbers(self, model: str) -> SoakRequest:
        x = self._arrays.integers(-(1 << 40), 1 << 40, max(1, self._size(20_000))).astype(np.float64)
        return SoakRequest(model, {"x": x}, lambda answer: np.array_equal(answer["y"], x * 2 + 1), allow_worker_loss)

    def waits(self) -> SoakRequest:
        """Return a slow request, whose caller may time out before the answer."""
        ms = self.random.randrange(150)
        timeout_s = self.random.choice([None, None, 0.001, 0.02, 0.1])
        allowed_outcome = allow_none if timeout_s is None else allow_timeout
        return SoakRequest("waits", {"ms": [ms]}, lambda answer: int(answer["ms"][0]) == ms, allowed_outcome, timeout_s)

    def hangs(self) -> SoakRequest:
        """Return a request that may hang, and with it all others of its batch."""
        ms = HANGS_MS if self.random.random() < 0.05 else self.random.randrange(20)
        return SoakRequest("hangs", {"ms": [ms]}, lambda answer: int(answer["ms"][0]) == ms, allow_execution_timeout)

    def refuses(self) -> SoakRequest:
        """Return a request that must fail with an error that has its own number."""
        number = self.random.getrandbits(40)

        def allow_own_error(error: BaseException) -> str | None:
            is_own_error = isinstance(error, PyTritonClientInferenceServerError) and f"<{number}>" in str(error)
            return "refused" if is_own_error else None

        return SoakRequest("refuses", {"x": [number]}, lambda answer: False, allow_own_error)
