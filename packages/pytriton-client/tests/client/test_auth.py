from __future__ import annotations

import pytest

from pytriton.client.auth import create_auth_headers, extract_access_token_from_headers


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ("http", "triton-access-token"),
        ("HTTP", "triton-access-token"),
        ("grpc", "triton-grpc-protocol-triton-access-token"),
        ("gRPC", "triton-grpc-protocol-triton-access-token"),
    ],
)
def test_header_of_each_protocol(protocol: str, name: str) -> None:
    headers = create_auth_headers("secret", protocol)
    assert headers == {name: "secret"}
    assert extract_access_token_from_headers({name.upper(): "secret", "other": "x"}) == "secret"


@pytest.mark.parametrize(("token", "protocol"), [("", "http"), (None, "http"), ("secret", "ftp"), ("secret", None)])
def test_refused(token: str, protocol: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be None or empty|Invalid protocol") as caught:
        create_auth_headers(token, protocol)
    assert "secret" not in str(caught.value)


def test_extract() -> None:
    both = {**create_auth_headers("one", "http"), **create_auth_headers("one", "grpc")}
    assert extract_access_token_from_headers({}) is None
    assert extract_access_token_from_headers(None) is None
    assert extract_access_token_from_headers(both) == "one"
    with pytest.raises(ValueError, match="Conflicting authentication headers"):
        extract_access_token_from_headers({**both, **create_auth_headers("two", "grpc")})
