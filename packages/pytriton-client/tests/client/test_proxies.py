"""Proxies that the environment names, over real sockets: who goes through one, how, and what errors say of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import select
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pytriton.client import AsyncioModelClient, DecoupledModelClient, FuturesModelClient, ModelClient, TlsSettings
from pytriton.client._core.url import TritonUrl
from pytriton.client._route.proxies import check_tunnel, describe_proxy, find_route
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientModelNotReadyError, PyTritonClientValueError
from support.http import serving

LIMIT_S = 60.0
NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")
HOST = "triton.test"
"""A name that the proxy alone knows."""


class Proxy(BaseHTTPRequestHandler):
    """Hands on requests to any host, all of which are this one, and opens tunnels; asks for a password."""

    protocol_version = "HTTP/1.1"
    asked: list[str]
    refusal = 0

    def do_GET(self) -> None:
        if self._is_refused():
            return
        parts = urlsplit(self.path)
        assert self.headers["Host"] == parts.netloc
        assert parts.hostname == HOST
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", parts.port, timeout=LIMIT_S)) as connection:
            connection.request(self.command, parts.path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        self.send_response(response.status)
        for name, value in response.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def do_CONNECT(self) -> None:
        if self._is_refused():
            return
        host, _, port = self.path.partition(":")
        assert host == HOST
        self.close_connection = True
        with socket.create_connection(("127.0.0.1", int(port)), LIMIT_S) as upstream, contextlib.suppress(OSError):
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: upstream, upstream: self.connection}
            while True:
                for readable in select.select(list(ends), [], [])[0]:
                    data = readable.recv(1 << 16)
                    if not data:
                        return
                    ends[readable].sendall(data)

    def _is_refused(self) -> bool:
        self.asked.append(f"{self.command} {self.path}")
        given = self.headers.get("Proxy-Authorization", "")
        status = self.refusal or (200 if given == f"Basic {base64.b64encode(b'me:p@ss').decode()}" else 407)
        if status != 200:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return status != 200

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def handler() -> type[Proxy]:
    return type("Handler", (Proxy,), {"asked": []})


@pytest.fixture
def proxy(handler: type[Proxy]) -> Iterator[str]:
    with serving(handler) as address:
        yield f"http://me:p%40ss@{address}"


def ask_all(url: str, tls: TlsSettings | None) -> None:
    a = np.array([1.0], np.float32)
    with ModelClient(url, "add", tls=tls) as client:
        for _ in range(2):
            client.infer_sample(a, a)
    with FuturesModelClient(url, "add", tls=tls) as futures:
        futures.infer_sample(a, a).result(LIMIT_S)
    with DecoupledModelClient(url, "count", tls=tls) as decoupled:
        assert len(list(decoupled.infer_sample(np.array([2], np.int32)))) == 2

    async def ask() -> None:
        async with AsyncioModelClient(url, "add", tls=tls) as client:
            for _ in range(2):
                await client.infer_sample(a, a)

    asyncio.run(ask())


def hidden(url: str) -> str:
    """The address of a server with the name that the proxy alone knows."""
    return url.replace("127.0.0.1", HOST)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_over_http_requests_go_to_the_proxy(
    http_server: Any, proxy: str, handler: type[Proxy], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    ask_all(hidden(http_server.url), None)
    assert f"POST {hidden(http_server.url)}/v2/models/add/infer" in handler.asked
    assert not any(asked.startswith("CONNECT") for asked in handler.asked)


def test_with_tls_there_is_a_tunnel(
    encrypted_server: Any, certificates: Any, proxy: str, handler: type[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypted_server.protocol == "grpc":
        pytest.skip("gRPC goes its own way")
    monkeypatch.setenv("https_proxy", proxy)
    ask_all(hidden(encrypted_server.url), TlsSettings(ca_file=certificates.ca))
    assert set(handler.asked) == {f"CONNECT {hidden(encrypted_server.url).removeprefix('https://')}"}


def test_over_grpc_its_own_rules_hold(
    server: Any, proxy: str, handler: type[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.protocol == "http":
        pytest.skip("see the others")
    monkeypatch.setenv("http_proxy", proxy)
    ask_all(hidden(server.url), None)
    assert set(handler.asked) == {f"CONNECT {hidden(server.url).removeprefix('grpc://')}"}


def test_a_server_of_this_host_is_asked_without_one(
    server: Any, proxy: str, handler: type[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES[:4]:
        monkeypatch.setenv(name, proxy)
    ask_all(server.url, None)
    ask_all(server.url.replace("127.0.0.1", "localhost"), None)
    assert handler.asked == []


def errors_of(url: str, **settings: Any) -> list[PyTritonClientError]:
    sample = np.array([1.0], np.float32)
    settings = {"init_timeout_s": 0.5, **settings}
    errors: list[PyTritonClientError] = []
    with ModelClient(url, "add", **settings) as client:
        with pytest.raises(PyTritonClientModelNotReadyError) as caught:
            client.infer_sample(sample, sample)
        errors.append(caught.value)

    async def ask() -> None:
        async with AsyncioModelClient(url, "add", **settings) as client:
            with pytest.raises(PyTritonClientModelNotReadyError) as caught:
                await client.infer_sample(sample, sample)
            errors.append(caught.value)

    asyncio.run(ask())
    return errors


@pytest.mark.parametrize("url", ["http://a.test", "https://a.test", "grpc://a.test"])
def test_errors_name_the_variable(url: str, proxy: str, handler: type[Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "https_proxy" if url.startswith("https") else "http_proxy"
    monkeypatch.setenv(variable, proxy)
    handler.refusal = 503
    # The one setting, and the variable, by which there is none. First, as gRPC tries again for a while after its end.
    for error in errors_of(url, trust_env=False):
        assert "variable" not in error.message
    with monkeypatch.context() as patch:
        patch.setenv("no_proxy", "other,a.test")
        for error in errors_of(url):
            assert "variable" not in error.message
    assert handler.asked == []
    for error in errors_of(url):
        assert f"The variable {variable} of the environment" in error.message
        assert urlsplit(proxy).netloc.rpartition("@")[2] in error.message
        assert "p%40ss" not in error.message
        assert "p@ss" not in error.message
    assert handler.asked


@pytest.mark.parametrize(
    ("url", "listed", "is_exempt"),
    [
        ("http://a.b.test", "b.test", True),
        ("http://a.b.test", ".b.test", True),
        ("http://a.b.test", "*.B.test", True),
        ("http://ab.test", "b.test", False),
        ("http://a.test:81", "a.test:81", True),
        ("http://a.test:81", "a.test:82", False),
        ("http://a.test", " x , * ", True),
        ("http://10.1.2.3", "10.0.0.0/8", True),
        ("http://11.1.2.3", "10.0.0.0/8", False),
        ("http://[fd00::1]", "fd00::1", True),
        ("http://[fd00::1]:81", "[fd00::1]:81", True),
        ("http://127.0.0.2", "", True),
        ("http://[::1]", "", True),
        ("http://a.test", "", False),
    ],
)
def test_what_is_exempt(url: str, listed: str, is_exempt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", listed)
    parsed = TritonUrl.from_url(url)
    route = find_route(parsed)
    assert (route.hostname, route.port) == ((parsed.hostname, parsed.port) if is_exempt else ("proxy", 3128))
    assert bool(describe_proxy(parsed)) is not is_exempt


def test_variables_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    url = TritonUrl.from_url("http://a.test/x")
    monkeypatch.setenv("HTTP_PROXY", "http://upper")
    assert find_route(url).hostname == "upper"
    assert find_route(url).port == 80
    assert find_route(url).prefix == "http://a.test:8000/x"
    monkeypatch.setenv("REQUEST_METHOD", "GET")  # of CGI, where a caller can set the variable
    assert find_route(url).hostname == "a.test"
    monkeypatch.setenv("http_proxy", "")
    assert find_route(url).prefix == "/x"


@pytest.mark.parametrize("value", ["socks5://user:word@proxy:1080", "https://proxy", "http://", "http://proxy:x"])
def test_what_is_no_proxy_for_http_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", value)
    for kind in (ModelClient, AsyncioModelClient, FuturesModelClient):
        with pytest.raises(PyTritonClientValueError, match="the variable all_proxy") as caught:
            kind("http://a.test", "add")
        assert "word" not in str(caught.value)
        assert "trust_env=False" in str(caught.value)


def test_what_a_proxy_says_of_a_tunnel_is_escaped() -> None:
    check_tunnel(b"HTTP/1.0 200 Connection established\r\n\r\n")
    with pytest.raises(OSError, match=r"'HTTP/1.1 502 \\x1b'"):
        check_tunnel(b"HTTP/1.1 502 \x1b\r\n\r\n")
    with pytest.raises(OSError, match="no tunnel"):
        check_tunnel(b"")
