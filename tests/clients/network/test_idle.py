"""Clients behind a proxy with TLS that closes what nobody uses for a while."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import trustme

from pytriton.client import TlsSettings
from support.clients import KINDS, serving_all
from support.processes import free_ports, haproxy, require
from support.waiting import PATIENCE_S

# One thread, so that connections are closed in the order in which their time is over.
CONFIG = """
global
    nbthread 1
defaults
    mode http
    timeout connect 60s
    timeout client 600s
    timeout server 600s
    timeout http-keep-alive 100ms
listen plain
    bind 127.0.0.1:{plain}
    server triton {http}
listen http
    bind 127.0.0.1:{https} ssl crt {certificate}
    server triton {http}
listen grpc
    bind 127.0.0.1:{grpcs} ssl crt {certificate} alpn h2
    server triton {grpc} proto h2
"""


class Proxy(NamedTuple):
    """Where HAProxy listens, and what it is trusted by."""

    urls: dict[str, str]
    authority: Path

    def wait_until_it_has_closed(self) -> None:
        """Wait until it closes a connection that is used no more from now on, and so those before."""
        parts = urlsplit(self.urls["https"])
        context = ssl.create_default_context(cafile=self.authority)
        with (
            socket.create_connection((str(parts.hostname), int(parts.port or 0)), PATIENCE_S) as connected,
            context.wrap_socket(connected, server_hostname=parts.hostname) as encrypted,
        ):
            encrypted.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: it\r\n\r\n")
            answer = b""
            while piece := encrypted.recv(1000):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    require("haproxy")
    folder = tmp_path_factory.mktemp("haproxy")
    authority, certificate, configuration = (folder / name for name in ("ca.pem", "server.pem", "haproxy.cfg"))
    signs = trustme.CA()
    signs.cert_pem.write_to_path(authority)
    signs.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    with ExitStack() as stack:
        triton = stack.enter_context(serving_all())
        names = ("plain", "https", "grpcs")
        ports = dict(zip(names, free_ports(3), strict=True))
        servers = {"http": urlsplit(str(triton.http_url)).netloc, "grpc": urlsplit(str(triton.grpc_url)).netloc}
        configuration.write_text(CONFIG.format(certificate=certificate, **ports, **servers))

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", ports["grpcs"])) == 0

        stack.enter_context(haproxy(configuration, folder, listens))
        yield Proxy({name: f"{name.replace('plain', 'http')}://127.0.0.1:{ports[name]}" for name in names}, authority)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["plain", "https", "grpcs"])
def test_no_call_fails_after_a_quiet_time(proxy: Proxy, scheme: str, kind: str) -> None:
    tls = None if scheme == "plain" else TlsSettings(proxy.authority)
    with KINDS[kind].asking(proxy.urls[scheme], tls=tls) as check:
        for _ in range(3):
            check()
            # The loop of the asyncio clients does not see what happens meanwhile.
            proxy.wait_until_it_has_closed()
