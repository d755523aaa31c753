"""Inference callables that call into their own server: which model is calling, and work that must not block it."""

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ReferenceType

from pytriton.decorators import TritonContext


class CallingModel(Protocol):
    """The part of a model that is used while its callable runs."""

    name: str
    version: int

    @property
    def key(self) -> tuple[str, int]:
        """The identity of a model within its server."""

    @property
    def triton_context(self) -> TritonContext:
        """The context that all models of the server share."""


CALLING_MODEL: Final[contextvars.ContextVar["ReferenceType[CallingModel] | None"]] = contextvars.ContextVar(
    "pytriton_calling_model", default=None
)
"""Set in the context of each inference callable."""

logger = logging.getLogger(__name__)


def calling_model(triton_context: TritonContext) -> CallingModel | None:
    """Return the model whose callable runs in this thread or task; None if it is not one of this server.

    Threads that a callable starts with its context count as well, because the callable may wait for them.
    """
    reference = CALLING_MODEL.get()
    model = None if reference is None else reference()
    return model if model is not None and model.triton_context is triton_context else None


def run_in_background(what: str, action: Callable[[], object], *, daemon: bool = True) -> bool:
    """Run in a thread what a callable must not wait for, because it waits for the callable; log errors.

    Returns False if no thread can be started, at the end of the interpreter.
    """

    def run() -> None:
        try:
            # An empty context, so that the thread does not count as the callable.
            contextvars.Context().run(action)
        except Exception as error:
            logger.error("%s() failed after its caller was let go: %s", what, error)

    try:
        threading.Thread(target=run, name="pytriton-background", daemon=daemon).start()
    except RuntimeError:
        logger.debug("%s: no thread can be started any more.", what)
        return False
    return True
