from __future__ import annotations

from typing import Any

import pytest

from pytriton.client._core.url import TritonUrl
from pytriton.client.exceptions import PyTritonClientInvalidUrlError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost", "http://localhost:8000"),
        ("localhost:9000", "http://localhost:9000"),
        ("HTTP://Example.org", "http://example.org:8000"),
        ("http://10.0.0.1:80/path/of%20a/", "http://10.0.0.1:80/path/of%20a"),
        ("gateway/models/ü", "http://gateway:8000/models/%C3%BC"),
        ("https://gateway/", "https://gateway:443"),
        ("grpc://host/", "grpc://host:8001"),
        ("grpc://localhost", "grpc://localhost:8001"),
        ("GRPC://localhost:65535", "grpc://localhost:65535"),
        ("https://host", "https://host:443"),
        ("grpcs://host", "grpcs://host:8001"),
        ("[::1]", "http://[::1]:8000"),
        ("[::1]:9000", "http://[::1]:9000"),
        ("grpc://[fe80::1]:9001", "grpc://[fe80::1]:9001"),
        ("http://my_host.internal.", "http://my_host.internal.:8000"),
        ("grpc://pods?load_balancing=round_robin", "grpc://pods:8001?load_balancing=round_robin"),
    ],
)
def test_accepted(url: str, expected: str) -> None:
    parsed = TritonUrl.from_url(url)
    assert parsed.with_scheme == expected
    assert parsed.without_scheme + parsed.path == expected.partition("://")[2].partition("?")[0]
    assert parsed.is_balanced == ("?" in expected)
    assert TritonUrl.from_url(parsed.with_scheme) == parsed
    assert parsed.protocol == parsed.scheme.rstrip("s")
    assert parsed.is_encrypted == parsed.scheme.endswith("s")
    assert "[" not in parsed.hostname


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *((it, True) for it in ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.8.9.1", "127.1", "0x7f.1")),
        *((it, True) for it in ("[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "0.0.0.0", "0", "[::]")),
        *(
            (it, False)
            for it in ("10.0.0.1", "[fd00::2]", "[::ffff:10.0.0.1]", "[fe80::1%25lo]", "1.127", "localhost.x")
        ),
        *((it, False) for it in ("my-localhost", "127.0.0.1.test", "triton")),
    ],
)
def test_hosts_that_are_this_one(host: str, is_loopback: bool) -> None:
    for scheme in ("http", "grpc"):
        assert TritonUrl.from_url(f"{scheme}://{host}:8000").is_loopback is is_loopback


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "ftp://host", "host:port", "host:", "host:0", "host:65536", "host:-1", "::1", "[::1", "a b"),
        *("http://:80", "http:///path", "host\n", "-host", None, 8000, b"localhost"),
        *("grpc://host/path", "host#there", "grpc://host/#there", "grpcs://host/path/"),
    ],
)
def test_refused(url: Any) -> None:
    with pytest.raises(PyTritonClientInvalidUrlError, match="Invalid url") as caught:
        TritonUrl.from_url(url)
    assert caught.value.received == repr(url)
    assert "host[:port]" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:word@host:81/x", "http://***@host:81/x"),
        ("word@host", "***@host"),
        ("grpc://user:wo@rd@host", "grpc://***@host"),
        ("https://host/x?key=word", "https://host/x?..."),
        ("grpc://host?load_balancing=round_robin&key=word", "grpc://host?..."),
        ("grpc://host?key=word", "grpc://host?..."),
        ("http://a?load_balancing=round_robin", "http://a?..."),
        ("grpc://a?load_balancing", "grpc://a?..."),
        ("grpc://a?load_balancing=random", "grpc://a?..."),
        ("ftp://user:word@host", "ftp://***@host"),
        ("user:word@host:port", "***@host:port"),
    ],
)
def test_what_may_be_secret_is_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(PyTritonClientInvalidUrlError) as caught:
        TritonUrl.from_url(url)
    assert f"Invalid url {shown!r}: " in str(caught.value)
    assert caught.value.received == repr(shown)
    assert "word" not in f"{caught.value} {vars(caught.value)}"
