"""What the bytes of a peer may be wrong about; `proxy_backend.errors` shows the whole tree."""

from __future__ import annotations


class ProxyBackendError(Exception):
    """Base of every error of this distribution."""


class ProtocolError(ProxyBackendError):
    """The peer sent something that the protocol does not allow."""


class AttachError(ProxyBackendError):
    """The worker did not get through to the proxy backend."""


class VersionMismatchError(AttachError):
    """Worker and proxy backend speak different major versions of the protocol.

    Attributes:
        ours: (major, minor) of this side.
        theirs: (major, minor) of the peer.
    """

    def __init__(self, message: str, *, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        super().__init__(message)
        self.ours = ours
        self.theirs = theirs
