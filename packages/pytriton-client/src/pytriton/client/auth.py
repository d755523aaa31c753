"""How an access token travels: the names of the headers live here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["create_auth_headers", "extract_access_token_from_headers"]

_HEADER_OF_PROTOCOL = {
    "http": "triton-access-token",
    # Triton expects this prefix in gRPC metadata only.
    "grpc": "triton-grpc-protocol-triton-access-token",
}


def create_auth_headers(access_token: str, protocol: str) -> dict[str, str]:
    """Return the header that carries an access token.

    Args:
        access_token: The token, as ``Triton.get_access_token()`` returns it.
        protocol: ``"http"`` or ``"grpc"``, in any case.

    Raises:
        ValueError: The token is empty or ``None``, or the protocol is another one.
    """
    if not access_token:
        raise ValueError(
            f"access_token cannot be None or empty; received {access_token!r}. Leave it out where none is needed."
        )
    name = _HEADER_OF_PROTOCOL.get(str(protocol).lower())
    if name is None:
        raise ValueError(f"Invalid protocol {protocol!r}. Must be 'http' or 'grpc'.")
    return {name: access_token}


def extract_access_token_from_headers(headers: Mapping[str, str] | None) -> str | None:
    """Return the access token that headers carry in the form of either protocol, or ``None``.

    Args:
        headers: Names (in any case) and values; ``None`` is none at all.

    Raises:
        ValueError: Both forms are there, with different tokens.
    """
    lower = {str(name).lower(): value for name, value in (headers or {}).items()}
    tokens = {lower[name] for name in _HEADER_OF_PROTOCOL.values() if lower.get(name)}
    if len(tokens) > 1:
        names = " and ".join(repr(name) for name in _HEADER_OF_PROTOCOL.values())
        raise ValueError(
            f"Conflicting authentication headers found: {names} contain different tokens. Send one of them."
        )
    return tokens.pop() if tokens else None
