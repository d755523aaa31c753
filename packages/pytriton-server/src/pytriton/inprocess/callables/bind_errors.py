"""Errors of `Server.bind` and `Server.unbind`. Apart from what does the binding, as that is much to import."""

from __future__ import annotations

from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.inprocess.capi.errors import AlreadyExistsError, NotFoundError

__all__ = ["AlreadyBoundError", "NotBoundError"]


class AlreadyBoundError(AlreadyExistsError, PyTritonInvalidOperationError):
    """There is a model of the name already, or one of the same name that does not go together with it."""


class NotBoundError(NotFoundError, PyTritonInvalidOperationError):
    """No callable is bound under the name and version."""
