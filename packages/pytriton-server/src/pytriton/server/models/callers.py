"""Inference callables that call into their own server: which model is calling, and work that must not block it."""

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ReferenceType

from pytriton.decorators import TritonContext

__all__ = ["CALLING_MODEL", "CallingModel", "calling_model", "run_in_background"]


class CallingModel(Protocol):
    """What is asked of a model whose callable is running."""

    name: str
    version: int

    @property
    def key(self) -> tuple[str, int]:
        """What no two models of one server share."""

    @property
    def triton_context(self) -> TritonContext:
        """What all models of the server have in common."""


CALLING_MODEL: Final[contextvars.ContextVar["ReferenceType[CallingModel] | None"]] = contextvars.ContextVar(
    "pytriton_calling_model", default=None
)
"""Set in the context of each inference callable."""

logger = logging.getLogger(__name__)


def calling_model(triton_context: TritonContext) -> CallingModel | None:
    """Return the model whose callable runs in this thread or task; None where that is none of a certain server.

    What a callable hands to `asyncio.to_thread`, or to a thread with `contextvars.copy_context`, counts as well: all of
    these may be waited for by it.

    Args:
        triton_context: What all models of the server have in common.
    """
    reference = CALLING_MODEL.get()
    model = None if reference is None else reference()
    return model if model is not None and model.triton_context is triton_context else None


def run_in_background(what: str, action: Callable[[], object], *, daemon: bool = True) -> bool:
    """Run what a callable would wait for, which itself waits for the callable, in a thread. Errors go to the log.

    Args:
        what: Name of the action, for the log.
        action: What to do.
        daemon: Whether the interpreter may end before it is done.

    Returns:
        Whether it was started; at the end of the interpreter no thread can be.
    """

    def run() -> None:
        try:
            # The thread must not count as the callable, whatever context a thread inherits.
            contextvars.Context().run(action)
        except Exception as error:
            logger.error("%s() failed after its caller was let go: %s", what, error)

    try:
        threading.Thread(target=run, name="pytriton-background", daemon=daemon).start()
    except RuntimeError:
        logger.debug("%s: no thread can be started any more.", what)
        return False
    return True
