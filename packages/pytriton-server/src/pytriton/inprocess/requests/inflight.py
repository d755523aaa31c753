"""Whose memory the inputs of the requests in flight are."""

from __future__ import annotations

from pytriton.inprocess.capi import process

__all__ = ["OWNERS", "owner_of"]

OWNERS: dict[int, object] = process.shared("owners of inputs", dict)
"""By the address of a request of the C API: what keeps all its input buffers alive.

Set before Triton gets the request, and removed when it releases it.
"""


def owner_of(request: int) -> object:
    """Return what keeps the inputs of a request alive; `None` if it was not made here, as those inside an ensemble."""
    return OWNERS.get(request)
