"""Warnings that a client issues."""

from __future__ import annotations

__all__ = ["NotSupportedTimeoutWarning", "PyTritonWarning", "SharedMemoryWarning"]


class PyTritonWarning(UserWarning):
    """Base of every warning that a client issues."""


class NotSupportedTimeoutWarning(PyTritonWarning):
    """A timeout cannot be kept. No client here issues it: the name stays for code that filters it."""


class SharedMemoryWarning(PyTritonWarning):
    """Shared memory cannot be used where it was to be used if possible: tensors travel in requests and responses."""
